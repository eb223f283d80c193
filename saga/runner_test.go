package saga_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"math"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// on returns an observer that calls fn for the events of a kind. The observer silent keeps the runner from logging
// events.
func on(kind saga.EventKind, fn func(saga.Event)) func(context.Context, saga.Event) {
	return func(_ context.Context, e saga.Event) {
		if e.Kind == kind {
			fn(e)
		}
	}
}

func silent(context.Context, saga.Event) {}

// total returns the sum of a metric, such as "status=started", over all definitions.
func total(r *saga.Runner, label string) (sum int) {
	for name, n := range metricsOf(r) {
		if strings.HasPrefix(name, "saga.s") && strings.HasSuffix(name, ","+label+"}") &&
			!strings.HasPrefix(name, "saga.stored") {
			sum += int(n)
		}
	}
	return sum
}

// long returns d, or a twelfth of it with -short: a runner polls 86,400 times in a day of virtual time.
func long(d time.Duration) time.Duration {
	if testing.Short() {
		return d / 12
	}
	return d
}

// begin runs a runner until stop is called or the test ends.
func begin[S any](t *testing.T, st store.Store, cfg saga.RunnerConfig, sagas ...*saga.Saga[S]) (r *saga.Runner,
	stop func()) {
	t.Helper()
	return observed(t, st, cfg, nil, sagas...)
}

// observed is like begin, with an observer unless it is nil.
func observed[S any](
	t *testing.T, st store.Store, cfg saga.RunnerConfig, hear func(context.Context, saga.Event), sagas ...*saga.Saga[S],
) (r *saga.Runner, stop func()) {
	t.Helper()
	r = saga.NewRunner(st, cfg)
	if hear != nil {
		r.Observe(hear)
	}
	for _, sg := range sagas {
		saga.Register(r, sg)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
	})
	t.Cleanup(stop)
	synctest.Wait()
	return r, stop
}

// result waits for a saga of any definition whose state is an S.
func result[S any](ctx context.Context, r *saga.Runner, id string) (S, error) {
	return saga.ResultOf[S](ctx, r, id)
}

// requireEnd waits for a saga and checks that its error matches want; nil means that it is completed.
func requireEnd(t *testing.T, r *saga.Runner, id string, want error) {
	t.Helper()
	_, err := result[trip](t.Context(), r, id)
	require.ErrorIs(t, err, want)
}

func requireStatus(t *testing.T, r *saga.Runner, id string, want saga.Status, msg ...any) {
	t.Helper()
	require.Equal(t, want, instance(t, r, id).Status, msg...)
}

func instance(t *testing.T, r *saga.Runner, id string) *saga.Instance {
	t.Helper()
	in, err := r.Get(t.Context(), id)
	require.NoError(t, err)
	return in
}

func operate(t *testing.T, r *saga.Runner, id string, op saga.Operation) {
	t.Helper()
	require.NoError(t, r.Operate(t.Context(), id, op))
}

// start starts a saga of a definition that may be unregistered.
func start[S any](ctx context.Context, r *saga.Runner, sg *saga.Saga[S], id string, s S) (*saga.Instance, error) {
	d, err := saga.Define(sg)
	if err != nil {
		return nil, err
	}
	data, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	return r.Start(ctx, d, id, data)
}

func events(t *testing.T, r *saga.Runner, id string) []string {
	t.Helper()
	log, err := r.History(context.Background(), id, 0, 0)
	require.NoError(t, err)
	var list []string
	for i, e := range log {
		require.EqualValues(t, i+1, e.Seq, "log gap")
		list = append(list, strings.TrimSpace(string(e.Kind)+" "+e.Step))
	}
	return list
}

func mustStart(t *testing.T, r *saga.Runner, sg *saga.Saga[trip]) *saga.Instance {
	t.Helper()
	in, err := saga.Register(r, sg).Start(t.Context(), "trip-1", trip{})
	require.NoError(t, err)
	return in
}

// abandoned starts a saga of one step whose owner has crashed or has lost it.
func abandoned(t *testing.T, st store.Store, id, owner string) {
	t.Helper()
	_, created, err := st.Start(t.Context(), store.StartRequest{
		ID: id, Saga: "trip", Version: 1, Status: saga.Running, State: []byte(`{}`),
		Progress: []byte(`{"steps":[{"n":"flight","s":"started"}]}`),
		Owner:    owner, LeaseTTL: 15 * time.Second, Log: []store.Entry{{Kind: saga.EventCreated}},
	})
	require.NoError(t, err)
	require.True(t, created)
}

// A gate is a store whose calls a test can change or fail.
type gate struct {
	store.Store
	mu     sync.Mutex
	closed bool
	commit func(context.Context, store.CommitRequest) (store.Receipt, error)
	claim  func(context.Context, store.ClaimRequest) ([]store.Record, error)
	start  func(context.Context, store.StartRequest) (store.Record, bool, error)

	heartbeat func(context.Context, store.HeartbeatRequest) ([]store.Renewed, error)
}

func (g *gate) set(closed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = closed
}

func (g *gate) err() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return errDown
	}
	return nil
}

func (g *gate) Start(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
	if g.start != nil {
		return g.start(ctx, req)
	}
	return g.Store.Start(ctx, req)
}

func (g *gate) Claim(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
	if err := g.err(); err != nil {
		return nil, err
	}
	if g.claim != nil {
		return g.claim(ctx, req)
	}
	return g.Store.Claim(ctx, req)
}

func (g *gate) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	if err := g.err(); err != nil {
		return nil, err
	}
	if g.heartbeat != nil {
		return g.heartbeat(ctx, req)
	}
	return g.Store.Heartbeat(ctx, req)
}

func (g *gate) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	if err := g.err(); err != nil {
		return store.Receipt{}, err
	}
	if g.commit != nil {
		return g.commit(ctx, req)
	}
	return g.Store.Commit(ctx, req)
}

func (g *gate) Load(ctx context.Context, id string) (store.Record, error) {
	if err := g.err(); err != nil {
		return store.Record{}, err
	}
	return g.Store.Load(ctx, id)
}

// TestLockedRowIsNotLost: a heartbeat that cannot extend a lease leaves it unchanged.
func TestLockedRowIsNotLost(t *testing.T) {
	for name, c := range map[string]struct {
		locked time.Duration
		lost   bool
	}{"for one heartbeat": {6 * time.Second, false}, "for longer": {21 * time.Second, true}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun := time.Now()
				memory := saga.NewMemory()
				g := &gate{Store: memory,
					claim: func(context.Context, store.ClaimRequest) ([]store.Record, error) { return nil, nil }}
				g.heartbeat = func(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
					if since := time.Since(begun); since > 3*time.Second && since < 3*time.Second+c.locked {
						var list []store.Renewed
						for _, h := range req.Held {
							list = append(list, store.Renewed{ID: h.ID, Epoch: h.Epoch, Locked: true})
						}
						return list, nil
					}
					return memory.Heartbeat(ctx, req)
				}
				st := step("flight")
				st.Do = func(ctx context.Context, _ *trip) error {
					select {
					case <-ctx.Done():
					case <-time.After(40 * time.Second):
					}
					assert.Equal(t, c.lost, ctx.Err() != nil)
					return ctx.Err()
				}
				sg := sequence(st)
				r, stop := begin(t, g, saga.RunnerConfig{}, sg)
				mustStart(t, r, sg)
				time.Sleep(time.Minute)
				stop()
				require.Equal(t, c.lost, r.Stats().Lost == 1)
			})
		})
	}
}

// TestUnansweredHeartbeatKeepsLease: the connection is half open, and so is the connection of the next heartbeat.
func TestUnansweredHeartbeatKeepsLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		memory := saga.NewMemory()
		g := &gate{Store: memory}
		beats := 0
		g.heartbeat = func(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
			if beats++; beats%3 != 0 {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return memory.Heartbeat(ctx, req)
		}
		st := step("flight")
		st.Do = func(ctx context.Context, _ *trip) error {
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Second):
			}
			return ctx.Err()
		}
		sg := sequence(st)
		r, _ := begin(t, g, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		requireEnd(t, r, "trip-1", nil)
		synctest.Wait()
		require.Zero(t, r.Stats().Lost)
	})
}

// TestForeignCommitOfSameEpochIsNotOwn: a transaction that timed out commits later and replaces a record of the same
// length.
func TestForeignCommitOfSameEpochIsNotOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := saga.NewMemory()
		g := &gate{Store: st}
		g.commit = func(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
			if req.Status != saga.Compensating {
				return st.Commit(ctx, req)
			}
			late := req
			late.Nonce, late.Status, late.Release = req.Nonce+1, saga.Completed, true
			late.Log = []store.Entry{{Step: "hotel", Op: saga.OpDo, Kind: saga.EventStepDone}, {Kind: saga.EventCompleted}}
			require.Len(t, req.Log, len(late.Log))
			_, err := st.Commit(ctx, late)
			require.NoError(t, err)
			return st.Commit(ctx, req)
		}
		flight := step("flight")
		flight.Undo = func(context.Context, *trip) error { t.Error("a completed saga was undone"); return nil }
		sg := sequence(flight, failing("hotel", saga.Declined(errDeclined)))
		r, _ := begin(t, g, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		requireEnd(t, r, "trip-1", nil)
		time.Sleep(time.Minute)
		require.Equal(t, []string{"created", "step_done flight", "step_done hotel", "completed"}, events(t, r, "trip-1"))
		require.EqualValues(t, 1, r.Stats().Lost)
		require.Zero(t, r.Stats().Held)
	})
}

func TestStoppingRunnerReleasesSagas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := saga.NewMemory()
		slow := step("flight")
		slow.Do = func(context.Context, *trip) error { time.Sleep(5 * time.Second); return nil }
		sg := sequence(slow, step("hotel"))
		first, stop := begin(t, store, saga.RunnerConfig{}, sg)
		begun := time.Now()
		mustStart(t, first, sg)
		time.Sleep(time.Second)
		stop()
		require.Equal(t, 5*time.Second, time.Since(begun), "the attempt ends")
		synctest.Wait()
		require.Contains(t, events(t, first, "trip-1"), "released")
		rec, err := store.Load(t.Context(), "trip-1")
		require.NoError(t, err)
		require.Empty(t, rec.Owner)
		in := mustStart(t, first, sg)
		require.Equal(t, saga.StepStarted, in.Steps[1].Status, "a runner that has stopped starts nothing itself")

		second, _ := begin(t, store, saga.RunnerConfig{}, sg)
		requireEnd(t, second, "trip-1", nil)
		require.Equal(t, []string{"created", "step_done flight", "released", "step_done hotel", "completed"},
			events(t, second, "trip-1"))
		synctest.Wait()
		require.Zero(t, second.Stats().TakenOver)
	})
}

func TestClaimDuringStopIsReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{Store: saga.NewMemory()}
		g.claim = func(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
			time.Sleep(2 * time.Second)
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			return g.Store.Claim(ctx, req)
		}
		sg := sequence(step("flight"))
		idle := saga.NewRunner(g.Store, saga.RunnerConfig{})
		saga.Register(idle, sg)
		mustStart(t, idle, sg)
		r, stop := begin(t, g, saga.RunnerConfig{}, sg)
		time.Sleep(time.Second)
		stop()
		synctest.Wait()
		require.EqualValues(t, 1, r.Stats().Claimed)
		require.Empty(t, instance(t, idle, "trip-1").Owner)
		require.Equal(t, []string{"created", "released"}, events(t, idle, "trip-1"))
	})
}

func TestDrainingRunnerRenewsLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := saga.NewMemory()
		slow := step("flight")
		slow.Do = func(context.Context, *trip) error { time.Sleep(40 * time.Second); return nil }
		slow.Timeout = time.Minute
		sg := sequence(slow)
		first, stop := begin(t, store, saga.RunnerConfig{Drain: time.Minute}, sg)
		mustStart(t, first, sg)
		second, _ := begin(t, store, saga.RunnerConfig{}, sg)
		stop()
		require.Equal(t, []string{"created", "step_done flight", "completed"}, events(t, second, "trip-1"))
		require.Zero(t, second.Stats().Claimed)
	})
}

func TestAttemptCutShortIsInDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := saga.NewMemory()
		calls := 0
		st := step("flight")
		st.Do = func(ctx context.Context, _ *trip) error {
			if calls++; calls == 1 {
				<-ctx.Done()
				require.EqualError(t, context.Cause(ctx), "saga: runner stopped")
				return ctx.Err()
			}
			require.Equal(t, 1, saga.CommandFrom(ctx).Attempt, "it counts as none")
			return saga.Permanent(errDeclined)
		}
		sg := sequence(st)
		first, stop := begin(t, store, saga.RunnerConfig{Drain: 3 * time.Second}, sg)
		begun := time.Now()
		mustStart(t, first, sg)
		synctest.Wait()
		stop()
		require.Equal(t, 3*time.Second, time.Since(begun))
		second, _ := begin(t, store, saga.RunnerConfig{}, sg)
		s, err := result[trip](t.Context(), second, "trip-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.Equal(t, []string{"undo flight"}, s.Calls)
		require.Equal(t, []string{"created", "released", "step_failed flight", "turned_back flight", "step_undone flight",
			"compensated"},
			events(t, second, "trip-1"))
	})
}

func TestLongWaitIsParked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var attempts []int
		var at []time.Duration
		begun := time.Now()
		st := step("flight")
		st.Attempts = 5
		st.Backoff = func(n int) time.Duration {
			return []time.Duration{0, time.Second, time.Hour, time.Hour, time.Second}[n]
		}
		st.Do = func(ctx context.Context, s *trip) error {
			attempts = append(attempts, saga.CommandFrom(ctx).Attempt)
			at = append(at, time.Since(begun).Round(2*time.Second))
			s.Calls = append(s.Calls, "do")
			if len(attempts) < 5 {
				return errDeclined
			}
			return nil
		}
		sg := sequence(st)
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Zero(t, r.Stats().Held)
		in := instance(t, r, "trip-1")
		require.Equal(t, saga.Running, in.Status)
		require.Equal(t, 2, in.Failures)
		require.Equal(t, "declined", in.LastError)
		require.Equal(t, time.Hour+time.Second, in.WakeAt.Sub(begun))
		require.Equal(t, time.Minute, in.IdleFor())
		s, err := result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Len(t, s.Calls, 5, "changes of a failed attempt are stored")
		require.Equal(t, []int{1, 2, 3, 4, 5}, attempts)
		require.Equal(t, []string{"created", "parked", "parked", "step_done flight", "completed"}, events(t, r, "trip-1"))
		require.Equal(t, time.Hour+2*time.Second, at[2])
	})
}

func TestConflictingChangesAreRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := step("a"), step("b")
		b.Parallel = true
		sg := sequence(a, b) // both append to Calls
		var retries atomic.Int64
		r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, on(saga.EventAttempted, func(e saga.Event) {
			if e.Err != nil {
				retries.Add(1)
				assert.Equal(t, "saga: two steps that run in parallel have both changed s.Calls", e.Err.Error())
			}
		}), sg)
		mustStart(t, r, sg)
		s, err := result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.ElementsMatch(t, []string{"do a", "do b"}, s.Calls)
		require.EqualValues(t, 1, retries.Load())
	})
}

func TestUnencodableStateTurnsSagaBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := &saga.Saga[float64]{Name: "sum", Steps: []saga.Step[float64]{
			{
				Name: "one", Do: func(_ context.Context, s *float64) error { *s = 1; return nil },
				Undo: func(context.Context, *float64) error { return nil },
			},
			{
				Name: "two", Do: func(_ context.Context, s *float64) error { *s = math.NaN(); return nil },
				Undo: func(_ context.Context, s *float64) error { *s *= 10; return nil },
			},
		}}
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		_, err := saga.Register(r, sg).Start(t.Context(), "sum-1", 0)
		require.NoError(t, err)
		s, err := result[float64](t.Context(), r, "sum-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.ErrorContains(t, err, "state does not encode")
		require.Equal(t, 10.0, s)

		_, err = saga.Register(r, sg).Start(t.Context(), "sum-2", math.Inf(1))
		require.ErrorContains(t, err, "state does not encode")
		_, err = r.Get(t.Context(), "sum-2")
		require.ErrorIs(t, err, saga.ErrNotFound)
	})
}

func TestUnreadableRecordIsStuckUnchanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, change := range map[string]func(*store.StartRequest){
			"state": func(r *store.StartRequest) { r.State = []byte("{") },
			"steps": func(r *store.StartRequest) { r.Progress = []byte("{") },
		} {
			st := saga.NewMemory()
			req := store.StartRequest{
				ID: "trip-1", Saga: "trip", Version: 1, Status: saga.Running, State: []byte(`{}`),
				Progress: []byte(`{"steps":[{"n":"flight","s":"started"}]}`), Log: []store.Entry{{Kind: saga.EventCreated}},
			}
			change(&req)
			_, _, err := st.Start(t.Context(), req)
			require.NoError(t, err)
			sg := sequence(step("flight"))
			require.NoError(t, idle(st, sg).Operate(t.Context(), "trip-1",
				saga.Operation{Action: saga.ActionCancel, Note: "ill"}), name)
			r, stop := begin(t, st, saga.RunnerConfig{}, sg)
			in, err := r.Wait(t.Context(), "trip-1")
			require.NoError(t, err)
			require.Equal(t, saga.Stuck, in.Status, name)
			require.Equal(t, req.State, in.State)
			if name != "state" {
				_, err = saga.Register(r, sg).Result(t.Context(), "trip-1")
				require.ErrorContains(t, err, "record's steps cannot be read")
				require.ErrorIs(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionRetry}),
					saga.ErrNotRegistered, name)
			}
			operate(t, r, "trip-1", saga.Operation{Action: saga.ActionAbandon, Note: "beyond repair"})
			stop()
		}
	})
}

// TestUnreadableRecordOfLostOwnerIsInDoubt: the owner lost the saga and cannot read its record any more. The step
// may have taken effect.
func TestUnreadableRecordOfLostOwnerIsInDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, sg := &gate{Store: saga.NewMemory()}, sequence(step("flight"))
		var owner atomic.Value
		g.claim = func(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
			owner.Store(req.Owner)
			return g.Store.Claim(ctx, req)
		}
		_, stop := observed(t, store.Store(g), saga.RunnerConfig{}, silent, sequence(step("train")))
		abandoned(t, g, "trip-1", owner.Load().(string))
		operate(t, idle(g.Store, sg), "trip-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"})
		time.Sleep(time.Minute)
		stop()
		// A runner that can read the saga may claim it at once.
		operate(t, idle(g.Store, sg), "trip-1", saga.Operation{Action: saga.ActionRetry})
		r, _ := begin(t, g.Store, saga.RunnerConfig{}, sg)
		s, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.Equal(t, []string{"undo flight"}, s.Calls)
	})
}

// TestUnreadableReleasedRecordHasNoDoubt: the record was released, so a pivot that never started has no effect to
// find out.
func TestUnreadableReleasedRecordHasNoDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		charge := step("charge")
		charge.Pivot, charge.Undo = true, nil
		st, sg := saga.NewMemory(), sequence(charge)
		_, err := saga.Register(idle(st, sg), sg).Start(t.Context(), "trip-1", trip{})
		require.NoError(t, err)
		operate(t, idle(st, sg), "trip-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"})
		_, stop := observed(t, st, saga.RunnerConfig{}, silent, sequence(step("train")))
		time.Sleep(time.Minute)
		stop()
		operate(t, idle(st, sg), "trip-1", saga.Operation{Action: saga.ActionRetry})
		r, _ := begin(t, st, saga.RunnerConfig{}, sg)
		s, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.Empty(t, s.Calls)
	})
}

func TestPanicInStepIsFailedAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		boom := step("hotel")
		boom.Attempts = 1
		boom.Do = func(context.Context, *trip) error { panic(refusal{}) } // which is no refusal of the call
		exit := boom
		exit.Do = func(context.Context, *trip) error { runtime.Goexit(); return nil }
		var retries []error
		var logged bytes.Buffer
		log.SetOutput(&logged)
		defer log.SetOutput(os.Stderr)
		for _, st := range []saga.Step[trip]{boom, exit} {
			sg := sequence(step("flight"), st)
			r, stop := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
			mustStart(t, r, sg)
			s, err := result[trip](t.Context(), r, "trip-1")
			require.ErrorIs(t, err, saga.ErrCompensated)
			require.Equal(t, []string{"do flight", "undo hotel", "undo flight"}, s.Calls)
			retries = append(retries, err)
			stop()
		}
		require.ErrorContains(t, retries[0], "panic: refused")
		require.Contains(t, logged.String(), "saga: step hotel of trip panicked: refused")
		require.ErrorContains(t, retries[1], "runtime.Goexit")
	})
}

func TestRunnerTurnsBackAtDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := step("hotel")
		hang.Do = func(ctx context.Context, _ *trip) error { <-ctx.Done(); return ctx.Err() }
		sg := sequence(step("flight"), hang)
		sg.Timeout = 20 * time.Second
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		begun := time.Now()
		mustStart(t, r, sg)
		s, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrDeadline)
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.Equal(t, 20*time.Second, time.Since(begun))
		require.Equal(t, []string{"do flight", "undo hotel", "undo flight"}, s.Calls)
	})
}

func TestStartWithStoreError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := sequence(step("flight"))
		st := &gate{Store: saga.NewMemory()}
		r, _ := begin(t, st, saga.RunnerConfig{}, sg)
		t.Log("an answer that was lost")
		st.start = func(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
			_, _, err := st.Store.Start(ctx, req)
			require.NoError(t, err)
			return store.Record{}, false, errDown
		}
		begun := time.Now()
		mustStart(t, r, sg)
		requireEnd(t, r, "trip-1", nil)
		require.Zero(t, time.Since(begun), "it runs here immediately, not after its lease has expired")

		t.Log("a failed one")
		st.start = func(context.Context, store.StartRequest) (store.Record, bool, error) {
			return store.Record{}, false, errDown
		}
		_, err := saga.Register(r, sg).Start(t.Context(), "trip-2", trip{})
		require.ErrorIs(t, err, errDown)
	})
}

func TestStartValidatesBeforeWriting(t *testing.T) {
	store := saga.NewMemory()
	r := saga.NewRunner(store, saga.RunnerConfig{})
	sg := sequence(step("flight"))
	sagas := saga.Register(r, sg)
	v2 := sequence(step("flight"))
	v2.Version = 2
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		ctx  context.Context
		sg   *saga.Saga[trip]
		id   string
		want string
	}{
		{ended, sg, "trip-1", "context canceled"},
		{t.Context(), v2, "trip-1", "saga: definition not registered: trip version 2"},
		{t.Context(), sequence(), "trip-1", "saga.Saga.Steps is empty"},
		{t.Context(), sg, "", `saga: id is "": must be 1 to 200 bytes`},
		{t.Context(), sg, strings.Repeat("x", 201), "saga: id is 201 bytes long"},
		{t.Context(), sg, "a\x00b", "without NUL"},
		{t.Context(), sg, "\xff", "UTF-8"},
	} {
		_, err := start(c.ctx, r, c.sg, c.id, trip{})
		require.ErrorContains(t, err, c.want)
	}
	require.ErrorContains(t, sagas.StartTx(t.Context(), nil, "trip-1", trip{}), "saga: no transactions")
	recs, _, err := r.List(t.Context(), saga.Filter{})
	require.NoError(t, err)
	require.Empty(t, recs)
}

// TestUnknownVersionIsLeftToOthers: the runner has a later version only.
func TestUnknownVersionIsLeftToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v1, v2 := sequence(step("flight")), sequence(step("train"), step("hotel"))
		v2.Version = 2
		st := saga.NewMemory()
		old := saga.NewRunner(st, saga.RunnerConfig{})
		_, err := saga.Register(old, v1).Start(t.Context(), "one", trip{})
		require.NoError(t, err)
		_, err = saga.Register(old, v2, v1).Start(t.Context(), "two", trip{})
		require.NoError(t, err)

		r, _ := begin(t, st, saga.RunnerConfig{}, v2)
		s, err := result[trip](t.Context(), r, "two")
		require.NoError(t, err)
		require.Equal(t, []string{"do train", "do hotel"}, s.Calls)
		time.Sleep(2 * time.Second)
		require.Empty(t, instance(t, r, "one").Owner)
		require.Equal(t, []string{"created"}, events(t, r, "one"))
		_, err = result[trip](canceledAfter(t, time.Minute), r, "one")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, r.Operate(t.Context(), "one", saga.Operation{Action: saga.ActionRetry}), saga.ErrNotRegistered)
	})
}

func canceledAfter(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestResultSurvivesStoreErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{Store: saga.NewMemory()}
		sg := sequence(step("flight"))
		r, _ := begin(t, g, saga.RunnerConfig{}, sg)
		var a audience
		r.Observe(a.hear)
		mustStart(t, r, sg)
		g.set(true)
		ctx := canceledAfter(t, 10*time.Second)
		_, err := result[trip](ctx, r, "trip-1")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, errDown)
		require.Contains(t, lines(a.heard(saga.EventStoreFailed)), `store_failed saga: result of "trip-1": `+errDown.Error())
		time.AfterFunc(10*time.Second, func() { g.set(false) })
		requireEnd(t, r, "trip-1", nil)
	})
}

// TestRunnerWithoutDefinitionsClaimsNothing: it does not call the store.
func TestRunnerWithoutDefinitionsClaimsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{Store: saga.NewMemory()}
		g.claim = func(_ context.Context, req store.ClaimRequest) ([]store.Record, error) {
			assert.NotEmpty(t, req.Definitions)
			return nil, nil
		}
		begin[trip](t, g, saga.RunnerConfig{})
		time.Sleep(time.Minute)
	})
}

// TestRepeatedStartDoesNotRunLostSaga repeats a Start of a saga that this runner has lost.
func TestRepeatedStartDoesNotRunLostSaga(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, sg := &forgetful{Store: saga.NewMemory()}, slow(time.Hour)
		r, _ := observed[trip](t, st, saga.RunnerConfig{}, silent, sg)
		mustStart(t, r, sg)
		st.forgot.Store("trip-1")
		time.Sleep(6 * time.Second)
		require.EqualValues(t, 1, r.Stats().Lost)
		in := mustStart(t, r, sg)
		require.NotEmpty(t, in.Owner, "its lease is not over")
		synctest.Wait()
		require.Zero(t, r.Stats().Held)
	})
}

// TestLostStartAnswerRunsNoForeignSaga: the answer to a Start is lost, and another runner has claimed the saga
// since.
func TestLostStartAnswerRunsNoForeignSaga(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, sg := &gate{Store: saga.NewMemory()}, slow(time.Hour)
		g.start = func(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
			req.Owner = "" // as if its lease had expired
			_, _, err := g.Store.Start(ctx, req)
			require.NoError(t, err)
			_, err = g.Store.Claim(ctx, store.ClaimRequest{
				Owner: "other", LeaseTTL: time.Minute, Limit: 1,
				Definitions: []store.Definition{{Saga: req.Saga, Version: req.Version}},
			})
			require.NoError(t, err)
			return store.Record{}, false, errDown
		}
		r, _ := begin(t, store.Store(g), saga.RunnerConfig{}, sg)
		in := mustStart(t, r, sg)
		require.Equal(t, "other", in.Owner)
		require.Zero(t, r.Stats().Held)
	})
}

// TestLostStartAnswerRunsSagaOnce: the answer to a Start is lost, and the same runner has claimed the saga since.
func TestLostStartAnswerRunsSagaOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, sg := &gate{Store: saga.NewMemory()}, slow(time.Hour)
		r, _ := begin(t, store.Store(g), saga.RunnerConfig{}, sg)
		g.start = func(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
			req.Owner = ""
			_, _, err := g.Store.Start(ctx, req)
			require.NoError(t, err)
			r.Wake()
			time.Sleep(time.Second)
			return store.Record{}, false, errDown
		}
		mustStart(t, r, sg)
		synctest.Wait()
		stats := r.Stats()
		require.Equal(t, []int64{1, 1, 0}, []int64{stats.Held, stats.InFlight, stats.Lost})
	})
}

// TestAttemptOfLostSagaIsInterrupted, even if the step has succeeded and its state is still being encoded.
func TestAttemptOfLostSagaIsInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var codec slowCodec
		flight, hotel := step("flight"), step("hotel")
		flight.Do = func(context.Context, *trip) error { codec.takes.Store(int64(10 * time.Second)); return nil }
		hotel.Do = func(ctx context.Context, _ *trip) error { <-ctx.Done(); return ctx.Err() }
		hotel.Parallel = true
		sg := sequence(flight, hotel)
		sg.Codec = &codec
		st := &forgetful{Store: saga.NewMemory()}
		r, _ := observed[trip](t, st, saga.RunnerConfig{}, silent, sg)
		var a audience
		r.Observe(a.hear)
		mustStart(t, r, sg)
		st.forgot.Store("trip-1") // lost at the heartbeat, while the state of flight is encoded
		time.Sleep(11 * time.Second)
		require.Equal(t, []string{"lost", "attempted hotel do interrupted 5s context canceled",
			"attempted flight do interrupted"},
			lines(a.heard(saga.EventAttempted, saga.EventLost)))
		require.Equal(t, 2, total(r, "outcome=interrupted"))
		require.Zero(t, r.Stats().InFlight)
		require.EqualValues(t, 1, r.Stats().Lost)
		require.Zero(t, r.Stats().Held)
	})
}

// TestUnknownCommitIsReported: it is not known whether the commit has happened.
func TestUnknownCommitIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, failed := &gate{Store: saga.NewMemory()}, false
		g.commit = func(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
			if !failed {
				failed = true
				g.set(true)
				time.AfterFunc(time.Second, func() { g.set(false) })
				return store.Receipt{}, errTooLong
			}
			return g.Store.Commit(ctx, req)
		}
		sg := sequence(step("flight"))
		r, _ := observed(t, store.Store(g), saga.RunnerConfig{Poll: time.Hour}, silent, sg)
		var a audience
		r.Observe(a.hear)
		mustStart(t, r, sg)
		time.Sleep(time.Minute)
		told := lines(a.heard(saga.EventStoreFailed))
		require.Equal(t, `store_failed saga: commit of "trip-1": value too long`, told[0])
		require.Contains(t, told, `store_failed saga: commit of "trip-1": `+errDown.Error())
		requireCompleted(t, r, "trip-1")
	})
}

// TestStoppingRunnerDoesNotSpin: attempts are in progress in parallel with a step whose next attempt is due.
func TestStoppingRunnerDoesNotSpin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		flight, hotel, car := slow(5 * time.Second).Steps[0], slow(3 * time.Second).Steps[0], failing("car", errDeclined)
		hotel.Name, hotel.Parallel = "hotel", true
		car.Parallel, car.Backoff = true, constant(time.Second)
		sg := sequence(flight, hotel, car)
		r, stop := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		synctest.Wait()
		begun := time.Now()
		stop()
		require.Equal(t, 5*time.Second, time.Since(begun))
		require.Equal(t, 1, state(t, r, "trip-1", "car").Attempts)
	})
}

// TestConcurrentCancels: the race detector finds a request, or a read of it, without a lock.
func TestConcurrentCancels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		flight, going := step("flight"), make(chan struct{})
		flight.Do = func(context.Context, *trip) error { <-going; return nil }
		sg, other := sequence(flight), sequence(step("hotel"))
		other.Name = "other"
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg, other)
		mustStart(t, r, sg)
		synctest.Wait()
		var calls sync.WaitGroup
		for range 4 {
			calls.Go(func() {
				for range 1000 {
					assert.NoError(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"}))
				}
			})
		}
		calls.Go(func() {
			for i := range 500 { // sagas are claimed and released
				_, err := saga.Register(r, other).Start(t.Context(), fmt.Sprint("other-", i), trip{})
				assert.NoError(t, err)
			}
		})
		calls.Wait()
		close(going)
		requireEnd(t, r, "trip-1", saga.ErrCanceled)
	})
}

// TestRegisterDuringReads registers definitions while sagas are read. The race detector finds a read without a lock.
func TestRegisterDuringReads(t *testing.T) {
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	sg := sequence(step("flight"))
	saga.Register(r, sg)
	mustStart(t, r, sg)
	var calls sync.WaitGroup
	calls.Go(func() {
		for i := range 100 {
			other := sequence(step("flight"))
			other.Version = i + 2
			saga.Register(r, other)
		}
	})
	calls.Go(func() {
		for range 100 {
			if _, err := r.Get(t.Context(), "trip-1"); err != nil {
				t.Error(err)
			}
		}
	})
	calls.Wait()
}

func TestConcurrentRunIsError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, stop := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sequence(step("flight")))
		require.ErrorContains(t, r.Run(t.Context()), "running already")
		stop()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.NoError(t, r.Run(ctx), "again after it has ended")
	})
}

// Run returns nil whenever ctx is done. If ctx is done already, Run does not use the store, which would panic here.
func TestRunAfterCtxIsDone(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, saga.NewRunner(&skewed{}, saga.RunnerConfig{}).Run(ctx))
}

// A skewed store's clock is ahead of or behind the process's clock.
type skewed struct {
	store.Store
	by time.Duration
}

func (s *skewed) shift(rec store.Record) store.Record {
	for _, t := range []*time.Time{&rec.WakeAt, &rec.CompleteBy, &rec.CreatedAt, &rec.UpdatedAt, &rec.Now} {
		if !t.IsZero() {
			*t = t.Round(0).Add(s.by)
		}
	}
	return rec
}

func (s *skewed) Start(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
	rec, created, err := s.Store.Start(ctx, req)
	return s.shift(rec), created, err
}

func (s *skewed) Claim(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
	recs, err := s.Store.Claim(ctx, req)
	for i := range recs {
		recs[i] = s.shift(recs[i])
	}
	return recs, err
}

func (s *skewed) Load(ctx context.Context, id string) (store.Record, error) {
	rec, err := s.Store.Load(ctx, id)
	return s.shift(rec), err
}

func TestStoreClockDecides(t *testing.T) {
	for _, by := range []time.Duration{-time.Hour, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			var at []time.Duration
			begun := time.Now()
			st := step("flight")
			st.Attempts = 3
			st.Backoff = func(n int) time.Duration { return []time.Duration{0, 2 * time.Second, time.Minute}[n] }
			st.Do = func(context.Context, *trip) error {
				at = append(at, time.Since(begun))
				return errDeclined
			}
			st.Undo = func(context.Context, *trip) error {
				at = append(at, time.Since(begun))
				return nil
			}
			sg := sequence(st)
			sg.Timeout = 10 * time.Minute
			r, _ := begin(t, &skewed{saga.NewMemory(), by}, saga.RunnerConfig{}, sg)
			mustStart(t, r, sg)
			_, err := result[trip](t.Context(), r, "trip-1")
			require.ErrorIs(t, err, saga.ErrCompensated)
			require.NotErrorIs(t, err, saga.ErrDeadline)
			require.Len(t, at, 4)
			for i, want := range []time.Duration{0, 2 * time.Second, 62 * time.Second, 62 * time.Second} {
				require.InDelta(t, want.Seconds(), at[i].Seconds(), 2, "%d", i) // a poll after each wait
			}
		})
	}
}
