package saga_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// fragile is a Codec that panics on demand.
type fragile struct {
	mu             sync.Mutex
	encode, decode bool
	spared         int // calls of Decode that work all the same
}

func (f *fragile) Encode(s *trip) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.encode {
		panic("encode")
	}
	return json.Marshal(s)
}

func (f *fragile) Decode(data []byte, s *trip) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.spared--; f.decode && f.spared < 0 {
		panic("decode")
	}
	return json.Unmarshal(data, s)
}

func TestAPanicInACodecIsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		codec := &fragile{}
		hotel := step("hotel")
		hotel.Do = func(context.Context, *trip) error {
			codec.mu.Lock()
			defer codec.mu.Unlock()
			codec.encode = true
			return nil
		}
		sg := sequence(step("flight"), hotel)
		sg.Codec = codec
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		_, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrStuck)
		require.ErrorContains(t, err, "the state does not encode: saga: panic: encode")
		_, err = saga.Start(t.Context(), r, sg, "trip-2", trip{})
		require.ErrorContains(t, err, "panic: encode")

		t.Log("one that does not decode is stuck as it is")
		codec.encode = false
		require.NoError(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionRetry}))
		_, err = result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		sg2 := sequence(step("flight"))
		sg2.Version, sg2.Codec = 2, codec
		codec.decode, codec.spared = true, 1 // that of Start
		saga.Register(r, sg2)
		_, err = saga.Start(t.Context(), r, sg2, "trip-3", trip{Calls: []string{"begin"}})
		require.NoError(t, err)
		time.Sleep(time.Second)
		in, err := r.Get(t.Context(), "trip-3")
		require.NoError(t, err)
		require.Equal(t, saga.Stuck, in.Status)
		require.JSONEq(t, `{"Calls":["begin"]}`, string(in.State))
	})
}

// TestACodecThatFailsNowAndThen fails the attempt whose copy of the state it does not make, or
// whose changes cannot be put together with those of another. The first call is for the saga
// itself, which is stuck then.
func TestACodecThatFailsNowAndThen(t *testing.T) {
	for n := range 12 {
		fails, times := n/2, n%2+1
		synctest.Test(t, func(t *testing.T) {
			codec := &flaky{times: int64(times)}
			codec.fails.Store(int64(fails) + 1) // after that of Start
			hotel := step("hotel")
			hotel.After = []string{}
			sg := sequence(step("flight"), hotel)
			sg.Codec = codec
			r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{OnEvent: silent}, sg)
			mustStart(t, r, sg)
			time.Sleep(time.Minute)
			in, err := r.Get(t.Context(), "trip-1")
			require.NoError(t, err)
			require.Equal(t, map[bool]saga.Status{true: saga.Completed, false: saga.Stuck}[fails > 0], in.Status)
		})
	}
}

// A flaky Codec fails to decode so many times, after so many calls that work.
type flaky struct {
	fails atomic.Int64
	times int64
}

func (f *flaky) Encode(s *trip) ([]byte, error) { return json.Marshal(s) }

func (f *flaky) Decode(data []byte, s *trip) error {
	if n := f.fails.Add(-1); n < 0 && n >= -f.times {
		return errDown
	}
	return json.Unmarshal(data, s)
}

func TestAPanicInABackoffEndsTheAttempts(t *testing.T) {
	for _, durable := range []bool{false, true} {
		for _, fails := range []error{errDeclined, refusal{}} {
			synctest.Test(t, func(t *testing.T) {
				st := failing("hotel", fails)
				st.Backoff = func(int) time.Duration { panic("boom") }
				sg := sequence(step("flight"), st)
				var err error
				if durable {
					r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
					mustStart(t, r, sg)
					_, err = result[trip](t.Context(), r, "trip-1")
				} else {
					err = saga.Run(t.Context(), sg, &trip{})
				}
				require.ErrorIs(t, err, saga.ErrCompensated)
				require.ErrorContains(t, err, "panic: boom: "+fails.Error())

				t.Log("of Do and of Undo")
				undo := step("flight")
				undo.Undo, undo.Backoff = note("undo flight", fails), st.Backoff
				err = saga.Run(t.Context(), sequence(undo, failing("hotel", saga.NoEffect(errDeclined))), &trip{})
				require.ErrorIs(t, err, saga.ErrStuck)
				require.ErrorContains(t, err, "panic: boom: "+fails.Error())
			})
		}
	}
}

func TestAHookThatPanicsOrExitsIsTold(t *testing.T) {
	for how, leave := range map[string]func(){"boom": func() { panic("boom") }, "called runtime.Goexit": runtime.Goexit} {
		t.Run(how, func(t *testing.T) {
			var logged bytes.Buffer
			before := slog.Default()
			slog.SetDefault(slog.New(slog.NewTextHandler(&logged, nil)))
			defer slog.SetDefault(before)
			play := func(t *testing.T, onPanic func(context.Context, any, []byte)) int64 {
				sg := sequence(step("flight"), failing("hotel", saga.Abort(errDeclined)))
				sg.Steps[1].Pivot, sg.Steps[1].Undo = true, nil
				r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{
					OnEvent: func(context.Context, saga.Event) { leave() },
					OnPanic: onPanic,
				}, sg)
				r.Observe(func(context.Context, saga.Event) { leave() })
				mustStart(t, r, sg)
				_, err := result[trip](t.Context(), r, "trip-1")
				require.ErrorIs(t, err, saga.ErrStuck)
				synctest.Wait()
				require.Zero(t, r.Stats().Claimed, "it is held from its start to its end")
				return r.Stats().HookPanics
			}
			synctest.Test(t, func(t *testing.T) {
				var told atomic.Int64
				n := play(t, func(_ context.Context, value any, _ []byte) {
					told.Add(1)
					if !strings.Contains(fmt.Sprint(value), how) {
						t.Error(value)
					}
				})
				require.Equal(t, told.Load(), n)
				require.Positive(t, n)
			})
			require.Empty(t, logged.String())
			synctest.Test(t, func(t *testing.T) { play(t, nil) })
			for _, hook := range []string{"OnEvent ", "an observer "} {
				require.Regexp(t, "saga: "+hook+"panicked.*"+how, logged.String())
			}
			if how == "boom" {
				require.Contains(t, logged.String(), "panic_test.go", "with its stack")
			}
		})
	}
}

// TestAHookOfPanicsMayExit: as a require in it does, when it fails.
func TestAHookOfPanicsMayExit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := step("flight")
		st.Do = func(context.Context, *trip) error { panic("boom") }
		sg := sequence(st)
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{
			OnEvent: func(context.Context, saga.Event) { panic("boom") },
			OnPanic: func(context.Context, any, []byte) { runtime.Goexit() },
		}, sg)
		mustStart(t, r, sg)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_, err := result[trip](ctx, r, "trip-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.Zero(t, r.Stats().Claimed, "it is held from its start to its end")
	})
}

// faulty is an error whose methods panic if it is a nil pointer.
type faulty struct{ text string }

func (f *faulty) Error() string { return f.text }

// TestAnErrorThatCannotBeReadIsAPanicOfItsStep: a runner would end the process with it, and
// Run would undo nothing.
func TestAnErrorThatCannotBeReadIsAPanicOfItsStep(t *testing.T) {
	var none *faulty
	declined := failing("charge", saga.NoEffect(errDeclined))
	do := failing("hotel", none)
	do.Attempts = 1
	undo := step("hotel")
	undo.Undo, undo.UndoAttempts = note("undo hotel", none), 1
	beside := do
	beside.After = []string{}
	beside.Do, beside.Undo = func(context.Context, *trip) error { return none }, func(context.Context, *trip) error { return nil }
	children := saga.Step[trip]{Name: "hotel", Attempts: 1, Saga: saga.ChildOf(
		&saga.Saga[trip]{Name: "room", Steps: []saga.Step[trip]{step("room")}},
		func(*trip) (trip, error) { return trip{}, none }, nil)}
	for name, sg := range map[string]*saga.Saga[trip]{
		"Do":     sequence(step("flight"), do),
		"Undo":   sequence(step("flight"), undo, declined),
		"beside": sequence(step("flight"), beside),
		"begin":  sequence(step("flight"), children),
	} {
		if name != "begin" {
			t.Run("Run, "+name, func(t *testing.T) {
				var s trip
				require.Panics(t, func() { _ = saga.Run(t.Context(), sg, &s) })
				require.Equal(t, name != "Undo", slices.Contains(s.Calls, "undo flight"), s.Calls)
			})
		}
		t.Run("Runner, "+name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var panics atomic.Int64
				r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{
					OnEvent: silent, OnPanic: func(context.Context, any, []byte) { panics.Add(1) },
				}, sg)
				mustStart(t, r, sg)
				_, err := result[trip](t.Context(), r, "trip-1")
				require.ErrorIs(t, err, map[bool]error{true: saga.ErrStuck, false: saga.ErrCompensated}[name == "Undo"])
				require.EqualValues(t, 1, panics.Load())
			})
		})
	}
}

// hollow is an error of which only the text can be read if it is a nil pointer.
type hollow struct{ err error }

func (h *hollow) Error() string { return "hollow" }
func (h *hollow) Unwrap() error { return h.err }

// hollowCodec does not encode the state after the first step.
type hollowCodec struct{ slowCodec }

func (c *hollowCodec) Encode(s *trip) ([]byte, error) {
	if len(s.Calls) > 0 {
		return nil, (*hollow)(nil)
	}
	return c.slowCodec.Encode(s)
}

// TestAnErrorThatCannotBeUnwrappedIsReadAsFarAsItCanBe: a runner would end the process with it.
func TestAnErrorThatCannotBeUnwrappedIsReadAsFarAsItCanBe(t *testing.T) {
	var none *hollow
	panics := step("flight")
	panics.Do = func(context.Context, *trip) error { panic(none) }
	panics.Attempts = 1
	waits := failing("flight", errDeclined)
	waits.Backoff = func(int) time.Duration { panic(none) }
	coded := sequence(step("flight"))
	coded.Codec = new(hollowCodec)
	for name, sg := range map[string]*saga.Saga[trip]{"Do": sequence(panics), "Backoff": sequence(waits), "Codec": coded} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{OnEvent: silent, OnPanic: func(context.Context, any, []byte) {}}, sg)
				mustStart(t, r, sg)
				_, err := result[trip](t.Context(), r, "trip-1")
				var failed *saga.Error
				require.ErrorAs(t, err, &failed)
				require.ErrorContains(t, err, "panic: ")
			})
		})
	}
}

// TestASlowHookOfStartCostsNoLease: the runner holds the saga, and any child, while the hooks
// are told of its start. Its first step begins after them.
func TestASlowHookOfStartCostsNoLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{}
		sg := sequence(w.parcels(1))
		slow := func(_ context.Context, e saga.Event) {
			if e.Kind == saga.EventCreated {
				time.Sleep(time.Hour)
				w.mu.Lock()
				defer w.mu.Unlock()
				require.Empty(t, w.did)
			}
		}
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{OnEvent: slow}, sg)
		startOrder(t, r, sg)
		_, err := result[trip](t.Context(), r, "order-1")
		require.NoError(t, err)
		require.Zero(t, r.Stats().TakenOver)
		require.Zero(t, r.Stats().Lost)
		require.Equal(t, []string{"created", "done pack", "done ship", "completed"}, events(t, r, "order-1/parcels/0"))
	})
}
