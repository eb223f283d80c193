package saga_test

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/sqltx/standby"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/internal/participant"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A ledger is a minimal database with one table of strings. It accepts the statements of Apply, and "do NAME". A
// transaction writes when it commits, and then calls onCommit.
type ledger struct {
	mu       sync.Mutex
	rows     map[string]string
	effects  []string
	onCommit map[string]func() error // by the argument of "with"
	lose     int                     // number of COMMITs whose answer is lost
	refuse   int                     // number of COMMITs that fail
	commit   func() error            // called by each COMMIT, unless nil
	broken   error                   // error of the first answer, after it was read
}

func newLedger(t *testing.T) (*ledger, *sql.DB) {
	l := &ledger{rows: make(map[string]string), onCommit: make(map[string]func() error)}
	db := sql.OpenDB(l)
	t.Cleanup(func() { _ = db.Close() })
	return l, db
}

func (l *ledger) Connect(context.Context) (driver.Conn, error) { return &ledgerConn{l: l}, nil }
func (l *ledger) Driver() driver.Driver                        { return nil }

func (l *ledger) did() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string{}, l.effects...)
}

type ledgerConn struct {
	l       *ledger
	rows    map[string]string
	effects []string
	with    []string
}

func (c *ledgerConn) Prepare(string) (driver.Stmt, error) { return nil, errors.New("not prepared") }
func (c *ledgerConn) Close() error                        { return nil }

func (c *ledgerConn) Begin() (driver.Tx, error) {
	c.rows, c.effects, c.with = make(map[string]string), nil, nil
	return c, nil
}

func (c *ledgerConn) Rollback() error { return nil }

func (c *ledgerConn) Commit() error {
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	if c.l.commit != nil {
		if err := c.l.commit(); err != nil {
			return err
		}
	}
	if c.l.refuse > 0 {
		c.l.refuse--
		return errors.New("commit refused")
	}
	for _, name := range c.with {
		if err := c.l.onCommit[name](); err != nil {
			return err
		}
	}
	for k, v := range c.rows {
		c.l.rows[k] = v
	}
	c.l.effects = append(c.l.effects, c.effects...)
	if c.l.lose > 0 {
		c.l.lose--
		return errors.New("connection reset")
	}
	return nil
}

func words(args []driver.NamedValue) []string {
	var list []string
	for _, a := range args {
		list = append(list, a.Value.(string))
	}
	return list
}

func (c *ledgerConn) ExecContext(_ context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	w := words(args)
	switch {
	case query == "do":
		c.effects = append(c.effects, w[0])
	case query == "with":
		c.with = append(c.with, w[0])
	case strings.HasPrefix(query, "INSERT INTO saga_barrier (saga_id, step, op, reason"):
		key := strings.Join(w[:3], " ")
		if c.get(key) != "" {
			return driver.RowsAffected(0), nil
		}
		c.rows[key] = w[3]
		c.rows[key+" fingerprint"] = strings.Join(w[4:], "")
	default:
		return nil, errors.New("syntax error: " + query)
	}
	return driver.RowsAffected(1), nil
}

func (c *ledgerConn) get(key string) string {
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	return c.rows[key] + c.l.rows[key]
}

func (c *ledgerConn) QueryContext(_ context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	if strings.HasPrefix(query, "SELECT 1 /*! + 1 */, (SELECT reason FROM saga_barrier") {
		return &kindRows{version: c.get("  version"), err: c.l.broken}, nil
	}
	key := strings.Join(words(args), " ")
	switch columns, _, _ := strings.Cut(strings.TrimPrefix(query, "SELECT "), " FROM saga_barrier"); columns {
	case "reason":
		return &ledgerRows{values: []string{c.get(key)}}, nil
	case "reason, fingerprint":
		return &ledgerRows{values: []string{c.get(key), c.get(key + " fingerprint")}}, nil
	}
	return nil, errors.New("syntax error: " + query)
}

// kindRows has the kind of the database, and the version of the barrier's table if it is recorded.
type kindRows struct {
	version string
	read    bool
	err     error // the error of Close
}

func (r *kindRows) Columns() []string { return []string{"kind", "reason"} }
func (r *kindRows) Close() error      { return r.err }
func (r *kindRows) Next(dest []driver.Value) error {
	if r.read {
		return io.EOF
	}
	dest[0], r.read = "1", true
	if r.version != "" {
		dest[1] = r.version
	}
	return nil
}

type ledgerRows struct {
	values []string // the reason, and perhaps the fingerprint
	read   bool
}

func (r *ledgerRows) Columns() []string { return []string{"reason", "fingerprint"}[:len(r.values)] }
func (r *ledgerRows) Close() error      { return nil }
func (r *ledgerRows) Next(dest []driver.Value) error {
	if r.read || r.values[0] == "" {
		return io.EOF
	}
	for i, v := range r.values {
		dest[i] = v
	}
	r.read = true
	return nil
}

// A txMemory is a Memory whose commits can join a ledger's transactions.
type txMemory struct {
	store.Store
	l      *ledger
	db     *sql.DB
	mu     sync.Mutex
	fenced bool // the next CommitTx finds another owner

	exclusive bool
}

func newTxMemory(t *testing.T) *txMemory {
	l, db := newLedger(t)
	return &txMemory{Store: saga.NewMemory(), l: l, db: db}
}

func (m *txMemory) Exclusive() bool { return m.exclusive }

func (m *txMemory) Begin(ctx context.Context) (*sql.Tx, error) { return m.db.BeginTx(ctx, nil) }

func (m *txMemory) with(ctx context.Context, tx *sql.Tx, name string, fn func() error) error {
	m.l.mu.Lock()
	m.l.onCommit[name] = fn
	m.l.mu.Unlock()
	_, err := tx.ExecContext(ctx, "with", name)
	return err
}

func (m *txMemory) StartTx(ctx context.Context, tx *sql.Tx, req store.StartRequest) (store.Record, bool, error) {
	if rec, err := m.Load(ctx, req.ID); err == nil {
		return rec, false, nil
	}
	return store.Record{ID: req.ID, Saga: req.Saga}, true, m.with(ctx, tx, "start "+req.ID, func() error {
		_, _, err := m.Start(context.Background(), req)
		return err
	})
}

func (m *txMemory) PostTx(ctx context.Context, tx *sql.Tx, req store.PostRequest) (store.Record, error) {
	rec, err := m.Load(ctx, req.ID)
	if err != nil {
		return rec, err
	}
	list, err := m.Messages(ctx, req.ID)
	known := slices.ContainsFunc(list, func(s store.Message) bool { return s.Name == req.Name })
	if err == nil && !known {
		err = req.Admit(&rec)
	}
	if err != nil {
		return rec, err
	}
	return rec, m.with(ctx, tx, "signal "+req.ID, func() error {
		_, err := m.Post(context.Background(), req)
		return err
	})
}

func (m *txMemory) CommitTx(ctx context.Context, tx *sql.Tx, req store.CommitRequest) (store.Receipt, error) {
	rec, err := m.Load(ctx, req.ID)
	m.mu.Lock()
	fenced := m.fenced
	m.fenced = false
	m.mu.Unlock()
	if err != nil || fenced || rec.Epoch != req.Epoch || rec.Seq != req.Seq {
		return store.Receipt{}, store.ErrFenced
	}
	return store.Receipt{CancelRequested: rec.CancelRequested, CancelNote: rec.CancelNote},
		m.with(ctx, tx, "commit "+req.ID, func() error {
			_, err := m.Commit(context.Background(), req)
			return err
		})
}

// inTx returns a step that writes to the ledger.
func inTx(name string) saga.Step[trip] {
	do := func(what string) func(context.Context, *sql.Tx, *trip) error {
		return func(ctx context.Context, tx *sql.Tx, s *trip) error {
			s.Calls = append(s.Calls, what)
			_, err := tx.ExecContext(ctx, "do", what)
			return err
		}
	}
	return saga.Step[trip]{
		Name: name, DoTx: do("do " + name), UndoTx: do("undo " + name),
		Backoff: func(int) time.Duration { return time.Second },
	}
}

func TestDoTxAppliesOnceWhateverCommitReturns(t *testing.T) {
	for name, trouble := range map[string]func(*txMemory){
		"the answer is lost":   func(m *txMemory) { m.l.lose = 1 },
		"it does not commit":   func(m *txMemory) { m.l.refuse = 2 },
		"fenced, but not lost": func(m *txMemory) { m.fenced = true },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := newTxMemory(t)
				trouble(store)
				sg := sequence(inTx("flight"), step("hotel"))
				r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
				mustStart(t, r, sg)
				s, err := result[trip](t.Context(), r, "trip-1")
				require.NoError(t, err)
				require.Equal(t, []string{"do flight"}, store.l.did())
				require.Equal(t, []string{"do flight", "do hotel"}, s.Calls, "changes that were rolled back are not in the state")
				require.Equal(t, []string{"created", "step_done flight", "step_done hotel", "completed"}, events(t, r, "trip-1"))
			})
		})
	}
}

func TestFailedDoTxNeedsNoUndo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newTxMemory(t)
		bad := inTx("hotel")
		do := bad.DoTx
		bad.DoTx = func(ctx context.Context, tx *sql.Tx, s *trip) error {
			_ = do(ctx, tx, s)
			return errDeclined
		}
		panics := inTx("hotel")
		panics.DoTx = func(ctx context.Context, tx *sql.Tx, s *trip) error {
			_ = do(ctx, tx, s)
			panic("boom")
		}
		for i, st := range []saga.Step[trip]{bad, panics} {
			sg := sequence(inTx("flight"), st)
			sg.Version = i
			r, stop := begin[trip](t, store, saga.RunnerConfig{}, sg)
			id := []string{"one", "two"}[i]
			_, err := saga.Register(r, sg).Start(t.Context(), id, trip{})
			require.NoError(t, err)
			s, err := result[trip](t.Context(), r, id)
			require.ErrorIs(t, err, saga.ErrCompensated)
			require.Equal(t, []string{"do flight", "undo flight"}, s.Calls)
			require.Equal(t, []string{"created", "step_done flight", "step_no_effect hotel", "turned_back hotel",
				"step_undone flight", "compensated"},
				events(t, r, id))
			stop()
		}
		require.Equal(t, []string{"do flight", "undo flight", "do flight", "undo flight"}, store.l.did())
	})
}

// TestNoAttemptStartsDuringDoTx, except for attempts that start together with it, whose start is recorded before.
func TestNoAttemptStartsDuringDoTx(t *testing.T) {
	for name, order := range map[string][]int{"first": {0, 1, 2}, "last": {1, 2, 0}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store, begun := newTxMemory(t), time.Now()
				var at sync.Map
				note := func(what string) bool {
					_, again := at.LoadOrStore(what, time.Since(begun))
					if again {
						at.Store(what+" again", time.Since(begun))
					}
					return again
				}
				one, two, beside := inTx("one"), inTx("two"), step("beside")
				for _, st := range []*saga.Step[trip]{&one, &two} {
					name := st.Name
					st.DoTx = func(context.Context, *sql.Tx, *trip) error {
						note(name)
						time.Sleep(5 * time.Second)
						return nil
					}
				}
				beside.Do = func(context.Context, *trip) error {
					if !note("beside") {
						return errDeclined
					}
					return nil
				}
				steps := []saga.Step[trip]{one, beside, two}
				sg := sequence(steps[order[0]], steps[order[1]], steps[order[2]])
				sg.Steps[1].Parallel, sg.Steps[2].Parallel = true, true
				r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
				mustStart(t, r, sg)
				requireEnd(t, r, "trip-1", nil)
				waits := 0
				for _, what := range []string{"one", "two", "beside", "beside again"} {
					when, _ := at.Load(what)
					switch {
					case what == "beside":
						require.Zero(t, when)
					case when != time.Duration(0):
						require.EqualValues(t, 5*time.Second, when, what)
						waits++
					}
				}
				require.Equal(t, 2, waits, "one of the two, and a second attempt")
			})
		})
	}
}

// TestNothingIsCommittedDuringExclusiveDoTx: its transaction may be the only one that can write.
func TestNothingIsCommittedDuringExclusiveDoTx(t *testing.T) {
	for _, first := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			hotel := inTx("hotel")
			do := hotel.DoTx
			hotel.DoTx = func(ctx context.Context, tx *sql.Tx, s *trip) error {
				time.Sleep(5 * time.Second)
				return do(ctx, tx, s)
			}
			beside := saga.Step[trip]{Name: "beside", ReadOnly: true, Do: func(context.Context, *trip) error { return nil }}
			sg := sequence(beside, hotel)
			if first {
				sg = sequence(hotel, beside)
			}
			sg.Steps[1].Parallel = true
			r, _ := begin[trip](t, newTxMemory(t), saga.RunnerConfig{}, sg)
			mustStart(t, r, sg)
			requireCompleted(t, r, "trip-1")
			synctest.Wait()
			require.EqualValues(t, 1, r.Stats().Commits)
		})
	}
}

// TestExclusiveDoTxEndsAfterThirdOfLease: otherwise two of them, one after the other, would cost the other sagas
// their leases.
func TestExclusiveDoTxEndsAfterThirdOfLease(t *testing.T) {
	for exclusive, want := range map[bool]time.Duration{true: 3 * time.Second, false: time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			store := newTxMemory(t)
			store.exclusive = exclusive
			begun := time.Now()
			st := inTx("flight")
			st.Attempts = 1
			st.DoTx = func(ctx context.Context, _ *sql.Tx, _ *trip) error {
				<-ctx.Done()
				require.Equal(t, want, time.Since(begun))
				return ctx.Err()
			}
			sg := sequence(st)
			r, _ := begin[trip](t, store, saga.RunnerConfig{LeaseTTL: 9 * time.Second}, sg)
			mustStart(t, r, sg)
			requireEnd(t, r, "trip-1", saga.ErrCompensated)
		})
	}
}

func TestDoTxWithUnencodableStateIsRolledBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		memory, codec := newTxMemory(t), &fragile{}
		st := inTx("flight")
		do := st.DoTx
		st.DoTx = func(ctx context.Context, tx *sql.Tx, s *trip) error {
			codec.mu.Lock()
			defer codec.mu.Unlock()
			codec.encode = true
			return do(ctx, tx, s)
		}
		sg := sequence(st)
		sg.Codec = codec
		r, _ := begin[trip](t, memory, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		_, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.ErrorContains(t, err, "state does not encode")
		require.Empty(t, memory.l.did())
	})
}

// A txHeartless store fails heartbeats and claims for some time.
type txHeartless struct {
	*txMemory
	until time.Time
}

func (h *txHeartless) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	if time.Now().Before(h.until) {
		return nil, errDown
	}
	return h.txMemory.Heartbeat(ctx, req)
}

func (h *txHeartless) Claim(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
	if time.Now().Before(h.until) {
		return nil, errDown
	}
	return h.txMemory.Claim(ctx, req)
}

// TestDoTxOfLostSagaIsReported like any other attempt.
func TestDoTxOfLostSagaIsReported(t *testing.T) {
	for _, returned := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			memory := newTxMemory(t)
			st := inTx("flight")
			do := st.DoTx
			var codec slowCodec
			st.DoTx = func(ctx context.Context, tx *sql.Tx, s *trip) error {
				if saga.CommandFrom(ctx).Epoch == 1 {
					if returned {
						codec.takes.Store(int64(16 * time.Second))
						return do(ctx, tx, s)
					}
					<-ctx.Done()
					return ctx.Err()
				}
				return do(ctx, tx, s)
			}
			sg := sequence(st)
			sg.Codec = &codec
			var outcomes []string
			r, _ := observed[trip](t, &txHeartless{memory, time.Now().Add(20 * time.Second)}, saga.RunnerConfig{},
				on(saga.EventAttempted, func(e saga.Event) { outcomes = append(outcomes, string(e.Outcome)) }), sg)
			mustStart(t, r, sg)
			requireEnd(t, r, "trip-1", nil)
			require.Equal(t, []string{"interrupted", "done"}, outcomes)
			require.Equal(t, []string{"do flight"}, memory.l.did())
		})
	}
}

// TestDoTxRolledBackByStopIsNoAttempt: the transaction has not failed, so it does not count against Attempts or
// UndoAttempts, and the store is healthy.
func TestDoTxRolledBackByStopIsNoAttempt(t *testing.T) {
	for _, back := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			store, flight, stopped := newTxMemory(t), inTx("flight"), false
			flight.Attempts, flight.UndoAttempts = 1, 1
			tx, late := &flight.DoTx, step("hotel")
			if back {
				tx, late = &flight.UndoTx, failing("hotel", saga.Declined(errDeclined))
			}
			fn := *tx
			*tx = func(ctx context.Context, tx *sql.Tx, s *trip) error {
				err := fn(ctx, tx, s)
				if !stopped {
					stopped = true
					time.Sleep(5 * time.Second)
				}
				return err
			}
			sg := sequence(flight, late)
			first, stop := begin[trip](t, store, saga.RunnerConfig{Drain: time.Second}, sg)
			mustStart(t, first, sg)
			time.Sleep(time.Second)
			stop()
			require.Zero(t, first.Stats().StoreErrors)
			r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
			_, err := result[trip](t.Context(), r, "trip-1")
			if back {
				require.ErrorIs(t, err, saga.ErrCompensated)
				require.Equal(t, []string{"do flight", "undo flight"}, store.l.did())
			} else {
				require.NoError(t, err)
				require.Equal(t, []string{"do flight"}, store.l.did())
			}
		})
	}
}

// A slowLoad store is slow to return whether a commit has happened.
type slowLoad struct{ *txMemory }

func (m *slowLoad) Load(ctx context.Context, id string) (store.Record, error) {
	time.Sleep(2 * time.Second)
	return m.txMemory.Load(ctx, id)
}

// TestTransactionEndedByStepIsNotRepeated: the runner stops, and the next one does not repeat the transaction, which
// has taken effect.
func TestTransactionEndedByStepIsNotRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, flight := newTxMemory(t), inTx("flight")
		fn := flight.DoTx
		flight.DoTx = func(ctx context.Context, tx *sql.Tx, s *trip) error { return errors.Join(fn(ctx, tx, s), tx.Commit()) }
		sg := sequence(flight)
		first, stop := begin[trip](t, &slowLoad{store}, saga.RunnerConfig{Drain: time.Second}, sg)
		mustStart(t, first, sg)
		synctest.Wait()
		stop()
		r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
		requireEnd(t, r, "trip-1", saga.ErrCompensated)
		require.Equal(t, []string{"do flight", "undo flight"}, store.l.did())
	})
}

func TestFencedOwnerRollsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		memory := newTxMemory(t)
		st := inTx("flight")
		do, calls := st.DoTx, 0
		st.DoTx = func(ctx context.Context, tx *sql.Tx, s *trip) error {
			if calls++; calls > 1 {
				return do(ctx, tx, s)
			}
			err := do(ctx, tx, s)
			time.Sleep(time.Millisecond)
			_, cerr := memory.Claim(ctx, store.ClaimRequest{
				Owner: "other", LeaseTTL: time.Second, Limit: 1, Definitions: []store.Definition{{Saga: "trip", Version: 1}},
			})
			require.NoError(t, cerr)
			return err
		}
		sg := sequence(st)
		g := &txGate{memory}
		r, _ := begin[trip](t, g, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		time.Sleep(500 * time.Millisecond)
		require.Empty(t, memory.l.did(), "a paused owner that wakes up commits nothing")
		synctest.Wait()
		require.EqualValues(t, 1, r.Stats().Lost)
		requireEnd(t, r, "trip-1", nil)
		require.Equal(t, []string{"do flight"}, memory.l.did())
	})
}

// A txGate grants leases that have already expired by the store's clock.
type txGate struct{ *txMemory }

func (g *txGate) Start(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
	req.LeaseTTL = time.Nanosecond
	return g.txMemory.Start(ctx, req)
}

func TestStartTx(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newTxMemory(t)
		sg := sequence(step("flight"))
		other := &saga.Saga[trip]{Name: "other", Steps: sg.Steps}
		r, _ := begin[trip](t, store, saga.RunnerConfig{Poll: time.Hour}, sg, other)
		var created []string
		r.Observe(func(_ context.Context, e saga.Event) {
			if e.Kind == saga.EventCreated {
				created = append(created, e.ID)
			}
		})
		begun := time.Now()
		tx, err := store.Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, saga.Register(r, sg).StartTx(t.Context(), tx, "trip-1", trip{}))
		_, err = r.Get(t.Context(), "trip-1")
		require.ErrorIs(t, err, saga.ErrNotFound)
		require.Empty(t, created, "the transaction may be rolled back")
		require.NoError(t, tx.Commit())
		r.Wake()
		requireEnd(t, r, "trip-1", nil)
		require.Equal(t, []string{"trip-1"}, created)
		require.EqualValues(t, 1, total(r, "status=started"))
		require.Zero(t, time.Since(begun))

		tx, err = store.Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, saga.Register(r, sg).StartTx(t.Context(), tx, "trip-1", trip{}))
		require.ErrorIs(t, saga.Register(r, other).StartTx(t.Context(), tx, "trip-1", trip{}), saga.ErrExists)
		require.ErrorContains(t, saga.Register(r, sg).StartTx(t.Context(), tx, "", trip{}), "id is")
		require.NoError(t, tx.Rollback())
		require.Error(t, saga.Register(r, sg).StartTx(t.Context(), tx, "trip-2", trip{}), "it has ended")
	})
}

// TestStartTxReportsCreationOnce: an operation before any claim reports the saga, or else its first owner alone.
func TestStartTxReportsCreationOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, sg := newTxMemory(t), sequence(step("flight"))
		start := func(r *saga.Runner, id string) {
			tx, err := st.Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, saga.Register(r, sg).StartTx(t.Context(), tx, id, trip{}))
			require.NoError(t, tx.Commit())
		}
		var created []string
		record := func(_ context.Context, e saga.Event) {
			if e.Kind == saga.EventCreated {
				created = append(created, e.ID)
			}
		}
		operator := idle(st, sg)
		operator.Observe(record)
		start(operator, "operated")
		operate(t, operator, "operated", saga.Operation{Action: saga.ActionAbandon, Note: "a mistake"})
		require.Equal(t, []string{"operated"}, created)

		start(operator, "taken over")
		claimed, err := st.Claim(t.Context(), store.ClaimRequest{
			Owner: "dead", LeaseTTL: time.Second, Limit: 1,
			Definitions: []store.Definition{{Saga: sg.Name, Version: sg.Version}},
		})
		require.NoError(t, err)
		require.Len(t, claimed, 1)
		time.Sleep(time.Minute)
		r, _ := observed(t, st, saga.RunnerConfig{}, record, sg)
		requireEnd(t, r, "taken over", nil)
		require.Equal(t, []string{"operated"}, created, "its dead owner has reported the other one")
	})
}

func TestApply(t *testing.T) {
	for _, c := range []struct {
		name string
		ops  string
		want []string // the commands that are applied
		errs string   // the result of each: "-" for nil, "u" for undone, "f" for full
	}{
		{"once", "do", []string{"do"}, "-"},
		{"do again", "do do", []string{"do"}, "--"},
		{"undo", "do undo", []string{"do", "undo"}, "--"},
		{"undo again", "do undo undo", []string{"do", "undo"}, "---"},
		{"undo of nothing", "undo undo", nil, "--"},
		{"do that comes late", "undo do", nil, "-u"},
		{"do that comes again late", "do undo do", []string{"do", "undo"}, "---"},
		{"all of it", "undo do undo do", nil, "-u-u"},
		{"declined", "full do do", nil, "fff"},
		{"undo of a declined command", "full undo do undo", nil, "f-f-"},
		{"refused after it was applied", "do full undo", []string{"do", "undo"}, "---"},
		{"refused after it was undone", "undo full", nil, "-u"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, db := newLedger(t)
			for i, op := range strings.Fields(c.ops) {
				var full error
				if op == "full" {
					op, full = "do", saga.Declined(errors.New("full"))
				}
				err := apply(t, db, "trip/2026/1/hotel/inn/"+op, full)
				switch c.errs[i] {
				case '-':
					require.NoError(t, err)
				case 'u':
					require.ErrorContains(t, err, "its undo came first")
					require.True(t, saga.IsDeclined(err))
				case 'f':
					require.EqualError(t, err, "full")
					require.True(t, saga.IsDeclined(err))
				}
			}
			require.Equal(t, append([]string{}, c.want...), l.did())
		})
	}
	for _, c := range []struct {
		name string
		ops  string // each with the fingerprint of its request, if it has one
		want []string
		errs string // as above, and "o" for another request
	}{
		{"one request", "do:1 do:1 do:2", []string{"do"}, "--o"},
		{"without a fingerprint at first", "do do:1", []string{"do"}, "--"},
		{"without a fingerprint later", "do:1 do", []string{"do"}, "--"},
		{"undo is another request", "do:1 undo:2 undo:2 undo:3", []string{"do", "undo"}, "---o"},
		{"undo of nothing, in two requests", "undo:1 undo:1 undo:2", nil, "--o"},
		{"do that comes late, in its own request", "undo:1 do:2", nil, "-u"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, db := newLedger(t)
			for i, op := range strings.Fields(c.ops) {
				op, fingerprint, _ := strings.Cut(op, ":")
				ctx := saga.WithCommand(t.Context(), saga.Command{ID: "1/hotel/" + op})
				err := saga.Apply(participant.WithFingerprint(ctx, fingerprint), db, func(tx *sql.Tx) error {
					_, err := tx.ExecContext(ctx, "do", op)
					return err
				})
				switch c.errs[i] {
				case '-':
					require.NoError(t, err)
				case 'u':
					require.ErrorIs(t, err, participant.ErrUndone)
				case 'o':
					require.ErrorIs(t, err, participant.ErrOtherRequest)
					require.False(t, saga.IsDeclined(err), "the first request was applied")
				}
			}
			require.Equal(t, append([]string{}, c.want...), l.did())
		})
	}
	t.Run("a failed command may be repeated", func(t *testing.T) {
		l, db := newLedger(t)
		for _, fail := range []error{errDeclined, saga.Permanent(errDeclined), nil} {
			require.Equal(t, fail, apply(t, db, "1/hotel/do", fail))
		}
		require.Equal(t, []string{"do"}, l.did())
	})
	t.Run("a decline that is not recorded is none", func(t *testing.T) {
		l, db := newLedger(t)
		l.refuse = 1
		err := apply(t, db, "1/hotel/do", saga.Declined(errDeclined))
		require.ErrorContains(t, err, "commit refused")
		require.False(t, saga.IsDeclined(err))
		require.NoError(t, apply(t, db, "1/hotel/do", nil))
		require.Equal(t, []string{"do"}, l.did())
	})
	t.Run("a truncated answer", func(t *testing.T) {
		l, db := newLedger(t)
		l.rows["  version"], l.broken = "1 1", errDown
		require.ErrorIs(t, apply(t, db, "1/hotel/do", nil), errDown)
		require.Empty(t, l.did())
	})
	t.Run("without a command", func(t *testing.T) {
		_, db := newLedger(t)
		require.ErrorContains(t, saga.Apply(t.Context(), db, nil), "ctx carries no command")
		for _, id := range []string{"x", "a/do", "a/b/redo"} {
			require.ErrorContains(t, apply(t, db, id, nil), "is not the id of a command")
		}
		require.NoError(t, db.Close())
		require.ErrorContains(t, apply(t, db, "1/a/do", nil), "saga: barrier:")
	})
}

// apply applies the command with an ID. Its function returns err.
func apply(t *testing.T, db *sql.DB, id string, err error) error {
	ctx := saga.WithCommand(t.Context(), saga.Command{ID: id})
	if db != nil {
		inUse := db.Stats().InUse
		defer func() { require.Equal(t, inUse, db.Stats().InUse, "no transaction is left open") }()
	}
	return saga.Apply(ctx, db, func(tx *sql.Tx) error {
		_, wrong := tx.ExecContext(ctx, "do", id[strings.LastIndex(id, "/")+1:])
		return cmp.Or(wrong, err)
	})
}

// TestDeclineYieldsToConcurrentAttempt: the other attempt is applied before the decline is recorded.
func TestDeclineYieldsToConcurrentAttempt(t *testing.T) {
	l, db := newLedger(t)
	ctx := saga.WithCommand(t.Context(), saga.Command{ID: "1/hotel/do"})
	require.NoError(t, saga.Apply(ctx, db, func(*sql.Tx) error {
		require.NoError(t, apply(t, db, "1/hotel/do", nil))
		return saga.Declined(errDeclined)
	}))
	require.Equal(t, []string{"do"}, l.did())
}

// TestRepeatedDeclineYieldsToAppliedAttempt: another attempt is applied in between, so the command must not be
// reported as one that took no effect.
func TestRepeatedDeclineYieldsToAppliedAttempt(t *testing.T) {
	l, db := newLedger(t)
	l.commit = func() error {
		l.commit, l.rows["1 hotel do"] = nil, "do"
		return &standby.Error{Code: "26000"}
	}
	require.NoError(t, apply(t, db, "1/hotel/do", saga.Declined(errDeclined)))
}

// TestApplyForgetsDeclineOfRepeatedAttempt: the decline came from a stale prepared statement of the driver.
func TestApplyForgetsDeclineOfRepeatedAttempt(t *testing.T) {
	_, db := newLedger(t)
	errs := []error{saga.Declined(&standby.Error{Code: "26000"}), errDeclined}
	ctx := saga.WithCommand(t.Context(), saga.Command{ID: "1/hotel/do"})
	require.Equal(t, errDeclined, saga.Apply(ctx, db, func(*sql.Tx) (err error) {
		err, errs = errs[0], errs[1:]
		return err
	}))
	require.NoError(t, apply(t, db, "1/hotel/do", nil), "it was not refused")
}
