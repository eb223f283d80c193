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
