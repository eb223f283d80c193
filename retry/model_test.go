package retry_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/internal/attempt"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/retry"
)

// A scenario is one call to Do with its configuration and the results of its attempts. Its times are a few
// nanoseconds, so that the jitter of RetryAfter is zero and all times are exact.
type scenario struct {
	attempts       int
	delays         []time.Duration // the last one repeats; none: no retry
	delay          int             // Config.Delay: 0: nil, 1: adds 1, 2: ends the retrying after a refusal
	healthyAfter   time.Duration
	attemptTimeout time.Duration
	maxRetryAfter  time.Duration
	minDelay       time.Duration
	contrary       bool          // RetryIf is the opposite of Retryable
	fresh          bool          // a new operation in the attempt of another Retrier
	budget         int           // 0: allows nothing; 1: two retries for each call; negative: there is none
	deadline       time.Duration // of ctx; 0: none
	cancel         time.Duration // of ctx; 0: never
	answers        []answer      // the last one repeats
}

type answer struct {
	word
	takes  time.Duration
	honors bool // it returns when its ctx is done
}

// A word is an error and its classification.
type word struct {
	err       error
	kind      behavior.Kind
	retryable bool
	after     time.Duration
	permanent error // the error that Do returns if err is marked by Permanent
}

// saying is an error with all methods of the protocol.
type saying word

func (s *saying) Error() string             { return fmt.Sprintf("kind %d, %t, %d", s.kind, s.retryable, s.after) }
func (s *saying) Refused() bool             { return s.kind == behavior.Refused }
func (s *saying) Answered() bool            { return s.kind == behavior.Answered }
func (s *saying) Retryable() bool           { return s.retryable }
func (s *saying) RetryAfter() time.Duration { return s.after }

func says(kind behavior.Kind, retryable bool, after time.Duration) word {
	w := word{kind: kind, retryable: retryable, after: after}
	w.err = (*saying)(&w)
	return w
}

// An outcome is everything that can be observed of a call.
type outcome struct {
	story  []string // attempts, callbacks and events, with their times
	ended  time.Duration
	result string // the error of Do, as text
	kind   behavior.Kind
	stats  retry.Stats
	left   int64   // of the budget
	finds  []error // in the result, by errors.Is
}

var (
	errFinal = errors.New("final")
	down     = word{err: errDown, kind: behavior.Failed, retryable: true}
	words    = []word{
		{kind: behavior.Done}, down, down, down,
		{err: retry.Permanent(errFinal), kind: behavior.Failed, permanent: errFinal},
		{err: retry.Permanent(retry.Permanent(errFinal)), kind: behavior.Failed, permanent: errFinal},
		{err: backoff.Permanent(errFinal), kind: behavior.Failed, permanent: errFinal},
		says(behavior.Failed, false, 0), says(behavior.Failed, false, 3),
		says(behavior.Failed, true, 3), says(behavior.Failed, true, 9),
		says(behavior.Answered, false, 0), says(behavior.Answered, false, 3),
		says(behavior.Answered, true, 0), says(behavior.Answered, true, 3),
		says(behavior.Refused, true, 0), says(behavior.Refused, true, 0), says(behavior.Refused, true, 3),
		says(behavior.Refused, false, 0), says(behavior.Refused, false, 3), says(behavior.Refused, false, 9),
		{
			err:  errors.Join(errDown, says(behavior.Refused, false, 3).err),
			kind: behavior.Failed, retryable: true,
		},
		{
			err:  errors.Join(says(behavior.Answered, false, 0).err, says(behavior.Refused, true, 3).err),
			kind: behavior.Answered,
		},
	}
)

// scenarioOf returns the scenario for any bytes.
func scenarioOf(data []byte) scenario {
	next := func(n int) int {
		if len(data) == 0 {
			return 0
		}
		b := data[0]
		data = data[1:]
		return int(b) % n
	}
	optional := func(n int) time.Duration { return time.Duration(max(0, next(2*n)-n)) }
	s := scenario{
		attempts:       next(7) - 1,
		delay:          max(0, next(6)-3),
		healthyAfter:   optional(12),
		attemptTimeout: optional(8),
		maxRetryAfter:  optional(10),
		contrary:       next(4) == 1,
		fresh:          next(4) == 1,
		budget:         next(3) - 1,
		deadline:       optional(60),
		cancel:         optional(60),
	}
	for range next(4) {
		s.delays = append(s.delays, time.Duration(next(8)))
	}
	for range 1 + next(8) {
		s.answers = append(s.answers, answer{words[next(len(words))], time.Duration(next(10)), next(2) == 0})
	}
	s.minDelay = optional(5) // last, so that older inputs keep their meaning
	// A call without a limit must be canceled, and must take time until then.
	if s.attempts < 0 || s.healthyAfter > 0 {
		if s.cancel == 0 {
			s.cancel = 59
		}
		s.answers[len(s.answers)-1].takes++
	}
	return s
}

func at[T any](list []T, i int) T { return list[min(i, len(list)-1)] }

const never = time.Duration(math.MaxInt64)

// model returns the outcome of s. It returns false if two things happen at the same instant, in an undefined order.
func (s scenario) model() (outcome, bool) {
	var o outcome
	tell := func(now time.Duration, format string, args ...any) {
		o.story = append(o.story, fmt.Sprintf("%d: ", now)+fmt.Sprintf(format, args...))
	}
	orNever := func(d time.Duration) time.Duration {
		if d == 0 {
			return never
		}
		return d
	}
	attempts := s.attempts
	if attempts == 0 {
		attempts = 3
	} else if attempts < 0 {
		attempts = math.MaxInt
	}
	maxRetryAfter := s.maxRetryAfter
	if maxRetryAfter == 0 {
		maxRetryAfter = time.Minute
	}
	deadline, cancel := orNever(s.deadline), orNever(s.cancel)
	end := min(deadline, cancel)
	why := context.Canceled
	if deadline == end {
		why = context.DeadlineExceeded
	}
	if deadline == cancel && end != never {
		return o, false
	}

	var last string      // the text of the last remembered error
	var all, latest word // of all attempts together, and of the last one
	all.kind = behavior.Refused
	var now, from time.Duration
	delays := 0
	for n, i := 1, 0; ; n, i = n+1, i+1 {
		a := at(s.answers, i)
		mark := n
		if attempts == 1 {
			mark = 0
		}
		tell(now, "attempt %d, marked %d", i+1, mark)
		began := now
		timeout := never
		if s.attemptTimeout > 0 {
			timeout = now + s.attemptTimeout
		}
		ctxEnds := min(timeout, end)
		latest = a.word
		done := now + a.takes
		if a.honors && done >= ctxEnds {
			if timeout == end || done == ctxEnds {
				return o, false
			}
			done, latest = ctxEnds, word{err: why, kind: behavior.Failed, retryable: true}
			if timeout < end {
				latest.err = context.DeadlineExceeded
			}
		} else if done == end || done == timeout || timeout == end && done > end {
			return o, false
		}
		now = done
		text := textOf(latest.err)
		late := done > timeout && timeout < end &&
			latest.retryable && latest.err != context.DeadlineExceeded && latest.err != nil
		if late {
			text = "late: " + text
		}
		o.stats.Attempts++
		if i > 0 {
			o.stats.Retried++
		} else {
			from = now
		}
		if i > 0 && s.budget >= 0 && all.kind != behavior.Refused && latest.kind == behavior.Refused {
			o.left++
		}
		if s.healthyAfter > 0 && now-began >= s.healthyAfter && latest.err != nil && latest.kind != behavior.Refused {
			n, delays, from, last, all = 1, 0, now, "", word{kind: behavior.Refused}
		}
		if all.kind == behavior.Refused && latest.kind != behavior.Refused && s.budget >= 0 {
			o.left += 2 * int64(s.budget)
		}
		o.ended = now
		if latest.err == nil {
			o.result = "success"
			if i > 0 {
				o.stats.Recovered++
			} else {
				o.stats.FirstTry++
			}
			return o, true
		}
		ended := &o.stats.Canceled
		if why == context.DeadlineExceeded {
			ended = &o.stats.Deadline
		}
		asItIs := func(counted *int64) (outcome, bool) {
			*counted++
			o.result, o.kind, o.finds = text, latest.kind, []error{latest.err}
			return o, true
		}
		remember := func() {
			last = text
			if latest.kind == behavior.Failed || all.kind == behavior.Refused || latest.kind == all.kind {
				all = latest
			}
		}
		giveUp := func(n int, counted *int64, reason error) (outcome, bool) {
			*counted++
			o.result = fmt.Sprintf("gave up after %d in %d: %v: %q", n, now-from, reason, last)
			o.kind = all.kind
			o.finds = []error{all.err, reason}
			if latest.kind != behavior.Refused {
				o.finds = append(o.finds, latest.err)
			}
			return o, true
		}
		switch {
		case latest.permanent != nil:
			latest.err = latest.permanent
			text = latest.permanent.Error()
			return asItIs(&o.stats.Permanent)
		case latest.kind == behavior.Answered && !latest.retryable:
			return asItIs(&o.stats.Permanent)
		case now >= end && n == 1 && (latest.err == why || late && why == context.DeadlineExceeded):
			return asItIs(ended)
		case now >= end:
			remember()
			return giveUp(n, ended, why)
		case latest.kind == behavior.Refused && !latest.retryable:
			if all.kind == behavior.Refused {
				return asItIs(&o.stats.Permanent)
			}
			return giveUp(n-1, &o.stats.Permanent, latest.err)
		}
		if latest.kind == behavior.Failed {
			if s.contrary {
				tell(now, "if %s", text)
			}
			if latest.retryable == s.contrary {
				return asItIs(&o.stats.Permanent)
			}
		}
		remember()
		if n >= attempts || len(s.delays) == 0 {
			return giveUp(n, &o.stats.Exhausted, retry.ErrExhausted)
		}
		delay := at(s.delays, delays)
		delays++
		if s.delay > 0 {
			tell(now, "delay %d %s in %d after %d", n, text, delay, now-from)
			delay++
		}
		if s.delay == 2 && latest.kind == behavior.Refused {
			return giveUp(n, &o.stats.Exhausted, retry.ErrExhausted)
		}
		if latest.after > maxRetryAfter {
			return giveUp(n, &o.stats.Exhausted, retry.ErrExhausted)
		}
		delay = max(delay, latest.after, s.minDelay)
		switch {
		case now+delay >= deadline:
			return giveUp(n, &o.stats.Deadline, context.DeadlineExceeded)
		case s.budget >= 0 && all.kind != behavior.Refused && o.left == 0:
			return giveUp(n, &o.stats.OverBudget, retry.ErrOverBudget)
		}
		if s.budget >= 0 && all.kind != behavior.Refused {
			o.left--
		}
		tell(now, "hook %d %s in %d after %d", n, text, delay, now-from)
		if now+delay == cancel {
			return o, false
		}
		if now+delay > cancel {
			now, o.ended = cancel, cancel
			if s.budget >= 0 && all.kind != behavior.Refused {
				o.left++
			}
			return giveUp(n, &o.stats.Canceled, context.Canceled)
		}
		now += delay
	}
}

// textOf returns the text of err, shortened if it reports an AttemptTimeout.
func textOf(err error) string {
	if err == nil {
		return ""
	}
	if strings.HasPrefix(err.Error(), "retry: attempt took longer") {
		return "late: " + errors.Unwrap(err).Error()
	}
	return err.Error()
}

// run executes s.
func (s scenario) run(t *testing.T) (o outcome, err error) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if s.deadline > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, s.deadline)
			defer cancel()
		}
		if s.cancel > 0 {
			time.AfterFunc(s.cancel, cancel)
		}
		if s.fresh {
			ctx = retry.Fresh(attempt.With(ctx, 1))
		}
		start := time.Now()
		tell := func(format string, args ...any) {
			o.story = append(o.story, fmt.Sprintf("%d: ", time.Since(start))+fmt.Sprintf(format, args...))
		}
		cfg := retry.Config{
			Attempts:       s.attempts,
			HealthyAfter:   s.healthyAfter,
			AttemptTimeout: s.attemptTimeout,
			MaxRetryAfter:  s.maxRetryAfter,
			MinDelay:       s.minDelay,
			Backoff:        func() retry.Backoff { return &repeatingDelays{all: s.delays} },
		}
		if s.contrary {
			cfg.RetryIf = func(err error) bool {
				tell("if %s", textOf(err))
				return !resilience.Retryable(err)
			}
		}
		if s.delay > 0 {
			cfg.Delay = func(_ context.Context, a retry.FailedAttempt) time.Duration {
				tell("delay %d %s in %d after %d", a.Number, textOf(a.Err), a.Delay, a.RetryingFor)
				if s.delay == 2 && behavior.IsRefused(a.Err) {
					return -1
				}
				return a.Delay + 1
			}
		}
		if s.budget >= 0 {
			cfg.Budget = retry.NewBudget(retry.BudgetConfig{Ratio: []float64{retry.None, 2}[s.budget], PerSecond: retry.None})
		}
		r := onRetry(retry.New(cfg), func(_ context.Context, e retry.Event) {
			tell("hook %d %s in %d after %d", e.Attempts, textOf(e.Err), e.Delay, e.RetryingFor)
		})
		calls := 0
		err = r.Do(ctx, func(ctx context.Context) error {
			calls++
			n, _ := retry.AttemptFrom(ctx)
			tell("attempt %d, marked %d", calls, n)
			a := at(s.answers, calls-1)
			if !a.honors {
				time.Sleep(a.takes)
				return a.err
			}
			select {
			case <-time.After(a.takes):
				return a.err
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		o.ended = time.Since(start)
		o.stats = r.Stats()
		if cfg.Budget != nil {
			o.left = cfg.Budget.Stats().Left
		}
		o.result = "success"
		o.kind = behavior.Read(err).Kind
		if e, ok := err.(*retry.Error); ok {
			require.ErrorIs(t, err, e.Err)
			reason := e.Cause
			for _, known := range []error{retry.ErrExhausted, retry.ErrOverBudget, context.Canceled, context.DeadlineExceeded} {
				if errors.Is(e.Cause, known) {
					reason = known
				}
			}
			o.result = fmt.Sprintf("gave up after %d in %d: %v: %q", e.Attempts, e.RetryingFor, reason, textOf(e.Err))
		} else if err != nil {
			o.result = textOf(err)
		}
	})
	return o, err
}

// repeatingDelays is a user's own BackOff: it has more or fewer delays than there are Attempts.
type repeatingDelays struct {
	all  []time.Duration
	next int
}

func (b *repeatingDelays) Reset() { b.next = 0 }

func (b *repeatingDelays) NextBackOff() time.Duration {
	if len(b.all) == 0 {
		return backoff.Stop
	}
	b.next++
	return at(b.all, b.next-1)
}

func checkAgainstModel(t *testing.T, data []byte) (checked bool) {
	s := scenarioOf(data)
	want, certain := s.model()
	if !certain {
		return false
	}
	got, err := s.run(t)
	for _, each := range want.finds {
		require.ErrorIs(t, err, each, "%q: %+v", data, s)
	}
	want.finds = nil
	require.Equal(t, want, got, "%q: %+v", data, s)
	return true
}

func TestRetrierMatchesItsModel(t *testing.T) {
	checked := 0
	for range 5000 {
		data := make([]byte, 60)
		for i := range data {
			data[i] = byte(rand.Uint32())
		}
		if checkAgainstModel(t, data) {
			checked++
		}
	}
	require.Greater(t, checked, 2500)
}

func FuzzRetrier(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) { checkAgainstModel(t, data) })
}
