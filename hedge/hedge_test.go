package hedge_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/retry"
)

// A reply is the result of one call: after takes, or when its ctx is done, it returns value and err.
type reply struct {
	takes time.Duration
	value string
	err   error
}

// replies returns a function whose nth call has the nth reply, and a log of when each call started and of the cause
// of its ctx.
func replies(all ...reply) (fn func(context.Context) (string, error), log *hedgeLog) {
	log = &hedgeLog{start: time.Now()}
	return func(ctx context.Context) (string, error) {
		n := log.begin()
		defer log.running.Add(-1)
		r := all[n]
		select {
		case <-time.After(r.takes):
			return r.value, r.err
		case <-ctx.Done():
			log.lose(n, context.Cause(ctx))
			return "", ctx.Err()
		}
	}, log
}

type hedgeLog struct {
	start   time.Time
	running atomic.Int64
	mu      sync.Mutex
	started []time.Duration
	lost    map[int]error
}

func (l *hedgeLog) begin() (n int) {
	l.running.Add(1)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.started = append(l.started, time.Since(l.start))
	return len(l.started) - 1
}

func (l *hedgeLog) lose(n int, why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lost == nil {
		l.lost = make(map[int]error)
	}
	l.lost[n] = why
}

const ms = time.Millisecond

var (
	errDown = errors.New("backend: down")
	full    = refusal{}
)

// A refusal is an inner policy's error instead of a call.
type refusal struct{}

func (refusal) Error() string { return "refused" }
func (refusal) Refused() bool { return true }

// A saying is an error of a kind.
type saying struct{ kind behavior.Kind }

func (saying) Error() string    { return "saying" }
func (s saying) Refused() bool  { return s.kind == behavior.Refused }
func (s saying) Answered() bool { return s.kind == behavior.Answered }

// leaves runs fn on its own goroutine, and returns "left" if it panics or exits the goroutine.
func leaves(fn func()) (how string) {
	var wg sync.WaitGroup
	wg.Go(func() {
		how = "left"
		defer func() { _ = recover() }()
		fn()
		how = "returned"
	})
	wg.Wait()
	return how
}

// do calls fn with a new Hedger, whose second calls are unlimited unless cfg has a Ratio.
func do[T any](ctx context.Context, cfg hedge.Config, fn func(context.Context) (T, error)) (T, error) {
	cfg.Ratio = cmp.Or(cfg.Ratio, hedge.Unlimited)
	return hedge.New[T](cfg).Do(ctx, fn)
}

func TestHedge(t *testing.T) {
	errOther := errors.New("backend: other")
	for _, c := range []struct {
		name    string
		replies []reply
		want    string
		errs    []error
		took    time.Duration
		started []time.Duration
		lost    []int
	}{
		{"a call that is fast enough is not hedged", []reply{{10 * ms, "first", nil}},
			"first", nil, 10 * ms, []time.Duration{0}, nil},
		{"the second wins", []reply{{time.Second, "first", nil}, {10 * ms, "second", nil}},
			"second", nil, 60 * ms, []time.Duration{0, 50 * ms}, []int{0}},
		{"the first wins after all", []reply{{80 * ms, "first", nil}, {time.Second, "second", nil}},
			"first", nil, 80 * ms, []time.Duration{0, 50 * ms}, []int{1}},
		{"but no third is made", []reply{{time.Second, "first", nil}, {time.Second, "second", nil}},
			"first", nil, time.Second, []time.Duration{0, 50 * ms}, []int{1}},
		{"a failure does not win", []reply{{200 * ms, "first", nil}, {10 * ms, "", errDown}},
			"first", nil, 200 * ms, []time.Duration{0, 50 * ms}, nil},
		{"a failure does not win the other way round", []reply{{60 * ms, "", errDown}, {100 * ms, "second", nil}},
			"second", nil, 150 * ms, []time.Duration{0, 50 * ms}, nil},
		{"a failure is not hedged", []reply{{10 * ms, "", errDown}},
			"", []error{errDown}, 10 * ms, []time.Duration{0}, nil},
		{"nor are two", []reply{{60 * ms, "", errDown}, {20 * ms, "", errOther}},
			"", []error{errDown, errOther}, 70 * ms, []time.Duration{0, 50 * ms}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fn, log := replies(c.replies...)
				got, err := do(t.Context(), hedge.Config{Delay: 50 * ms}, fn)
				require.Equal(t, c.took, time.Since(log.start))
				require.Zero(t, log.running.Load(), "no call outlives Do")
				require.Equal(t, c.want, got)
				if c.errs == nil {
					require.NoError(t, err)
				}
				for _, want := range c.errs {
					require.ErrorIs(t, err, want)
				}
				if len(c.errs) == 1 {
					require.Equal(t, c.errs[0], err, "a single error is returned unchanged")
				}
				require.Equal(t, c.started, log.started)
				require.Len(t, log.lost, len(c.lost))
				for _, n := range c.lost {
					require.ErrorContains(t, log.lost[n], "call is no longer needed")
				}
				time.Sleep(time.Hour)
				require.Equal(t, c.started, log.started, "no call starts later")
			})
		})
	}
}

func TestHedgeHonorsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		errShutdown := errors.New("shutting down")
		ctx, cancel := context.WithCancelCause(t.Context())
		fn, log := replies(reply{takes: time.Hour}, reply{takes: time.Hour})
		time.AfterFunc(75*ms, func() { cancel(errShutdown) })
		_, err := do(ctx, hedge.Config{Delay: 50 * ms}, fn)
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, 75*ms, time.Since(log.start))
		require.Equal(t, map[int]error{0: errShutdown, 1: errShutdown}, log.lost)

		_, err = do(ctx, hedge.Config{Delay: 50 * ms}, fn)
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, errShutdown)
		require.Len(t, log.started, 2, "ctx is checked first")
	})
}

func TestNoSecondCallAfterTheFirstReturned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for range 500 {
			var calls atomic.Int64
			_, err := do(t.Context(), hedge.Config{Delay: 50 * ms}, func(ctx context.Context) (int, error) {
				if calls.Add(1) == 1 {
					time.Sleep(50 * ms) // until the other call is due
					return 1, nil
				}
				<-ctx.Done() // forever, if it started after the end
				return 0, ctx.Err()
			})
			require.NoError(t, err)
		}
	})
}

func TestWinnersContextStaysAliveWithDiscard(t *testing.T) {
	for name, c := range map[string]struct {
		discard func(any)
		want    error
	}{
		"plain values":          {nil, context.Canceled},
		"values to be released": {func(any) {}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var ctxs [2]context.Context
				var calls atomic.Int64
				_, err := do(t.Context(), hedge.Config{Delay: 50 * ms, Discard: c.discard},
					func(ctx context.Context) (int, error) {
						n := calls.Add(1) - 1
						ctxs[n] = ctx
						if n == 0 {
							<-ctx.Done()
							return 0, ctx.Err()
						}
						return 1, nil
					})
				require.NoError(t, err)
				require.Equal(t, context.Canceled, ctxs[0].Err())
				require.Equal(t, c.want, ctxs[1].Err())
			})
		})
	}
}

func TestPanicAndExitReachTheCaller(t *testing.T) {
	for _, who := range []int{0, 1} {
		for name, leave := range map[string]func(){"panic": func() { panic(errDown) }, "exit": runtime.Goexit} {
			t.Run(fmt.Sprintf("%s in call %d", name, who), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var discarded []any
					var calls, running atomic.Int64
					run := func() {
						_, _ = do(t.Context(), hedge.Config{
							Delay:   50 * ms,
							Discard: func(value any) { discarded = append(discarded, value) },
						}, func(ctx context.Context) (string, error) {
							n := int(calls.Add(1)) - 1
							running.Add(1)
							defer running.Add(-1)
							switch n {
							case who:
								time.Sleep([]time.Duration{75 * ms, 25 * ms}[who])
								leave()
							}
							<-ctx.Done()
							return "unwanted", nil
						})
					}
					start := time.Now()
					switch {
					case name == "panic" && who == 0:
						require.PanicsWithValue(t, errDown, run)
					case name == "panic":
						e := panicOf(t, run)
						require.ErrorIs(t, e, errDown)
						require.ErrorIs(t, e, errDown)
						require.Contains(t, string(e.Stack()), "TestPanicAndExitReachTheCaller", "the stack of the call")
						require.ErrorContains(t, e, "hedge_test.go")
					default:
						require.Equal(t, "left", leaves(run))
					}
					require.Zero(t, running.Load())
					require.Equal(t, 75*ms, time.Since(start))
					require.Equal(t, []any{"unwanted"}, discarded)
				})
			})
		}
	}
}

type stacked interface {
	error
	Stack() []byte
}

// panicOf returns the error that fn panics with, which has a stack.
func panicOf(t *testing.T, fn func()) (e stacked) {
	t.Helper()
	defer func() {
		var ok bool
		e, ok = recover().(stacked)
		require.True(t, ok)
	}()
	fn()
	return nil
}

func TestNestedHedgePanicWrappedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := hedge.Config{Delay: 50 * ms}
		second := func(fn func()) func(context.Context) (int, error) { // calls fn in the second call
			var calls atomic.Int64
			return func(ctx context.Context) (int, error) {
				if calls.Add(1) == 2 {
					fn()
				}
				<-ctx.Done()
				return 0, ctx.Err()
			}
		}
		e := panicOf(t, func() {
			_, _ = do(t.Context(), cfg, second(func() {
				_, _ = do(t.Context(), cfg, second(func() { panic("broken") }))
			}))
		})
		require.ErrorContains(t, e, "hedge: second call panicked: broken\n")
		require.Equal(t, 1, strings.Count(e.Error(), "panicked: broken"))
	})
}

// A panic is neither an answer nor a refusal, even if its value is such an error.
func TestPanicIsAFailure(t *testing.T) {
	for _, kind := range []behavior.Kind{behavior.Answered, behavior.Refused} {
		value := saying{kind}
		require.Equal(t, kind, behavior.Read(value).Kind)
		synctest.Test(t, func(t *testing.T) {
			var calls atomic.Int64
			e := panicOf(t, func() {
				_, _ = do(t.Context(), hedge.Config{Delay: 50 * ms}, func(ctx context.Context) (int, error) {
					if calls.Add(1) == 2 {
						panic(value)
					}
					<-ctx.Done()
					return 0, ctx.Err()
				})
			})
			require.ErrorIs(t, e, value)
			require.Equal(t, behavior.Failed, behavior.Read(e).Kind)
		})
	}
}

func TestPanicAfterTheRaceIsNotLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var discarded []any
		var calls atomic.Int64
		e := panicOf(t, func() {
			_, _ = do(t.Context(), hedge.Config{
				Delay:   50 * ms,
				Discard: func(value any) { discarded = append(discarded, value) },
			}, func(ctx context.Context) (string, error) {
				if calls.Add(1) == 1 {
					time.Sleep(75 * ms)
					return "won", nil
				}
				<-ctx.Done()
				panic("sore loser")
			})
		})
		require.ErrorContains(t, e, "panicked: sore loser")
		require.NoError(t, errors.Unwrap(e))
		require.Equal(t, []any{"won"}, discarded)
	})
}

func TestRatioLimitsSecondCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hedge.New[int](hedge.Config{Delay: ms}) // one call in ten may be hedged
		require.Equal(t, 0.1, h.Config().Ratio)
		run := func(n int, takes time.Duration) (second int64) {
			before := h.Stats().Hedged
			for range n {
				_, err := h.Do(t.Context(), func(context.Context) (int, error) { time.Sleep(takes); return 0, nil })
				require.NoError(t, err)
			}
			return h.Stats().Hedged - before
		}
		require.Equal(t, int64(99), run(1000, 5*ms), "each call counts when it has returned")
		require.Equal(t, int64(901), h.Stats().OverBudget)
		require.Zero(t, run(1000, 0))
		require.Equal(t, int64(11), run(11, 5*ms), "ten are saved up, and the calls add one")
	})
	unlimited := hedge.New[int](hedge.Config{Delay: ms, Ratio: hedge.Unlimited})
	require.EqualValues(t, hedge.Unlimited, unlimited.Config().Ratio)
}

func TestRefusedCallsDoNotCountForRatio(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hedge.New[string](hedge.Config{Delay: 50 * ms, Ratio: 1})
		run := func(all ...reply) {
			fn, _ := replies(all...)
			_, _ = h.Do(t.Context(), fn)
		}
		slow := reply{takes: 100 * ms}
		run(reply{err: full})
		run(slow)
		require.Equal(t, int64(1), h.Stats().OverBudget, "the refused call allowed none, and the slow one has not returned")
		run(slow, reply{takes: 10 * ms, err: full})
		run(slow, reply{takes: 10 * ms, err: full})
		require.Equal(t, int64(2), h.Stats().Hedged)
		for range 3 { // each slow call allowed one, which the refused calls did not use
			run(reply{takes: 100 * ms, err: full}, reply{takes: 100 * ms})
		}
		require.Equal(t, int64(5), h.Stats().Hedged)
		run(slow)
		require.Equal(t, int64(5), h.Stats().Hedged)
		require.Equal(t, int64(2), h.Stats().OverBudget)
	})
}

func TestHedgerCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hedge.New[string](hedge.Config{Name: "users", Delay: 50 * ms, Ratio: 1, Quantile: 0.5})
		do := func(ctx context.Context, all ...reply) *hedgeLog {
			fn, log := replies(all...)
			_, _ = h.Do(ctx, fn)
			return log
		}
		want := hedge.Stats{Delay: 50 * ms}
		require.Equal(t, want, h.Stats())

		do(t.Context(), reply{takes: 10 * ms})
		want.FirstWon = 1
		require.Equal(t, want, h.Stats())

		log := do(t.Context(), reply{takes: time.Second}, reply{takes: 10 * ms})
		require.EqualError(t, log.lost[0], "hedge: users: call is no longer needed")
		want.HedgeWon, want.Hedged = 1, 1
		require.Equal(t, want, h.Stats())

		do(t.Context(), reply{takes: 60 * ms}, reply{takes: 200 * ms})
		want.FirstWon, want.Hedged = 2, 2
		require.Equal(t, want, h.Stats())

		do(t.Context(), reply{takes: 10 * ms, err: errDown})
		want.Failed = 1
		require.Equal(t, want, h.Stats())

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		do(ctx, reply{})
		require.Equal(t, want, h.Stats(), "it called nothing")

		for range 20 {
			do(t.Context(), reply{takes: 10 * ms})
		}
		want.FirstWon, want.Delay = 22, 10*ms+1
		require.Equal(t, want, h.Stats())

		for range 11 { // ten are saved up
			do(t.Context(), reply{takes: 15 * ms, err: full}, reply{takes: ms, err: errDown})
		}
		want.Failed, want.Hedged, want.OverBudget = 12, 12, 1
		require.Equal(t, want, h.Stats())
	})
}

func TestHedgeLearnsItsDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hedge.New[string](hedge.Config{Delay: time.Second, Quantile: 0.9, Ratio: hedge.Unlimited})
		run := func(all ...reply) (hedgedAfter time.Duration) {
			fn, log := replies(all...)
			_, _ = h.Do(t.Context(), fn)
			if len(log.started) > 1 {
				return log.started[1]
			}
			return 0
		}
		for i := range 19 {
			require.Zero(t, run(reply{takes: time.Duration(i+1) * ms}))
		}
		_, ok := hedge.LatencyOf(h, 0.9)
		require.False(t, ok)
		require.Equal(t, time.Second, run(reply{takes: 2 * time.Second}, reply{takes: 10 * ms}), "19 calls are not enough")
		// There are 20 now: 1 to 19 ms, and the slow one.
		d, ok := hedge.LatencyOf(h, 0.9)
		require.True(t, ok)
		require.Equal(t, 18*ms, d)
		d, _ = hedge.LatencyOf(h, 1)
		require.Equal(t, 1010*ms, d)
		d, _ = hedge.LatencyOf(h, 0.01)
		require.Equal(t, 1*ms, d)
		require.Equal(t, 18*ms+1, run(reply{takes: time.Second}, reply{takes: 10 * ms}))

		before, _ := hedge.LatencyOf(h, 0.01)
		for range 100 {
			run(reply{err: errDown})
		}
		after, _ := hedge.LatencyOf(h, 0.01)
		require.Equal(t, before, after, "the duration of a failure is no latency")

		for range 1000 {
			run(reply{takes: 7 * ms}, reply{takes: time.Minute})
		}
		for _, q := range []float64{0.001, 0.5, 1} {
			d, _ := hedge.LatencyOf(h, q)
			require.Equal(t, 7*ms, d, "old latencies are dropped")
		}
	})
}

// Otherwise the caller's ctx would hold the ctx of each failed call.
func TestFailedCallsContextIsCanceled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, takes := range []time.Duration{0, 100 * ms} {
			var mu sync.Mutex
			var ctxs []context.Context
			h := hedge.New[int](hedge.Config{Delay: 50 * ms, Ratio: hedge.Unlimited, Discard: func(any) {}})
			_, err := h.Do(t.Context(), func(ctx context.Context) (int, error) {
				mu.Lock()
				ctxs = append(ctxs, ctx)
				mu.Unlock()
				time.Sleep(takes)
				return 0, errDown
			})
			require.ErrorIs(t, err, errDown)
			for _, ctx := range ctxs {
				require.ErrorIs(t, ctx.Err(), context.Canceled)
			}
		}
	})
}

func TestLatenciesAreSorted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var all []time.Duration
		h := hedge.New[int](hedge.Config{Delay: time.Hour, Quantile: 0.5})
		for range 3000 {
			d := time.Duration(rand.Int64N(200)) // many alike
			all = append(all, d)
			_, _ = h.Do(t.Context(), func(context.Context) (int, error) { time.Sleep(d); return 0, nil })
		}
		last := slices.Sorted(slices.Values(all[2000:]))
		for i, want := range last {
			got, ok := hedge.LatencyOf(h, float64(i+1)/1000)
			require.True(t, ok)
			require.Equal(t, want, got)
		}
	})
}

// TestHedgeUnderContention runs calls with all results on many goroutines, and checks the counters.
func TestHedgeUnderContention(t *testing.T) {
	const workers, each = 16, 500
	synctest.Test(t, func(t *testing.T) {
		var firsts, hedged, discarded, returned, failed, left, succeeded, refused atomic.Int64
		h := hedge.New[int](hedge.Config{
			Delay: 2 * ms, Quantile: 0.5, Ratio: 0.5,
			Discard: func(any) { discarded.Add(1) },
		})
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				for range each {
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.Int64N(30)+1)*ms)
					var calls, running atomic.Int64
					how := leaves(func() {
						_, err := h.Do(ctx, func(ctx context.Context) (int, error) {
							if calls.Add(1) == 1 {
								firsts.Add(1)
							} else {
								hedged.Add(1)
							}
							running.Add(1)
							defer running.Add(-1)
							takes := time.Duration(rand.Int64N(12)) * ms
							if rand.IntN(3) == 0 {
								select {
								case <-time.After(takes):
								case <-ctx.Done():
									return 0, ctx.Err()
								}
							} else {
								time.Sleep(takes)
							}
							switch rand.IntN(20) {
							case 0, 1, 2:
								return 0, errDown
							case 3:
								refused.Add(1)
								return 0, full
							case 4:
								panic("broken")
							case 5:
								runtime.Goexit()
							}
							succeeded.Add(1)
							return 0, nil
						})
						if err == nil {
							returned.Add(1)
						} else {
							failed.Add(1)
						}
					})
					if how == "left" {
						left.Add(1)
					}
					if running.Load() != 0 {
						t.Error("a call outlived Do")
					}
					cancel()
				}
			})
		}
		wg.Wait()
		for _, n := range []*atomic.Int64{&hedged, &discarded, &returned, &failed, &left, &refused} {
			require.Positive(t, n.Load())
		}
		require.Equal(t, int64(workers*each), firsts.Load(), "each Do starts a first call")
		require.Equal(t, int64(workers*each), returned.Load()+failed.Load()+left.Load())
		require.Equal(t, succeeded.Load(), returned.Load()+discarded.Load(), "each value is returned or discarded, once")
		s := h.Stats()
		require.Equal(t, returned.Load(), s.FirstWon+s.HedgeWon)
		require.Equal(t, hedged.Load(), s.Hedged)
		require.Equal(t, failed.Load(), s.Failed)
		require.Positive(t, s.FirstWon)
		require.Positive(t, s.HedgeWon)
		require.Positive(t, s.OverBudget)
	})
}

func TestConfigValidate(t *testing.T) {
	for want, cfg := range map[string]hedge.Config{
		"hedge.Config.Delay is 0s: must be more than 0":                       {},
		"hedge.Config.Delay is -1s: must be more than 0":                      {Delay: -time.Second},
		"hedge.Config.Quantile is 1: must be 0 (for Delay) or less than 1":    {Delay: 1, Quantile: 1},
		"hedge.Config.Quantile is -0.5: must be 0 (for Delay) or less than 1": {Delay: 1, Quantile: -0.5},
		"hedge.Config.Quantile is NaN: must be 0 (for Delay) or less than 1":  {Delay: 1, Quantile: math.NaN()},
		"hedge.Config.Ratio is -0.5: must be 0 (for 0.1) to 1, or Unlimited":  {Delay: 1, Ratio: -0.5},
		"hedge.Config.Ratio is -2: must be 0 (for 0.1) to 1, or Unlimited":    {Delay: 1, Ratio: -2},
		"hedge.Config.Ratio is 1.5: must be 0 (for 0.1) to 1, or Unlimited":   {Delay: 1, Ratio: 1.5},
		"hedge.Config.Ratio is NaN: must be 0 (for 0.1) to 1, or Unlimited":   {Delay: 1, Ratio: math.NaN()},
	} {
		require.EqualError(t, cfg.Validate(), want)
		require.PanicsWithError(t, want, func() { hedge.New[int](cfg) })
	}
}

// A second call that does not start because ctx is done takes nothing from Ratio.
func TestNoSecondCallAfterContextIsDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hedge.New[int](hedge.Config{Delay: 50 * ms, Ratio: 1})
		ctx, cancel := context.WithTimeout(t.Context(), 10*ms)
		defer cancel()
		_, err := h.Do(ctx, func(context.Context) (int, error) {
			time.Sleep(100 * ms) // it ignores its ctx
			return 1, nil
		})
		require.NoError(t, err)
		require.Equal(t, hedge.Stats{FirstWon: 1, Delay: 50 * ms}, h.Stats())
	})
}

// A Retrier in the losing call counts neither a failure nor a cancel.
func TestLosingCallIsNoFailureOfItsRetrier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, wait := range []time.Duration{0, time.Minute} { // it loses during an attempt, or during a wait
			r := retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(wait)})
			var events []retry.Event
			r.Observe(func(_ context.Context, e retry.Event) { events = append(events, e) })
			h := hedge.New[int](hedge.Config{Delay: 50 * ms, Ratio: hedge.Unlimited})
			var calls atomic.Int64
			_, err := h.Do(t.Context(), func(ctx context.Context) (v int, err error) {
				first := calls.Add(1) == 1
				attempts := 0
				err = r.Do(ctx, func(ctx context.Context) error {
					if attempts++; !first || attempts == 1 {
						if !first {
							time.Sleep(ms)
							return nil
						}
						return errDown
					}
					<-ctx.Done()
					return ctx.Err()
				})
				return 1, err
			})
			require.NoError(t, err)
			require.Equal(t, hedge.Stats{HedgeWon: 1, Hedged: 1, Delay: 50 * ms}, h.Stats())
			s := r.Stats() // which count only the winning call
			s.Attempts, s.Retried = 0, 0
			require.Equal(t, retry.Stats{FirstTry: 1}, s)
			require.Len(t, events, 1)
			require.Equal(t, retry.EventRetried, events[0].Kind)
		}
	})
}

// An eventLog records events.
type eventLog struct {
	mu     sync.Mutex
	events []hedge.Event
}

func (l *eventLog) note(_ context.Context, e hedge.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
}

func (l *eventLog) take() []hedge.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	events := l.events
	l.events = nil
	return events
}

func TestHedgerDescribe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hedge.New[string](hedge.Config{Name: "users", Delay: 50 * ms, Quantile: 0.9, Ratio: 1, Discard: func(any) {}})
		d := h.Describe()
		require.Equal(t, []string{"hedge", "users"}, []string{d.Kind, d.Name})
		require.Equal(t, hedge.Config{Name: "users", Delay: 50 * ms, Quantile: 0.9, Ratio: 1}, d.Config())
		require.NotNil(t, h.Config().Discard)
		require.Nil(t, d.Update)

		var events []policy.Event
		stop := d.Observe(func(_ context.Context, e policy.Event) { events = append(events, e) })
		do := func() {
			fn, _ := replies(reply{takes: time.Second}, reply{takes: ms})
			_, _ = h.Do(t.Context(), fn)
		}
		do() // the first call has not allowed a second one yet
		do()
		require.Equal(t, []policy.Event{
			{Kind: "hedge", Name: "users", What: "over_budget", Level: slog.LevelWarn},
			{Kind: "hedge", Name: "users", What: "hedged", Level: slog.LevelDebug},
		}, events)
		stop()
		do()
		require.Len(t, events, 2)

		metrics := map[string]float64{}
		for _, m := range d.Metrics() {
			metrics[m.Name] = m.Value
			require.Equal(t, m.Name != "hedge.delay_seconds", m.Counter, m.Name)
		}
		require.Equal(t, map[string]float64{
			"hedge.calls{outcome=first_won}": 1, "hedge.calls{outcome=hedge_won}": 2, "hedge.calls{outcome=failed}": 0,
			"hedge.hedges{outcome=made}": 2, "hedge.hedges{outcome=over_budget}": 1, "hedge.delay_seconds": 0.05,
		}, metrics)
	})
}

func TestEventsOfAHedger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		h := hedge.New[string](hedge.Config{Name: "users", Delay: 50 * ms, Ratio: 1})
		stop := h.Observe(func(ctx context.Context, e hedge.Event) {
			_ = h.Stats() // no lock is held
			log.note(ctx, e)
		})
		do := func(all ...reply) {
			fn, _ := replies(all...)
			_, _ = h.Do(t.Context(), fn)
		}
		do(reply{takes: 10 * ms})
		do(reply{takes: 10 * ms, err: errDown})
		require.Empty(t, log.take(), "not hedged")

		do(reply{takes: time.Second}, reply{takes: 10 * ms})
		require.Equal(t, []hedge.Event{{Kind: hedge.EventHedged, Name: "users"}}, log.take())

		for range 3 {
			do(reply{takes: 60 * ms, err: full}, reply{takes: 20 * ms, err: errDown})
		}
		require.Equal(t, []hedge.Event{
			{Kind: hedge.EventHedged, Name: "users"},
			{Kind: hedge.EventHedged, Name: "users"},
			{Kind: hedge.EventOverBudget, Name: "users"},
		}, log.take())
		stop()
	})
}

func TestObserverPanicReachesTheCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, ratio := range []float64{hedge.Unlimited, 0.1} { // of a second call, or of one that is over budget
			h := hedge.New[string](hedge.Config{Delay: 50 * ms, Ratio: ratio})
			h.Observe(func(context.Context, hedge.Event) { panic("observer") })
			fn, log := replies(reply{takes: time.Second}, reply{takes: ms})
			e := panicOf(t, func() { _, _ = h.Do(t.Context(), fn) })
			require.ErrorContains(t, e, "panicked: observer")
			require.Len(t, log.lost, 1)
			require.Equal(t, 50*ms, time.Since(log.start))
		}
	})
}
