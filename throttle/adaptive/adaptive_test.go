package adaptive_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/adaptive"
)

func ok(context.Context) error { return nil }

// overload is how a server says that it refuses a call to shed load.
type overload struct{}

func (overload) Error() string   { return "overloaded" }
func (overload) Throttled() bool { return true }

var errOverloaded error = overload{}

// A word is an error that says what it is asked to.
type word struct {
	refused, answered, throttled, timeout bool
	after                                 time.Duration
}

func (word) Error() string               { return "a word" }
func (w word) Refused() bool             { return w.refused }
func (w word) Answered() bool            { return w.answered }
func (w word) Throttled() bool           { return w.throttled }
func (w word) Timeout() bool             { return w.timeout }
func (w word) RetryAfter() time.Duration { return w.after }

func overloaded(context.Context) error { return errOverloaded }

func newAdaptive(cfg adaptive.Config, seed uint64) *adaptive.Throttle {
	a := adaptive.New(cfg)
	a.SetRand(rand.New(rand.NewPCG(seed, 5)).Float64)
	return a
}

// The probability follows the formula, call by call.
func TestThrottleFollowsTheFormula(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var requests, accepts float64
		draw := 0.0
		a := adaptive.New(adaptive.Config{Name: "users"})
		a.SetRand(func() float64 { return draw })
		formula := func() float64 { return max(0, (requests-2*accepts)/(requests+1)) }
		for range 10 {
			require.NoError(t, a.Do(t.Context(), ok))
			requests, accepts = requests+1, accepts+1
			require.Zero(t, a.Stats().Probability)
		}
		draw = 0.999 // all are sent
		for range 30 {
			require.Equal(t, errOverloaded, a.Do(t.Context(), overloaded))
			requests++
			require.InDelta(t, formula(), a.Stats().Probability, 1e-12)
		}
		require.InDelta(t, 20.0/41, formula(), 1e-12)
		draw = formula() - 1e-9
		err := a.Do(t.Context(), ok)
		require.EqualError(t, err, "throttle: users: limited (shed)")
		requests++ // what is kept back is wanted all the same
		require.InDelta(t, formula(), a.Stats().Probability, 1e-12)
		draw = formula() + 1e-9
		require.NoError(t, a.Wrap(ok)(t.Context()))
		require.Equal(t, adaptive.Stats{Sent: 41, Refused: 1, Probability: 20.0 / 43}, a.Stats())
	})
}

func TestThrottleForgetsCallsOutsideTheWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := adaptive.New(adaptive.Config{Window: 24 * time.Second})
		a.SetRand(func() float64 { return 1 })
		for range 10 {
			_ = a.Do(t.Context(), overloaded)
		}
		require.InDelta(t, 10.0/11, a.Stats().Probability, 1e-12)
		time.Sleep(12 * time.Second)
		_ = a.Do(t.Context(), overloaded)
		time.Sleep(12*time.Second - 1)
		require.InDelta(t, 11.0/12, a.Stats().Probability, 1e-12)
		time.Sleep(time.Nanosecond)
		require.InDelta(t, 1.0/2, a.Stats().Probability, 1e-12)
		time.Sleep(time.Hour)
		require.Zero(t, a.Stats().Probability)
	})
}

func TestThrottleCountsCallsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAdaptive(adaptive.Config{Window: time.Minute}, 1)
		var calls sync.WaitGroup
		for i := range 100 {
			calls.Go(func() {
				err := a.Do(t.Context(), func(context.Context) error {
					time.Sleep(time.Second)
					if i < 90 {
						return errOverloaded
					}
					return nil
				})
				require.NotErrorIs(t, err, throttle.ErrLimited)
			})
		}
		synctest.Wait()
		require.Zero(t, a.Stats().Probability)
		calls.Wait()
		require.InDelta(t, (100.0-2*10)/101, a.Stats().Probability, 1e-12)

		a = newAdaptive(adaptive.Config{Window: time.Minute}, 1)
		go func() {
			_ = a.Do(t.Context(), func(context.Context) error { time.Sleep(time.Hour); return errOverloaded })
		}()
		time.Sleep(time.Hour) // it was sent in a step that has gone
		synctest.Wait()
		require.Zero(t, a.Stats().Probability)
	})
}

// A call counts while the step in which it was sent is in the window. A call that
// counts neither way leaves nothing behind when the step leaves the window.
func TestThrottleLongCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAdaptive(adaptive.Config{Window: 24 * time.Second}, 1)
		_ = a.Do(t.Context(), func(context.Context) error {
			time.Sleep(23500 * time.Millisecond)
			return errOverloaded
		})
		require.InDelta(t, 0.5, a.Stats().Probability, 1e-12)
		time.Sleep(500 * time.Millisecond)
		require.Zero(t, a.Stats().Probability)

		for range 5 {
			require.Panics(t, func() { _ = a.Do(t.Context(), func(context.Context) error { panic("boom") }) })
		}
		time.Sleep(time.Minute)
		_ = a.Do(t.Context(), overloaded)
		require.InDelta(t, 0.5, a.Stats().Probability, 1e-12)
	})
}

// An error that is a refusal says so. The server has taken all other calls.
func TestThrottleClassifiesErrors(t *testing.T) {
	limited := func() error {
		l := throttle.New(throttle.Config{Rate: 1e-3, Burst: 1})
		l.Allow()
		return l.Wait(t.Context())
	}()
	const neither, accepted, refused = 0, -1, 1
	notFound := errors.New("not found")
	for name, c := range map[string]struct {
		err  error
		want int
	}{
		"nil":                            {nil, accepted},
		"any error":                      {notFound, accepted},
		"an answer":                      {word{answered: true}, accepted},
		"a refusal to shed load":         {errOverloaded, refused},
		"429":                            {word{throttled: true, answered: true, after: time.Second}, refused},
		"an answer of a timeout":         {word{answered: true, timeout: true}, accepted},
		"503 with a time":                {word{after: time.Second}, refused},
		"an answer with a time":          {word{answered: true, after: time.Second}, accepted},
		"a timeout":                      {word{timeout: true}, refused},
		"an attempt's deadline":          {context.DeadlineExceeded, refused},
		"a refusal of this module":       {limited, neither},
		"a refusal of another policy":    {word{refused: true, after: time.Second, throttled: true}, neither},
		"a refusal beside a failure":     {errors.Join(limited, notFound), accepted},
		"a refusal beside an overload":   {errors.Join(limited, errOverloaded), refused},
		"an overload beside a failure":   {errors.Join(notFound, errOverloaded), refused},
		"a refusal beside a timeout":     {errors.Join(limited, context.DeadlineExceeded), refused},
		"a cancel that is not the ctx's": {context.Canceled, accepted},
	} {
		for _, err := range []error{c.err, fmt.Errorf("calling: %w", c.err)} {
			if c.err == nil {
				err = nil
			}
			a := newAdaptive(adaptive.Config{}, 1)
			require.Equal(t, err, a.Do(t.Context(), func(context.Context) error { return err }))
			s := a.Stats()
			require.InDelta(t, max(0, float64(c.want))/2, s.Probability, 1e-12, name)
			require.EqualValues(t, 1, s.Sent)
			// A sample that counts neither way leaves no trace.
			_ = a.Do(t.Context(), overloaded)
			require.InDelta(t, map[int]float64{neither: 1.0 / 2, accepted: 0, refused: 2.0 / 3}[c.want],
				a.Stats().Probability, 1e-12, name)
		}
	}
}

func TestThrottleIgnoresCanceledCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		deadline, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		for what, c := range map[string]struct {
			do   func(a *adaptive.Throttle)
			want float64
		}{
			"a caller's cancel": {func(a *adaptive.Throttle) {
				require.ErrorIs(t, a.Do(ctx, func(ctx context.Context) error { cancel(); return errOverloaded }), errOverloaded)
				require.ErrorIs(t, a.Do(ctx, ok), context.Canceled)
			}, 0},
			"a caller's deadline": {func(a *adaptive.Throttle) {
				_ = a.Do(deadline, func(ctx context.Context) error { <-ctx.Done(); return errors.New("broken pipe") })
			}, 0.5},
			"a panic": {func(a *adaptive.Throttle) {
				require.Panics(t, func() { _ = a.Do(t.Context(), func(context.Context) error { panic("boom") }) })
			}, 0},
		} {
			a := newAdaptive(adaptive.Config{}, 1)
			c.do(a)
			require.InDelta(t, c.want, a.Stats().Probability, 1e-12, what)
		}
	})
}

// Throttled is called for calls that this module made and the caller did not cancel.
func TestThrottleWithThrottled(t *testing.T) {
	var asked []error
	a := newAdaptive(adaptive.Config{Throttled: func(err error) bool {
		asked = append(asked, err)
		return !errors.Is(err, errOverloaded)
	}}, 1)
	_ = a.Do(t.Context(), overloaded)
	require.Zero(t, a.Stats().Probability)
	other := errors.New("busy")
	_ = a.Do(t.Context(), func(context.Context) error { return word{refused: true} })
	ctx, cancel := context.WithCancel(t.Context())
	_ = a.Do(ctx, func(context.Context) error { cancel(); return other })
	require.NoError(t, a.Do(t.Context(), ok))
	for range 4 {
		_ = a.Do(t.Context(), func(context.Context) error { return other })
	}
	require.Equal(t, []error{errOverloaded, other, other, other, other}, asked)
	require.InDelta(t, (6.0-2*2)/7, a.Stats().Probability, 1e-12)
}

// A server of limited capacity. Refusing a call costs it 0.15 of serving one.
type server struct {
	capacity     float64 // calls served in a second, if none is refused
	left         float64
	served, seen int
}

func (s *server) call(context.Context) error {
	s.seen++
	if s.left < 1 {
		s.left = max(0, s.left-0.15)
		return errOverloaded
	}
	s.left--
	s.served++
	return nil
}

// load offers calls to the server for 6 minutes and returns what a second of the
// last was like.
func load(
	t *testing.T, s *server, perSecond int, do func(context.Context, func(context.Context) error) error,
) (sent, served float64) {
	t.Helper()
	const minutes = 6
	for second := range minutes * 60 {
		if second == (minutes-1)*60 {
			s.seen, s.served = 0, 0
		}
		for range perSecond {
			s.left = min(s.left+s.capacity/float64(perSecond), 20)
			_ = do(t.Context(), s.call)
		}
		time.Sleep(time.Second)
	}
	return float64(s.seen) / 60, float64(s.served) / 60
}

func TestThrottleSendsKTimesTheAccepted(t *testing.T) {
	seeds := uint64(3)
	if testing.Short() {
		seeds = 1
	}
	for seed := range seeds {
		for _, k := range []float64{1.5, 2, 3} {
			synctest.Test(t, func(t *testing.T) {
				bare := &server{capacity: 100}
				sentBare, servedBare := load(t, bare, 400,
					func(ctx context.Context, fn func(context.Context) error) error { return fn(ctx) })
				a := newAdaptive(adaptive.Config{K: k}, seed)
				sent, served := load(t, &server{capacity: 100}, 400, a.Do)
				require.EqualValues(t, 400, sentBare)
				require.InEpsilon(t, k*served, sent, 0.05, "K x accepts")
				require.Greater(t, served, 1.5*servedBare, "goodput, as refusing costs the server too")
			})
		}
	}
}

func TestThrottleRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAdaptive(adaptive.Config{}, 1)
		sent, _ := load(t, &server{}, 100, a.Do)
		require.Less(t, sent, 2.0, "of a server that is down, but enough to notice")
		require.Positive(t, sent)
		load(t, &server{capacity: 1000}, 100, a.Do)
		load(t, &server{capacity: 1000}, 100, a.Do) // what is sent doubles in about 40 s
		_, served := load(t, &server{capacity: 1000}, 100, a.Do)
		require.EqualValues(t, 100, served)
		require.Zero(t, a.Stats().Probability)
	})
}

func TestThrottleValidate(t *testing.T) {
	for want, cfg := range map[string]adaptive.Config{
		"adaptive.Config.K is 1: must be 0 (for 2), or above 1 and at most 1e9":       {K: 1},
		"adaptive.Config.K is NaN: must be 0 (for 2), or above 1 and at most 1e9":     {K: math.NaN()},
		"adaptive.Config.K is +Inf: must be 0 (for 2), or above 1 and at most 1e9":    {K: math.Inf(1)},
		"adaptive.Config.Window is -1ns: must be 0 (for 2 minutes), or at least 24ns": {Window: -1},
	} {
		require.PanicsWithError(t, want, func() { adaptive.New(cfg) })
	}
	require.NoError(t, adaptive.Config{Window: 24}.Validate())
}

func TestThrottleDescribesItself(t *testing.T) {
	a := adaptive.New(adaptive.Config{Name: "users"})
	a.SetRand(func() float64 { return 0 })
	d := a.Describe()
	require.Equal(t, []string{"throttle", "users"}, []string{d.Kind, d.Name})
	require.Equal(t, adaptive.Config{Name: "users", K: 2, Window: 2 * time.Minute}, d.Config())
	require.Error(t, d.Update(false, func(cfg any) error { cfg.(*adaptive.Config).K = 1; return nil }))
	require.NoError(t, d.Update(true, func(cfg any) error { cfg.(*adaptive.Config).K = 3; return nil }))
	require.NoError(t, d.Update(false, func(cfg any) error {
		c := cfg.(*adaptive.Config)
		require.Zero(t, c.K, "the configuration as it was given")
		c.K = 1.5
		return nil
	}))
	require.Equal(t, 1.5, a.Config().K)

	var events []policy.Event
	defer d.Observe(func(_ context.Context, e policy.Event) { events = append(events, e) })()
	require.Equal(t, errOverloaded, a.Do(t.Context(), overloaded))
	err := a.Do(t.Context(), ok)
	require.Equal(t, []policy.Event{{
		Kind: "throttle", Name: "users", What: "refused", Level: slog.LevelWarn, Err: err,
		Attrs: []slog.Attr{slog.String("reason", "shed")},
	}}, events)
	require.Equal(t, []policy.Metric{
		{Name: "throttle.calls{outcome=admitted,reason=}", Counter: true, Value: 1},
		{Name: "throttle.calls{outcome=refused,reason=shed}", Counter: true, Value: 1},
		{Name: "throttle.shed_ratio", Value: 2.0 / 3},
	}, d.Metrics())
}
