package retry_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/retry"
)

var errDown = errors.New("backend: down")

// failing returns a function that fails n times with err before it succeeds, and
// the number of its calls.
func failing(n int, err error) (fn func(context.Context) error, calls *int) {
	calls = new(int)
	return func(context.Context) error {
		*calls++
		if *calls <= n {
			return err
		}
		return nil
	}, calls
}

const forever = 1 << 30

// onRetry has f called before each wait of r.
func onRetry(r *retry.Retrier, f func(context.Context, retry.Event)) *retry.Retrier {
	r.Observe(func(ctx context.Context, e retry.Event) {
		if e.Kind == retry.EventRetried {
			f(ctx, e)
		}
	})
	return r
}

func succeed(context.Context) error { return nil }

// seconds returns the time since start.
func seconds(start time.Time) float64 { return time.Since(start).Seconds() }

func TestErrorHasLastErrorAndCause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		r := retry.New(retry.Config{Name: "users", Backoff: retry.Constant(600 * time.Millisecond)})
		err := r.Do(t.Context(), func(context.Context) error {
			n++
			return fmt.Errorf("call %d: %w", n, errDown)
		})
		require.ErrorIs(t, err, errDown)
		require.ErrorIs(t, err, retry.ErrExhausted)
		e, ok := errors.AsType[*retry.Error](err)
		require.True(t, ok)
		require.Equal(t, "users", e.Name)
		require.Equal(t, 3, e.Attempts)
		require.Equal(t, 1200*time.Millisecond, e.RetryingFor)
		require.Equal(t, retry.ErrExhausted, e.Cause)
		require.EqualError(t, e.Err, "call 3: backend: down")
		require.EqualError(t, err, "retry: users: gave up after 3 attempts: call 3: backend: down")
	})
}

func TestFirstTrySuccessCostsNothing(t *testing.T) {
	built := 0
	r := retry.New(retry.Config{
		Backoff: func() retry.Backoff { built++; return &backoff.ZeroBackOff{} },
		RetryIf: func(error) bool { panic("called for a success") },
	})
	built = 0 // New validates one
	wrapped := r.Wrap(succeed)
	for name, c := range map[string]struct {
		ctx    context.Context
		allocs float64
	}{
		"background": {context.Background(), 0},
		"cancelable": {t.Context(), 1}, // the mark
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.allocs, testing.AllocsPerRun(1000, func() { _ = r.Do(c.ctx, succeed) }))
			require.Equal(t, c.allocs, testing.AllocsPerRun(1000, func() { _ = wrapped(c.ctx) }))
		})
	}
	require.Zero(t, built)
	require.Equal(t, retry.Stats{FirstTry: total(r.Stats()), Attempts: total(r.Stats())}, r.Stats())
}

func TestOneBackoffForEachRetriedCall(t *testing.T) {
	var built []*recordingBackOff
	r := retry.New(retry.Config{Backoff: func() retry.Backoff {
		b := new(recordingBackOff)
		built = append(built, b)
		return b
	}})
	built = nil
	for range 2 {
		fn, _ := failing(2, errDown)
		require.NoError(t, r.Do(t.Context(), fn))
	}
	require.Equal(t, []*recordingBackOff{{"reset", "next", "next"}, {"reset", "next", "next"}}, built)
}

// recordingBackOff is a BackOff without delays that records the calls of its methods.
type recordingBackOff []string

func (b *recordingBackOff) Reset()                     { *b = append(*b, "reset") }
func (b *recordingBackOff) NextBackOff() time.Duration { *b = append(*b, "next"); return 0 }

func TestWaitPastTheDeadlineIsNotStarted(t *testing.T) {
	const tooLate = ": wait would pass the deadline: context deadline exceeded; last error: backend: down"
	for _, c := range []struct {
		name     string
		deadline time.Duration
		delay    time.Duration
		attempts int
		took     time.Duration
		reason   error
		text     string
	}{
		{"the wait ends before the deadline", 2*time.Second + 1, time.Second, 3, 2 * time.Second, retry.ErrExhausted,
			"retry: gave up after 3 attempts: backend: down"},
		{"the wait ends at the deadline", 2 * time.Second, time.Second, 2, time.Second, context.DeadlineExceeded,
			"retry: gave up after 2 attempts" + tooLate},
		{"the wait ends after the deadline", time.Second, time.Hour, 1, 0, context.DeadlineExceeded,
			"retry: gave up after 1 attempt" + tooLate},
		{"the longest wait there is", time.Hour, 1<<63 - 1, 1, 0, context.DeadlineExceeded,
			"retry: gave up after 1 attempt" + tooLate},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				if c.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.deadline)
					defer cancel()
				}
				retries := 0
				r := onRetry(retry.New(retry.Config{Backoff: retry.Constant(c.delay)}),
					func(context.Context, retry.Event) { retries++ })
				fn, calls := failing(forever, errDown)
				start := time.Now()
				err := r.Do(ctx, fn)
				require.NoError(t, ctx.Err(), "it returned before the deadline")
				require.Equal(t, c.took, time.Since(start))
				require.Equal(t, c.attempts, *calls)
				require.Equal(t, c.attempts-1, retries)
				require.ErrorIs(t, err, errDown)
				require.ErrorIs(t, err, c.reason)
				require.EqualError(t, err, c.text)
			})
		})
	}
}

// Logs and alerts group errors by their text: equal failures have equal texts, whatever their times.
func TestErrorTextIsStable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, c := range map[string]struct {
			cfg   retry.Config
			fails func(n int) error
		}{
			"exhausted":   {retry.Config{}, func(int) error { return errDown }},
			"retry after": {retry.Config{}, func(n int) error { return answeringError{true, time.Hour + time.Duration(n)} }},
			"deadline": {
				retry.Config{MaxRetryAfter: 24 * time.Hour},
				func(n int) error { return answeringError{true, time.Hour + time.Duration(n)} },
			},
			"over budget": {
				retry.Config{Budget: retry.NewBudget(retry.BudgetConfig{Ratio: retry.None, PerSecond: retry.None})},
				func(int) error { return errDown },
			},
		} {
			texts := make(map[string]bool)
			for n := range 100 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				err := retry.New(c.cfg).Do(ctx, func(context.Context) error {
					time.Sleep(time.Duration(n) * time.Millisecond)
					return c.fails(n)
				})
				cancel()
				require.Error(t, err)
				texts[err.Error()] = true
			}
			require.Len(t, texts, 1, name)
		}
	})
}

func TestCancelDuringWaitKeepsErrorAndCause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		errShutdown := errors.New("shutting down")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(3*time.Second, func() { cancel(errShutdown) })
		r := retry.New(retry.Config{Attempts: retry.Unlimited, Backoff: retry.Constant(2 * time.Second)})
		fn, calls := failing(forever, errDown)
		start := time.Now()
		err := r.Do(ctx, fn)
		require.Equal(t, 3.0, seconds(start))
		require.Equal(t, 2, *calls)
		require.ErrorIs(t, err, errDown)
		require.ErrorIs(t, err, errShutdown)
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, retry.ErrExhausted)
		require.EqualError(t, err,
			"retry: gave up after 2 attempts: context canceled: shutting down; last error: backend: down")
	})
}

func TestCancelInObserverIsHonored(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	fn, calls := failing(forever, errDown)
	err := onRetry(retry.New(retry.Config{Backoff: retry.Constant(0)}),
		func(context.Context, retry.Event) { cancel() }).Do(ctx, fn)
	require.Equal(t, 1, *calls)
	require.ErrorIs(t, err, context.Canceled)
}

func TestAttemptTimeoutError(t *testing.T) {
	reset := errors.New("connection reset")
	errSlow := fmt.Errorf("users: %w", os.ErrDeadlineExceeded)
	for _, c := range []struct {
		name     string
		returned error
		text     string // of the error that RetryIf gets; empty: as returned
	}{
		{"another error", reset, "retry: users: attempt took longer than AttemptTimeout of 1s: connection reset"},
		{"a refusal", refusal{retryable: true}, "retry: users: attempt took longer than AttemptTimeout of 1s: refused"},
		{"the end of ctx", context.DeadlineExceeded, ""},
		{"a timeout", errSlow, "retry: users: attempt took longer than AttemptTimeout of 1s: users: i/o timeout"},
		{"permanent", retry.Permanent(reset), ""},
		{"answered", notFound, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				for _, nested := range []bool{false, true} {
					outer := retry.New(retry.Config{Attempts: 1})
					if nested {
						outer = retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(0)})
					}
					var seen error
					inner := retry.New(retry.Config{
						Name: "users", Attempts: 2, Backoff: retry.Constant(0), AttemptTimeout: time.Second,
					})
					_ = outer.Do(t.Context(), func(ctx context.Context) error {
						seen = inner.Do(ctx, func(ctx context.Context) error {
							<-ctx.Done()
							return c.returned
						})
						return seen
					})
					if e, ok := errors.AsType[*retry.Error](seen); ok {
						seen = e.Err
					}
					if c.text != "" {
						require.EqualError(t, seen, c.text)
						require.ErrorIs(t, seen, context.DeadlineExceeded)
						require.ErrorIs(t, seen, c.returned)
						require.True(t, behavior.IsTimeout(seen))
						require.Equal(t, behavior.Read(c.returned), behavior.Read(seen), "the classification is unchanged")
					} else if c.name != "permanent" {
						require.Equal(t, c.returned, seen)
					} else if !nested {
						require.Equal(t, reset, seen)
					}
				}
			})
		})
	}
}

// A connection with the deadline of its ctx often returns before ctx is canceled. Either can happen first.
func TestAttemptTimeoutPassesAtItsTime(t *testing.T) {
	r := retry.New(retry.Config{Attempts: 1, AttemptTimeout: time.Second})
	for i := range 200 {
		synctest.Test(t, func(t *testing.T) {
			ctx := t.Context()
			if i%2 == 1 {
				ctx, _ = linger.Begin(ctx) // within a Transport
			}
			err := r.Do(ctx, func(context.Context) error {
				time.Sleep(time.Second)
				return errDown
			})
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.ErrorIs(t, err, errDown)
		})
	}
}

func TestPermanentMarkIsRemoved(t *testing.T) {
	wrapped := fmt.Errorf("users: %w", retry.Permanent(errDown))
	for _, c := range []struct {
		name           string
		returned, want error
	}{
		{"marked", retry.Permanent(errDown), errDown},
		{"marked by the engine", backoff.Permanent(errDown), errDown},
		{"marked twice", retry.Permanent(retry.Permanent(errDown)), errDown},
		{"marked by both", retry.Permanent(backoff.Permanent(errDown)), errDown},
		{"marked further down", wrapped, wrapped},
	} {
		t.Run(c.name, func(t *testing.T) {
			fn, calls := failing(forever, c.returned)
			r := retry.New(retry.Config{RetryIf: func(error) bool { panic("called for a permanent error") }})
			err := r.Do(t.Context(), fn)
			require.Equal(t, 1, *calls)
			require.Equal(t, c.want, err)
			require.False(t, resilience.Retryable(c.returned))
			require.EqualError(t, c.returned, err.Error())
		})
	}
	require.NoError(t, retry.Permanent(nil))
	empty := &backoff.PermanentError{} // which has no text
	require.Equal(t, error(empty), retry.New(retry.Config{}).Do(t.Context(), func(context.Context) error { return empty }))
}

// answeringError has the methods Retryable and RetryAfter.
type answeringError struct {
	retryable bool
	after     time.Duration
}

func (answeringError) Error() string               { return "backend: answered" }
func (e answeringError) Retryable() bool           { return e.retryable }
func (e answeringError) RetryAfter() time.Duration { return e.after }

func TestUncomparableCauseIsKept(t *testing.T) {
	type boxed struct{ error } // comparing its error panics
	for name, cause := range map[string]error{
		"slice":          uncomparable{"gone"},
		"slice in a box": boxed{uncomparable{"gone"}},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			err := retry.New(retry.Config{}).Do(ctx, func(context.Context) error {
				cancel(cause)
				return errors.Join(ctx.Err(), cause)
			})
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorContains(t, err, "uncomparable: [gone]")
		})
	}
}

func TestErrorTimeout(t *testing.T) {
	slow := fmt.Errorf("users: %w", os.ErrDeadlineExceeded) // Timeout() is true
	for _, c := range []struct {
		name    string
		err     *retry.Error
		timeout bool
	}{
		{"the last error is", &retry.Error{Err: slow, Cause: retry.ErrExhausted}, true},
		{"the cause is", &retry.Error{Err: errDown, Cause: context.DeadlineExceeded}, true},
		{"it is one of several", &retry.Error{
			Err: errors.Join(os.ErrNotExist, &fs.PathError{Err: errDown}, context.DeadlineExceeded),
		}, true},
		{"the caller canceled", &retry.Error{Err: errDown, Cause: context.Canceled}, false},
		{"nothing is known", &retry.Error{}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.timeout, (&url.Error{Err: c.err}).Timeout())
		})
	}
}

func TestRetryAfterIsTheMinimumDelay(t *testing.T) {
	for _, c := range []struct {
		name           string
		after, backoff time.Duration
		least, most    time.Duration
	}{
		{"longer than the backoff", 10 * time.Second, time.Second, 10 * time.Second, 11 * time.Second},
		{"shorter than the backoff", time.Second, 5 * time.Second, 5 * time.Second, 5 * time.Second},
		{"none", 0, time.Second, time.Second, time.Second},
		{"negative", -time.Hour, time.Second, time.Second, time.Second},
		{"at MaxRetryAfter", time.Minute, 0, time.Minute, 66 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := retry.New(retry.Config{Backoff: retry.Constant(c.backoff)})
				seen := make(map[time.Duration]bool)
				for range 50 {
					fn, _ := failing(1, fmt.Errorf("users: %w", answeringError{retryable: true, after: c.after}))
					start := time.Now()
					require.NoError(t, r.Do(t.Context(), fn))
					took := time.Since(start)
					require.GreaterOrEqual(t, took, c.least)
					require.LessOrEqual(t, took, c.most)
					seen[took] = true
				}
				if c.most > c.least {
					require.Greater(t, len(seen), 25, "clients do not retry at the same moment")
				}
			})
		})
	}
}

func TestRetryAfterJitterFitsTheDeadline(t *testing.T) {
	for _, c := range []struct{ after, left time.Duration }{
		{10 * time.Second, 10*time.Second + 1},
		{10 * time.Second, 10100 * time.Millisecond},
		{10 * time.Second, 10900 * time.Millisecond},
		{10 * time.Second, 11100 * time.Millisecond},
		{28 * time.Second, 30 * time.Second},
		{time.Second, 1050 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			for _, err := range []error{answeringError{true, c.after}, refusal{true, c.after}} {
				for range 200 {
					ctx, cancel := context.WithTimeout(t.Context(), c.left)
					fn, _ := failing(1, err)
					start := time.Now()
					require.NoError(t, retry.New(retry.Config{Backoff: retry.Constant(0)}).Do(ctx, fn), "%v of %v", c.after, c.left)
					require.GreaterOrEqual(t, time.Since(start), c.after)
					cancel()
				}
			}
		})
	}
}

func TestTooLongRetryAfterEndsTheRetrying(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fn, calls := failing(forever, answeringError{retryable: true, after: time.Minute + 1})
		start := time.Now()
		err := retry.New(retry.Config{}).Do(t.Context(), fn)
		require.ErrorIs(t, err, retry.ErrExhausted)
		require.EqualError(t, err, "retry: gave up after 1 attempt: "+
			"RetryAfter is longer than MaxRetryAfter; last error: backend: answered")

		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		fn2, calls2 := failing(forever, answeringError{retryable: true, after: 30 * time.Second})
		err = retry.New(retry.Config{}).Do(ctx, fn2)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		e, ok := errors.AsType[interface {
			error
			RetryAfter() time.Duration
		}](err)
		require.True(t, ok, "the caller gets the RetryAfter")
		require.Equal(t, 30*time.Second, e.RetryAfter())

		// No sum overflows.
		longest := time.Duration(1<<63 - 1)
		fn3, calls3 := failing(forever, answeringError{retryable: true, after: longest})
		err = retry.New(retry.Config{MaxRetryAfter: longest}).Do(ctx, fn3)
		require.ErrorIs(t, err, context.DeadlineExceeded)

		require.Equal(t, []int{1, 1, 1}, []int{*calls, *calls2, *calls3})
		require.Zero(t, time.Since(start))
	})
}

func TestDefaultBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		most := make([]time.Duration, 12)
		r := onRetry(retry.New(retry.Config{Attempts: len(most) + 1}),
			func(_ context.Context, e retry.Event) { most[e.Attempts-1] = max(most[e.Attempts-1], e.Delay) })
		for range 300 {
			fn, _ := failing(forever, errDown)
			require.Error(t, r.Do(t.Context(), fn))
		}
		for i, d := range most {
			bound := min(100*time.Millisecond<<i, 10*time.Second)
			require.LessOrEqual(t, d, bound)
			require.Greater(t, d, bound*9/10)
		}
	})
}

func TestErrorTexts(t *testing.T) {
	gone := uncomparable{"gone"}
	for want, e := range map[string]*retry.Error{
		"retry: gave up after 0 attempts":                  {},
		"retry: a: gave up after 1 attempt: backend: down": {Name: "a", Attempts: 1, Err: errDown},
		"retry: gave up after 2 attempts: over budget": {
			Attempts: 2, RetryingFor: 1234567890, Cause: retry.ErrOverBudget,
		},
		"retry: gave up after 2 attempts: context canceled": {
			Attempts: 2, RetryingFor: 2345678, Cause: context.Canceled, Err: context.Canceled,
		},
		"retry: gave up after 2 attempts: context canceled; last error: uncomparable: [gone]": {
			Attempts: 2, Cause: context.Canceled, Err: gone,
		},
		"retry: gave up after 0 attempts: uncomparable: [gone]": {Cause: gone, Err: gone},
	} {
		require.EqualError(t, e, want)
		require.NotErrorIs(t, e, errors.ErrUnsupported)
	}
}

type uncomparable []string

func (e uncomparable) Error() string { return fmt.Sprintf("uncomparable: %s", []string(e)) }

func TestPanicAndExitPassThrough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		budget := retry.NewBudget(retry.BudgetConfig{})
		before := budget.Stats().Left
		var hook func()
		r := onRetry(retry.New(retry.Config{Backoff: retry.Constant(0), Budget: budget, AttemptTimeout: time.Hour}),
			func(context.Context, retry.Event) { hook() })
		for _, leave := range []func(){func() { panic("broken") }, runtime.Goexit} {
			for n := range 2 {
				hook = func() {}
				require.Equal(t, "left", leaves(func() {
					_ = r.Do(t.Context(), func(ctx context.Context) error {
						if attempt, _ := retry.AttemptFrom(ctx); attempt > n {
							leave()
						}
						return errDown
					})
				}))
			}
			hook = leave
			require.Equal(t, "left", leaves(func() {
				fn, _ := failing(forever, errDown)
				_ = r.Do(t.Context(), fn)
			}))
		}
		require.Equal(t, before-4, budget.Stats().Left, "four retries, of four calls")
	})
}

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

// If the error of an attempt matches ctx.Err() but not the cause of ctx, the cause is added.
func TestErrorHasTheCauseOfContext(t *testing.T) {
	why := errors.New("user disconnected")
	ctx, cancel := context.WithCancelCause(t.Context())
	err := retry.New(retry.Config{}).Do(ctx, func(ctx context.Context) error {
		cancel(why)
		return ctx.Err()
	})
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, why)

	said := fmt.Errorf("users: %w: %w", context.Canceled, why)
	err = retry.New(retry.Config{}).Do(t.Context(), func(context.Context) error { return said })
	require.NotSame(t, said, err, "ctx is not done")
	ctx, cancel = context.WithCancelCause(t.Context())
	err = retry.New(retry.Config{}).Do(ctx, func(context.Context) error {
		cancel(why)
		return said
	})
	require.Same(t, said, err, "it matches both")

	ctx, cancel = context.WithCancelCause(t.Context())
	err = retry.New(retry.Config{}).Do(ctx, func(context.Context) error {
		cancel(why)
		return why
	})
	require.ErrorIs(t, err, context.Canceled, "it does not match ctx.Err()")
}
