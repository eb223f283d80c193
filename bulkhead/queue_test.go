package bulkhead_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

type levelKey struct{}

func atLevel(ctx context.Context, level int) context.Context {
	return context.WithValue(ctx, levelKey{}, level)
}

func levelOf(ctx context.Context) int {
	level, _ := ctx.Value(levelKey{}).(int)
	return level
}

// callers start calls in a bubble, one after the other, and note in which order
// they run. Each runs until it is told to end.
type callers struct {
	t    *testing.T
	b    *bulkhead.Bulkhead
	mu   sync.Mutex
	ran  []string
	errs map[string]error
	end  map[string]chan struct{}
}

func newCallers(t *testing.T, b *bulkhead.Bulkhead) *callers {
	return &callers{t: t, b: b, errs: map[string]error{}, end: map[string]chan struct{}{}}
}

func (c *callers) start(ctx context.Context, name string) {
	end := make(chan struct{})
	c.end[name] = end
	go func() {
		err := c.b.Do(ctx, func(context.Context) error {
			c.mu.Lock()
			c.ran = append(c.ran, name)
			c.mu.Unlock()
			<-end
			return nil
		})
		c.mu.Lock()
		defer c.mu.Unlock()
		c.errs[name] = err
	}()
	synctest.Wait()
}

func (c *callers) finish(names ...string) {
	for _, name := range names {
		close(c.end[name])
		delete(c.end, name)
		synctest.Wait()
	}
}

func (c *callers) finishAll() {
	for len(c.end) > 0 {
		for _, name := range slices.Clone(c.ran) {
			if c.end[name] != nil {
				c.finish(name)
			}
		}
		for name := range c.end { // refused
			if c.errs[name] != nil {
				delete(c.end, name)
			}
		}
	}
	requireIdle(c.t, c.b)
}

func (c *callers) refusal(name string) bulkhead.Reason {
	c.t.Helper()
	var full *bulkhead.FullError
	require.ErrorAs(c.t, c.errs[name], &full, name)
	return full.Reason
}

func TestMoreImportantCallsGoFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 9, Levels: 3, Priority: levelOf}))
		c.start(t.Context(), "running")
		for i, level := range []int{2, 1, 0, 99, 1, -5} { // 99 is clamped to 2, -5 to 0
			c.start(atLevel(t.Context(), level), fmt.Sprintf("%d at %d", i, level))
		}
		require.Equal(t, []int{2, 2, 2}, c.b.Stats().Queued)
		c.finishAll()
		require.Equal(t, []string{"running", "2 at 0", "5 at -5", "1 at 1", "4 at 1", "0 at 2", "3 at 99"}, c.ran)
	})
}

func TestImportantCallDisplacesInFullQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 3, Levels: 3, Priority: levelOf}))
		c.start(t.Context(), "running")
		c.start(atLevel(t.Context(), 2), "old low")
		time.Sleep(time.Second)
		c.start(atLevel(t.Context(), 2), "new low")
		c.start(atLevel(t.Context(), 1), "middle")
		time.Sleep(time.Second)

		c.start(atLevel(t.Context(), 2), "another low")
		require.Equal(t, bulkhead.QueueFull, c.refusal("another low"))
		c.start(atLevel(t.Context(), 0), "high")
		require.Equal(t, bulkhead.Displaced, c.refusal("new low"))
		require.ErrorIs(t, c.errs["new low"], bulkhead.ErrFull)
		var full *bulkhead.FullError
		require.ErrorAs(t, c.errs["new low"], &full)
		require.Equal(t, time.Second, full.Waited)
		c.start(atLevel(t.Context(), 1), "another middle")
		require.Equal(t, bulkhead.Displaced, c.refusal("old low"))
		c.start(atLevel(t.Context(), 1), "one middle too many")
		require.Equal(t, bulkhead.QueueFull, c.refusal("one middle too many"))
		c.start(atLevel(t.Context(), 0), "another high")
		require.Equal(t, bulkhead.Displaced, c.refusal("another middle"))

		c.finishAll()
		require.Equal(t, []string{"running", "high", "another high", "middle"}, c.ran)
	})
}

// Slots are kept for the first until there are enough: calls that cost less wait behind it, also
// those that came later and those of other shares.
func TestCostlyCallIsNotPassed(t *testing.T) {
	for name, share := range map[string]func(context.Context) string{"one share": nil, "shares": shareOf} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 4, Cost: costOf, Share: share, MaxWait: -1, Queue: 50}))
				for i := range 4 {
					c.start(ofShare(t.Context(), "a"), fmt.Sprint("light ", i))
				}
				c.start(costing(ofShare(t.Context(), "a"), 3), "costly")
				c.finish("light 0")
				c.start(ofShare(t.Context(), "b"), "behind")
				c.finish("light 1")
				require.Len(t, c.ran, 4)
				require.Equal(t, 2, c.b.Stats().InFlight)
				c.finish("light 2")
				require.Equal(t, []string{"costly"}, c.ran[4:])
				require.Equal(t, 4, c.b.Stats().InFlight)
				c.finish("light 3")
				require.Equal(t, []string{"costly", "behind"}, c.ran[4:])
				c.finishAll()
			})
		})
	}
}

// A more important call takes free slots that are kept for a less important one.
func TestImportantCallPassesCostlyOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 3, Cost: costOf, MaxWait: -1, Levels: 2, Priority: levelOf}))
		low := atLevel(t.Context(), 1)
		c.start(costing(low, 2), "running")
		c.start(costing(low, 2), "costly")
		c.start(low, "behind")
		c.start(t.Context(), "high")
		require.Equal(t, []string{"running", "high"}, c.ran)
		c.finish("running")
		require.Equal(t, []string{"running", "high", "costly"}, c.ran)
		c.finishAll()
		require.Equal(t, "behind", c.ran[3])
	})
}

func TestTooCostlyIsRefusedImmediately(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{
		Name: "x", Limit: 4, Cost: costOf, MaxWait: -1, Queue: 5, Levels: 2, Priority: levelOf,
	})
	err := b.Do(costing(t.Context(), 5), nothing)
	require.ErrorIs(t, err, bulkhead.ErrFull)
	require.EqualError(t, err, "bulkhead: x: full (too_costly): 5 slots, limit 4")
	var full *bulkhead.FullError
	require.ErrorAs(t, err, &full)
	require.False(t, full.Retryable())
	require.NoError(t, b.Do(costing(t.Context(), 4), nothing))
	require.NoError(t, b.Do(atLevel(costing(t.Context(), 4), 1), nothing))
	defer hold(t, b)()
	err = b.Do(costing(t.Context(), int(^uint(0)>>1)), nothing)
	require.ErrorContains(t, err, "too_costly")
}

func TestRefusalText(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Name: "users", Limit: 1, MaxWait: -1, Queue: 1})
		defer hold(t, b)()
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errors.New("client gone"))
		defer cancel()
		require.EqualError(t, b.Do(ctx, nothing),
			"bulkhead: users: full (context_ended): 1 of 1 in flight, 0 waiting, waited 1s: "+
				"context deadline exceeded: client gone")
	})
}

func TestRefusalsMatchTheirErrors(t *testing.T) {
	for reason, want := range map[bulkhead.Reason]bool{bulkhead.DeadlineTooClose: true, bulkhead.WaitTooLong: false} {
		err := &bulkhead.FullError{Reason: reason}
		require.ErrorIs(t, err, bulkhead.ErrFull)
		require.Equal(t, want, errors.Is(err, context.DeadlineExceeded), reason)
		require.NotErrorIs(t, err, context.Canceled)
		require.True(t, err.Retryable())
	}
}

// A growing ctx is the ctx of a call whose limit may grow.
type growing struct {
	context.Context
	limit int
}

func (g growing) MaxLimit() int { return g.limit }

func TestTooCostlyIsRetryableIfLimitMayGrow(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 2, Cost: costOf})
	for limit, want := range map[int]bool{3: false, 4: true, 5: true} {
		err := b.Do(growing{costing(t.Context(), 4), limit}, nothing)
		full, _ := errors.AsType[*bulkhead.FullError](err)
		require.Equal(t, bulkhead.TooCostly, full.Reason)
		require.Equal(t, want, full.Retryable(), limit)
	}
}
