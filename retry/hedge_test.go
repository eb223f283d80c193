package retry_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/retry"
)

// A reply is what one of several calls does: it takes a while, unless its ctx
// ends before, and then returns value or err.
type reply struct {
	takes time.Duration
	value string
	err   error
}

// replies returns a function whose nth call does as the nth reply says, and
// notes for each when it began and why its ctx ended.
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
	began   []time.Duration
	lost    map[int]error
}

func (l *hedgeLog) begin() (n int) {
	l.running.Add(1)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.began = append(l.began, time.Since(l.start))
	return len(l.began) - 1
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

// hedge makes one call of a Hedger of its own.
func hedge[T any](ctx context.Context, cfg retry.HedgeConfig, fn func(context.Context) (T, error)) (T, error) {
	return retry.NewHedger[T](cfg).Do(ctx, fn)
}

func TestHedge(t *testing.T) {
	errOther := errors.New("backend: other")
	for _, c := range []struct {
		name    string
		max     int
		replies []reply
		want    string
		errs    []error
		took    time.Duration
		began   []time.Duration
		lost    []int
	}{
		{"a call that is fast enough is not hedged", 2, []reply{{10 * ms, "first", nil}},
			"first", nil, 10 * ms, []time.Duration{0}, nil},
		{"the second wins", 2, []reply{{time.Second, "first", nil}, {10 * ms, "second", nil}},
			"second", nil, 60 * ms, []time.Duration{0, 50 * ms}, []int{0}},
		{"the first wins after all", 2, []reply{{80 * ms, "first", nil}, {time.Second, "second", nil}},
			"first", nil, 80 * ms, []time.Duration{0, 50 * ms}, []int{1}},
		{"a third is made", 3, []reply{{time.Second, "first", nil}, {time.Second, "second", nil}, {10 * ms, "third", nil}},
			"third", nil, 110 * ms, []time.Duration{0, 50 * ms, 100 * ms}, []int{0, 1}},
		{"but not more than Max", 2, []reply{{time.Second, "first", nil}, {time.Second, "second", nil}},
			"first", nil, time.Second, []time.Duration{0, 50 * ms}, []int{1}},
		{"none is made if Max is 1", 1, []reply{{time.Second, "first", nil}},
			"first", nil, time.Second, []time.Duration{0}, nil},
		{"a failure does not win", 2, []reply{{200 * ms, "first", nil}, {10 * ms, "", errDown}},
			"first", nil, 200 * ms, []time.Duration{0, 50 * ms}, nil},
		{"a failure does not win the other way round", 2, []reply{{60 * ms, "", errDown}, {100 * ms, "second", nil}},
			"second", nil, 150 * ms, []time.Duration{0, 50 * ms}, nil},
		{"a failure does not stop what is to come", 3, []reply{{60 * ms, "", errDown}, {200 * ms, "second", nil}, {10 * ms, "third", nil}},
			"third", nil, 110 * ms, []time.Duration{0, 50 * ms, 100 * ms}, []int{1}},
		{"a failure is not hedged", 2, []reply{{10 * ms, "", errDown}},
			"", []error{errDown}, 10 * ms, []time.Duration{0}, nil},
		{"nor are two", 3, []reply{{60 * ms, "", errDown}, {20 * ms, "", errOther}},
			"", []error{errDown, errOther}, 70 * ms, []time.Duration{0, 50 * ms}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fn, log := replies(c.replies...)
				got, err := hedge(t.Context(), retry.HedgeConfig{Delay: 50 * ms, Max: c.max}, fn)
				require.Equal(t, c.took, time.Since(log.start))
				require.Zero(t, log.running.Load(), "no call outlives Hedge")
				require.Equal(t, c.want, got)
				if c.errs == nil {
					require.NoError(t, err)
				}
				for _, want := range c.errs {
					require.ErrorIs(t, err, want)
				}
				if len(c.errs) == 1 {
					require.Equal(t, c.errs[0], err, "one error comes back as it is")
				}
				require.Equal(t, c.began, log.began)
				require.Len(t, log.lost, len(c.lost))
				for _, n := range c.lost {
					require.ErrorContains(t, log.lost[n], "the hedge is over")
				}
				time.Sleep(time.Hour)
				require.Equal(t, c.began, log.began, "no call is made later")
			})
		})
	}
}

func TestHedgeMakesTheFirstCallOnTheCallersGoroutine(t *testing.T) {
	stack, err := hedge(t.Context(), retry.HedgeConfig{Delay: time.Hour}, func(context.Context) (string, error) {
		return string(debug.Stack()), nil
	})
	require.NoError(t, err)
	require.Contains(t, stack, "testing.tRunner(")
}

func TestHedgeHonorsItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		errShutdown := errors.New("shutting down")
		ctx, cancel := context.WithCancelCause(t.Context())
		fn, log := replies(reply{takes: time.Hour}, reply{takes: time.Hour}, reply{takes: time.Hour})
		time.AfterFunc(75*ms, func() { cancel(errShutdown) })
		_, err := hedge(ctx, retry.HedgeConfig{Delay: 50 * ms, Max: 3}, fn)
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, 75*ms, time.Since(log.start))
		require.Equal(t, map[int]error{0: errShutdown, 1: errShutdown}, log.lost)

		_, err = hedge(ctx, retry.HedgeConfig{Delay: 50 * ms}, fn)
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, errShutdown)
		require.Len(t, log.began, 2, "an ended ctx is honored before anything else")
	})
}

// endsOnLook is a ctx that ends when it has been looked at n times.
type endsOnLook struct {
	context.Context
	n int
}

func (c *endsOnLook) Err() error {
	if c.n--; c.n < 0 {
		return context.Canceled
	}
	return nil
}

func TestHedgeCallsOrSaysThatItsContextHasEnded(t *testing.T) {
	for looks := range 5 {
		calls := 0
		ctx := &endsOnLook{t.Context(), looks}
		got, err := hedge(ctx, retry.HedgeConfig{Delay: time.Hour}, func(context.Context) (string, error) {
			calls++
			return "value", nil
		})
		if calls == 0 {
			require.ErrorIs(t, err, context.Canceled)
		} else {
			require.NoError(t, err)
			require.Equal(t, "value", got)
		}
	}
}

func TestHedgeThatIsOverMakesNoOtherCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for range 500 {
			var calls atomic.Int64
			_, err := hedge(t.Context(), retry.HedgeConfig{Delay: 50 * ms}, func(ctx context.Context) (int, error) {
				if calls.Add(1) == 1 {
					time.Sleep(50 * ms) // until the other call is due
					return 1, nil
				}
				<-ctx.Done() // forever, if it began after the end
				return 0, ctx.Err()
			})
			require.NoError(t, err)
		}
	})
}

func TestHedgeMakesNoOtherCallAfterItsContextHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 25*ms)
		defer cancel()
		calls := 0
		got, err := hedge(ctx, retry.HedgeConfig{Delay: 50 * ms}, func(context.Context) (string, error) {
			calls++
			time.Sleep(time.Second) // does not heed its ctx
			return "late", nil
		})
		require.NoError(t, err)
		require.Equal(t, "late", got, "success that comes late is success")
		require.Equal(t, 1, calls)
	})
}

func TestHedgeDiscardsWhatItDoesNotReturn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ctxs [3]context.Context
		var calls atomic.Int64
		var discarded []any
		ctx, cancel := context.WithCancel(t.Context())
		got, err := hedge(ctx, retry.HedgeConfig{
			Delay: 50 * ms, Max: 3,
			Discard: func(value any) { discarded = append(discarded, value) },
		}, func(ctx context.Context) (string, error) {
			n := calls.Add(1) - 1
			ctxs[n] = ctx
			time.Sleep([]time.Duration{300 * ms, 100 * ms, 200 * ms}[n]) // they do not heed their ctx
			return fmt.Sprint(n), nil
		})
		require.NoError(t, err)
		require.Equal(t, "1", got)
		require.ElementsMatch(t, []any{"0", "2"}, discarded)
		require.Error(t, ctxs[0].Err())
		require.NoError(t, ctxs[1].Err(), "the value that was returned may live on its ctx")
		require.Error(t, ctxs[2].Err())
		cancel()
		require.Error(t, ctxs[1].Err())
	})
}

func TestPanicInDiscardLosesNoValue(t *testing.T) {
	for name, leave := range map[string]func(){"panic": func() { panic("broken") }, "exit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var discarded []any
				var calls atomic.Int64
				require.Equal(t, "left", leaves(func() {
					_, _ = hedge(t.Context(), retry.HedgeConfig{
						Delay: 50 * ms, Max: 4,
						Discard: func(value any) { discarded = append(discarded, value); leave() },
					}, func(context.Context) (string, error) {
						time.Sleep(time.Second)
						return fmt.Sprint(calls.Add(1)), nil
					})
				}))
				require.ElementsMatch(t, []any{"1", "2", "3", "4"}, discarded, "the winner's, too: nobody has got it")
			})
		})
	}
}

func TestContextOfTheWinnerLivesOnlyIfValuesNeedIt(t *testing.T) {
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
				_, err := hedge(t.Context(), retry.HedgeConfig{Delay: 50 * ms, Discard: c.discard},
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

func TestHedgePassesOnPanicAndExit(t *testing.T) {
	for _, who := range []int{0, 1} {
		for name, leave := range map[string]func(){"panic": func() { panic(errDown) }, "exit": runtime.Goexit} {
			t.Run(fmt.Sprintf("%s in call %d", name, who), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var discarded []any
					var calls, running atomic.Int64
					hedge := func() {
						_, _ = hedge(t.Context(), retry.HedgeConfig{
							Delay: 50 * ms, Max: 3,
							Discard: func(value any) { discarded = append(discarded, value) },
						}, func(ctx context.Context) (string, error) {
							n := int(calls.Add(1)) - 1
							running.Add(1)
							defer running.Add(-1)
							switch n {
							case who:
								time.Sleep([]time.Duration{75 * ms, 25 * ms}[who])
								leave()
							case 2:
								panic("a call was made after the end")
							}
							<-ctx.Done()
							return "unwanted", nil
						})
					}
					start := time.Now()
					switch {
					case name == "panic" && who == 0:
						require.PanicsWithValue(t, errDown, hedge)
					case name == "panic":
						e := panicOf(t, hedge)
						require.ErrorIs(t, e, errDown)
						require.ErrorIs(t, e, errDown)
						require.Contains(t, string(e.Stack()), "TestHedgePassesOnPanicAndExit", "the stack of the call")
						require.ErrorContains(t, e, "hedge_test.go")
					default:
						require.Equal(t, "left", leaves(hedge))
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

// panicOf returns the error with a stack that fn panics with.
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

func TestPanicOfAHedgeWithinAHedgeIsWrappedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := retry.HedgeConfig{Delay: 50 * ms}
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
			_, _ = hedge(t.Context(), cfg, second(func() {
				_, _ = hedge(t.Context(), cfg, second(func() { panic("broken") }))
			}))
		})
		require.ErrorContains(t, e, "retry: a hedged call panicked: broken\n")
		require.Equal(t, 1, strings.Count(e.Error(), "panicked: broken"))
	})
}

// A panic is neither an answer nor a refusal, whatever error it has as its value.
func TestPanicOfAHedgeWithAnErrorIsAFailure(t *testing.T) {
	for _, kind := range []behavior.Kind{behavior.Answered, behavior.Refused} {
		value := says(kind, true, 0).err
		require.Equal(t, kind, behavior.Read(value).Kind)
		synctest.Test(t, func(t *testing.T) {
			var calls atomic.Int64
			e := panicOf(t, func() {
				_, _ = hedge(t.Context(), retry.HedgeConfig{Delay: 50 * ms}, func(ctx context.Context) (int, error) {
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

func TestHedgePanicAfterTheEndIsNotLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var discarded []any
		var calls atomic.Int64
		e := panicOf(t, func() {
			_, _ = hedge(t.Context(), retry.HedgeConfig{
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

func TestHedgeIsBoundByItsBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: 0.1, PerSecond: -1})
		var calls atomic.Int64
		const hedges = 1000
		for range hedges {
			_, err := hedge(t.Context(), retry.HedgeConfig{Delay: 1 * ms, Max: 3, Budget: b},
				func(ctx context.Context) (int, error) {
					calls.Add(1)
					time.Sleep(5 * ms)
					return 0, nil
				})
			require.NoError(t, err)
		}
		require.Equal(t, int64(hedges+hedges/10), calls.Load(), "success does not give back what the load has cost")
	})
}

func TestHedgeOfACallThatIsRefusedEarnsNoBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: 1, PerSecond: -1})
		for _, c := range []struct {
			err  error
			want int64
		}{{full, 0}, {open, 0}, {errDown, 1}, {nil, 2}} {
			fn, _ := replies(reply{takes: ms, err: c.err})
			_, err := hedge(t.Context(), retry.HedgeConfig{Delay: 50 * ms, Budget: b}, fn)
			require.Equal(t, c.err, err)
			require.Equal(t, retry.BudgetStats{Called: c.want, Left: c.want}, balance(b))
		}
		fn, _ := replies(reply{takes: 20 * time.Second, err: full})
		_, err := hedge(t.Context(), retry.HedgeConfig{Max: 1, Delay: 50 * ms, Budget: b}, fn)
		require.Equal(t, full, err)
		require.Zero(t, b.Stats().Called, "its time is past")
	})
}

func TestRefusedHedgeCostsNoBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{})
		for _, c := range []struct {
			second error
			want   int64
		}{{full, 0}, {errDown, 1}, {nil, 2}} {
			fn, _ := replies(reply{takes: 100 * ms}, reply{takes: 10 * ms, err: c.second})
			_, err := hedge(t.Context(), retry.HedgeConfig{Delay: 50 * ms, Budget: b}, fn)
			require.NoError(t, err)
			require.Equal(t, c.want, b.Stats().Charged)
		}
	})
}

func TestHedgerCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: -1, PerSecond: 1})
		h := retry.NewHedger[string](retry.HedgeConfig{
			Name: "users", Delay: 50 * ms, Max: 3, Budget: b, Quantile: 0.5,
		})
		do := func(ctx context.Context, all ...reply) *hedgeLog {
			fn, log := replies(all...)
			_, _ = h.Do(ctx, fn)
			return log
		}
		want := retry.HedgeStats{Delay: 50 * ms}
		require.Equal(t, want, h.Stats())

		do(t.Context(), reply{takes: 10 * ms})
		want.FirstWon = 1
		require.Equal(t, want, h.Stats())

		log := do(t.Context(), reply{takes: time.Second}, reply{takes: 10 * ms})
		require.EqualError(t, log.lost[0], "retry: users: the hedge is over: this call is not needed any more")
		want.HedgeWon, want.Hedged = 1, 1
		require.Equal(t, want, h.Stats())

		do(t.Context(), reply{takes: 120 * ms}, reply{takes: 200 * ms}, reply{takes: time.Second})
		want.FirstWon, want.Hedged = 2, 3
		require.Equal(t, want, h.Stats())

		do(t.Context(), reply{takes: 10 * ms, err: errDown})
		want.Failed = 1
		require.Equal(t, want, h.Stats())

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		do(ctx, reply{})
		require.Equal(t, want, h.Stats(), "it called nothing")

		for range 7 {
			do(t.Context(), reply{takes: 60 * ms}, reply{takes: time.Second})
		}
		want.FirstWon, want.Hedged = 9, 10
		require.Equal(t, want, h.Stats())
		do(t.Context(), reply{takes: 60 * ms}, reply{takes: time.Second})
		want.FirstWon, want.OverBudget = 10, 1
		require.Equal(t, want, h.Stats())

		for range 20 {
			do(t.Context(), reply{takes: 10 * ms})
		}
		want.FirstWon, want.Delay = 30, 10*ms+1
		require.Equal(t, want, h.Stats())
	})
}

func TestHedgeWithinARetrier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := retry.New(retry.Config{Backoff: retry.Constant(0)})
		inner := retry.New(retry.Config{Backoff: retry.Constant(0)})
		var calls atomic.Int64
		err := r.Do(t.Context(), func(ctx context.Context) error {
			_, err := hedge(ctx, retry.HedgeConfig{Delay: 50 * ms}, func(ctx context.Context) (int, error) {
				return 0, inner.Do(ctx, func(context.Context) error {
					calls.Add(1)
					time.Sleep(75 * ms)
					return errDown
				})
			})
			return err
		})
		require.ErrorIs(t, err, errDown)
		require.Equal(t, int64(6), calls.Load())
	})
}

func TestHedgeLearnsItsDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := retry.NewHedger[string](retry.HedgeConfig{Delay: time.Second, Quantile: 0.9})
		hedge := func(all ...reply) (hedgedAfter time.Duration) {
			fn, log := replies(all...)
			_, _ = h.Do(t.Context(), fn)
			if len(log.began) > 1 {
				return log.began[1]
			}
			return 0
		}
		for i := range 19 {
			require.Zero(t, hedge(reply{takes: time.Duration(i+1) * ms}))
		}
		_, ok := retry.LatencyOf(h, 0.9)
		require.False(t, ok)
		require.Equal(t, time.Second, hedge(reply{takes: 2 * time.Second}, reply{takes: 10 * ms}), "19 calls say too little")
		// 20 of them now: 1 to 19 ms, and the slow one for as long as it ran.
		d, ok := retry.LatencyOf(h, 0.9)
		require.True(t, ok)
		require.Equal(t, 18*ms, d)
		d, _ = retry.LatencyOf(h, 1)
		require.Equal(t, 1010*ms, d)
		d, _ = retry.LatencyOf(h, 0)
		require.Equal(t, 1*ms, d)
		require.Equal(t, 18*ms+1, hedge(reply{takes: time.Second}, reply{takes: 10 * ms}))

		before, _ := retry.LatencyOf(h, 0.01)
		for range 100 {
			hedge(reply{err: errDown})
		}
		after, _ := retry.LatencyOf(h, 0.01)
		require.Equal(t, before, after, "how fast a failure is says nothing")

		for range 1000 {
			hedge(reply{takes: 7 * ms}, reply{takes: time.Minute})
		}
		for _, q := range []float64{0.001, 0.5, 1} {
			d, _ := retry.LatencyOf(h, q)
			require.Equal(t, 7*ms, d, "what is long past is forgotten")
		}
	})
}

func TestLatenciesAreSorted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var all []time.Duration
		h := retry.NewHedger[int](retry.HedgeConfig{Delay: time.Hour, Quantile: 0.5})
		for range 3000 {
			d := time.Duration(rand.Int64N(200)) // many alike
			all = append(all, d)
			_, _ = h.Do(t.Context(), func(context.Context) (int, error) { time.Sleep(d); return 0, nil })
		}
		last := slices.Sorted(slices.Values(all[2000:]))
		for i, want := range last {
			got, ok := retry.LatencyOf(h, float64(i+1)/1000)
			require.True(t, ok)
			require.Equal(t, want, got)
		}
		_, ok := retry.LatencyOf(h, math.NaN())
		require.False(t, ok)
	})
}

// TestHedgeUnderContention mixes everything that can happen at once, on real
// goroutines, and counts.
func TestHedgeUnderContention(t *testing.T) {
	const workers, each = 16, 500
	synctest.Test(t, func(t *testing.T) {
		var firsts, hedged, discarded, returned, failed, left, succeeded, refused atomic.Int64
		budget := retry.NewBudget(retry.BudgetConfig{Ratio: 0.5, PerSecond: -1})
		h := retry.NewHedger[int](retry.HedgeConfig{
			Delay: 2 * ms, Quantile: 0.5, Max: 4, Budget: budget,
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
						t.Error("a call outlived its hedge")
					}
					cancel()
				}
			})
		}
		wg.Wait()
		for _, n := range []*atomic.Int64{&hedged, &discarded, &returned, &failed, &left, &refused} {
			require.Positive(t, n.Load())
		}
		require.Equal(t, int64(workers*each), firsts.Load(), "each hedge makes a first call")
		require.Equal(t, int64(workers*each), returned.Load()+failed.Load()+left.Load())
		require.Equal(t, succeeded.Load(), returned.Load()+discarded.Load(), "each value is returned or discarded, once")
		s := h.Stats()
		require.Equal(t, returned.Load(), s.FirstWon+s.HedgeWon)
		require.Equal(t, hedged.Load(), s.Hedged)
		require.Equal(t, failed.Load(), s.Failed)
		require.Positive(t, s.FirstWon)
		require.Positive(t, s.HedgeWon)
		require.Equal(t, budget.Stats().OverBudget, s.OverBudget)
	})
}

// TestHedgeCutsTheTail measures what a hedge is for, in exact virtual time: of
// 10 000 calls one in twenty is slow.
func TestHedgeCutsTheTail(t *testing.T) {
	const calls, fast, slow = 10_000, 10 * ms, time.Second
	measure := func(cfg retry.HedgeConfig) (p50, p99 time.Duration, load float64) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(1, 2)) // guarded by mu
			var mu sync.Mutex
			made := 0
			backend := func(ctx context.Context) (int, error) {
				mu.Lock()
				made++
				takes := fast
				if random.IntN(20) == 0 {
					takes = slow
				}
				mu.Unlock()
				select {
				case <-time.After(takes):
					return 0, nil
				case <-ctx.Done():
					return 0, ctx.Err()
				}
			}
			var took []time.Duration
			h := retry.NewHedger[int](cfg)
			for range calls {
				start := time.Now()
				_, err := h.Do(t.Context(), backend)
				require.NoError(t, err)
				took = append(took, time.Since(start))
			}
			slices.Sort(took)
			p50, p99, load = took[calls/2], took[calls*99/100], float64(made)/calls
		})
		return p50, p99, load
	}
	p50, p99, load := measure(retry.HedgeConfig{Delay: 20 * ms, Max: 1})
	t.Logf("without: p50 %v, p99 %v, load %.3f", p50, p99, load)
	require.Equal(t, fast, p50)
	require.Equal(t, slow, p99)
	require.Equal(t, 1.0, load)

	p50, p99, load = measure(retry.HedgeConfig{Delay: 20 * ms})
	t.Logf("with: p50 %v, p99 %v, load %.3f", p50, p99, load)
	require.Equal(t, fast, p50)
	require.Equal(t, 20*ms+fast, p99)
	require.InDelta(t, 1.05, load, 0.005)

	p50, p99, load = measure(retry.HedgeConfig{Delay: 200 * ms, Quantile: 0.9})
	t.Logf("with a learned delay: p50 %v, p99 %v, load %.3f", p50, p99, load)
	require.Equal(t, fast, p50)
	require.Equal(t, 2*fast+1, p99)
	require.InDelta(t, 1.05, load, 0.005)

	budget := retry.NewBudget(retry.BudgetConfig{Ratio: 0.02, PerSecond: -1})
	p50, p99, load = measure(retry.HedgeConfig{Delay: 20 * ms, Budget: budget})
	t.Logf("with a budget of 2 %%: p50 %v, p99 %v, load %.3f", p50, p99, load)
	require.LessOrEqual(t, load, 1.02)
}

func TestHedgeConfigSaysWhatIsWrong(t *testing.T) {
	for want, cfg := range map[string]retry.HedgeConfig{
		"retry.HedgeConfig.Delay is 0s: must be more than 0":                             {},
		"retry.HedgeConfig.Delay is -1s: must be more than 0":                            {Delay: -time.Second},
		"retry.HedgeConfig.Quantile is 1: must be 0 (for Delay alone) or less than 1":    {Delay: 1, Quantile: 1},
		"retry.HedgeConfig.Quantile is -0.5: must be 0 (for Delay alone) or less than 1": {Delay: 1, Quantile: -0.5},
		"retry.HedgeConfig.Quantile is NaN: must be 0 (for Delay alone) or less than 1":  {Delay: 1, Quantile: math.NaN()},
		"retry.HedgeConfig.Max is -1: must be 0 (for 2) or more":                         {Delay: 1, Max: -1},
	} {
		require.EqualError(t, cfg.Validate(), want)
		require.PanicsWithError(t, want, func() { _, _ = hedge(t.Context(), cfg, func(context.Context) (int, error) { return 0, nil }) })
	}
}

func TestHedgeThatIsRefusedNeedsNoBudget(t *testing.T) {
	fn, _ := replies(reply{err: full})
	_, err := hedge(t.Context(), retry.HedgeConfig{Delay: time.Minute}, fn)
	require.Equal(t, full, err)
}

// A further call that is not made, as ctx has ended, counts nowhere.
func TestHedgeAfterTheEndOfItsContextCountsInNoBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{})
		ctx, cancel := context.WithTimeout(t.Context(), 10*ms)
		defer cancel()
		_, err := hedge(ctx, retry.HedgeConfig{Delay: 50 * ms, Budget: b}, func(context.Context) (int, error) {
			time.Sleep(100 * ms) // it does not heed its ctx
			return 1, nil
		})
		require.NoError(t, err)
		require.Zero(t, b.Stats().BudgetTotals)
	})
}
