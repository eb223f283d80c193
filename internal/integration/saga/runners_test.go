package saga_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// quick configures a runner that takes over soon.
func quick(c saga.RunnerConfig) saga.RunnerConfig {
	c.LeaseTTL, c.Poll = 500*time.Millisecond, 20*time.Millisecond
	return c
}

// run runs a runner until the test ends.
func run(t *testing.T, r *saga.Runner) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = r.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
}

type nothing struct{}

func done(context.Context, *nothing) error { return nil }

// markTable has no key: what an open transaction has written keeps nobody else
// from writing the same.
const markTable = `CREATE TABLE mark (id text)`

// mark returns a DoTx or UndoTx that inserts a mark.
func mark(ctx context.Context, tx *sql.Tx, _ *nothing) error {
	// each database has its own placeholders
	_, err := tx.ExecContext(ctx, `INSERT INTO mark (id) VALUES ('`+saga.CommandFrom(ctx).ID+`')`)
	return err
}

func marks(t *testing.T, db *sql.DB) (n int) {
	t.Helper()
	require.NoError(t, db.QueryRow(`SELECT count(*) FROM mark`).Scan(&n))
	return n
}

// A pausedStore is that of a process which stops in the middle of a
// transaction, and knows nothing of it when it goes on: its transaction is
// still open, and it has not noticed that its lease is over.
type pausedStore struct {
	*sqlstore.Store
	reached, resume chan struct{}
	once            sync.Once
}

func (s *pausedStore) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	select {
	case <-s.reached: // it is stopped
		return nil, errors.New("stopped")
	default:
		return s.Store.Heartbeat(ctx, req)
	}
}

func (s *pausedStore) Begin(context.Context) (*sql.Tx, error) {
	return s.Store.Begin(context.Background()) // nothing rolls it back while the process is stopped
}

func (s *pausedStore) CommitTx(ctx context.Context, tx *sql.Tx, req store.CommitRequest) (store.Receipt, error) {
	s.once.Do(func() {
		close(s.reached)
		<-s.resume
	})
	return s.Store.CommitTx(context.WithoutCancel(ctx), tx, req)
}

// TestPausedOwnerCommitsNothing has the owner of a DoTx, or UndoTx, stop before
// its last statement until another process has taken the saga over and done
// the step. On SQLite the open transaction keeps everybody else out, so that
// nobody can have taken over when it goes on: it commits.
func TestPausedOwnerCommitsNothing(t *testing.T) {
	for _, op := range []saga.Op{saga.OpDo, saga.OpUndo} {
		t.Run(string(op), func(t *testing.T) {
			onEach(t, func(t *testing.T, d database) {
				db := d.open(t)
				_, err := db.Exec(markTable)
				require.NoError(t, err)
				step := saga.Step[nothing]{Name: "step", DoTx: mark, Undo: done}
				last := saga.Step[nothing]{Name: "last", Do: done, Undo: done}
				end := saga.Completed
				if op == saga.OpUndo {
					step = saga.Step[nothing]{Name: "step", Do: done, UndoTx: mark}
					last.Do = func(context.Context, *nothing) error { return saga.Declined(errRefused) }
					end = saga.Compensated
				}
				steps := []saga.Step[nothing]{step, last}

				paused := &pausedStore{Store: d.store(t), reached: make(chan struct{}), resume: make(chan struct{})}
				observed := &observedStore{pausedStore: paused}
				owner := saga.NewRunner(observed, quick(saga.RunnerConfig{Name: "paused", Drain: saga.None}))
				saga.Register(owner, &saga.Saga[nothing]{Name: "trip", Steps: steps})
				def := &saga.Saga[nothing]{Name: "trip", Steps: steps}
				other := saga.NewRunner(d.store(t), quick(saga.RunnerConfig{Name: "other"}))
				sagas := saga.Register(other, def)

				ctx, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				wg.Go(func() { _ = owner.Run(ctx) })
				_, err = sagas.Start(ctx, "a", nothing{}) // it does not run yet
				require.NoError(t, err)
				<-paused.reached
				run(t, other)
				if d.Dialect == sqlstore.SQLite {
					time.Sleep(time.Second) // until the lease is over
					close(paused.resume)
				}
				_, err = result(ctx, other, "a")
				if end == saga.Completed {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, saga.ErrCompensated)
				}
				require.Equal(t, 1, marks(t, db))
				if d.Dialect != sqlstore.SQLite {
					close(paused.resume)
				}
				cancel()
				wg.Wait()
				if d.Dialect != sqlstore.SQLite {
					require.ErrorIs(t, observed.first(), store.ErrFenced, "the owner has not tried")
				}
				require.Equal(t, 1, marks(t, db))
				in, err := other.Get(t.Context(), "a")
				require.NoError(t, err)
				require.Equal(t, end, in.Status)
			})
		})
	}
}

// An observedStore keeps the error of the first CommitTx.
type observedStore struct {
	*pausedStore
	mu  sync.Mutex // the owner may hold the saga again while its first attempt is paused
	err error
}

func (s *observedStore) first() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *observedStore) CommitTx(ctx context.Context, tx *sql.Tx, req store.CommitRequest) (store.Receipt, error) {
	rc, err := s.pausedStore.CommitTx(ctx, tx, req)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
	}
	return rc, err
}

// A skewedStore is the store as processes see it whose own clocks are wrong: the
// database's is off by so much, seen from there. (The database's clock is the
// only one that they share, so that it has to be the same for all of them.)
type skewedStore struct {
	*sqlstore.Store
	by time.Duration
}

func (s *skewedStore) skew(rec store.Record) store.Record {
	for _, t := range []*time.Time{&rec.WakeAt, &rec.CompleteBy, &rec.CreatedAt, &rec.UpdatedAt, &rec.Now} {
		if !t.IsZero() {
			*t = t.Add(s.by)
		}
	}
	return rec
}

func (s *skewedStore) Start(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
	rec, created, err := s.Store.Start(ctx, req)
	return s.skew(rec), created, err
}

func (s *skewedStore) Claim(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
	recs, err := s.Store.Claim(ctx, req)
	for i := range recs {
		recs[i] = s.skew(recs[i])
	}
	return recs, err
}

func (s *skewedStore) Load(ctx context.Context, id string) (store.Record, error) {
	rec, err := s.Store.Load(ctx, id)
	return s.skew(rec), err
}

// TestClocksAnHourApart has two processes, whose clocks are an hour ahead of the
// database's, or behind it, share sagas that retry, park and have a deadline:
// nothing is taken over from a live owner, nothing waits for an hour, and no
// deadline passes early.
func TestClocksAnHourApart(t *testing.T) {
	for _, by := range []time.Duration{time.Hour, -time.Hour} {
		t.Run(by.String(), func(t *testing.T) { onEach(t, func(t *testing.T, d database) { skewed(t, d, by) }) })
	}
}

func skewed(t *testing.T, d database, by time.Duration) {
	var mu sync.Mutex
	attempts := make(map[string]int)
	def := func() *saga.Saga[nothing] {
		flaky := saga.Step[nothing]{
			Name: "flaky", Undo: done, Attempts: 5,
			Backoff: func(int) time.Duration { return 1100 * time.Millisecond },
			Do: func(ctx context.Context, _ *nothing) error {
				mu.Lock()
				defer mu.Unlock()
				id := saga.CommandFrom(ctx).ID
				if attempts[id]++; attempts[id] < 3 {
					return errUnreachable
				}
				return nil
			},
		}
		return &saga.Saga[nothing]{Name: "trip", Timeout: 10 * time.Minute,
			Steps: []saga.Step[nothing]{flaky, {Name: "last", Do: done, Undo: done}}}
	}
	var runners []*saga.Runner
	var defs []*saga.Saga[nothing]
	for range 2 {
		// What no live process loses, and a wait for which each gives its sagas back.
		r := saga.NewRunner(&skewedStore{d.store(t), by},
			saga.RunnerConfig{LeaseTTL: 3 * time.Second, Poll: 20 * time.Millisecond})
		sg := def()
		saga.Register(r, sg)
		run(t, r)
		runners, defs = append(runners, r), append(defs, sg)
	}
	for i := range 20 {
		_, err := saga.Register(runners[i%2], defs[i%2]).Start(t.Context(), fmt.Sprint("trip-", i), nothing{})
		require.NoError(t, err)
	}
	for i := range 20 {
		_, err := result(t.Context(), runners[(i+1)%2], fmt.Sprint("trip-", i))
		require.NoError(t, err)
	}
	for _, r := range runners {
		require.Zero(t, r.Stats().TakenOver)
		require.Zero(t, r.Stats().Lost)
	}
}

// TestMixedVersions has a process that knows only version 2 leave version 1
// alone, and one that knows both finish it.
func TestMixedVersions(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		v1 := &saga.Saga[nothing]{Name: "trip", Version: 1, Steps: []saga.Step[nothing]{{Name: "old", Do: done, Undo: done}}}
		v2 := func() *saga.Saga[nothing] {
			return &saga.Saga[nothing]{Name: "trip", Version: 2,
				Steps: []saga.Step[nothing]{{Name: "new", Do: done, Undo: done}}}
		}
		config := quick(saga.RunnerConfig{})
		both := saga.NewRunner(d.store(t), quick(saga.RunnerConfig{}))
		saga.Register(both, v1, v2())
		_, err := saga.Register(both, v1).Start(t.Context(), "a", nothing{}) // no runner runs yet
		require.NoError(t, err)

		young, sg := saga.NewRunner(d.store(t), config), v2()
		sagas := saga.Register(young, sg)
		run(t, young)
		_, err = sagas.Start(t.Context(), "b", nothing{})
		require.NoError(t, err)
		_, err = result(t.Context(), young, "b")
		require.NoError(t, err)
		in, err := both.Get(t.Context(), "a")
		require.NoError(t, err)
		require.Equal(t, saga.Running, in.Status)
		require.Zero(t, in.Epoch, "it was claimed")

		run(t, both)
		_, err = result(t.Context(), both, "a")
		require.NoError(t, err)
	})
}

// TestPoisonedSaga has one saga kill every process that runs it: it is stuck
// before long, and all others end.
func TestPoisonedSaga(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		// A process that dies is a runner whose ctx ends without a drain and whose
		// store answers nothing any more.
		var awaitTrips func(context.Context)
		start := func(dead chan struct{}) (*saga.Runner, *saga.Saga[nothing]) {
			var once sync.Once
			store := &dyingStore{Store: d.store(t), dead: dead}
			r := saga.NewRunner(store, quick(saga.RunnerConfig{MaxTakeovers: 2, Drain: saga.None, Concurrency: 4}))
			sg := &saga.Saga[nothing]{Name: "trip", Steps: []saga.Step[nothing]{{
				Name: "step", Undo: done,
				Do: func(ctx context.Context, _ *nothing) error {
					if strings.HasPrefix(saga.CommandFrom(ctx).ID, "poison/") {
						awaitTrips(ctx) // or their bad luck would be taken for poison
						once.Do(func() { close(dead) })
						<-ctx.Done()
					}
					return ctx.Err()
				},
			}}}
			saga.Register(r, sg)
			return r, sg
		}
		idle, sg := start(make(chan struct{}))
		awaitTrips = func(ctx context.Context) {
			for ctx.Err() == nil {
				done, _, err := idle.List(ctx, saga.Filter{Status: []saga.Status{saga.Completed}})
				if err == nil && len(done) == 20 {
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
		}
		_, err := saga.Register(idle, sg).Start(t.Context(), "poison", nothing{})
		require.NoError(t, err)
		for i := range 20 {
			_, err := saga.Register(idle, sg).Start(t.Context(), fmt.Sprint("trip-", i), nothing{})
			require.NoError(t, err)
		}
		deaths := 0
		for ended := false; !ended; {
			dead := make(chan struct{})
			r, _ := start(dead)
			ctx, cancel := context.WithCancel(t.Context())
			stopped := make(chan struct{})
			go func() { _ = r.Run(ctx); close(stopped) }()
			for alive := true; alive && !ended; {
				select {
				case <-dead:
					deaths, alive = deaths+1, false
				case <-time.After(20 * time.Millisecond):
					list, _, err := idle.List(t.Context(), saga.Filter{Status: []saga.Status{saga.Running, saga.Compensating}})
					require.NoError(t, err)
					ended = len(list) == 0
				}
			}
			cancel()
			<-stopped
		}
		require.Equal(t, 3, deaths)
		for i := range 20 {
			_, err := result(t.Context(), idle, fmt.Sprint("trip-", i))
			require.NoError(t, err)
		}
		_, err = result(t.Context(), idle, "poison")
		require.ErrorIs(t, err, saga.ErrStuck)
	})
}

// A dyingStore writes nothing after its process has died.
type dyingStore struct {
	*sqlstore.Store
	dead chan struct{}
}

func (s *dyingStore) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	select {
	case <-s.dead:
		return store.Receipt{}, errors.New("dead")
	default:
		return s.Store.Commit(ctx, req)
	}
}

func (s *dyingStore) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	select {
	case <-s.dead:
		return nil, errors.New("dead")
	default:
		return s.Store.Heartbeat(ctx, req)
	}
}

// TestTransactionThatIsLongPoisonsNoSaga has a DoTx take longer than the lease.
// On SQLite it keeps every heartbeat out.
func TestTransactionThatIsLongPoisonsNoSaga(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		t.Parallel()
		const lease = 2 * time.Second
		r := saga.NewRunner(d.store(t), saga.RunnerConfig{LeaseTTL: lease, Poll: 20 * time.Millisecond})
		ended := make(chan error, 1)
		long := &saga.Saga[nothing]{Name: "long", Steps: []saga.Step[nothing]{{
			Name: "long", Attempts: 2, UndoTx: mark, Backoff: func(int) time.Duration { return 0 },
			DoTx: func(ctx context.Context, tx *sql.Tx, _ *nothing) error {
				select {
				case <-ctx.Done():
				case <-time.After(lease + lease/2):
				}
				return ctx.Err()
			},
		}}}
		bystander := &saga.Saga[nothing]{Name: "bystander", Steps: []saga.Step[nothing]{{
			Name: "step", Undo: done,
			Do: func(ctx context.Context, _ *nothing) error {
				select {
				case <-ctx.Done():
				case err := <-ended:
					ended <- err
				}
				return ctx.Err()
			},
		}}}
		saga.Register(r, long)
		saga.Register(r, bystander)
		run(t, r)
		_, err := saga.Register(r, bystander).Start(t.Context(), "b", nothing{})
		require.NoError(t, err)
		_, err = saga.Register(r, long).Start(t.Context(), "a", nothing{})
		require.NoError(t, err)
		_, err = result(t.Context(), r, "a")
		ended <- err
		if d.Dialect == sqlstore.SQLite {
			require.ErrorIs(t, err, saga.ErrCompensated)
		} else {
			require.NoError(t, err)
		}
		_, err = result(t.Context(), r, "b")
		require.NoError(t, err)
		require.Zero(t, r.Stats().TakenOver)
	})
}

// TestCanceledCaller has the caller's ctx end right after the start: the saga
// goes on.
func TestCanceledCaller(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		release := make(chan struct{})
		sg := &saga.Saga[nothing]{Name: "trip", Steps: []saga.Step[nothing]{
			{Name: "a", Undo: done, Do: func(ctx context.Context, _ *nothing) error { <-release; return ctx.Err() }},
			{Name: "b", Undo: done, Do: func(ctx context.Context, _ *nothing) error { return ctx.Err() }},
		}}
		r := saga.NewRunner(d.store(t), quick(saga.RunnerConfig{}))
		sagas := saga.Register(r, sg)
		run(t, r)
		ctx, cancel := context.WithCancel(t.Context())
		_, err := sagas.Start(ctx, "a", nothing{})
		require.NoError(t, err)
		cancel()
		close(release)
		_, err = result(ctx, r, "a")
		require.ErrorIs(t, err, context.Canceled)
		_, err = result(t.Context(), r, "a")
		require.NoError(t, err)
	})
}

// result waits for a saga of any definition.
func result(ctx context.Context, r *saga.Runner, id string) (*saga.Instance, error) {
	in, err := r.Wait(ctx, id)
	if err == nil && in.Status != saga.Completed {
		err = &saga.Error{Saga: in.Saga, ID: id, Status: in.Status, Step: in.Step, Err: errors.New(in.Cause)}
	}
	return in, err
}
