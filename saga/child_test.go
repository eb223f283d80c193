package saga_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A parcel is the state of a child.
type parcel struct {
	Weight int
	Label  string
}

// A warehouse is the participant of the children. Its methods are safe for concurrent use.
type warehouse struct {
	mu   sync.Mutex               // guards did
	did  []string                 // each call, such as "do pack order-1/parcels/0"
	fail map[string]error         // the error of a call
	hold map[string]chan struct{} // the channel that a call waits for
}

func (w *warehouse) step(name string) saga.Step[parcel] {
	call := func(op string) func(context.Context, *parcel) error {
		return func(ctx context.Context, p *parcel) error {
			id := saga.CommandFrom(ctx).ID
			what := op + " " + name + " " + strings.TrimSuffix(id, "/"+name+"/"+op)
			w.mu.Lock()
			w.did = append(w.did, what)
			w.mu.Unlock()
			if hold := w.hold[what]; hold != nil {
				select {
				case <-hold:
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			}
			if op == "do" {
				p.Label = fmt.Sprint(name, "ed ", p.Weight)
			}
			return w.fail[what]
		}
	}
	return saga.Step[parcel]{Name: name, Do: call("do"), Undo: call("undo"), Timeout: 100 * time.Hour,
		Backoff: func(int) time.Duration { return time.Second }}
}

func (w *warehouse) parcel() *saga.Saga[parcel] {
	return &saga.Saga[parcel]{Name: "parcel", Steps: []saga.Step[parcel]{w.step("pack"), w.step("ship")}}
}

// parcels returns a step with n children.
func (w *warehouse) parcels(n int) saga.Step[trip] {
	return saga.Step[trip]{Name: "parcels", Child: saga.ChildrenOf(w.parcel(), func(*trip) ([]parcel, error) {
		list := make([]parcel, n)
		for i := range list {
			list[i].Weight = i
		}
		return list, nil
	}, func(s *trip, list []parcel) error {
		for _, p := range list {
			s.Calls = append(s.Calls, p.Label)
		}
		return nil
	})}
}

func startOrder(t *testing.T, r *saga.Runner, sg *saga.Saga[trip]) {
	t.Helper()
	_, err := saga.Register(r, sg).Start(t.Context(), "order-1", trip{})
	require.NoError(t, err)
}

func TestChildren(t *testing.T) {
	for _, n := range []int{0, 1, 3} {
		for _, places := range []int{1, 64} {
			synctest.Test(t, func(t *testing.T) {
				w := &warehouse{}
				sg := sequence(step("flight"), w.parcels(n), step("car"))
				r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{Concurrency: places, Inject: trace, Extract: withTrace}, sg)
				begun := time.Now()
				startOrder(t, r, sg)
				s, err := result[trip](t.Context(), r, "order-1")
				require.NoError(t, err)
				require.Equal(t, append(append([]string{"do flight"}, []string{"shiped 0", "shiped 1", "shiped 2"}[:n]...),
					"do car"), s.Calls)
				if places > 1 {
					require.Zero(t, time.Since(begun), "each end wakes the parent")
				}
				require.Len(t, w.did, 2*n)
				for i := range n {
					in, err := r.Get(t.Context(), saga.ChildID("order-1", "parcels", i))
					require.NoError(t, err)
					require.Equal(t, "order-1", in.Parent)
					require.Equal(t, saga.Completed, in.Status)
					_, err = start(t.Context(), r, w.parcel(), in.ID, parcel{})
					require.NoError(t, err, "it exists, as any saga")
				}
				synctest.Wait() // Result may return before the end is counted
				require.EqualValues(t, n+1, total(r, "status=started"))
				require.EqualValues(t, n+1, total(r, "status=completed"))
			})
		}
	}
}

// TestWaitingParentHoldsNoPlace leaves the only place to the child.
func TestWaitingParentHoldsNoPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{hold: map[string]chan struct{}{"do pack order-1/parcels/0": make(chan struct{})}}
		sg := sequence(w.parcels(1))
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{Concurrency: 1}, sg)
		startOrder(t, r, sg)
		time.Sleep(long(90 * time.Hour))
		synctest.Wait()
		require.Equal(t, []string{"do pack order-1/parcels/0"}, w.did)
		require.Zero(t, r.Stats().TakenOver)
		in := instance(t, r, "order-1")
		require.Empty(t, in.Owner)
		require.Equal(t, 1, in.Steps[0].Children)
		require.False(t, in.Steps[0].WaitingSince.IsZero())
		require.Zero(t, in.Failures)
		require.Equal(t, 0, in.Steps[0].Attempts, "to wait is no attempt")
		require.Less(t, len(events(t, r, "order-1")), 60, "it looks around less and less often")
		close(w.hold["do pack order-1/parcels/0"])
		requireEnd(t, r, "order-1", nil)
	})
}

// TestCompensatedChildTurnsParentBack turns the other children back too, whether they are running or completed.
func TestCompensatedChildTurnsParentBack(t *testing.T) {
	full := saga.Declined(errors.New("full"))
	for name, hold := range map[string]bool{"the other is running": true, "the other is completed": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fails := make(chan struct{}) // closed when the other child has started or is completed
				w := &warehouse{
					fail: map[string]error{"do ship order-1/parcels/1": full},
					hold: map[string]chan struct{}{"do ship order-1/parcels/1": fails},
				}
				if hold {
					w.hold["do ship order-1/parcels/0"] = make(chan struct{})
				}
				begun := time.Now()
				time.AfterFunc(time.Hour, func() { close(fails) })
				sg := sequence(step("flight"), w.parcels(2), step("car"))
				r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
				startOrder(t, r, sg)
				s, err := result[trip](t.Context(), r, "order-1")
				require.ErrorIs(t, err, saga.ErrCompensated)
				require.LessOrEqual(t, time.Since(begun), time.Hour+time.Second)
				require.ErrorContains(t, err,
					`child "order-1/parcels/1": saga: parcel "order-1/parcels/1": compensated: step ship: full`)
				require.Equal(t, []string{"do flight", "undo flight"}, s.Calls)
				slices.Sort(w.did)
				want := []string{
					"do pack order-1/parcels/0", "do pack order-1/parcels/1", "do ship order-1/parcels/0", "do ship order-1/parcels/1",
					"undo pack order-1/parcels/0", "undo pack order-1/parcels/1", "undo ship order-1/parcels/0",
				}
				require.Equal(t, want, w.did)
				for i := range 2 {
					requireStatus(t, r, saga.ChildID("order-1", "parcels", i), saga.Compensated)
				}
			})
		})
	}
}

// TestRetryRestartsFailedChildren retries a step that does not turn its saga back. Only the children that were
// compensated or abandoned start again, under new IDs.
func TestRetryRestartsFailedChildren(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full, never := saga.Declined(errors.New("full")), make(chan struct{})
		w := &warehouse{
			fail: map[string]error{"do ship order-1/parcels/1": full, "do ship order-1/parcels/4": full},
			hold: map[string]chan struct{}{"do pack order-1/parcels/2": never},
		}
		charge := step("charge")
		charge.Pivot = true
		sg := sequence(charge, w.parcels(3), step("letter"))
		r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, sg)
		startOrder(t, r, sg)
		stuck := func() {
			t.Helper()
			_, err := result[trip](t.Context(), r, "order-1")
			require.ErrorIs(t, err, saga.ErrStuck)
			require.ErrorContains(t, err, "full")
		}
		stuck()
		operate(t, r, "order-1/parcels/2", saga.Operation{Action: saga.ActionAbandon, Note: "lost"})
		operate(t, r, "order-1", saga.Operation{Action: saga.ActionRetry})
		stuck()
		operate(t, r, "order-1", saga.Operation{Action: saga.ActionRetry, Note: "now it has room"})
		s, err := result[trip](t.Context(), r, "order-1")
		require.NoError(t, err)
		require.Equal(t, []string{"do charge", "shiped 0", "shiped 1", "shiped 2", "do letter"}, s.Calls)
		var all []string
		page, _, err := r.List(t.Context(), saga.Filter{ID: "order-1/"})
		require.NoError(t, err)
		for _, in := range page {
			all = append(all, strings.TrimPrefix(in.ID, "order-1/parcels/")+" "+string(in.Status))
		}
		require.Equal(t, []string{"0 completed", "1 compensated", "2 abandoned", "4 compensated", "5 completed",
			"7 completed"}, slices.Sorted(slices.Values(all)))
	})
}

// TestRetryWithChangedChildrenStaysStuck: begin now returns another number of children, so they cannot be matched
// with the earlier ones.
func TestRetryWithChangedChildrenStaysStuck(t *testing.T) {
	for name, again := range map[string]func() ([]parcel, error){
		"step has 1 children, and begin returns 2": func() ([]parcel, error) { return make([]parcel, 2), nil },
		"nothing to send": func() ([]parcel, error) {
			return nil, saga.Permanent(errors.New("nothing to send"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &warehouse{fail: map[string]error{"do ship order-1/parcels/0": saga.Declined(errors.New("full"))}}
				charge, retried := step("charge"), false
				charge.Pivot = true
				sg := sequence(charge,
					saga.Step[trip]{Name: "parcels", Child: saga.ChildrenOf(w.parcel(), func(*trip) ([]parcel, error) {
						if retried {
							return again()
						}
						return make([]parcel, 1), nil
					}, nil)})
				r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, sg)
				startOrder(t, r, sg)
				_, err := result[trip](t.Context(), r, "order-1")
				require.ErrorContains(t, err, "full")
				retried = true
				operate(t, r, "order-1", saga.Operation{Action: saga.ActionRetry})
				_, err = result[trip](t.Context(), r, "order-1")
				require.ErrorIs(t, err, saga.ErrStuck)
				require.ErrorContains(t, err, name)
				_, err = r.Get(t.Context(), "order-1/parcels/1")
				require.ErrorIs(t, err, saga.ErrNotFound)
			})
		})
	}
}

// TestBeginChangingStateFails: begin must not change the state. If it does, the step fails and its children turn
// back.
func TestBeginChangingStateFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := &saga.Saga[float64]{Name: "sum",
			Steps: []saga.Step[float64]{{Name: "parcel", Child: saga.ChildOf((&warehouse{}).parcel(),
				func(s *float64) (parcel, error) { *s = math.NaN(); return parcel{}, nil }, nil)}}}
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		_, err := saga.Register(r, sg).Start(t.Context(), "order-1", 1)
		require.NoError(t, err)
		_, err = saga.Register(r, sg).Result(t.Context(), "order-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.ErrorContains(t, err, "state does not encode")
		requireStatus(t, r, "order-1/parcel/0", saga.Compensated)
	})
}

// TestDeclinedParentLeavesNoChild: a Declined error of begin or end says nothing about the children, so they are
// turned back.
func TestDeclinedParentLeavesNoChild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{}
		sg := sequence(saga.Step[trip]{Name: "parcel", Child: saga.ChildOf(w.parcel(),
			func(*trip) (parcel, error) { return parcel{}, nil },
			func(*trip, parcel) error { return saga.Declined(errDeclined) })})
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		startOrder(t, r, sg)
		requireEnd(t, r, "order-1", saga.ErrCompensated)
		requireStatus(t, r, "order-1/parcel/0", saga.Compensated)
	})
}

// TestCompensatingParentTurnsChildrenBack turns the parent back after its children are completed, or while they run.
func TestCompensatingParentTurnsChildrenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{}
		sg := sequence(w.parcels(2), failing("car", saga.Declined(errDeclined)))
		var turned atomic.Int64
		r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{
			Poll: time.Hour, LeaseTTL: 4 * time.Hour,
		}, on(saga.EventTurnedBack, func(saga.Event) { turned.Add(1) }), sg)
		begun := time.Now()
		startOrder(t, r, sg)
		requireEnd(t, r, "order-1", saga.ErrCompensated)
		require.Len(t, w.did, 8)
		require.EqualValues(t, 3, turned.Load(), "each child is reported")
		require.Zero(t, time.Since(begun))
		require.Equal(t, []string{"created", "step_done pack", "step_done ship", "completed", "turned_back",
			"step_undone ship", "step_undone pack", "compensated"},
			events(t, r, "order-1/parcels/1"))
		require.Equal(t, "the saga that started it turned back", instance(t, r, "order-1/parcels/1").Cause)
	})
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{hold: map[string]chan struct{}{"do ship order-1/parcels/1": make(chan struct{})}}
		sg := sequence(w.parcels(2), step("car"))
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		startOrder(t, r, sg)
		time.Sleep(time.Hour)
		begun := time.Now()
		operate(t, r, "order-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"})
		requireEnd(t, r, "order-1", saga.ErrCanceled)
		require.LessOrEqual(t, time.Since(begun), time.Second)
		require.Len(t, w.did, 8)
	})
}

// newer returns the step of a program without version 1 of the parcel.
func (w *warehouse) newer() saga.Step[trip] {
	child := w.parcel()
	child.Version = 2
	return saga.Step[trip]{Name: "parcels", UndoAttempts: 1,
		Child: saga.ChildrenOf(child, func(*trip) ([]parcel, error) { return nil, nil }, nil)}
}

// TestParentOfUnknownChildrenIsStuck: no runner knows the version of the children any more. At first, the parent waits
// for another runner that does, as during a deployment. Then it is reported instead of waiting silently.
func TestParentOfUnknownChildrenIsStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, st := &warehouse{hold: map[string]chan struct{}{"do ship order-1/parcels/1": make(chan struct{})}},
			saga.NewMemory()
		sg := sequence(w.parcels(2))
		first, stop := observed(t, st, saga.RunnerConfig{}, silent, sg)
		startOrder(t, first, sg)
		time.Sleep(time.Minute)
		stop()

		r, _ := observed(t, st, saga.RunnerConfig{}, silent, sequence(w.newer()))
		operate(t, r, "order-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"})
		time.Sleep(10 * time.Second)
		requireStatus(t, r, "order-1", saga.Compensating)
		in := instance(t, r, "order-1/parcels/1")
		require.True(t, in.CancelRequested, "the other children turn back meanwhile")
		require.NotZero(t, total(r, "outcome=refused"), "it reports what it waits for")
		time.Sleep(time.Hour)
		in = instance(t, r, "order-1")
		require.Equal(t, saga.Stuck, in.Status)
		require.Contains(t, in.LastError, "definition not registered: parcel version 0")
		require.Equal(t, 20, total(r, "outcome=refused"), "before it fails")

		saga.Register(r, w.parcel())
		operate(t, r, "order-1", saga.Operation{Action: saga.ActionRetry})
		requireEnd(t, r, "order-1", saga.ErrCompensated)
		for i := range 2 {
			requireStatus(t, r, saga.ChildID("order-1", "parcels", i), saga.Compensated)
		}
	})
}

// TestParentWaitsForUnknownStuckChild checks that the parent waits as for any stuck child.
func TestParentWaitsForUnknownStuckChild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, st := &warehouse{fail: map[string]error{
			"do ship order-1/parcels/0": saga.Declined(errDeclined), "undo pack order-1/parcels/0": saga.Permanent(errDeclined),
		}}, saga.NewMemory()
		sg := sequence(w.parcels(1))
		first, stop := observed(t, st, saga.RunnerConfig{}, silent, sg)
		startOrder(t, first, sg)
		time.Sleep(time.Minute)
		stop()

		r, _ := observed(t, st, saga.RunnerConfig{}, silent, sequence(w.newer()))
		operate(t, r, "order-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"})
		time.Sleep(time.Hour)
		saga.Register(r, w.parcel())
		operate(t, r, "order-1/parcels/0", saga.Operation{Action: saga.ActionSkip})
		requireEnd(t, r, "order-1", saga.ErrCompensated)
	})
}

// A forgetful store reports in a heartbeat that the runner has lost a saga, and returns no saga from Claim.
type forgetful struct {
	store.Store
	forgot atomic.Value // its ID
}

func (f *forgetful) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	req.Held = slices.DeleteFunc(req.Held, func(h store.Held) bool { return h.ID == f.forgot.Load() })
	return f.Store.Heartbeat(ctx, req)
}

func (f *forgetful) Claim(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
	if f.forgot.Load() != nil {
		return nil, nil
	}
	return f.Store.Claim(ctx, req)
}

// TestUndoWaitsForStuckChild waits until an operator resolves it.
func TestUndoWaitsForStuckChild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{fail: map[string]error{"undo pack order-1/parcels/0": saga.Permanent(errDeclined)}}
		sg := sequence(w.parcels(1), failing("car", saga.Declined(errDeclined)))
		r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, sg)
		startOrder(t, r, sg)
		time.Sleep(long(24 * time.Hour))
		requireStatus(t, r, "order-1", saga.Compensating)
		require.Zero(t, r.Stats().StoreErrors)
		clear(w.fail)
		operate(t, r, "order-1/parcels/0", saga.Operation{Action: saga.ActionRetry, Note: "mended"})
		requireEnd(t, r, "order-1", saga.ErrCompensated)
		require.ErrorIs(t, r.Operate(t.Context(), "order-1/parcels/0", saga.Operation{Action: saga.ActionRetry}),
			saga.ErrNotAllowed)
	})
}

// TestParentTurnsStuckChildBack turns back a child that is stuck while it goes forward.
func TestParentTurnsStuckChildBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, fails := &warehouse{}, true
		st := &gate{Store: saga.NewMemory()}
		st.commit = func(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
			if fails && req.ID == "order-1/parcels/0" && req.Status == saga.Compensating {
				fails = false
				return store.Receipt{}, errDown
			}
			return st.Store.Commit(ctx, req)
		}
		child := w.parcel()
		child.Steps[1].Await = "go"
		sg := sequence(saga.Step[trip]{Name: "parcels",
			Child: saga.ChildOf(child, func(*trip) (parcel, error) { return parcel{}, nil }, nil)})
		r, _ := observed(t, store.Store(st), saga.RunnerConfig{}, silent, sg)
		startOrder(t, r, sg)
		time.Sleep(time.Minute)
		rec, err := st.Load(t.Context(), "order-1/parcels/0")
		require.NoError(t, err)
		_, err = st.Commit(t.Context(), store.CommitRequest{
			ID: rec.ID, Epoch: rec.Epoch, Seq: rec.Seq, Status: saga.Stuck, Progress: rec.Progress,
			Log: []store.Entry{{Kind: saga.EventStuck}}, Release: true,
		})
		require.NoError(t, err)
		operate(t, r, "order-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"})
		requireEnd(t, r, "order-1", saga.ErrCanceled)
		require.Equal(t, []string{"do pack order-1/parcels/0", "undo pack order-1/parcels/0"}, w.did)
		require.EqualValues(t, 1, r.Stats().StoreErrors, "the first try is reported")
	})
}

// A reverting store lets another owner of the parent turn a completed child back when the child is first read.
type reverting struct {
	store.Store
	idle atomic.Bool
}

func (s *reverting) Load(ctx context.Context, id string) (store.Record, error) {
	rec, err := s.Store.Load(ctx, id)
	if rec.Parent != "" && rec.Status == saga.Completed && s.idle.CompareAndSwap(false, true) {
		_, err = s.Store.Commit(ctx, store.CommitRequest{
			ID: rec.ID, Epoch: rec.Epoch, Seq: rec.Seq, Status: saga.Compensated, Progress: rec.Progress,
			Log: []store.Entry{{Kind: saga.EventCompensated}}, Release: true,
		})
	}
	return rec, err
}

// TestChildIsTurnedBackOnce lets two owners of the parent turn the same child back.
func TestChildIsTurnedBackOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{}
		parcels := w.parcels(1)
		parcels.Child = saga.ChildOf(w.parcel(), func(*trip) (parcel, error) { return parcel{}, nil }, nil)
		sg := sequence(parcels, saga.Step[trip]{Name: "paid", Await: "paid"})
		st := &reverting{Store: saga.NewMemory()}
		st.idle.Store(true)
		r, _ := begin[trip](t, st, saga.RunnerConfig{}, sg)
		startOrder(t, r, sg)
		time.Sleep(time.Minute)
		st.idle.Store(false)
		operate(t, r, "order-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"})
		requireEnd(t, r, "order-1", saga.ErrCanceled)
		require.Equal(t, []string{"completed", "compensated"}, last(events(t, r, "order-1/parcels/0"), 2))
	})
}

func TestDefinitionIsItsOwnChild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := &saga.Saga[parcel]{Name: "box"}
		sg.Steps = []saga.Step[parcel]{{Name: "inside", Child: saga.ChildrenOf(sg,
			func(p *parcel) ([]parcel, error) {
				return slices.Repeat([]parcel{{Weight: p.Weight - 1}}, p.Weight), nil
			}, nil)}}
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		_, err := saga.Register(r, sg).Start(t.Context(), "box-1", parcel{Weight: 3})
		require.NoError(t, err)
		_, err = saga.Register(r, sg).Result(t.Context(), "box-1")
		require.NoError(t, err)
		require.EqualValues(t, 1+3+3*2+3*2*1, total(r, "status=completed"))
	})
}

// TestLateChildDoesNothing: an owner that was cut off while it started children continues after the next owner has
// turned back.
func TestLateChildDoesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := &lateStart{Store: saga.NewMemory(), wake: make(chan struct{})}
		w := &warehouse{}
		sg := sequence(w.parcels(3))
		r, _ := begin[trip](t, st, saga.RunnerConfig{Name: "late"}, sg)
		_, _, err := st.Store.Start(t.Context(), store.StartRequest{
			ID: "order-1", Saga: "trip", Version: 1, Status: saga.Running, State: []byte(`{}`),
			Progress: []byte(`{"steps":[{"n":"parcels","s":"started"}]}`), Log: []store.Entry{{Kind: saga.EventCreated}},
		})
		require.NoError(t, err)
		r.Wake()
		synctest.Wait()
		require.True(t, st.waits.Load())
		st.cut.Store(true)
		_, err = st.Store.Post(t.Context(), store.PostRequest{ID: "order-1", Payload: []byte("ill"), Cancel: true})
		require.NoError(t, err)
		other, _ := begin(t, st.Store, saga.RunnerConfig{Name: "other"}, sg)
		requireEnd(t, other, "order-1", saga.ErrCanceled)
		close(st.wake)
		time.Sleep(time.Hour)
		did := slices.Clone(w.did)
		slices.Sort(did)
		for i := range 2 { // the third one never starts
			in, err := other.Get(t.Context(), saga.ChildID("order-1", "parcels", i))
			require.NoError(t, err)
			require.Equal(t, saga.Compensated, in.Status, did)
		}
		require.NotContains(t, did, "do pack order-1/parcels/1")
		_, err = other.Get(t.Context(), saga.ChildID("order-1", "parcels", 2))
		require.ErrorIs(t, err, saga.ErrNotFound, "later children do not start either")
	})
}

// A lateStart store delays the Start of the second child until wake is closed. All other calls of the process fail
// by then.
type lateStart struct {
	store.Store
	wake       chan struct{}
	waits, cut atomic.Bool
}

func (s *lateStart) Start(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
	if req.ID == "order-1/parcels/1" {
		s.waits.Store(true)
		<-s.wake
	}
	if s.cut.Load() {
		ctx = context.Background() // the process has not noticed yet
	}
	return s.Store.Start(ctx, req)
}

func (s *lateStart) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	if s.cut.Load() {
		return nil, errors.New("connection lost")
	}
	return s.Store.Heartbeat(ctx, req)
}

func (s *lateStart) Claim(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
	if s.cut.Load() {
		return nil, errors.New("connection lost")
	}
	return s.Store.Claim(ctx, req)
}

// TestRegisterChecksNeedsOfAllChildren checks every child, not only the first one.
func TestRegisterChecksNeedsOfAllChildren(t *testing.T) {
	begin := func(*trip) (trip, error) { return trip{}, nil }
	plain, tx := sequence(step("flight")), sequence(inTx("hotel"))
	plain.Name, tx.Name = "plain", "tx"
	sg := sequence(
		saga.Step[trip]{Name: "first", Child: saga.ChildOf(plain, begin, nil)},
		saga.Step[trip]{Name: "second", Child: saga.ChildOf(tx, begin, nil)},
	)
	require.PanicsWithError(t, "saga: no transactions: tx has a DoTx or UndoTx", func() {
		saga.Register(saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{}), sg)
	})
}

func TestChildIDInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{}
		child := w.parcel()
		st := saga.Step[trip]{Name: "parcel",
			Child: saga.ChildOf(child, func(*trip) (parcel, error) { return parcel{}, nil }, nil)}
		sg := sequence(step("flight"), st)
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		_, err := saga.Register(r, child).Start(t.Context(), "order-1/parcel/0", parcel{})
		require.NoError(t, err, "Register knows the children")
		startOrder(t, r, sg)
		_, err = result[trip](t.Context(), r, "order-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.ErrorContains(t, err, "id in use")
		_, err = result[parcel](t.Context(), r, "order-1/parcel/0")
		require.NoError(t, err, "it is another's")
	})
}

// A countingReads store counts the reads of children and the messages that wake their parent.
type countingReads struct {
	store.Store
	loads, listed, woken atomic.Int64
}

func (s *countingReads) Post(ctx context.Context, req store.PostRequest) (store.Record, error) {
	if !req.Cancel {
		s.woken.Add(1)
	}
	return s.Store.Post(ctx, req)
}

func (s *countingReads) Load(ctx context.Context, id string) (store.Record, error) {
	if strings.HasPrefix(id, "order-1/") {
		s.loads.Add(1)
	}
	return s.Store.Load(ctx, id)
}

func (s *countingReads) Children(ctx context.Context, req store.ChildrenRequest) ([]store.ChildRecord, error) {
	list, err := s.Store.Children(ctx, req)
	s.listed.Add(int64(len(list)))
	return list, err
}

// A listless store sometimes fails to list children.
type listless struct {
	store.Store
	fails atomic.Bool
}

func (s *listless) Children(ctx context.Context, req store.ChildrenRequest) ([]store.ChildRecord, error) {
	if s.fails.Load() {
		return nil, errDown
	}
	return s.Store.Children(ctx, req)
}

// TestStoreErrorForgetsNoChild fails a read of the children for which a step waits.
func TestStoreErrorForgetsNoChild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{hold: map[string]chan struct{}{"do pack order-1/parcels/0": make(chan struct{})}}
		sg := sequence(w.parcels(2))
		st := &listless{Store: saga.NewMemory()}
		r, _ := observed[trip](t, st, saga.RunnerConfig{}, silent, sg)
		startOrder(t, r, sg)
		time.Sleep(time.Minute)
		st.fails.Store(true)
		for r.Stats().StoreErrors == 0 {
			time.Sleep(time.Second)
		}
		synctest.Wait()
		require.Equal(t, 2, state(t, r, "order-1", "parcels").Children)
		st.fails.Store(false)
		close(w.hold["do pack order-1/parcels/0"])
		requireCompleted(t, r, "order-1")
	})
}

// TestStoreErrorFailsNoUndoOfChildren checks that the step reads its children again.
func TestStoreErrorFailsNoUndoOfChildren(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, w, car := &listless{Store: saga.NewMemory()}, &warehouse{}, step("car")
		parcels := w.parcels(1)
		parcels.UndoAttempts = 1
		car.Do = func(context.Context, *trip) error {
			st.fails.Store(true)
			time.AfterFunc(time.Minute, func() { st.fails.Store(false) })
			return saga.Declined(errDeclined)
		}
		sg := sequence(parcels, car)
		r, _ := observed[trip](t, st, saga.RunnerConfig{}, silent, sg)
		startOrder(t, r, sg)
		requireEnd(t, r, "order-1", saga.ErrCompensated)
	})
}

// TestCompensatedChildrenWakeParentOnce: the last child wakes the parent, which reads no child before that.
func TestCompensatedChildrenWakeParentOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		child := &saga.Saga[parcel]{Name: "parcel", Steps: []saga.Step[parcel]{{
			Name: "pack", Timeout: 100 * time.Hour, Undo: func(context.Context, *parcel) error { return nil },
			Do: func(_ context.Context, p *parcel) error {
				time.Sleep(time.Duration(1+p.Weight) * time.Hour)
				return nil
			},
		}}}
		list := []parcel{{Weight: 0}, {Weight: 1}, {Weight: 2}}
		of := saga.ChildrenOf(child, func(*trip) ([]parcel, error) { return list, nil }, nil)
		sg, st := sequence(saga.Step[trip]{Name: "parcels", Child: of}), &countingReads{Store: saga.NewMemory()}
		r, _ := begin[trip](t, st, saga.RunnerConfig{}, sg)
		startOrder(t, r, sg)
		synctest.Wait()
		operate(t, r, "order-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"})
		time.Sleep(4 * time.Hour)
		requireStatus(t, r, "order-1", saga.Compensated)
		require.EqualValues(t, 2*len(list), st.loads.Load(), "and once more by Cancel")
		require.EqualValues(t, 1, st.woken.Load())
	})
}

func TestChildIDLength(t *testing.T) {
	require.Equal(t, "order-1/parcels/7", saga.ChildID("order-1", "parcels", 7))
	seen := make(map[string]bool)
	id := "é" + strings.Repeat("ü", 90)
	for depth := range 200 {
		for n := range 3 {
			child := saga.ChildID(id, "stép", n)
			require.LessOrEqual(t, len(child), 200)
			require.True(t, utf8.ValidString(child), depth)
			require.False(t, seen[child])
			seen[child] = true
		}
		id = saga.ChildID(id, "stép", depth%3)
	}
}

// TestChildTurnedBackByOperator: an operator turns a child back before a runner claims it. The parent does not
// mistake it for a child that it never starts: it turns the later children back and waits for them.
func TestChildTurnedBackByOperator(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		undo := make(chan struct{})
		time.AfterFunc(time.Minute, func() { close(undo) })
		w := &warehouse{hold: map[string]chan struct{}{
			"do pack order-1/parcels/1": make(chan struct{}), "undo pack order-1/parcels/1": undo,
		}}
		st := saga.NewMemory()
		sg := sequence(w.parcels(2))
		r, _ := begin(t, st, saga.RunnerConfig{}, sg)
		// A runner has started both children and crashed before it recorded them.
		for _, req := range []store.StartRequest{
			{ID: "order-1", Saga: "trip", Version: 1, Progress: []byte(`{"steps":[{"n":"parcels","s":"started","m":true}]}`)},
			{ID: "order-1/parcels/0", Saga: "parcel", Parent: "order-1", ParentStep: "parcels",
				Progress: []byte(`{"steps":[{"n":"pack","s":"started"},{"n":"ship","s":"idle"}]}`)},
			{ID: "order-1/parcels/1", Saga: "parcel", Parent: "order-1", ParentStep: "parcels",
				Progress: []byte(`{"steps":[{"n":"pack","s":"started"},{"n":"ship","s":"idle"}]}`)},
		} {
			req.Status, req.State, req.Log = saga.Running, []byte(`{}`), []store.Entry{{Kind: saga.EventCreated}}
			_, _, err := st.Start(t.Context(), req)
			require.NoError(t, err)
		}
		operate(t, r, "order-1/parcels/0", saga.Operation{Action: saga.ActionCompensate, Note: "not this one"})
		requireEnd(t, r, "order-1", saga.ErrCompensated)
		requireStatus(t, r, "order-1/parcels/1", saga.Compensated)
	})
}

// TestChildStartedBeforeParentRecord: a child starts before its parent has recorded it. The parent does not mistake
// it for a child that it never starts: the child continues, or turns back with the later children before the parent
// ends.
func TestChildStartedBeforeParentRecord(t *testing.T) {
	for _, cancel := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			later := make(chan struct{})
			time.AfterFunc(time.Minute, func() { close(later) })
			w, st := &warehouse{hold: map[string]chan struct{}{
				"do ship order-1/parcels/0": later, "do ship order-1/parcels/1": later, "undo pack order-1/parcels/0": later,
			}}, saga.NewMemory()
			sg := sequence(w.parcels(2))
			child := []byte(`{"steps":[{"n":"pack","s":"done"},{"n":"ship","s":"started"}]}`)
			for _, req := range []store.StartRequest{
				{ID: "order-1", Saga: "trip", Version: 1, Progress: []byte(`{"steps":[{"n":"parcels","s":"started","m":true}]}`)},
				{ID: "order-1/parcels/0", Saga: "parcel", Parent: "order-1", ParentStep: "parcels", Progress: child,
					Log: []store.Entry{{Kind: saga.EventStepDone}}},
				{ID: "order-1/parcels/1", Saga: "parcel", Parent: "order-1", ParentStep: "parcels", Progress: child,
					Log: []store.Entry{{Kind: saga.EventStepDone}}},
			} {
				req.Status, req.State, req.Log = saga.Running, []byte(`{}`),
					append([]store.Entry{{Kind: saga.EventCreated}}, req.Log...)
				_, _, err := st.Start(t.Context(), req)
				require.NoError(t, err)
			}
			if !cancel {
				r, _ := begin(t, st, saga.RunnerConfig{}, sg)
				requireCompleted(t, r, "order-1")
				return
			}
			_, err := st.Post(t.Context(), store.PostRequest{ID: "order-1", Payload: []byte("ill"), Cancel: true})
			require.NoError(t, err)
			blind := &unread{Store: st}
			r, _ := observed[trip](t, blind, saga.RunnerConfig{}, silent, sg)
			require.True(t, blind.failed.Load(), "an unreadable child may have started")
			requireEnd(t, r, "order-1", saga.ErrCanceled)
			for _, id := range []string{"order-1/parcels/0", "order-1/parcels/1"} {
				requireStatus(t, r, id, saga.Compensated)
			}
		})
	}
}

// An unread store fails the first read of the first child.
type unread struct {
	store.Store
	failed atomic.Bool
}

func (u *unread) Load(ctx context.Context, id string) (store.Record, error) {
	if id == "order-1/parcels/0" && u.failed.CompareAndSwap(false, true) {
		return store.Record{}, errDown
	}
	return u.Store.Load(ctx, id)
}
