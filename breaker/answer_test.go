package breaker_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/linger"
)

// A rpc is a stream that is open before the server has answered, like that of gRPC.
type rpc struct {
	context.Context
	*linger.Work
	onAnswer []func()
}

func (r *rpc) OnAnswer(f func()) { r.onAnswer = append(r.onAnswer, f) }

func (r *rpc) answer() {
	for _, f := range r.onAnswer {
		f()
	}
}

// openRPC makes a call whose stream is open when the call returns.
func openRPC(t *testing.T, b *breaker.Breaker) *rpc {
	t.Helper()
	r := &rpc{Context: t.Context()}
	ctx, work := linger.Begin(r)
	r.Work = work
	require.NoError(t, b.Do(ctx, func(context.Context) error { work.Continue(); return nil }))
	return r
}

func TestUnansweredStreamHasNoResult(t *testing.T) {
	b := breaker.New(breaker.Config{})
	r := openRPC(t, b)
	require.Equal(t, []int64{0, 0, 0}, results(b))
	r.answer()
	require.Equal(t, []int64{1, 0, 0}, results(b))
	r.answer()
	require.Equal(t, []int64{1, 0, 0}, results(b), "an answer counts once")
	r.End(errDown)
	require.Equal(t, []int64{1, 1, 0}, results(b))
	require.Equal(t, breaker.Counts{Failed: 1, ConsecutiveFailures: 1}, b.Stats().Window)

	for _, c := range []struct {
		name string
		end  error
		want []int64
	}{
		{"fails", errDown, []int64{0, 1, 0}},
		{"ends well", nil, []int64{1, 0, 0}},
		{"canceled", context.Canceled, []int64{0, 0, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := breaker.New(breaker.Config{})
			r := openRPC(t, b)
			r.End(c.end)
			require.Equal(t, c.want, results(b))
			r.answer()
			require.Equal(t, c.want, results(b), "an answer after the end counts for nothing")
		})
	}
}

// results returns the numbers of calls that succeeded, failed and were ignored.
func results(b *breaker.Breaker) []int64 {
	s := b.Stats()
	return []int64{s.Succeeded, s.Failed, s.Ignored}
}

// Streams that fail before an answer are failed calls. A stream in progress does not end their run, but the answer
// of a stream does.
func TestStreamsFailBeforeAnswer(t *testing.T) {
	b := breaker.New(breaker.Config{ConsecutiveFailures: 3})
	silent := openRPC(t, b)
	for range 2 {
		for range 2 {
			openRPC(t, b).End(errDown)
		}
		require.Equal(t, breaker.Closed, b.State())
		openRPC(t, b).answer() // the stream continues
	}
	for range 3 {
		openRPC(t, b).End(errDown)
	}
	require.Equal(t, breaker.Open, b.State())
	silent.answer()
	require.Equal(t, breaker.Open, b.State(), "the call started before the transition")
}

// A stream that ends well ends the run of broken streams, even if the server has not answered.
func TestStreamEndsWellBetweenBrokenStreams(t *testing.T) {
	for _, answers := range []bool{true, false} {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 2})
		for range 2 {
			broken := openRPC(t, b)
			broken.answer()
			broken.End(errDown)
			require.Equal(t, breaker.Closed, b.State())
			r := openRPC(t, b)
			if answers {
				r.answer()
			}
			r.End(nil)
		}
	}
}

// A subscription without events works: its call counts when the stream has continued for a Window.
func TestQuietStreamCountsAfterWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 2, Window: 10 * time.Second})
		for range 5 {
			r := openRPC(t, b)
			time.Sleep(11 * time.Second)
			r.End(errDown)
			require.Equal(t, breaker.Closed, b.State())
		}
		require.Equal(t, []int64{5, 5, 0}, results(b))
		for range 2 {
			r := openRPC(t, b)
			time.Sleep(9 * time.Second)
			r.End(errDown)
		}
		require.Equal(t, breaker.Open, b.State())
	})
}

// The stream of a probe need not be answered: the probe succeeds when its stream has continued for OpenFor.
func TestQuietStreamOfProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second})
		b.Trip(errDown, time.Second)
		time.Sleep(time.Second)
		openRPC(t, b)
		require.Equal(t, breaker.HalfOpen, b.State())
		time.Sleep(time.Second)
		require.Equal(t, breaker.Closed, b.State())
		b.Trip(errDown, time.Second)
		time.Sleep(time.Second)
		openRPC(t, b).End(errDown)
		require.Equal(t, breaker.Open, b.State())
	})
}
