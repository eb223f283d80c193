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

// A parcel is the state of the children, which write into a book that all share.
type parcel struct {
	Weight int
	Label  string
}

// A warehouse is the participant of the children.
type warehouse struct {
	mu   sync.Mutex               // of did
	did  []string                 // each call as "do pack order-1/parcels/0"
	fail map[string]error         // of a call
	hold map[string]chan struct{} // a call waits for its channel
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

// parcels returns a step with so many children.
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
				require.Equal(t, append(append([]string{"do flight"}, []string{"shiped 0", "shiped 1", "shiped 2"}[:n]...), "do car"), s.Calls)
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
				synctest.Wait() // the end of the order may be read before it is counted
				require.EqualValues(t, n+1, total(r, "status=started"))
				require.EqualValues(t, n+1, total(r, "status=completed"))
			})
		}
	}
}

// TestParentThatWaitsHoldsNoPlace: the only place is free for its child.
func TestParentThatWaitsHoldsNoPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{hold: map[string]chan struct{}{"do pack order-1/parcels/0": make(chan struct{})}}
		sg := sequence(w.parcels(1))
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{Concurrency: 1}, sg)
		startOrder(t, r, sg)
		time.Sleep(long(90 * time.Hour))
		synctest.Wait()
		require.Equal(t, []string{"do pack order-1/parcels/0"}, w.did)
		require.Zero(t, r.Stats().TakenOver)
		in, err := r.Get(t.Context(), "order-1")
		require.NoError(t, err)
		require.Empty(t, in.Owner)
		require.Equal(t, 1, in.Steps[0].Children)
		require.False(t, in.Steps[0].WaitingSince.IsZero())
		require.Zero(t, in.Failures)
		require.Equal(t, 0, in.Steps[0].Attempts, "to wait is no attempt")
		require.Less(t, len(events(t, r, "order-1")), 60, "it looks around less and less often")
		close(w.hold["do pack order-1/parcels/0"])
		_, err = result[trip](t.Context(), r, "order-1")
		require.NoError(t, err)
	})
}

// TestChildThatIsCompensatedTurnsItsParentBack, with its other children, whether these
// are running or completed.
func TestChildThatIsCompensatedTurnsItsParentBack(t *testing.T) {
	full := saga.Declined(errors.New("full"))
	for name, hold := range map[string]bool{"the other is running": true, "the other is completed": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fails := make(chan struct{}) // when the other has begun, or is completed
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
				require.ErrorContains(t, err, `child "order-1/parcels/1": saga: parcel "order-1/parcels/1": compensated: step ship: full`)
				require.Equal(t, []string{"do flight", "undo flight"}, s.Calls)
				slices.Sort(w.did)
				want := []string{
					"do pack order-1/parcels/0", "do pack order-1/parcels/1", "do ship order-1/parcels/0", "do ship order-1/parcels/1",
					"undo pack order-1/parcels/0", "undo pack order-1/parcels/1", "undo ship order-1/parcels/0",
				}
				require.Equal(t, want, w.did)
				for i := range 2 {
					in, err := r.Get(t.Context(), saga.ChildID("order-1", "parcels", i))
					require.NoError(t, err)
					require.Equal(t, saga.Compensated, in.Status)
				}
			})
		})
	}
}

// TestRetryStartsFailedChildrenAgain of a step that does not turn its saga back, under new
// ids: those that were compensated or abandoned, and no others.
func TestRetryStartsFailedChildrenAgain(t *testing.T) {
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
		require.NoError(t, r.Operate(t.Context(), "order-1/parcels/2", saga.Operation{Action: saga.ActionAbandon, Note: "lost"}))
		require.NoError(t, r.Operate(t.Context(), "order-1", saga.Operation{Action: saga.ActionRetry}))
		stuck()
		require.NoError(t, r.Operate(t.Context(), "order-1", saga.Operation{Action: saga.ActionRetry, Note: "now it has room"}))
		s, err := result[trip](t.Context(), r, "order-1")
		require.NoError(t, err)
		require.Equal(t, []string{"do charge", "shiped 0", "shiped 1", "shiped 2", "do letter"}, s.Calls)
		var all []string
		page, _, err := r.List(t.Context(), saga.Filter{ID: "order-1/"})
		require.NoError(t, err)
		for _, in := range page {
			all = append(all, strings.TrimPrefix(in.ID, "order-1/parcels/")+" "+string(in.Status))
		}
		require.Equal(t, []string{"0 completed", "1 compensated", "2 abandoned", "4 compensated", "5 completed", "7 completed"}, slices.Sorted(slices.Values(all)))
	})
}

// TestRetryOfAStepThatBeginsOtherChildrenNow leaves the saga stuck: which of them is which
// cannot be known.
func TestRetryOfAStepThatBeginsOtherChildrenNow(t *testing.T) {
	for name, again := range map[string]func() ([]parcel, error){
		"the step has 1 children, and begin returns 2": func() ([]parcel, error) { return make([]parcel, 2), nil },
		"nothing to send": func() ([]parcel, error) { return nil, saga.Permanent(errors.New("nothing to send")) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &warehouse{fail: map[string]error{"do ship order-1/parcels/0": saga.Declined(errors.New("full"))}}
				charge, retried := step("charge"), false
				charge.Pivot = true
				sg := sequence(charge, saga.Step[trip]{Name: "parcels", Child: saga.ChildrenOf(w.parcel(), func(*trip) ([]parcel, error) {
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
				require.NoError(t, r.Operate(t.Context(), "order-1", saga.Operation{Action: saga.ActionRetry}))
				_, err = result[trip](t.Context(), r, "order-1")
				require.ErrorIs(t, err, saga.ErrStuck)
				require.ErrorContains(t, err, name)
				_, err = r.Get(t.Context(), "order-1/parcels/1")
				require.ErrorIs(t, err, saga.ErrNotFound)
			})
		})
	}
}

// TestBeginThatChangesTheState so that it cannot be kept is a failure, and its children turn back.
func TestBeginThatChangesTheState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := &saga.Saga[float64]{Name: "sum", Steps: []saga.Step[float64]{{Name: "parcel", Child: saga.ChildOf((&warehouse{}).parcel(),
			func(s *float64) (parcel, error) { *s = math.NaN(); return parcel{}, nil }, nil)}}}
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		_, err := saga.Register(r, sg).Start(t.Context(), "order-1", 1)
		require.NoError(t, err)
		_, err = saga.Register(r, sg).Result(t.Context(), "order-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.ErrorContains(t, err, "the state does not encode")
		in, err := r.Get(t.Context(), "order-1/parcel/0")
		require.NoError(t, err)
		require.Equal(t, saga.Compensated, in.Status)
	})
}

// TestVoidOfAParentLeavesNoChild: begin or end does not know what became of the children.
func TestVoidOfAParentLeavesNoChild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{}
		sg := sequence(saga.Step[trip]{Name: "parcel", Child: saga.ChildOf(w.parcel(),
			func(*trip) (parcel, error) { return parcel{}, nil },
			func(*trip, parcel) error { return saga.Declined(errDeclined) })})
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		startOrder(t, r, sg)
		_, err := result[trip](t.Context(), r, "order-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		in, err := r.Get(t.Context(), "order-1/parcel/0")
		require.NoError(t, err)
		require.Equal(t, saga.Compensated, in.Status)
	})
}

// TestParentThatTurnsBackTurnsItsChildrenBack after they are completed, or while they
// run.
func TestParentThatTurnsBackTurnsItsChildrenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{}
		sg := sequence(w.parcels(2), failing("car", saga.Declined(errDeclined)))
		var turned atomic.Int64
		r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{
			Poll: time.Hour, LeaseTTL: 4 * time.Hour,
		}, on(saga.EventTurnedBack, func(saga.Event) { turned.Add(1) }), sg)
		begun := time.Now()
		startOrder(t, r, sg)
		_, err := result[trip](t.Context(), r, "order-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.Len(t, w.did, 8)
		require.EqualValues(t, 3, turned.Load(), "each is told")
		require.Zero(t, time.Since(begun))
		require.Equal(t, []string{"created", "step_done pack", "step_done ship", "completed", "turned_back", "step_undone ship", "step_undone pack", "compensated"},
			events(t, r, "order-1/parcels/1"))
		in, err := r.Get(t.Context(), "order-1/parcels/1")
		require.NoError(t, err)
		require.Equal(t, "the saga that started it turned back", in.Cause)
	})
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{hold: map[string]chan struct{}{"do ship order-1/parcels/1": make(chan struct{})}}
		sg := sequence(w.parcels(2), step("car"))
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		startOrder(t, r, sg)
		time.Sleep(time.Hour)
		begun := time.Now()
		require.NoError(t, r.Operate(t.Context(), "order-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"}))
		_, err := result[trip](t.Context(), r, "order-1")
		require.ErrorIs(t, err, saga.ErrCanceled)
		require.LessOrEqual(t, time.Since(begun), time.Second)
		require.Len(t, w.did, 8)
	})
}

// TestParentOfAChildThatNobodyKnowsIsStuck: it is completed, and its version was taken from the program. The parent
// does not wait for it in silence.
func TestParentOfAChildThatNobodyKnowsIsStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, st := &warehouse{}, saga.NewMemory()
		paid := saga.Step[trip]{Name: "paid", Await: "paid"}
		sg := sequence(w.parcels(1), paid)
		first, stop := observed(t, st, saga.RunnerConfig{}, silent, sg)
		startOrder(t, first, sg)
		time.Sleep(time.Minute)
		stop()

		newer := w.parcel()
		newer.Version = 2
		parcels := saga.Step[trip]{Name: "parcels", Child: saga.ChildOf(newer, func(*trip) (parcel, error) { return parcel{}, nil }, nil)}
		r, _ := observed(t, st, saga.RunnerConfig{}, silent, sequence(parcels, paid))
		require.NoError(t, r.Operate(t.Context(), "order-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"}))
		time.Sleep(time.Hour)
		in, err := r.Get(t.Context(), "order-1")
		require.NoError(t, err)
		require.Equal(t, saga.Stuck, in.Status)
		require.Contains(t, in.LastError, "definition not registered: parcel version 0")
		require.Equal(t, 20, total(r, "outcome=refused"), "before it fails")

		saga.Register(r, w.parcel())
		require.NoError(t, r.Operate(t.Context(), "order-1", saga.Operation{Action: saga.ActionRetry}))
		_, err = result[trip](t.Context(), r, "order-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.Equal(t, []string{"undo ship order-1/parcels/0", "undo pack order-1/parcels/0"}, w.did[2:])
	})
}

// newer returns the step of a program that no longer has the first version of the parcel.
func (w *warehouse) newer() saga.Step[trip] {
	child := w.parcel()
	child.Version = 2
	return saga.Step[trip]{Name: "parcels", UndoAttempts: 1, Child: saga.ChildrenOf(child, func(*trip) ([]parcel, error) { return nil, nil }, nil)}
}

// TestParentOfAChildThatOneRunnerDoesNotKnow waits for another that does, while a deployment is under way. Other
// children turn back meanwhile.
func TestParentOfAChildThatOneRunnerDoesNotKnow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, st := &warehouse{hold: map[string]chan struct{}{"do ship order-1/parcels/1": make(chan struct{})}}, saga.NewMemory()
		sg := sequence(w.parcels(2))
		first, stop := observed(t, st, saga.RunnerConfig{}, silent, sg)
		startOrder(t, first, sg)
		time.Sleep(time.Minute)
		stop()

		r, stop := observed(t, st, saga.RunnerConfig{}, silent, sequence(w.newer()))
		require.NoError(t, r.Operate(t.Context(), "order-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"}))
		time.Sleep(10 * time.Second)
		in, err := r.Get(t.Context(), "order-1/parcels/1")
		require.NoError(t, err)
		require.True(t, in.CancelRequested)
		require.NotZero(t, total(r, "outcome=refused"), "it does not wait in silence")
		stop()
		r, _ = begin(t, st, saga.RunnerConfig{}, sg)
		_, err = result[trip](t.Context(), r, "order-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
	})
}

// TestParentOfAStuckChildThatNobodyKnows waits for it, as for any that is stuck.
func TestParentOfAStuckChildThatNobodyKnows(t *testing.T) {
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
		require.NoError(t, r.Operate(t.Context(), "order-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"}))
		time.Sleep(time.Hour)
		saga.Register(r, w.parcel())
		require.NoError(t, r.Operate(t.Context(), "order-1/parcels/0", saga.Operation{Action: saga.ActionSkip}))
		_, err := result[trip](t.Context(), r, "order-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
	})
}

// TestPivotWhoseChildIsCompensated took no effect, although the child has a pivot itself:
// the parent turns back.
func TestPivotWhoseChildIsCompensated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{fail: map[string]error{"do ship order-1/parcels/0": saga.Declined(errDeclined)}}
		ship := w.step("ship")
		ship.Pivot, ship.Undo = true, nil
		child := &saga.Saga[parcel]{Name: "parcel", Steps: []saga.Step[parcel]{w.step("pack"), ship}}
		pivot := saga.Step[trip]{Name: "parcels", Pivot: true, Child: saga.ChildOf(child, func(*trip) (parcel, error) { return parcel{}, nil }, nil)}
		sg := sequence(step("flight"), pivot, step("car"))
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		startOrder(t, r, sg)
		s, err := result[trip](t.Context(), r, "order-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.Equal(t, []string{"do flight", "undo flight"}, s.Calls)
	})
}

// A forgetful store tells its runner that it has lost a saga, and lets it claim none.
type forgetful struct {
	store.Store
	forgot atomic.Value // the id
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

// TestUndoOfAChildThatIsStuckWaits for the operator.
func TestUndoOfAChildThatIsStuckWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{fail: map[string]error{"undo pack order-1/parcels/0": saga.Permanent(errDeclined)}}
		sg := sequence(w.parcels(1), failing("car", saga.Declined(errDeclined)))
		r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, sg)
		startOrder(t, r, sg)
		time.Sleep(long(24 * time.Hour))
		in, err := r.Get(t.Context(), "order-1")
		require.NoError(t, err)
		require.Equal(t, saga.Compensating, in.Status)
		require.Zero(t, r.Stats().StoreErrors)
		clear(w.fail)
		require.NoError(t, r.Operate(t.Context(), "order-1/parcels/0", saga.Operation{Action: saga.ActionRetry, Note: "mended"}))
		_, err = result[trip](t.Context(), r, "order-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.ErrorIs(t, r.Operate(t.Context(), "order-1/parcels/0", saga.Operation{Action: saga.ActionRetry}), saga.ErrNotAllowed)
	})
}

// TestParentTurnsAChildBackThatIsStuck on its way forward.
func TestParentTurnsAChildBackThatIsStuck(t *testing.T) {
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
		sg := sequence(saga.Step[trip]{Name: "parcels", Child: saga.ChildOf(child, func(*trip) (parcel, error) { return parcel{}, nil }, nil)})
		r, _ := observed(t, store.Store(st), saga.RunnerConfig{}, silent, sg)
		startOrder(t, r, sg)
		time.Sleep(time.Minute)
		rec, err := st.Load(t.Context(), "order-1/parcels/0")
		require.NoError(t, err)
		_, err = st.Commit(t.Context(), store.CommitRequest{
			ID: rec.ID, Epoch: rec.Epoch, Seq: rec.Seq, Status: saga.Stuck, Progress: rec.Progress, Log: []store.Entry{{Kind: saga.EventStuck}}, Release: true,
		})
		require.NoError(t, err)
		require.NoError(t, r.Operate(t.Context(), "order-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"}))
		_, err = result[trip](t.Context(), r, "order-1")
		require.ErrorIs(t, err, saga.ErrCanceled)
		require.Equal(t, []string{"do pack order-1/parcels/0", "undo pack order-1/parcels/0"}, w.did)
		require.EqualValues(t, 1, r.Stats().StoreErrors, "the first try is told of")
	})
}

// A reverting store has another owner of the parent turn a child back that is completed, when it
// is read for the first time.
type reverting struct {
	store.Store
	idle atomic.Bool
}

func (s *reverting) Load(ctx context.Context, id string) (store.Record, error) {
	rec, err := s.Store.Load(ctx, id)
	if rec.Parent != "" && rec.Status == saga.Completed && s.idle.CompareAndSwap(false, true) {
		_, err = s.Store.Commit(ctx, store.CommitRequest{
			ID: rec.ID, Epoch: rec.Epoch, Seq: rec.Seq, Status: saga.Compensated, Progress: rec.Progress, Log: []store.Entry{{Kind: saga.EventCompensated}}, Release: true,
		})
	}
	return rec, err
}

// TestChildIsTurnedBackOnce, though two owners of its parent want to.
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
		require.NoError(t, r.Operate(t.Context(), "order-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"}))
		_, err := result[trip](t.Context(), r, "order-1")
		require.ErrorIs(t, err, saga.ErrCanceled)
		require.Equal(t, []string{"completed", "compensated"}, last(events(t, r, "order-1/parcels/0"), 2))
	})
}

// TestDefinitionMayBeItsOwnChild.
func TestDefinitionMayBeItsOwnChild(t *testing.T) {
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

func TestChildThatIsAbandonedIsNotUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{hold: map[string]chan struct{}{"do ship order-1/parcels/0": make(chan struct{})}}
		sg := sequence(step("flight"), w.parcels(1))
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		startOrder(t, r, sg)
		time.Sleep(time.Hour)
		require.NoError(t, r.Operate(t.Context(), "order-1/parcels/0", saga.Operation{Action: saga.ActionAbandon, Note: "by hand"}))
		begun := time.Now()
		s, err := result[trip](t.Context(), r, "order-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.LessOrEqual(t, time.Since(begun), time.Second)
		require.Equal(t, []string{"do flight", "undo flight"}, s.Calls)
		require.Len(t, w.did, 2)
	})
}

// TestChildThatStartsLateDoesNothing: an owner that was cut off while it started children
// goes on after the next owner has turned back.
func TestChildThatStartsLateDoesNothing(t *testing.T) {
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
		_, err = result[trip](t.Context(), other, "order-1")
		require.ErrorIs(t, err, saga.ErrCanceled)
		close(st.wake)
		time.Sleep(time.Hour)
		did := slices.Clone(w.did)
		slices.Sort(did)
		for i := range 2 { // the third is never started
			in, err := other.Get(t.Context(), saga.ChildID("order-1", "parcels", i))
			require.NoError(t, err)
			require.Equal(t, saga.Compensated, in.Status, did)
		}
		require.NotContains(t, did, "do pack order-1/parcels/1")
		_, err = other.Get(t.Context(), saga.ChildID("order-1", "parcels", 2))
		require.ErrorIs(t, err, saga.ErrNotFound, "nor does it start those that follow")
	})
}

// A lateStart delays the Start of the second child until wake is closed, and cuts the
// process off, whose Starts arrive nevertheless.
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
		ctx = context.Background() // the process does not know yet
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

// TestRegisterRefusesWhatAnyChildNeeds, not the first one's alone.
func TestRegisterRefusesWhatAnyChildNeeds(t *testing.T) {
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

func TestChildWhoseIDIsTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{}
		child := w.parcel()
		st := saga.Step[trip]{Name: "parcel", Child: saga.ChildOf(child, func(*trip) (parcel, error) { return parcel{}, nil }, nil)}
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

// TestChildThatEndedIsKeptForItsParent, and what the child has started itself too: the
// parent may turn back long after Keep.
func TestChildThatEndedIsKeptForItsParent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{}
		parcels := w.parcels(2)
		middle := sequence(parcels)
		middle.Name = "middle"
		of := saga.ChildOf(middle, func(*trip) (trip, error) { return trip{}, nil }, nil)
		sg := sequence(saga.Step[trip]{Name: "middle", Child: of}, saga.Step[trip]{Name: "paid", Await: "paid", AwaitFor: 90 * 24 * time.Hour})
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{
			Poll: 10 * time.Minute, LeaseTTL: time.Hour, Retention: saga.Retention{Completed: time.Hour, Compensated: time.Hour},
		}, sg)
		startOrder(t, r, sg)
		time.Sleep(89 * 24 * time.Hour)
		require.Zero(t, r.Stats().Deleted)
		time.Sleep(26 * time.Hour)
		in, err := r.Get(t.Context(), "order-1")
		require.NoError(t, err)
		require.Equal(t, saga.Compensated, in.Status)
		require.Len(t, w.did, 8)
		time.Sleep(24 * time.Hour)
		require.EqualValues(t, 4, r.Stats().Deleted, "the whole family")
	})
}

// A countingReads counts the reads of children, and how often their parent is woken.
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

// TestChildEndsCheaply, however many siblings it has: they end one by one
// while their parent waits, on the way forward and on the way back.
func TestChildEndsCheaply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 200
		store := &countingReads{Store: saga.NewMemory()}
		slow := func(_ context.Context, p *parcel) error {
			time.Sleep(time.Duration(1+p.Weight) * time.Minute)
			return nil
		}
		child := &saga.Saga[parcel]{Name: "parcel", Steps: []saga.Step[parcel]{{Name: "pack", Do: slow, Undo: slow, Timeout: 100 * time.Hour}}}
		parcels := saga.Step[trip]{Name: "parcels", Child: saga.ChildrenOf(child, func(*trip) ([]parcel, error) {
			list := make([]parcel, n)
			for i := range list {
				list[i].Weight = i
			}
			return list, nil
		}, nil)}
		sg := sequence(parcels, saga.Step[trip]{Name: "paid", Await: "paid"})
		r, _ := begin[trip](t, store, saga.RunnerConfig{Concurrency: 2 * n}, sg)
		startOrder(t, r, sg)
		look := func(after time.Duration, loads, listed int) {
			t.Helper()
			time.Sleep(after)
			t.Log(store.loads.Load(), store.listed.Load())
			require.LessOrEqual(t, store.loads.Swap(0), int64(loads))
			require.LessOrEqual(t, store.listed.Swap(0), int64(listed))
		}
		const few = 50 // looks of the parent, in case nobody told it
		look((n+1)*time.Minute, n, (few+1)*n)
		require.NoError(t, r.Operate(t.Context(), "order-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"}))
		look((n+1)*time.Minute, 2*n, (few+1)*n)
		in, err := r.Get(t.Context(), "order-1")
		require.NoError(t, err)
		require.Equal(t, saga.Compensated, in.Status)
		require.Less(t, len(events(t, r, "order-1")), n/2)
	})
}

// TestPivotOfChildrenWaitsInPeace although one of them has failed, until all have ended.
func TestPivotOfChildrenWaitsInPeace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{
			fail: map[string]error{"do ship order-1/parcels/0": saga.Declined(errDeclined)},
			hold: map[string]chan struct{}{"do ship order-1/parcels/1": make(chan struct{})},
		}
		pivot := w.parcels(2)
		pivot.Pivot = true
		ship := w.step("ship")
		ship.Pivot, ship.Undo = true, nil
		child := &saga.Saga[parcel]{Name: "parcel", Steps: []saga.Step[parcel]{w.step("pack"), ship}}
		pivot.Child = saga.ChildrenOf(child, func(*trip) ([]parcel, error) { return make([]parcel, 2), nil }, nil)
		sg := sequence(step("flight"), pivot)
		r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, sg)
		startOrder(t, r, sg)
		time.Sleep(long(24 * time.Hour))
		in, err := r.Get(t.Context(), "order-1")
		require.NoError(t, err)
		require.Equal(t, saga.Running, in.Status)
		require.Less(t, in.Epoch, int64(30))
		close(w.hold["do ship order-1/parcels/1"])
		time.Sleep(time.Second)
		in, err = r.Get(t.Context(), "order-1")
		require.NoError(t, err)
		require.Equal(t, saga.Stuck, in.Status, "one parcel is on its way, and the other is not")
	})
}

func TestStoreThatFailsFailsNoChild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &noStart{Store: saga.NewMemory(), fails: 20}
		w := &warehouse{}
		sg := sequence(w.parcels(2))
		r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
		startOrder(t, r, sg)
		_, err := result[trip](t.Context(), r, "order-1")
		require.NoError(t, err)
		require.EqualValues(t, 20, r.Stats().StoreErrors)
	})
}

// TestChildThatEndsAtTheMomentOfParking, in another process, which does not find its parent
// written back yet.
func TestChildThatEndsAtTheMomentOfParking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{hold: map[string]chan struct{}{"do pack order-1/parcels/0": make(chan struct{})}}
		sg := sequence(w.parcels(1))
		st := &parking{Store: saga.NewMemory()}
		r, _ := observed[trip](t, st, saga.RunnerConfig{LeaseTTL: time.Hour}, silent, sg)
		st.before = func() {
			rec, err := st.Load(t.Context(), "order-1/parcels/0")
			require.NoError(t, err)
			_, err = st.Store.Commit(t.Context(), store.CommitRequest{
				ID: rec.ID, Epoch: rec.Epoch, Seq: rec.Seq, Status: saga.Completed, Progress: rec.Progress, Log: []store.Entry{{Kind: saga.EventCompleted}}, Release: true,
			})
			require.NoError(t, err)
			_, err = st.Post(t.Context(), store.PostRequest{ID: rec.Parent})
			require.NoError(t, err)
		}
		begun := time.Now()
		startOrder(t, r, sg)
		_, err := result[trip](t.Context(), r, "order-1")
		require.NoError(t, err)
		require.LessOrEqual(t, time.Since(begun), 2*time.Second)
	})
}

// A listless store fails to list children now and then.
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

// TestStoreThatFailsForgetsNoChild of a step that waits for them.
func TestStoreThatFailsForgetsNoChild(t *testing.T) {
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

// TestStoreThatFailsFailsNoUndoOfChildren: the step looks at them again.
func TestStoreThatFailsFailsNoUndoOfChildren(t *testing.T) {
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
		_, err := result[trip](t.Context(), r, "order-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
	})
}

// TestChildrenThatTurnBackCostLittle: the last of them wakes their parent, which reads none again meanwhile.
func TestChildrenThatTurnBackCostLittle(t *testing.T) {
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
		require.NoError(t, r.Operate(t.Context(), "order-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"}))
		time.Sleep(4 * time.Hour)
		in, err := r.Get(t.Context(), "order-1")
		require.NoError(t, err)
		require.Equal(t, saga.Compensated, in.Status)
		require.EqualValues(t, 2*len(list), st.loads.Load(), "and once more by Cancel")
		require.EqualValues(t, 1, st.woken.Load())
	})
}

// A noStart fails to start children.
type noStart struct {
	store.Store
	fails int
}

func (s *noStart) Start(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
	if req.Saga == "parcel" {
		if s.fails--; s.fails >= 0 {
			return store.Record{}, false, errors.New("connection lost")
		}
	}
	return s.Store.Start(ctx, req)
}

func TestChildIDFits(t *testing.T) {
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

// TestChildThatAnOperatorHasTurnedBack before any runner had it is not taken for one that
// its parent never starts: the children after it are turned back, and the parent waits for them.
func TestChildThatAnOperatorHasTurnedBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		undo := make(chan struct{})
		time.AfterFunc(time.Minute, func() { close(undo) })
		w := &warehouse{hold: map[string]chan struct{}{
			"do pack order-1/parcels/1": make(chan struct{}), "undo pack order-1/parcels/1": undo,
		}}
		st := saga.NewMemory()
		sg := sequence(w.parcels(2))
		r, _ := begin(t, st, saga.RunnerConfig{}, sg)
		// A runner has started both children, and crashed before it recorded that.
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
		require.NoError(t, r.Operate(t.Context(), "order-1/parcels/0", saga.Operation{Action: saga.ActionCompensate, Note: "not this one"}))
		_, err := result[trip](t.Context(), r, "order-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		in, err := r.Get(t.Context(), "order-1/parcels/1")
		require.NoError(t, err)
		require.Equal(t, saga.Compensated, in.Status)
	})
}

// TestChildThatHasBegun before its parent has recorded it is not taken for one that its parent
// never starts: it goes on, or is turned back with the children after it before the parent ends.
func TestChildThatHasBegun(t *testing.T) {
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
				{ID: "order-1/parcels/0", Saga: "parcel", Parent: "order-1", ParentStep: "parcels", Progress: child, Log: []store.Entry{{Kind: saga.EventStepDone}}},
				{ID: "order-1/parcels/1", Saga: "parcel", Parent: "order-1", ParentStep: "parcels", Progress: child, Log: []store.Entry{{Kind: saga.EventStepDone}}},
			} {
				req.Status, req.State, req.Log = saga.Running, []byte(`{}`), append([]store.Entry{{Kind: saga.EventCreated}}, req.Log...)
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
			require.True(t, blind.failed.Load(), "which says nothing of whether it has begun")
			_, err = result[trip](t.Context(), r, "order-1")
			require.ErrorIs(t, err, saga.ErrCanceled)
			for _, id := range []string{"order-1/parcels/0", "order-1/parcels/1"} {
				in, err := r.Get(t.Context(), id)
				require.NoError(t, err)
				require.Equal(t, saga.Compensated, in.Status)
			}
		})
	}
}

// An unread store fails to read the first child once.
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
