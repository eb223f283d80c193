package bulkhead_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 7)) }

// counted watches a million calls.
type counted struct {
	b        *bulkhead.Bulkhead
	inFlight atomic.Int64
	most     atomic.Int64
	ran      atomic.Int64
	refused  atomic.Int64
	ended    atomic.Int64 // before they came in
}

func (c *counted) in(n int) {
	now := c.inFlight.Add(int64(n))
	for most := c.most.Load(); now > most && !c.most.CompareAndSwap(most, now); most = c.most.Load() {
	}
	c.ran.Add(1)
}

func (c *counted) out(n int) { c.inFlight.Add(-int64(n)) }

func (c *counted) result(t *testing.T, err error) {
	switch {
	case err == nil:
	case errors.Is(err, bulkhead.ErrFull):
		var full *bulkhead.FullError
		if !errors.As(err, &full) || full.Queued > queueOfStress {
			t.Errorf("refused with %v", err)
		}
		c.refused.Add(1)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		c.ended.Add(1)
	default:
		t.Errorf("unexpected: %v", err)
	}
}

const (
	limitOfStress = 8
	queueOfStress = 12
)

func (c *counted) one(t *testing.T, rng *rand.Rand, resize bool) {
	ctx := context.Background()
	level := rng.IntN(3)
	if level > 0 {
		ctx = atLevel(ctx, level)
	}
	ctx = ofShare(ctx, []string{"a", "b", "c", "d"}[rng.IntN(4)])
	n := 1
	if rng.IntN(16) == 0 {
		n = 1 + rng.IntN(3)
		ctx = costing(ctx, n)
	}
	cancel := context.CancelFunc(func() {})
	switch rng.IntN(8) {
	case 0:
		ctx, cancel = context.WithCancel(ctx)
		if rng.IntN(2) == 0 {
			go cancel()
		}
	case 1:
		ctx, cancel = context.WithTimeout(ctx, time.Duration(rng.IntN(100))*time.Microsecond)
	}
	defer cancel()
	work := func(context.Context) error {
		c.in(n)
		defer c.out(n)
		if rng.IntN(4) == 0 {
			runtime.Gosched()
		}
		return nil
	}

	switch op := rng.IntN(32); {
	case op == 0 && resize:
		if err := c.b.Update(func(c *bulkhead.Config) {
			c.Limit, c.MaxWait = 4+rng.IntN(limitOfStress-3), time.Duration(1+rng.IntN(1000))*time.Microsecond
		}); err != nil {
			t.Error(err)
		}
	case op == 0:
		d := c.b.Describe()
		_, _ = d.Health(ctx), d.InUse()
	case op <= 2:
		done, err := c.b.Begin(ctx)
		if err == nil {
			c.in(n)
			c.out(n)
			done(nil)
		}
		c.result(t, err)
	case op <= 8:
		done, err := c.b.Begin(ctx)
		if err == nil {
			c.in(n)
			runtime.Gosched()
			c.out(n)
			done(nil)
			go done(nil) // does nothing
		}
		c.result(t, err)
	case op == 9:
		func() {
			defer func() { _ = recover() }()
			c.result(t, c.b.Do(ctx, func(context.Context) error {
				c.in(n)
				defer c.out(n)
				panic("boom")
			}))
		}()
	default:
		c.result(t, c.b.Do(ctx, work))
	}
}

// A million mixed operations: never more than Limit in flight nor more than Queue
// waiting, no slot lost and none made.
func TestMillionMixedOperations(t *testing.T) {
	for _, test := range []struct{ resize, shared bool }{{false, false}, {true, false}, {true, true}} {
		t.Run(fmt.Sprintf("%+v", test), func(t *testing.T) {
			cfg := bulkhead.Config{
				Limit: limitOfStress, Queue: queueOfStress, MaxWait: time.Millisecond,
				Levels: 3, Priority: levelOf, Cost: costOf,
			}
			if test.shared {
				cfg.Share = shareOf
			}
			b := bulkhead.New(cfg)
			b.Observe(func(context.Context, bulkhead.Event) {})
			c := &counted{b: b}
			stop := make(chan struct{})
			var watcher, workers sync.WaitGroup
			watcher.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						s := b.Stats()
						if waiting := s.Queued[0] + s.Queued[1] + s.Queued[2]; waiting > queueOfStress || s.InFlight > limitOfStress {
							t.Errorf("%d waiting, %d in flight", waiting, s.InFlight)
						}
						time.Sleep(100 * time.Microsecond)
					}
				}
			})
			const goroutines = 25
			each := 20_000
			if testing.Short() {
				each = 2000
			}
			for i := range goroutines {
				workers.Go(func() {
					rng := newRand(uint64(i))
					for range each {
						c.one(t, rng, test.resize)
					}
				})
			}
			workers.Wait()
			close(stop)
			watcher.Wait()

			require.NoError(t, setLimit(b, limitOfStress))
			require.LessOrEqual(t, c.most.Load(), int64(limitOfStress))
			require.Zero(t, c.inFlight.Load())
			s := b.Stats()
			require.Equal(t, c.ran.Load(), s.Admitted)
			require.Equal(t, c.refused.Load(), s.Refused)
			t.Logf("ran %d, ended before %d, refused %v, waited %d", c.ran.Load(), c.ended.Load(), s.Refusals, s.Waited)
			require.Zero(t, bulkhead.Shares(b))
			requireIdle(t, b)
		})
	}
}
