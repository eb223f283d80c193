package saga_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/store"
)

// stuckAlone starts a stuck saga whose owner died before it reported it.
func stuckAlone(t *testing.T, st store.Store, id string) {
	t.Helper()
	_, _, err := st.Start(t.Context(), store.StartRequest{
		ID: id, Saga: "trip", Version: 1, Status: saga.Stuck, Data: []byte(`{}`),
		Steps: []byte(`{"steps":[{"n":"flight","s":"failed"}],"step":"flight","cause":"full"}`),
		Log:   []store.Entry{{Kind: saga.EventStuck}},
	})
	require.NoError(t, err)
}

func TestAStuckSagaIsReportedThoughItsOwnerDied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		store := saga.NewMemory()
		stuckAlone(t, store, "trip-1")
		var told []time.Duration
		hook := on(saga.EventStuck, func(e saga.Event) {
			assert.Equal(t, "trip-1", e.ID)
			assert.Equal(t, "flight", e.Step)
			assert.EqualError(t, e.Err, "full")
			told = append(told, time.Since(begun))
		})
		begin(t, store, saga.RunnerConfig{OnEvent: hook}, sequence(step("flight")))
		begin(t, store, saga.RunnerConfig{OnEvent: hook, LeaseTTL: 16 * time.Second}, sequence(step("flight")))
		time.Sleep(time.Hour)
		synctest.Wait()
		require.Equal(t, []time.Duration{46 * time.Second}, told, "after a lease, in which its owner may do it, and once")
	})
}

// TestAStuckSagaIsReportedUntilThatIsRecorded: at least once, not at most.
func TestAStuckSagaIsReportedUntilThatIsRecorded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{Store: saga.NewMemory()}
		fails := 2
		g.reported = func(ctx context.Context, id string, seq int64) error {
			if fails--; fails >= 0 {
				return errDown
			}
			return g.Store.Reported(ctx, id, seq)
		}
		told := 0
		sg := sequence(failing("flight", saga.Abort(errDeclined)))
		sg.Steps[0].Undo = func(context.Context, *trip) error { return saga.Abort(errDeclined) }
		r, _ := begin(t, g, saga.RunnerConfig{OnEvent: on(saga.EventStuck, func(saga.Event) { told++ })}, sg)
		mustStart(t, r, sg)
		_, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrStuck)
		time.Sleep(time.Hour)
		synctest.Wait()
		require.Equal(t, 3, told)
		require.EqualValues(t, 2, r.Stats().StoreErrors)
	})
}

func TestReportsWithoutAHookAreLogged(t *testing.T) {
	before := slog.Default()
	defer slog.SetDefault(before)
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		slog.SetDefault(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelWarn})))
		st := saga.NewMemory()
		g := &gate{Store: st}
		stuckAlone(t, st, "trip-1")
		_, _, err := st.Start(t.Context(), store.StartRequest{ID: "order-1", Saga: "order", Status: saga.Running, Log: make([]store.Entry, 1)})
		require.NoError(t, err)
		_, stop := begin(t, g, saga.RunnerConfig{Name: "one"}, sequence(step("flight")))
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Contains(t, out.String(), `level=WARN msg="saga: stuck" runner=one saga=trip version=1 id=trip-1 step=flight err=full`)
		require.Contains(t, out.String(), `level=WARN msg="saga: due sagas of a definition that is not registered" runner=one saga=order version=0 count=1`)
		require.NotContains(t, out.String(), "failed")
		out.Reset()
		g.set(true)
		time.Sleep(10*time.Second - time.Millisecond)
		stop()
		n := bytes.Count(out.Bytes(), []byte(`msg="saga: the store has failed"`))
		require.Greater(t, n, 3)
		require.LessOrEqual(t, n, 11, "once a second")
	})
}

// TestWhatIsLogged says since when, and of a store that fails, one a second.
func TestWhatIsLogged(t *testing.T) {
	before := slog.Default()
	defer slog.SetDefault(before)
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		slog.SetDefault(slog.New(slog.NewTextHandler(&out, nil)))
		var down atomic.Bool
		g := &gate{Store: saga.NewMemory()}
		g.heartbeat = func(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
			if down.Load() {
				return nil, errDown
			}
			return g.Store.Heartbeat(ctx, req)
		}
		slow := failing("flight", errDeclined)
		slow.Attempts, slow.Backoff = 120, saga.Exponential(time.Minute, time.Minute)
		sg := sequence(slow)
		r, _ := begin(t, g, saga.RunnerConfig{Name: "one", LeaseTTL: 15 * time.Second, StalledAfter: 5 * time.Minute, Park: time.Hour}, sg)
		mustStart(t, r, sg)
		time.Sleep(10*time.Minute + 2*time.Second)
		synctest.Wait()
		require.Regexp(t, `level=WARN msg="saga: no progress" runner=one saga=trip version=1 id=trip-1 step=flight since=5m\S* err=declined`, out.String())
		out.Reset()
		down.Store(true)
		time.Sleep(11 * time.Second) // two heartbeats, of two tries each
		require.EqualValues(t, 4, r.Stats().StoreErrors)
		require.Equal(t, 2, bytes.Count(out.Bytes(), []byte(`level=WARN msg="saga: the store has failed" runner=one err="saga: heartbeat: `)), out.String())
	})
}

type checkedStore struct {
	store.Store
	err error
}

func (s *checkedStore) Check(ctx context.Context) error { return cmp.Or(ctx.Err(), s.err) }

func TestRunRefusesAStoreThatWasNotSetUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := &checkedStore{saga.NewMemory(), store.ErrNotMigrated}
		r := saga.NewRunner(st, saga.RunnerConfig{})
		require.ErrorIs(t, r.Run(t.Context()), store.ErrNotMigrated)

		sg := sequence(step("flight"))
		for i, err := range []error{nil, errDown /* for now, perhaps */} {
			st.err = err
			id := fmt.Sprint("trip-", i)
			r, _ := begin(t, st, saga.RunnerConfig{OnEvent: silent}, sg)
			_, err := saga.Start(t.Context(), r, sg, id, trip{})
			require.NoError(t, err)
			_, err = sg.Result(t.Context(), r, id)
			require.NoError(t, err)
			require.EqualValues(t, i, r.Stats().StoreErrors)
		}
	})
}

// A tellingStore notifies on demand.
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

func TestARunnerClaimsWhenTheStoreTellsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &tellingStore{Store: saga.NewMemory(), tell: make(chan bool)}
		sg := sequence(step("flight"))
		r, _ := begin(t, store, saga.RunnerConfig{Poll: time.Hour}, sg)
		elsewhere := saga.NewRunner(store, saga.RunnerConfig{})
		saga.Register(elsewhere, sg)
		start := func(id string) {
			_, err := saga.Start(t.Context(), elsewhere, sg, id, trip{})
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
		_, err = result[trip](t.Context(), r, "trip-2")
		require.NoError(t, err)
		require.Less(t, time.Since(begun), 10*time.Millisecond)
	})
}
