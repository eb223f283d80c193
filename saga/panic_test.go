package saga_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// A fragile Codec fails on demand.
type fragile struct {
	mu             sync.Mutex
	encode, decode bool
}

func (f *fragile) Encode(s *trip) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.encode {
		return nil, errors.New("encode")
	}
	return json.Marshal(s)
}

func (f *fragile) Decode(data []byte, s *trip) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.decode {
		return errors.New("decode")
	}
	return json.Unmarshal(data, s)
}

// TestCodecErrorsFailAttempts: a Codec error fails the attempt for which the state is copied, or whose changes
// cannot be merged. If the first call fails, which is for the saga itself, the saga is stuck.
func TestCodecErrorsFailAttempts(t *testing.T) {
	for n := range 12 {
		fails, times := n/2, n%2+1
		synctest.Test(t, func(t *testing.T) {
			codec := &flaky{times: int64(times)}
			codec.fails.Store(int64(fails) + 1) // after the call of Start
			hotel := step("hotel")
			hotel.Parallel = true
			sg := sequence(step("flight"), hotel)
			sg.Codec = codec
			r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, sg)
			mustStart(t, r, sg)
			time.Sleep(time.Minute)
			in := instance(t, r, "trip-1")
			require.Equal(t, map[bool]saga.Status{true: saga.Completed, false: saga.Stuck}[fails > 0], in.Status)
		})
	}
}

// A flaky Codec fails to decode several times after several successful calls.
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

// An explosive Codec panics on demand.
type explosive struct{ encode, decode atomic.Bool }

func (e *explosive) Encode(s *trip) ([]byte, error) {
	if e.encode.Load() {
		panic("encode")
	}
	return json.Marshal(s)
}

func (e *explosive) Decode(data []byte, s *trip) error {
	if e.decode.Load() {
		panic("decode")
	}
	return json.Unmarshal(data, s)
}

// TestPanicOutsideStepMakesSagaStuck: the panic does not end the process, with all other sagas, and then the next
// process.
func TestPanicOutsideStepMakesSagaStuck(t *testing.T) {
	var logged bytes.Buffer
	log.SetOutput(&logged)
	defer log.SetOutput(os.Stderr)
	for name, lay := range map[string]func(*explosive, *saga.Step[trip]){
		"in the Backoff": func(_ *explosive, hotel *saga.Step[trip]) {
			hotel.Do = note("do hotel", errDown)
			hotel.Backoff = func(n int) time.Duration { return make([]time.Duration, 1)[n] }
		},
		"of an error that is nil": func(_ *explosive, hotel *saga.Step[trip]) {
			hotel.Do = func(context.Context, *trip) error { var none *saga.Error; return none }
		},
		"in Encode": func(codec *explosive, hotel *saga.Step[trip]) {
			hotel.Do = func(context.Context, *trip) error { codec.encode.Store(true); return nil }
		},
		"in Decode": func(codec *explosive, hotel *saga.Step[trip]) {
			hotel.Do = func(context.Context, *trip) error { codec.decode.Store(true); return errDown }
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				codec, hotel, car := &explosive{}, step("hotel"), step("car")
				lay(codec, &hotel)
				car.Parallel = true
				sg := sequence(step("flight"), hotel, car)
				sg.Codec = codec
				st := saga.NewMemory()
				r, stop := observed(t, st, saga.RunnerConfig{}, silent, sg)
				mustStart(t, r, sg)
				time.Sleep(time.Minute)
				in := instance(t, r, "trip-1")
				require.Equal(t, saga.Stuck, in.Status)
				require.Contains(t, in.Cause, "panic outside of a step: ")
				require.Equal(t, saga.StepStarted, in.Steps[1].Status)
				require.True(t, in.Steps[1].MaybeApplied)
				require.Zero(t, r.Stats().Held)
				stop()

				mended := sequence(step("flight"), step("hotel"), car)
				r, _ = observed(t, st, saga.RunnerConfig{}, silent, mended)
				operate(t, r, "trip-1", saga.Operation{Action: saga.ActionCompensate})
				s, err := saga.Register(r, mended).Result(t.Context(), "trip-1")
				require.ErrorIs(t, err, saga.ErrCompensated)
				require.Contains(t, s.Calls, "undo hotel")
			})
			require.Contains(t, logged.String(), "saga: trip panicked outside of a step: ")
			logged.Reset()
		})
	}
}

// TestSlowStartObserverKeepsLease: the runner holds the saga, and any child, while observers are notified of its
// start. Its first step starts after that.
func TestSlowStartObserverKeepsLease(t *testing.T) {
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
		r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, slow, sg)
		startOrder(t, r, sg)
		requireEnd(t, r, "order-1", nil)
		require.Zero(t, r.Stats().TakenOver)
		require.Zero(t, r.Stats().Lost)
		require.Equal(t, []string{"created", "step_done pack", "step_done ship", "completed"},
			events(t, r, "order-1/parcels/0"))
	})
}

// TestStartObserverPrecedesFirstStep, even if no place was free: the runner claims the saga afterwards.
func TestStartObserverPrecedesFirstStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun, at := time.Now(), make(chan time.Duration, 2)
		st := taking(5*time.Second, step("flight"))
		do := st.Do
		st.Do = func(ctx context.Context, s *trip) error { at <- time.Since(begun); return do(ctx, s) }
		sg := sequence(st)
		r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{Concurrency: 1, Poll: time.Hour},
			func(_ context.Context, e saga.Event) {
				if e.Kind == saga.EventCreated && e.ID == "trip-2" {
					time.Sleep(10 * time.Second)
				}
			}, sg)
		mustStart(t, r, sg)
		_, err := saga.Register(r, sg).Start(t.Context(), "trip-2", trip{})
		require.NoError(t, err)
		requireCompleted(t, r, "trip-2")
		require.Equal(t, []time.Duration{0, 10 * time.Second}, []time.Duration{<-at, <-at})
	})
}

// TestSkipOfSagaStuckAtNoStep: a panic of the Codec does not belong to a step, so the operator must name one.
func TestSkipOfSagaStuckAtNoStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		codec := &flaky{times: 1}
		codec.fails.Store(1)
		sg := sequence(step("flight"))
		sg.Codec = codec
		r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, sg)
		mustStart(t, r, sg)
		_, err := r.Wait(t.Context(), "trip-1")
		require.NoError(t, err)
		err = r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionSkip})
		require.ErrorIs(t, err, saga.ErrNotAllowed)
		require.ErrorContains(t, err, "saga is stuck, but not at a step, so the operation must name the step")
	})
}
