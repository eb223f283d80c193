package behavior_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/behavior"
)

// plain says nothing; the others say one thing each. Those with an inner error say it
// of what they wrap.
var errPlain = errors.New("plain")

type says struct {
	error
	inner error
}

func (s says) Unwrap() error { return s.inner }

type refused struct {
	says
	is bool
}

func (r refused) Refused() bool { return r.is }

type answered struct {
	says
	is bool
}

func (a answered) Answered() bool { return a.is }

type retryable struct {
	says
	is bool
}

func (r retryable) Retryable() bool { return r.is }

type after struct {
	says
	d time.Duration
}

func (a after) RetryAfter() time.Duration { return a.d }

type throttled struct{ says }

func (throttled) Throttled() bool { return true }

func of(inner error) says { return says{errPlain, inner} }

func TestRead(t *testing.T) {
	ref := refused{of(nil), true}
	ans := answered{of(nil), true}
	final := retryable{of(nil), false}
	failed := behavior.End{Kind: behavior.Failed, Retryable: true}
	for name, test := range map[string]struct {
		err  error
		want behavior.End
	}{
		"nil":         {nil, behavior.End{}},
		"plain":       {errPlain, failed},
		"refused":     {ref, behavior.End{Kind: behavior.Refused, Retryable: true}},
		"not refused": {refused{of(nil), false}, failed},
		"answered":    {ans, behavior.End{Kind: behavior.Answered}},
		"final":       {final, behavior.End{Kind: behavior.Failed}},
		"throttled":   {throttled{of(nil)}, behavior.End{Kind: behavior.Failed, Retryable: true, Throttled: true}},
		"after":       {after{of(nil), 3}, behavior.End{Kind: behavior.Failed, Retryable: true, RetryAfter: 3}},
		"after, negative": {
			after{of(nil), -3}, failed,
		},

		"an answer to be retried": {
			retryable{of(after{of(ans), 3}), true},
			behavior.End{Kind: behavior.Answered, Retryable: true, RetryAfter: 3},
		},
		"a refusal with a time is not the dependency's": {
			after{of(ref), 3},
			behavior.End{Kind: behavior.Refused, Retryable: true, RetryAfter: 3},
		},
		"a final failure with a time": {
			after{of(final), 3},
			behavior.End{Kind: behavior.Failed, RetryAfter: 3},
		},
		"a refusal that is marked as an answer stays a refusal": {
			answered{of(ref), true},
			behavior.End{Kind: behavior.Refused, Retryable: true},
		},
		"an answer that is marked as a refusal is refused": {
			refused{of(ans), true},
			behavior.End{Kind: behavior.Refused, Retryable: true},
		},
		"the outermost word stands: not refused":  {refused{of(ref), false}, failed},
		"the outermost word stands: not answered": {answered{of(ans), false}, failed},
		"the outermost word stands: retryable":    {retryable{of(final), true}, failed},
		"the outermost word stands: no time":      {after{of(after{of(nil), 3}), 0}, failed},
		"not refused leaves an answer an answer":  {refused{of(ans), false}, behavior.End{Kind: behavior.Answered}},
		"not answered leaves a refusal a refusal": {answered{of(ref), false},
			behavior.End{Kind: behavior.Refused, Retryable: true}},
		"joined: no part":  {&several{}, failed},
		"joined: only nil": {&several{[]error{nil}}, failed},
		"joined: refused, refused": {errors.Join(ref, ref),
			behavior.End{Kind: behavior.Refused, Retryable: true}},
		"joined: refused, nil": {&several{[]error{ref, nil}},
			behavior.End{Kind: behavior.Refused, Retryable: true}},
		"joined: refused, failed":                       {errors.Join(ref, errPlain), failed},
		"joined: answered, refused":                     {errors.Join(ans, ref), behavior.End{Kind: behavior.Answered}},
		"joined: answered, a failure that says nothing": {errors.Join(ans, errPlain), behavior.End{Kind: behavior.Answered}},
		"joined: a failure that says so, answered":      {errors.Join(retryable{of(nil), true}, ans), failed},
		"joined: failed, final":                         {errors.Join(errPlain, final), behavior.End{Kind: behavior.Failed}},
		"joined: failed, refused and final":             {errors.Join(errPlain, retryable{of(ref), false}), failed},
		"joined: refused and final, twice": {errors.Join(retryable{of(ref), false},
			retryable{of(ref), false}), behavior.End{Kind: behavior.Refused}},
		"joined: refused and final, refused": {errors.Join(retryable{of(ref), false}, ref),
			behavior.End{Kind: behavior.Refused}},
		"joined: an answer to be retried, refused": {errors.Join(retryable{of(ans), true}, ref),
			behavior.End{Kind: behavior.Answered, Retryable: true}},
		"joined: the longest RetryAfter counts": {
			errors.Join(errPlain, after{of(nil), 3}, after{of(nil), 5}, after{of(nil), 4}, throttled{of(nil)}),
			behavior.End{Kind: behavior.Failed, Retryable: true, RetryAfter: 5},
		},
		"joined: a RetryAfter behind a final error": {
			errors.Join(final, fmt.Errorf("b: %w", errors.Join(after{of(nil), 3}, after{of(ans), 7}))),
			behavior.End{Kind: behavior.Failed, RetryAfter: 7},
		},
		"joined: a refusal's RetryAfter does not count beside a call that was made": {
			errors.Join(after{of(ref), 5}, after{of(nil), 3}),
			behavior.End{Kind: behavior.Failed, Retryable: true, RetryAfter: 3},
		},
		"joined: the longest RetryAfter counts if all were refused": {
			errors.Join(after{of(ref), 5}, after{of(ref), 7}),
			behavior.End{Kind: behavior.Refused, Retryable: true, RetryAfter: 7},
		},
		"joined: one throttled": {
			errors.Join(errPlain, throttled{of(nil)}),
			behavior.End{Kind: behavior.Failed, Retryable: true, Throttled: true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, test.want, behavior.Read(test.err))
			if test.err != nil {
				require.Equal(t, test.want, behavior.Read(fmt.Errorf("a: %w", fmt.Errorf("b: %w", test.err))), "wrapped")
				require.Equal(t, test.want, behavior.Read(errors.Join(test.err)), "joined alone")
			}
			require.Equal(t, test.want.Kind == behavior.Refused, behavior.IsRefused(test.err))
			require.Equal(t, test.want.Kind == behavior.Answered, behavior.IsAnswered(test.err))
		})
	}
}

// several is a join that may have no parts.
type several struct{ errs []error }

func (*several) Error() string     { return "several" }
func (s *several) Unwrap() []error { return s.errs }

func TestJoinReadsTheSameHoweverItsPartsAreGrouped(t *testing.T) {
	parts := []error{
		errPlain, refused{of(nil), true}, answered{of(nil), true}, retryable{of(nil), false},
		retryable{of(refused{of(nil), true}), false}, retryable{of(answered{of(nil), true}), true},
		after{of(nil), 3}, after{of(refused{of(nil), true}), 5}, throttled{of(nil)},
	}
	r := rand.New(rand.NewPCG(1, 1))
	for range 2000 {
		r.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		n := 1 + r.IntN(len(parts))
		half := r.IntN(n)
		want := behavior.Read(errors.Join(parts[:n]...))
		require.Equal(t, want, behavior.Read(errors.Join(errors.Join(parts[:half]...), errors.Join(parts[half:n]...))))
	}
}

func TestReadUnderTheEndOfTheCaller(t *testing.T) {
	canceled, cancel := context.WithCancel(context.Background())
	cancel()
	overran, cancel := context.WithDeadline(context.Background(), time.Unix(0, 0))
	defer cancel()
	late := unnoticed{context.Background(), time.Now()}
	early := unnoticed{context.Background(), time.Now().Add(time.Hour)}
	ref, ans := refused{of(nil), true}, answered{of(nil), true}
	for name, test := range map[string]struct {
		ctx  context.Context
		err  error
		want behavior.Kind
	}{
		"lives":              {context.Background(), errPlain, behavior.Failed},
		"canceled":           {canceled, errPlain, behavior.Canceled},
		"overran":            {overran, errPlain, behavior.Overran},
		"canceled, done":     {canceled, nil, behavior.Done},
		"canceled, refused":  {canceled, ref, behavior.Refused},
		"overran, refused":   {overran, ref, behavior.Refused},
		"canceled, answered": {canceled, ans, behavior.Answered},
		"overran, answered":  {overran, ans, behavior.Answered},
		"deadline to come":   {early, errPlain, behavior.Failed},
		"unnoticed":          {late, errPlain, behavior.Overran},
		"unnoticed, done":    {late, nil, behavior.Done},
		"unnoticed, refused": {late, ref, behavior.Refused},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, test.want, behavior.ReadUnder(test.ctx, test.err).Kind)
		})
	}
}

// An unnoticed ctx has a deadline, and is not canceled when that passes: not yet.
type unnoticed struct {
	context.Context
	deadline time.Time
}

func (c unnoticed) Deadline() (time.Time, bool) { return c.deadline, true }

func TestIsTimeout(t *testing.T) {
	require.True(t, behavior.IsTimeout(fmt.Errorf("a: %w", context.DeadlineExceeded)))
	require.True(t, behavior.IsTimeout(errors.Join(errPlain, timeout{true})))
	require.True(t, behavior.IsTimeout(fmt.Errorf("a: %w", errors.Join(nil, timeout{false}, timeout{true}))),
		"one is enough")
	require.False(t, behavior.IsTimeout(errors.Join(errPlain, timeout{false})))
	require.False(t, behavior.IsTimeout(errPlain))
	require.False(t, behavior.IsTimeout(nil))
}

type timeout struct{ is bool }

func (timeout) Error() string   { return "timeout" }
func (t timeout) Timeout() bool { return t.is }
