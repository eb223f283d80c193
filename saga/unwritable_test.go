package saga_test

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A picky store rejects commits whose state contains certain words, or all commits.
type picky struct {
	store.Store
	words    string
	noCommit atomic.Bool
	tries    atomic.Int64
}

var errTooLong = errors.New("value too long")

func (p *picky) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	p.tries.Add(1)
	if p.noCommit.Load() || p.words != "" && bytes.Contains(req.State, []byte(p.words)) {
		return store.Receipt{}, errTooLong
	}
	return p.Store.Commit(ctx, req)
}

func TestUnwritableCommitMakesSagaStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &picky{Store: saga.NewMemory(), words: "do hotel"}
		sg := sequence(step("flight"), step("hotel"), step("car"))
		r, _ := begin(t, store, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		begun := time.Now()
		s, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrStuck)
		require.ErrorContains(t, err, "state cannot be recorded: value too long")
		require.Equal(t, []string{"do flight"}, s.Calls, "the last recorded state")
		require.LessOrEqual(t, time.Since(begun), time.Minute)
		in := instance(t, r, "trip-1")
		require.Empty(t, in.Owner)
		require.Equal(t, saga.StepStarted, in.Steps[1].Status)
		require.True(t, in.Steps[1].MaybeApplied)
		require.Equal(t, []string{
			"created", "step_done flight", "resumed", "resumed", "resumed", "resumed", "resumed", "stuck",
		}, events(t, r, "trip-1"))

		t.Log("the saga can be retried and turned back")
		store.words = ""
		operate(t, r, "trip-1", saga.Operation{Action: saga.ActionCompensate})
		s, err = result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.Equal(t, []string{"do flight", "undo hotel", "undo flight"}, s.Calls)
	})
}

// TestUnwritableCommitEndsParallelAttempts: attempts in parallel with the one whose result cannot be committed are
// canceled.
func TestUnwritableCommitEndsParallelAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &picky{Store: saga.NewMemory(), words: "do hotel"}
		beside, hotel := step("beside"), step("hotel")
		beside.Timeout, hotel.Parallel = time.Hour, true
		beside.Do = func(ctx context.Context, _ *trip) error { <-ctx.Done(); return ctx.Err() }
		sg := sequence(beside, hotel)
		r, _ := begin(t, store, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		requireEnd(t, r, "trip-1", saga.ErrStuck)
		synctest.Wait()
		require.Zero(t, r.Stats().Held)
	})
}

// TestLostSagaIsNotStuck: the answer to a commit arrives after the lease has expired, and the store then accepts
// commits again. The next owner finds out whether the commit has happened.
func TestLostSagaIsNotStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{Store: saga.NewMemory()}
		down := func() bool { return time.Since(time.Unix(946684800, 0)) < 20*time.Second } // since the test started
		g.heartbeat = func(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
			if down() {
				return nil, errDown
			}
			return g.Store.Heartbeat(ctx, req)
		}
		g.claim = func(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
			if down() {
				return nil, errDown
			}
			return g.Store.Claim(ctx, req)
		}
		var commits atomic.Int64
		g.commit = func(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
			if commits.Add(1) == 1 {
				time.Sleep(6 * time.Second)
				return store.Receipt{}, errDown
			}
			return g.Store.Commit(ctx, req)
		}
		sg := slow(10 * time.Second)
		r, _ := observed(t, store.Store(g), saga.RunnerConfig{}, silent, sg)
		mustStart(t, r, sg)
		requireCompleted(t, r, "trip-1")
		require.EqualValues(t, 1, r.Stats().Lost)
		require.NotContains(t, events(t, r, "trip-1"), "stuck")
	})
}

// TestRejectedCommitsBackOff: a store that rejects each commit makes no saga stuck, even if it accepts heartbeats. A
// runner with such a saga stops in time.
func TestRejectedCommitsBackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &picky{Store: saga.NewMemory()}
		store.noCommit.Store(true)
		sg := sequence(step("flight"), step("hotel"))
		first, stop := begin[trip](t, store, saga.RunnerConfig{}, sg)
		mustStart(t, first, sg)
		time.Sleep(long(24 * time.Hour))
		require.Less(t, store.tries.Load(), int64(30_000), "two tries in about LeaseTTL/2")
		stopped := time.Now()
		stop()
		require.LessOrEqual(t, time.Since(stopped), 26*time.Second, "about Drain and LeaseTTL")

		store.tries.Store(0)
		r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
		time.Sleep(long(24 * time.Hour))
		require.Less(t, store.tries.Load(), int64(30_000))
		store.noCommit.Store(false)
		time.Sleep(15 * time.Second)
		requireStatus(t, r, "trip-1", saga.Completed)
	})
}

func TestAbandonEndsSagaOfHungAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		end := make(chan struct{})
		hang := step("hotel")
		hang.Do, hang.Timeout = func(context.Context, *trip) error { <-end; return nil }, saga.Unlimited
		sg := sequence(step("flight"), hang, step("car"))
		store := saga.NewMemory()
		r, _ := begin(t, store, saga.RunnerConfig{Name: "worker"}, sg)
		mustStart(t, r, sg)
		time.Sleep(long(24 * time.Hour))
		in, err := r.Get(t.Context(), "trip-1")
		require.NoError(t, err)
		require.Regexp(t, "^worker-.{12}$", in.Owner)
		require.Equal(t, []saga.Action{"cancel", "abandon"}, in.Actions)
		operator := saga.NewRunner(store, saga.RunnerConfig{}) // in another process
		err = operator.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionRetry})
		require.ErrorIs(t, err, saga.ErrNotAllowed)
		require.ErrorContains(t, err, "it is running, held by worker-")
		operate(t, operator, "trip-1", saga.Operation{Action: saga.ActionAbandon, Note: "the hotel's server is gone"})
		time.Sleep(time.Minute)
		close(end)
		requireEnd(t, r, "trip-1", saga.ErrAbandoned)
		synctest.Wait()
		require.Equal(t, []string{"created", "step_done flight", "abandoned"}, events(t, r, "trip-1"))
		require.Zero(t, r.Stats().Held)
	})
}

// An overloaded store answers no claim in time.
type overloaded struct {
	store.Store
	until  time.Time
	claims atomic.Int64
}

func (o *overloaded) Claim(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
	o.claims.Add(1)
	if time.Now().Before(o.until) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return o.Store.Claim(ctx, req)
}

// TestFailedClaimClaimsNothing, whatever the store returns with its error.
func TestFailedClaimClaimsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg, g := sequence(step("flight")), &gate{Store: saga.NewMemory()}
		var claims atomic.Int64
		g.claim = func(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
			recs, err := g.Store.Claim(ctx, req)
			if claims.Add(1) == 1 {
				err = errDown
			}
			return recs, err
		}
		_, err := saga.Register(idle(g, sg), sg).Start(t.Context(), "trip-1", trip{})
		require.NoError(t, err)
		r, _ := observed(t, store.Store(g), saga.RunnerConfig{}, silent, sg)
		require.Zero(t, r.Stats().Claimed)
		requireCompleted(t, r, "trip-1")
	})
}

// TestFailedClaimBacksOff, whatever wakes the runner: pauses of up to a LeaseTTL give the store time to recover.
func TestFailedClaimBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &overloaded{Store: saga.NewMemory(), until: time.Now().Add(10 * time.Minute)}
		var told atomic.Pointer[error]
		sg := sequence(step("flight"))
		r, stop := observed[trip](t, store, saga.RunnerConfig{},
			on(saga.EventStoreFailed, func(e saga.Event) { told.Store(&e.Err) }), sg)
		for time.Now().Before(store.until) {
			r.Wake()
			time.Sleep(10 * time.Millisecond)
		}
		require.Less(t, store.claims.Load(), int64(40))
		require.ErrorIs(t, *told.Load(), context.DeadlineExceeded)
		require.ErrorContains(t, *told.Load(), "claim (the next is in 15s)")
		time.Sleep(20 * time.Second)
		claims := store.claims.Load()
		r.Wake()
		synctest.Wait()
		require.Equal(t, claims+1, store.claims.Load(), "immediately, since the last claim succeeded")
		store.until = time.Now().Add(6 * time.Second)
		r.Wake()
		time.Sleep(6 * time.Second)
		require.ErrorContains(t, *told.Load(), "claim (the next is in 5s)", "it has failed for so long")
		stop()
	})
}

// A sudden store hangs or rejects commits for 15 minutes. Its outage ends with one rejection, after which it works.
type sudden struct {
	store.Store
	hangs bool
	ends  time.Time
	ended bool
}

func (s *sudden) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	over := !time.Now().Before(s.ends)
	switch {
	case s.ended:
		return s.Store.Commit(ctx, req)
	case !over && s.hangs:
		<-ctx.Done()
		return store.Receipt{}, ctx.Err()
	}
	s.ended = over
	return store.Receipt{}, errTooLong
}

// TestLastRejectionMakesNoSagaStuck: the store accepts the commit that follows its last rejection.
func TestLastRejectionMakesNoSagaStuck(t *testing.T) {
	for name, hangs := range map[string]bool{"hangs": true, "rejects": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sg := sequence(step("flight"), step("hotel"))
				r, _ := begin(t, store.Store(&sudden{
					Store: saga.NewMemory(), hangs: hangs, ends: time.Now().Add(15 * time.Minute),
				}), saga.RunnerConfig{}, sg)
				mustStart(t, r, sg)
				requireEnd(t, r, "trip-1", nil)
			})
		})
	}
}

// A flapping store rejects commits for some time. Then it accepts four commits without a result of a step, each
// followed by a rejection, and works after another rejection.
type flapping struct {
	store.Store
	accepted int
	works    bool
}

func (f *flapping) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	switch kind, probe := req.Log[0].Kind, req.Log[0].Kind == saga.EventResumed; {
	case f.works || kind == saga.EventStuck:
		return f.Store.Commit(ctx, req)
	case probe && f.accepted < 4:
		f.accepted++
		return f.Store.Commit(ctx, req)
	case probe:
		f.works = true
	}
	return store.Receipt{}, errTooLong
}

// TestFlappingStoreMakesNoSagaStuck: the store rejects most commits of any kind.
func TestFlappingStoreMakesNoSagaStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg, st := sequence(step("flight"), step("hotel")), &flapping{Store: saga.NewMemory()}
		r, _ := begin(t, store.Store(st), saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		requireEnd(t, r, "trip-1", nil)
		require.True(t, st.works)
	})
}
