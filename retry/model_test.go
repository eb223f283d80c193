package retry_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/retry"
)

// A scenario is one call of Do and what happens to it. Its times are a few
// nanoseconds: RetryAfter then has no room for jitter, and all is exact.
type scenario struct {
	attempts       int
	delays         []time.Duration // the last one repeats; none: no retry
	maxElapsed     time.Duration
	attemptTimeout time.Duration
	maxRetryAfter  time.Duration
	history        int
	budget         int           // retries it allows, times ten; negative: there is none
	deadline       time.Duration // of ctx; 0: none
	cancel         time.Duration // of ctx; 0: never
	answers        []answer      // the last one repeats
}

type answer struct {
	err   error
	takes time.Duration
	heeds bool // it returns when its ctx ends
}

// An outcome is all that can be seen of a call.
type outcome struct {
	story  []string // attempts and hooks, with their times
	ended  time.Duration
	result string // what Do returned
	stats  retry.Stats
	spent  int64 // of the budget
}

var (
	errFinal    = errors.New("final")
	errModelled = []error{
		nil, errDown, errDown, errDown, retry.Permanent(errFinal), answeringError{},
		answeringError{true, 3}, answeringError{true, 9},
	}
)

// scenarioOf turns any bytes into a scenario.
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
		maxElapsed:     optional(60),
		attemptTimeout: optional(8),
		maxRetryAfter:  optional(10),
		history:        next(4),
		budget:         next(3) - 1,
		deadline:       optional(60),
		cancel:         optional(60),
	}
	for range next(4) {
		s.delays = append(s.delays, time.Duration(next(8)))
	}
	for range 1 + next(8) {
		s.answers = append(s.answers, answer{errModelled[next(len(errModelled))], time.Duration(next(10)), next(2) == 0})
	}
	// What has no limit must be ended, and take time until it is.
	if s.attempts < 0 {
		if s.cancel == 0 {
			s.cancel = 59
		}
		s.answers[len(s.answers)-1].takes++
	}
	return s
}

func at[T any](list []T, i int) T { return list[min(i, len(list)-1)] }

const never = time.Duration(math.MaxInt64)

// model says what is to come of s. It is false where two things happen at the
// same instant, in an order that nobody promises.
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

	var errs []error
	var now, from time.Duration
	from = -1
	if s.maxElapsed > 0 {
		from = 0
	}
	for n := 1; ; n++ {
		a := at(s.answers, n-1)
		tell(now, "attempt %d", n)
		timeout := never
		if s.attemptTimeout > 0 {
			timeout = now + s.attemptTimeout
		}
		ctxEnds := min(timeout, end)
		err := a.err
		done := now + a.takes
		if a.heeds && done >= ctxEnds {
			if timeout == end || done == ctxEnds {
				return o, false
			}
			done, err = ctxEnds, why
			if timeout < end {
				err = context.DeadlineExceeded
			}
		} else if done == end {
			return o, false
		}
		now = done
		if n > 1 {
			o.stats.Retried++
			o.spent++
		}
		if from < 0 {
			from = now
		}
		o.ended = now
		if err == nil {
			o.result = "success"
			if n > 1 {
				o.stats.Recovered++
				o.spent--
			}
			return o, true
		}
		o.stats.Failed++
		errs = append(errs, err)
		giveUp := func(reason error) (outcome, bool) {
			switch reason {
			case retry.ErrExhausted:
				o.stats.Exhausted++
			case retry.ErrBudget:
				o.stats.Refused++
			}
			history := s.history
			if history == 0 {
				history = 8
			}
			o.result = fmt.Sprintf("gave up after %d in %d: %v: %v", n, now-from, reason, errs[max(0, len(errs)-history):])
			return o, true
		}
		switch {
		case errors.Is(err, errFinal):
			o.result = errFinal.Error()
			return o, true
		case now >= end:
			if n == 1 && errors.Is(err, why) {
				o.result = err.Error()
				return o, true
			}
			return giveUp(why)
		case err == error(answeringError{}):
			o.result = err.Error()
			return o, true
		case n >= attempts || len(s.delays) == 0:
			return giveUp(retry.ErrExhausted)
		}
		delay := at(s.delays, n-1)
		if e, ok := err.(answeringError); ok {
			if e.after > maxRetryAfter {
				return giveUp(retry.ErrExhausted)
			}
			delay = max(delay, e.after)
		}
		switch {
		case s.maxElapsed > 0 && now+delay >= s.maxElapsed:
			return giveUp(retry.ErrExhausted)
		case now+delay >= deadline:
			return giveUp(context.DeadlineExceeded)
		case s.budget >= 0 && o.spent >= int64(s.budget)*10:
			return giveUp(retry.ErrBudget)
		}
		o.stats.Failed--
		tell(now, "hook %d %v in %d after %d", n, err, delay, now-from)
		if now+delay == cancel {
			return o, false
		}
		if now+delay > cancel {
			now, o.ended = cancel, cancel
			o.stats.Failed++
			return giveUp(context.Canceled)
		}
		now += delay
	}
}

// run does what s says.
func (s scenario) run(t *testing.T) (o outcome) {
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
		start := time.Now()
		tell := func(format string, args ...any) {
			o.story = append(o.story, fmt.Sprintf("%d: ", time.Since(start))+fmt.Sprintf(format, args...))
		}
		cfg := retry.Config{
			Attempts:       s.attempts,
			MaxElapsed:     s.maxElapsed,
			AttemptTimeout: s.attemptTimeout,
			MaxRetryAfter:  s.maxRetryAfter,
			History:        s.history,
			Backoff:        func() backoff.BackOff { return &repeatingDelays{all: s.delays} },
			OnRetry: func(_ context.Context, a retry.Attempt) {
				tell("hook %d %v in %d after %d", a.Number, a.Err, a.Delay, a.Elapsed)
			},
		}
		if s.budget >= 0 {
			cfg.Budget = retry.NewBudget(retry.BudgetConfig{Ratio: -1, PerSecond: []int{-1, 1}[s.budget]})
		}
		r := retry.New(cfg)
		calls := 0
		err := r.Do(ctx, func(ctx context.Context) error {
			calls++
			n, _ := retry.AttemptFrom(ctx)
			require.Equal(t, calls, n)
			tell("attempt %d", n)
			a := at(s.answers, n-1)
			if !a.heeds {
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
			o.spent = cfg.Budget.Stats().Charged
		}
		o.result = "success"
		if e, ok := err.(*retry.Error); ok {
			require.ErrorIs(t, err, e.Errs[len(e.Errs)-1])
			reason := e.Reason
			for _, known := range []error{retry.ErrExhausted, retry.ErrBudget, context.Canceled, context.DeadlineExceeded} {
				if errors.Is(e.Reason, known) {
					reason = known
				}
			}
			o.result = fmt.Sprintf("gave up after %d in %d: %v: %v", e.Attempts, e.Elapsed, reason, e.Errs)
		} else if err != nil {
			o.result = err.Error()
		}
	})
	return o
}

// repeatingDelays is a BackOff of a user's own: Attempts has nothing to do with
// how many delays there are.
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
	got := s.run(t)
	if s.budget < 0 {
		want.spent = 0
	}
	require.Equal(t, want, got, "%q: %+v", data, s)
	return true
}

func TestRetrierIsAsItsModel(t *testing.T) {
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
