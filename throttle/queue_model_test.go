package throttle_test

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

// A bucket is the model of a limiter with waiting calls: a token bucket with a queue in
// front of it. The head of the queue goes as soon as its tokens are there.
type bucket struct {
	token time.Duration // that one takes to refill
	burst int
	now   time.Time
	full  time.Time // when the burst is, if nobody takes any
	queue []*caller
	last  time.Time // when one went
}

type caller struct {
	cost   int
	cancel context.CancelFunc
	due    time.Time // when it goes in the model; zero: it gives up
	went   time.Time // when it went
}

// due returns when n tokens are there, or were.
func (b *bucket) due(n int) time.Time { return b.full.Add(time.Duration(n-b.burst) * b.token) }

func (b *bucket) take(n int) {
	if b.full.Before(b.now) {
		b.full = b.now
	}
	b.full = b.full.Add(time.Duration(n) * b.token)
}

// advance lets the callers go whose tokens are there by then.
func (b *bucket) advance(then time.Time) {
	for len(b.queue) > 0 && !b.due(b.queue[0].cost).After(then) {
		first := b.queue[0]
		if due := b.due(first.cost); due.After(b.now) {
			b.now = due
		}
		first.due, b.last = b.now, b.now
		b.take(first.cost)
		b.queue = b.queue[1:]
	}
	b.now = then
}

func (b *bucket) refund(n int) {
	if owed := b.full.Sub(b.now); owed > 0 {
		b.full = b.full.Add(-min(time.Duration(n)*b.token, owed))
	}
}

func (b *bucket) set(token time.Duration, burst int) {
	if owed := b.full.Sub(b.now); owed > 0 {
		b.full = b.now.Add(time.Duration(float64(owed) * float64(token) / float64(b.token)))
	}
	b.token, b.burst = token, burst
}

// close reports whether rounding may decide if a call goes before this moment or after
// it: the head of the queue, or a call that comes now for n tokens.
func (b *bucket) close(n int, off time.Duration) bool {
	if len(b.queue) > 0 {
		n = b.queue[0].cost
	}
	return off > 0 && (b.now.Sub(b.last) <= off || b.due(n).Sub(b.now).Abs() <= off)
}

// playQueue makes calls that wait, some of which give up, calls that do not wait,
// refunds and changes of the rate. It compares the time at which each call goes with
// the model.
func playQueue(t *testing.T, choose interface{ IntN(n int) int }, events int) {
	limits := []struct {
		token time.Duration
		burst int
	}{{time.Millisecond, 4}, {time.Millisecond, 9}, {4 * time.Millisecond, 6}, {250 * time.Microsecond, 5}, {time.Minute, 7}}
	limit := limits[choose.IntN(len(limits))]
	type cost struct{}
	l := throttle.New(throttle.Config{
		Rate: every(limit.token), Burst: limit.burst, MaxWait: -1,
		Cost: func(ctx context.Context) int { return ctx.Value(cost{}).(int) },
	})
	start := time.Now()
	model := &bucket{token: limit.token, burst: limit.burst, now: start, full: start}
	var off float64 // how many tokens model and limiter may differ by: each change of the rate rounds
	var most time.Duration
	var all []*caller
	var calls sync.WaitGroup
	for event := range events {
		// The 100 ns keep all events apart from each other, and from what follows of them.
		time.Sleep(time.Duration(choose.IntN(60))*50*time.Microsecond + 100)
		model.advance(time.Now())
		kind, n := choose.IntN(8), 1+choose.IntN(4)
		if model.close(n, time.Duration(off*float64(model.token))) {
			continue
		}
		switch kind {
		case 0: // gives up
			if len(model.queue) > 0 {
				i := choose.IntN(len(model.queue))
				model.queue[i].cancel()
				model.queue = slices.Concat(model.queue[:i], model.queue[i+1:])
			}
		case 1:
			free := len(model.queue) == 0 && !model.due(n).After(model.now)
			require.Equal(t, free, l.Take(n).OK, "event %d", event)
			if free {
				model.take(n)
			}
		case 2:
			l.Refund(2 * n)
			model.refund(2 * n)
		case 3:
			next := limits[choose.IntN(len(limits))]
			require.NoError(t, setLimit(l, throttle.Limit{Rate: every(next.token), Burst: next.burst}))
			off += 3/float64(model.token) + 3/float64(next.token) // nanoseconds
			most = max(most, model.token, next.token)
			model.set(next.token, next.burst)
		default:
			c := &caller{cost: n}
			var ctx context.Context
			ctx, c.cancel = context.WithCancel(context.WithValue(t.Context(), cost{}, n))
			defer c.cancel()
			all, model.queue = append(all, c), append(model.queue, c)
			calls.Go(func() {
				if l.Wait(ctx) == nil {
					c.went = time.Now()
				}
			})
		}
		model.advance(time.Now())
		synctest.Wait()
		require.Equal(t, len(model.queue), l.Stats().Queued, "event %d", event)
	}
	calls.Wait()
	model.advance(time.Now().Add(most))
	for i, c := range all {
		require.Equal(t, c.due.IsZero(), c.went.IsZero(), "caller %d", i)
		if !c.went.IsZero() {
			require.InDelta(t, c.due.Sub(start), c.went.Sub(start), off*float64(most), "caller %d", i)
		}
	}
}

func TestWaitingIsAQueueInFrontOfABucket(t *testing.T) {
	for seed := range uint64(500) {
		synctest.Test(t, func(t *testing.T) { playQueue(t, rand.New(rand.NewPCG(seed, 6)), 60) })
	}
}

// FuzzWaiting plays a script: the limit, and then events: a pause in 50 us, a kind,
// a number of tokens less 1, and what belongs to it.
func FuzzWaiting(f *testing.F) {
	const giveUp, allow, refund, set, wait = 0, 1, 2, 3, 4
	const fours, nines, slow, fast, minutes = 0, 1, 2, 3, 4 // limits
	play := func(limit uint16, events ...[]uint16) {
		var b []byte
		for _, choice := range append([]uint16{limit}, slices.Concat(events...)...) {
			b = binary.LittleEndian.AppendUint16(b, choice)
		}
		f.Add(b)
	}
	event := func(e ...uint16) []uint16 { return e }
	repeat := func(n int, e ...uint16) []uint16 { return slices.Repeat(e, n) }
	for _, limit := range []uint16{fours, nines, slow, fast, minutes} {
		play(limit, repeat(9, 1, wait, 3), repeat(9, 20, wait, 0))                                         // a line
		play(limit, repeat(9, 0, wait, 2), event(5, giveUp, 0, 0, 5, giveUp, 0, 3, 5, giveUp, 0, 5))       // the first, one in the middle, the last
		play(limit, repeat(6, 0, wait, 3), repeat(3, 9, refund, 3), repeat(4, 9, allow, 0))                // tokens for who waits
		play(limit, repeat(7, 0, wait, 3), event(9, set, 0, fast, 3, set, 0, slow), repeat(3, 9, wait, 0)) // a new pace for who waits
		play(limit, repeat(5, 0, wait, 3), event(9, set, 0, minutes, 9, giveUp, 0, 0, 9, set, 0, nines))   // hardly any, and enough
		play(limit, repeat(30, 7, wait, 1, 0, giveUp, 0, 0, 3, allow, 0, 2, wait, 3, 1, refund, 0))        // all of it
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		synctest.Test(t, func(t *testing.T) { playQueue(t, (*script)(&b), min(len(b)/6+1, 200)) })
	})
}
