package saga_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/store"
)

// again returns a step that is Idempotent and takes some time.
func again(name string, takes time.Duration) saga.Step[trip] {
	st := step(name)
	do := st.Do
	st.Idempotent, st.Undo = true, nil
	st.Do = func(ctx context.Context, s *trip) error { time.Sleep(takes); return do(ctx, s) }
	return st
}

// TestStepsShareARecord counts the commits after the start.
func TestStepsShareARecord(t *testing.T) {
	readOnly, best, delayed := step("r"), again("best", 0), again("delayed", 0)
	readOnly.ReadOnly, readOnly.Undo = true, nil
	best.Do = func(context.Context, *trip) error { return saga.Abort(errDeclined) }
	best.BestEffort = true
	delayed.Delay = time.Second
	pivot, look := step("pivot"), readOnly
	pivot.Pivot, look.Pivot, look.Name = true, true, "look"
	many := func(n int, takes time.Duration) (list []saga.Step[trip]) {
		for i := range n {
			list = append(list, again(fmt.Sprint("m", i), takes))
		}
		return list
	}
	a, b, c := again("a", 0), again("b", 0), again("c", 0)
	for name, test := range map[string]struct {
		steps   []saga.Step[trip]
		commits int64
	}{
		"none":                    {[]saga.Step[trip]{step("x"), step("y"), step("z")}, 3},
		"all":                     {many(5, 0), 1},
		"reads only":              {[]saga.Step[trip]{readOnly, a}, 1},
		"before another":          {[]saga.Step[trip]{a, b, step("x")}, 2},
		"after another":           {[]saga.Step[trip]{step("x"), a, b}, 2},
		"after the pivot":         {[]saga.Step[trip]{pivot, a, b, c}, 2},
		"a pivot that reads":      {[]saga.Step[trip]{look, a, b}, 2},
		"a wait":                  {[]saga.Step[trip]{a, b, delayed, c}, 3},
		"one that fails for good": {[]saga.Step[trip]{pivot, a, best, b}, 3},
		"no more than 16 steps":   {many(33, 0), 3},
		"no longer than a second": {many(6, 400*time.Millisecond), 2},
		"longer than a second":    {many(1, time.Hour), 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sg := sequence(test.steps...)
				r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
				mustStart(t, r, sg)
				_, err := sg.Result(t.Context(), r, "trip-1")
				require.NoError(t, err)
				synctest.Wait() // Result may see the record before its commit is counted
				require.Equal(t, test.commits, r.Stats().Commits)
			})
		})
	}
}

// A mortal store is that of a process until this has crashed.
type mortal struct {
	store.Store
	dead atomic.Bool
}

func (m *mortal) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	if m.dead.Load() {
		return nil, errTooLong
	}
	return m.Store.Heartbeat(ctx, req)
}

func (m *mortal) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	if m.dead.Load() {
		return store.Receipt{}, errTooLong
	}
	return m.Store.Commit(ctx, req)
}

func (m *mortal) Claim(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
	if m.dead.Load() {
		return nil, errTooLong
	}
	return m.Store.Claim(ctx, req)
}

// TestACrashRepeatsTheStepsThatShareARecord, in their order and from the state that was
// recorded, wherever between two records it comes, and no other step.
func TestACrashRepeatsTheStepsThatShareARecord(t *testing.T) {
	for at, want := range []string{"0 01234", "01 1234", "012 234", "0123 234", "01234 234"} {
		synctest.Test(t, func(t *testing.T) {
			first := &mortal{Store: saga.NewMemory()}
			var mu sync.Mutex // of calls, which both runners make
			calls, buried := "", make(chan struct{})
			definition := func(dies bool) *saga.Saga[trip] {
				sg := &saga.Saga[trip]{Name: "trip"}
				for i := range 5 {
					st := again(fmt.Sprint(i), 0)
					if i == 1 {
						st = step("1")
					}
					do := st.Do
					st.Do = func(ctx context.Context, s *trip) error {
						last := dies && i == at
						mu.Lock()
						calls += st.Name
						if last {
							first.dead.Store(true)
							calls += " "
						}
						mu.Unlock()
						if last {
							<-buried
						}
						return do(ctx, s)
					}
					sg.Steps = append(sg.Steps, st)
				}
				return sg
			}
			sg := definition(true)
			r, _ := begin(t, first, saga.RunnerConfig{OnEvent: silent}, sg)
			mustStart(t, r, sg)
			second, _ := begin(t, first.Store, saga.RunnerConfig{}, definition(false))
			s, err := result[trip](t.Context(), second, "trip-1")
			require.NoError(t, err)
			require.Equal(t, []string{"do 0", "do 1", "do 2", "do 3", "do 4"}, s.Calls)
			mu.Lock()
			require.Equal(t, want, calls)
			mu.Unlock()
			close(buried)
		})
	}
}
