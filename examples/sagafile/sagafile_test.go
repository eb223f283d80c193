package sagafile_test

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-resilience/resilience/examples/sagafile"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sagastore"
	"github.com/go-resilience/resilience/saga/storetest"
)

func open(t *testing.T, path string) *sagafile.Store {
	t.Helper()
	st, err := sagafile.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	return st
}

func TestStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) sagastore.Store { return open(t, filepath.Join(t.TempDir(), "sagas")) })
}

// reopened is a store that is closed and opened again before each read, so that a read finds what the file has.
type reopened struct {
	*sagafile.Store
	t    *testing.T
	path string
}

func (r *reopened) reopen() {
	if err := r.Store.Close(); err != nil {
		r.t.Error(err)
	}
	r.Store = open(r.t, r.path)
}

func (r *reopened) Load(ctx context.Context, id string) (sagastore.Record, error) {
	r.reopen()
	return r.Store.Load(ctx, id)
}

func (r *reopened) History(ctx context.Context, id string, after int64, limit int) ([]sagastore.Entry, error) {
	r.reopen()
	return r.Store.History(ctx, id, after, limit)
}

func (r *reopened) Messages(ctx context.Context, id string) ([]sagastore.Message, error) {
	r.reopen()
	return r.Store.Messages(ctx, id)
}

// TestReopenedStore needs no lock: storetest reads while nothing else runs.
func TestReopenedStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) sagastore.Store {
		path := filepath.Join(t.TempDir(), "sagas")
		return &reopened{Store: open(t, path), t: t, path: path}
	})
}

type trip struct{ Calls []string }

// start runs a runner of a saga that waits for a signal, until stop is called.
func start(st sagastore.Store) (trips *saga.Handle[trip], stop func()) {
	note := func(call string) func(context.Context, *trip) error {
		return func(_ context.Context, t *trip) error {
			t.Calls = append(t.Calls, call)
			return nil
		}
	}
	r := saga.NewRunner(st, saga.RunnerConfig{Poll: 5 * time.Millisecond, LeaseTTL: time.Second, Drain: saga.None})
	trips = saga.Register(r, &saga.Saga[trip]{Name: "trip", Version: 1, Steps: []saga.Step[trip]{
		{Name: "flight", Do: note("do flight"), Undo: note("undo flight")},
		{Name: "hotel", Do: note("do hotel"), Undo: note("undo hotel"), Await: "paid"},
	}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = r.Run(ctx)
	}()
	return trips, func() { cancel(); <-done }
}

// TestSagaSurvivesARestart starts two sagas in one process and ends them in the next one. The first process has died
// during a write.
func TestSagaSurvivesARestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sagas")
	st := open(t, path)
	trips, stop := start(st)
	for _, id := range []string{"trip-1", "trip-2"} {
		if _, err := trips.Start(t.Context(), id, trip{}); err != nil {
			t.Fatal(err)
		}
		for waits := false; !waits; time.Sleep(time.Millisecond) {
			in, _, err := trips.Get(t.Context(), id)
			if err != nil {
				t.Fatal(err)
			}
			waits = in.Steps[1].Status == saga.StepWaiting
		}
	}
	stop()
	_ = st.Close()
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.WriteString(file, `{"Put":[{"Record":{"ID":"trip-1",`)
	if err := errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}

	trips, stop = start(open(t, path))
	defer stop()
	if err := trips.Signal(t.Context(), "trip-1", "paid", nil); err != nil {
		t.Fatal(err)
	}
	if err := trips.Cancel(t.Context(), "trip-2", "ill"); err != nil {
		t.Fatal(err)
	}
	if s, err := trips.Result(t.Context(), "trip-1"); err != nil || len(s.Calls) != 2 {
		t.Errorf("trip-1 has made %q, error %v", s.Calls, err)
	}
	if s, err := trips.Result(t.Context(), "trip-2"); !errors.Is(err, saga.ErrCanceled) || len(s.Calls) != 2 {
		t.Errorf("trip-2 has made %q, error %v", s.Calls, err)
	}
}
