package saga_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

func TestUnobservedEventsAreLogged(t *testing.T) {
	before := slog.Default()
	defer slog.SetDefault(before)
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		slog.SetDefault(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelWarn})))
		g := &gate{Store: saga.NewMemory()}
		charge := step("charge")
		charge.Pivot = true
		sg := sequence(charge, failing("flight", saga.Permanent(errors.New("full"))))
		r, stop := begin(t, g, saga.RunnerConfig{Name: "one"}, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Contains(t, out.String(),
			`level=WARN msg="saga: stuck" runner=one saga=trip id=trip-1 status=stuck step=flight err=full`)
		require.NotContains(t, out.String(), "failed")
		out.Reset()
		g.set(true)
		for range 3 { // in parallel with the runner, at different times
			go func() { _, _ = saga.Register(r, sg).Result(t.Context(), "trip-2") }()
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(10*time.Second - 31*time.Millisecond)
		stop()
		synctest.Wait()
		n := bytes.Count(out.Bytes(), []byte(`msg="saga: the store has failed"`))
		require.Greater(t, n, 3)
		require.LessOrEqual(t, n, 11, "once a second")
	})
}

func TestStalledStepIsLogged(t *testing.T) {
	before := slog.Default()
	defer slog.SetDefault(before)
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		slog.SetDefault(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelWarn})))
		charge := step("charge")
		charge.Pivot = true
		sg := sequence(charge, failing("flight", errDeclined))
		r, stop := begin(t, saga.NewMemory(), saga.RunnerConfig{Name: "one"}, sg)
		mustStart(t, r, sg)
		time.Sleep(8 * time.Second)
		stop()
		require.Contains(t, out.String(), `level=WARN msg="saga: a step fails again and again" runner=one saga=trip `+
			`id=trip-1 status=running step=flight op=do attempt=8 err=declined`)
	})
}

type checkedStore struct {
	store.Store
	err error
}

func (s *checkedStore) Check(ctx context.Context) error { return cmp.Or(ctx.Err(), s.err) }

func TestRunChecksStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := &checkedStore{saga.NewMemory(), store.ErrNotMigrated}
		r := saga.NewRunner(st, saga.RunnerConfig{})
		require.ErrorIs(t, r.Run(t.Context()), store.ErrNotMigrated)

		sg := sequence(step("flight"))
		for i, err := range []error{nil, errDown /* for now, perhaps */} {
			st.err = err
			id := fmt.Sprint("trip-", i)
			r, _ := observed(t, st, saga.RunnerConfig{}, silent, sg)
			_, err := saga.Register(r, sg).Start(t.Context(), id, trip{})
			require.NoError(t, err)
			requireEnd(t, r, id, nil)
			require.EqualValues(t, i, r.Stats().StoreErrors)
		}
	})
}

// A tellingStore notifies the runner on demand.
type tellingStore struct {
	store.Store
	listens int
	tell    chan bool // false: the connection fails
}

func (s *tellingStore) Listen(ctx context.Context, notify func()) error {
	s.listens++
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case ok := <-s.tell:
			if !ok {
				return errors.New("connection reset")
			}
			notify()
		}
	}
}

func TestRunnerClaimsOnNotification(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &tellingStore{Store: saga.NewMemory(), tell: make(chan bool)}
		sg := sequence(step("flight"))
		r, _ := begin(t, store, saga.RunnerConfig{Poll: time.Hour}, sg)
		elsewhere := saga.NewRunner(store, saga.RunnerConfig{})
		sagas := saga.Register(elsewhere, sg)
		start := func(id string) {
			_, err := sagas.Start(t.Context(), id, trip{})
			require.NoError(t, err)
		}
		begun := time.Now()
		start("trip-1")
		for range 3 {
			store.tell <- true
		}
		_, err := result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Less(t, time.Since(begun), 10*time.Millisecond)

		store.tell <- false
		time.Sleep(time.Hour + time.Second)
		synctest.Wait()
		require.Equal(t, 2, store.listens, "it listens again after Poll")
		begun = time.Now()
		start("trip-2")
		store.tell <- true
		requireEnd(t, r, "trip-2", nil)
		require.Less(t, time.Since(begun), 10*time.Millisecond)
	})
}
