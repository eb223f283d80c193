package bulkhead_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
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

// running returns the oldest of the calls that run.
func (c *callers) running() string {
	for _, name := range c.ran {
		if c.end[name] != nil {
			return name
		}
	}
	return ""
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

func TestOrderSaysWhichCallOfALevelIsFirst(t *testing.T) {
	for order, want := range map[bulkhead.Order][]string{
		bulkhead.FIFO:  {"a", "b", "c", "d"},
		bulkhead.LIFO:  {"a", "d", "c", "b"},
		bulkhead.CoDel: {"a", "b", "c", "d"}, // in good times
	} {
		synctest.Test(t, func(t *testing.T) {
			c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 3, Order: order}))
			for _, name := range []string{"a", "b", "c", "d"} {
				c.start(t.Context(), name)
			}
			c.finishAll()
			require.Equal(t, want, c.ran)
		})
	}
}

// By LIFO, the oldest is served last: it makes room, and not the newest.
func TestAFullQueueDropsTheCallThatIsServedLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{
			Limit: 1, MaxWait: -1, Queue: 3, Order: bulkhead.LIFO, Levels: 2, Priority: levelOf,
		}))
		c.start(t.Context(), "running")
		c.start(atLevel(t.Context(), 1), "old low")
		c.start(atLevel(t.Context(), 1), "new low")
		c.start(t.Context(), "old high")
		c.start(atLevel(t.Context(), 1), "newer low")
		require.Equal(t, bulkhead.Displaced, c.refusal("old low"))
		c.start(t.Context(), "high")
		require.Equal(t, bulkhead.Displaced, c.refusal("new low"))
		c.start(t.Context(), "new high")
		require.Equal(t, bulkhead.Displaced, c.refusal("newer low"))
		c.start(t.Context(), "newer high")
		require.Equal(t, bulkhead.Displaced, c.refusal("old high"))
		c.start(atLevel(t.Context(), 1), "another low")
		require.Equal(t, bulkhead.QueueFull, c.refusal("another low"), "it would be served last")
		c.finishAll()
		require.Equal(t, []string{"running", "newer high", "new high", "high"}, c.ran)
	})
}

// By LIFO, each newer call is first, and would take the next slot: before there are
// enough for a costly one.
func TestACostlyCallDoesNotStarveUnderLIFO(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 4, Cost: costOf, MaxWait: -1, Queue: 3, Order: bulkhead.LIFO}))
		for i := range 4 {
			c.start(t.Context(), fmt.Sprint("light ", i))
		}
		c.start(costing(t.Context(), 3), "costly")
		for i := 4; i < 20 && !slices.Contains(c.ran, "costly"); i++ {
			c.finish(c.running())
			c.start(t.Context(), fmt.Sprint("light ", i))
			require.NoError(t, c.errs["costly"])
		}
		require.Contains(t, c.ran, "costly")
		c.finishAll()
	})
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

func TestReserveKeepsSlotsForTheLevelsAbove(t *testing.T) {
	for level, want := range map[int]int{2: 5, 1: 8, 0: 10} {
		b := bulkhead.New(bulkhead.Config{Limit: 10, Levels: 3, Priority: levelOf, Reserve: []float64{0.2, 0.3}})
		got := 0
		for range 20 {
			if _, err := b.Begin(atLevel(t.Context(), level)); err == nil {
				got++
			}
		}
		require.Equal(t, want, got, "level %d", level)
	}
}

// fill takes slots at a level until it is refused, and returns how many.
func fill(t *testing.T, b *bulkhead.Bulkhead, level int) (n int) {
	t.Helper()
	for {
		done, err := b.TryBegin(atLevel(t.Context(), level))
		if err != nil {
			return n
		}
		defer done(nil)
		n++
	}
}

func TestReserveFollowsTheLimit(t *testing.T) {
	for name, cfg := range map[string]bulkhead.Config{
		"fixed":    {Limit: 10},
		"adaptive": {Adaptive: &bulkhead.AdaptiveLimit{Initial: 10}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg.Levels, cfg.Priority, cfg.Reserve = 4, levelOf, []float64{0.2, 0.3}
			b := bulkhead.New(cfg)
			for _, want := range [][5]int{{10, 10, 8, 5, 5}, {30, 30, 24, 15, 15}, {3, 3, 3, 2, 2}, {1, 1, 1, 1, 1}} {
				require.NoError(t, b.SetLimit(want[0]))
				for level := range 4 {
					require.Equal(t, want[1+level], fill(t, b, level), "limit %d, level %d", want[0], level)
				}
			}
		})
	}
}

// A level below a busy one has at least one slot that it may use.
func TestReserveLeavesASlotToEveryLevel(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 1, Levels: 2, Priority: levelOf, Reserve: []float64{1 - 1e-15}})
	for _, limit := range []int{1, 2, 1000, 1 << 29} {
		require.NoError(t, b.SetLimit(limit))
		require.Equal(t, 1, fill(t, b, 1))
	}
}

func TestLevelsHaveAReserveByDefault(t *testing.T) {
	for levels, want := range map[int][]int{2: {12, 9}, 3: {12, 10, 8}, 4: {16, 14, 12, 10}} {
		b := bulkhead.New(bulkhead.Config{Limit: want[0], Levels: levels, Priority: levelOf})
		none := bulkhead.New(bulkhead.Config{Limit: want[0], Levels: levels, Priority: levelOf, Reserve: []float64{}})
		for level := range levels {
			require.Equal(t, want[level], fill(t, b, level))
			require.Equal(t, want[0], fill(t, none, level))
		}
	}
}

func TestMoreImportantCallsPassACallThatWaitsForReservedSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{
			Limit: 10, MaxWait: -1, Queue: 9, Levels: 3, Priority: levelOf, Reserve: []float64{0.2, 0.3},
		}))
		// Five of level 2 run, and two wait although five slots are free.
		for i := range 7 {
			c.start(atLevel(t.Context(), 2), fmt.Sprint("low ", i))
		}
		require.Equal(t, 5, c.b.Stats().InFlight)
		// More important calls pass them at once.
		for i := range 3 {
			c.start(atLevel(t.Context(), 1), fmt.Sprint("middle ", i))
		}
		c.start(atLevel(t.Context(), 1), "middle 3")
		for i := range 2 {
			c.start(atLevel(t.Context(), 0), fmt.Sprint("high ", i))
		}
		require.Equal(t, 10, c.b.Stats().InFlight)
		require.Equal(t, []int{0, 1, 2}, c.b.Stats().Queued)
		// Freed slots are kept as before: it takes three until middle 3 runs.
		c.finish("low 0", "low 1")
		require.NotContains(t, c.ran, "middle 3")
		c.finish("low 2")
		require.Contains(t, c.ran, "middle 3")
		require.NotContains(t, c.ran, "low 5")
		_, err := c.b.TryBegin(atLevel(t.Context(), 2))
		require.ErrorIs(t, err, bulkhead.ErrFull)
		c.finishAll()
	})
}

func TestAFullQueueMakesRoomForAMoreImportantCall(t *testing.T) {
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

// Overload of three levels: the first is served within its reserve, and the last
// is refused first.
func TestOverloadIsRefusedFromBelow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{
			Limit: 10, Queue: 20, MaxWait: 50 * time.Millisecond,
			Levels: 3, Priority: levelOf, Reserve: []float64{0.3, 0.2},
		})
		var mu sync.Mutex
		var made, done [3]int
		var waited [3]time.Duration
		var wg sync.WaitGroup
		rng := rand.New(rand.NewPCG(1, 2))
		// 100 ms each: a capacity of 100 a second. Offered: 20, 30 and 150.
		for range 4000 {
			time.Sleep(time.Duration(rng.ExpFloat64() * float64(5*time.Millisecond)))
			level := 2
			switch x := rng.Float64(); {
			case x < 0.1:
				level = 0
			case x < 0.25:
				level = 1
			}
			made[level]++
			wg.Go(func() {
				start := time.Now()
				err := b.Do(atLevel(t.Context(), level), func(context.Context) error {
					mu.Lock()
					waited[level] = max(waited[level], time.Since(start))
					mu.Unlock()
					time.Sleep(100 * time.Millisecond)
					return nil
				})
				if err == nil {
					mu.Lock()
					done[level]++
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		require.Equal(t, made[0], done[0], "the first level is served within its reserve")
		require.Greater(t, float64(done[1]), 0.9*float64(made[1]))
		require.Less(t, float64(done[2]), 0.5*float64(made[2]))
		require.Greater(t, done[2], 0)
		requireIdle(t, b)
	})
}

func TestACostlyCallIsPassedByAsManySlotsAsTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 4, Cost: costOf, MaxWait: -1, Queue: 50}))
		for i := range 4 {
			c.start(t.Context(), fmt.Sprint("light ", i))
		}
		c.start(costing(t.Context(), 3), "costly")
		for i := 4; i < 20; i++ {
			c.start(t.Context(), fmt.Sprint("light ", i))
		}
		// As many slots as the limit has go to the calls behind it ...
		for i := range 4 {
			c.finish(fmt.Sprint("light ", i))
			require.NotContains(t, c.ran, "costly")
			require.Contains(t, c.ran, fmt.Sprint("light ", 4+i))
		}
		// ... and then slots are kept until there are three.
		c.finish("light 4", "light 5")
		require.Len(t, c.ran, 8)
		c.finish("light 6")
		require.Equal(t, "costly", c.ran[8])
		require.Equal(t, 4, c.b.Stats().InFlight)
		c.finishAll()
		require.Len(t, c.ran, 21)
	})
}

func TestANewCallPassesACostlyCallByTheSameRule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 4, Cost: costOf, MaxWait: -1, Queue: 50}))
		c.start(costing(t.Context(), 3), "running")
		c.start(costing(t.Context(), 2), "costly")
		for i := range 4 {
			name := fmt.Sprint("light ", i)
			c.start(t.Context(), name)
			require.Contains(t, c.ran, name)
			c.finish(name)
		}
		c.start(t.Context(), "one too many")
		require.NotContains(t, c.ran, "one too many")
		_, err := c.b.TryBegin(t.Context())
		require.ErrorIs(t, err, bulkhead.ErrFull)
		c.finish("running")
		require.ElementsMatch(t, []string{"costly", "one too many"}, c.ran[5:])
		c.finishAll()
	})
}

// Slots are kept for the first waiter, also after the one before it has given up or a
// newer one has arrived: otherwise costly calls would starve behind light ones.
func TestSlotsAreKeptWhenTheFirstChanges(t *testing.T) {
	for order, change := range map[bulkhead.Order]func(c *callers, cancelFirst func()){
		bulkhead.FIFO: func(_ *callers, cancelFirst func()) {
			cancelFirst()
			synctest.Wait()
		},
		bulkhead.LIFO: func(c *callers, _ func()) {
			c.start(costing(c.t.Context(), 3), "third costly")
		},
	} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCallers(t, bulkhead.New(bulkhead.Config{
					Limit: 4, Cost: costOf, MaxWait: -1, Queue: 9, Order: order, Levels: 2, Priority: levelOf, Reserve: []float64{},
				}))
				c.start(costing(t.Context(), 2), "running")
				ctx, cancel := context.WithCancel(costing(t.Context(), 3))
				defer cancel()
				c.start(ctx, "first costly")
				c.start(costing(t.Context(), 3), "second costly")
				for i := range 4 {
					name := fmt.Sprint("light ", i)
					c.start(atLevel(t.Context(), 1), name)
					c.finish(name)
				}
				c.start(atLevel(t.Context(), 1), "last light")
				require.Len(t, c.ran, 5)
				change(c, cancel)
				require.Len(t, c.ran, 5, "no call passes the new first")

				c.finish("running")
				first := map[bulkhead.Order]string{bulkhead.FIFO: "second costly", bulkhead.LIFO: "first costly"}[order]
				require.ElementsMatch(t, []string{first, "last light"}, c.ran[5:], "the count begins anew")
				c.finishAll()
			})
		})
	}
}

func TestAWaiterThatGivesUpLetsTheNextOnesPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 2, Cost: costOf, MaxWait: -1, Queue: 50}))
		c.start(t.Context(), "running")
		ctx, cancel := context.WithCancel(costing(t.Context(), 2))
		c.start(ctx, "costly")
		for i := range 2 {
			name := fmt.Sprint("light ", i)
			c.start(t.Context(), name)
			c.finish(name)
		}
		c.start(t.Context(), "behind")
		require.NotContains(t, c.ran, "behind")
		cancel()
		synctest.Wait()
		require.Equal(t, bulkhead.ContextEnded, c.refusal("costly"))
		require.Contains(t, c.ran, "behind")
		c.finishAll()
	})
}

func TestTooCostlyIsRefusedAtOnce(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Name: "x", Limit: 4, Cost: costOf, MaxWait: -1, Queue: 5, Levels: 2, Priority: levelOf, Reserve: []float64{0.25}})
	err := b.Do(costing(t.Context(), 5), nothing)
	require.ErrorIs(t, err, bulkhead.ErrFull)
	require.EqualError(t, err, "bulkhead: x: full (too costly): 5 slots at level 0, limit 4")
	var full *bulkhead.FullError
	require.ErrorAs(t, err, &full)
	require.False(t, full.Retryable())
	require.NoError(t, b.Do(costing(t.Context(), 4), nothing))
	require.NoError(t, b.Do(atLevel(costing(t.Context(), 3), 1), nothing))
	err = b.Do(atLevel(costing(t.Context(), 4), 1), nothing)
	require.ErrorContains(t, err, "too costly")
	err = b.Do(costing(t.Context(), int(^uint(0)>>1)), nothing)
	require.ErrorContains(t, err, "too costly")
	requireIdle(t, b)
}

// queueOf100 makes calls of 10 ms each, so that 100 wait when it returns.
func queueOf100(t *testing.T, b *bulkhead.Bulkhead, learn bool) {
	slow := func(context.Context) error {
		time.Sleep(10 * time.Millisecond)
		return nil
	}
	for range 100 {
		go func() { _ = b.Do(t.Context(), slow) }()
	}
	synctest.Wait()
	if learn {
		for range 20 {
			time.Sleep(10 * time.Millisecond)
			go func() { _ = b.Do(t.Context(), slow) }()
		}
		synctest.Wait()
	}
}

func TestADeadlineThatCannotBeMetIsRefusedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 200})
		queueOf100(t, b, true) // a new call waits for about a second

		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		start := time.Now()
		err := b.Do(ctx, nothing)
		var full *bulkhead.FullError
		require.ErrorAs(t, err, &full)
		require.Equal(t, bulkhead.DeadlineTooClose, full.Reason)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Zero(t, time.Since(start))

		// A deadline that may be met is tried.
		ctx, cancel = context.WithTimeout(t.Context(), 1100*time.Millisecond)
		defer cancel()
		require.NoError(t, b.Do(ctx, nothing))
		synctest.Wait()
		time.Sleep(time.Minute)
		requireIdle(t, b)
	})
}

func TestMaxWaitThatCannotBeMetIsRefusedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, Queue: 200, MaxWait: time.Second})
		queueOf100(t, b, true)
		require.Zero(t, b.Stats().Refused)
		require.NoError(t, b.SetLimit(2)) // does not change the pace
		require.NoError(t, b.SetLimit(1))
		for range 60 {
			go func() { _ = b.Do(t.Context(), nothing) }()
		}
		synctest.Wait()
		require.Positive(t, b.Stats().Refusals[bulkhead.WaitTooLong])
		require.Zero(t, b.Stats().Refusals[bulkhead.DeadlineTooClose])
		time.Sleep(time.Minute)
		requireIdle(t, b)
	})
}

// A single pause does not make a queue slow: of the last two batches of slots, the
// faster one says how long a wait is.
func TestOnePauseDoesNotMakeAQueueSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 200})
		release := hold(t, b)
		for i := range 120 {
			go func() {
				_ = b.Do(t.Context(), func(context.Context) error {
					if i == 19 {
						time.Sleep(5 * time.Second)
					}
					time.Sleep(10 * time.Millisecond)
					return nil
				})
			}()
			synctest.Wait() // they are served in this order
		}
		release()
		time.Sleep(5*time.Second + 235*time.Millisecond) // 24 slots are handed on: three batches
		synctest.Wait()
		require.Equal(t, []int{96}, b.Stats().Queued)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		require.NoError(t, b.Do(ctx, nothing), "the others need a second")
		time.Sleep(time.Minute)
		requireIdle(t, b)
	})
}

// As long as the pace of the queue is not known, or it does not go by age, any
// deadline is tried.
func TestADeadlineIsTriedWhereTheWaitIsNotKnown(t *testing.T) {
	for name, tc := range map[string]struct {
		order bulkhead.Order
		learn bool
	}{
		"cold": {bulkhead.FIFO, false},
		"LIFO": {bulkhead.LIFO, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 200, Order: tc.order})
				queueOf100(t, b, tc.learn)
				ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
				defer cancel()
				err := b.Do(ctx, nothing)
				var full *bulkhead.FullError
				require.ErrorAs(t, err, &full)
				require.Equal(t, bulkhead.ContextEnded, full.Reason)
				require.Equal(t, time.Millisecond, full.Waited)
				time.Sleep(time.Minute)
			})
		})
	}
}

// The pace of one queue says nothing about the next.
func TestThePaceIsForgottenWithTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 200})
		queueOf100(t, b, true)
		time.Sleep(time.Minute)
		require.Zero(t, b.Stats().InFlight)
		queueOf100(t, b, false)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		var full *bulkhead.FullError
		require.ErrorAs(t, b.Do(ctx, nothing), &full)
		require.Equal(t, bulkhead.ContextEnded, full.Reason)
		time.Sleep(time.Minute)
	})
}

// A call waits for those of its own level and of the more important ones: 8 of them, which
// takes three times the pace at the least. Those that have been served are ahead no longer.
func TestADeadlineThatCanJustBeMetIsTried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const pace = time.Millisecond
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Levels: 3, Priority: levelOf})
		call := func(level, n int) {
			for range n {
				go func() {
					_ = b.Do(atLevel(t.Context(), level), func(context.Context) error { time.Sleep(pace); return nil })
				}()
				synctest.Wait()
			}
		}
		reason := func(within time.Duration) bulkhead.Reason {
			ctx, cancel := context.WithTimeout(atLevel(t.Context(), 1), within)
			defer cancel()
			var full *bulkhead.FullError
			require.ErrorAs(t, b.Do(ctx, nothing), &full)
			return full.Reason
		}
		call(0, 21) // 16 of them give the pace
		time.Sleep(16 * pace)
		synctest.Wait()
		call(1, 4)
		call(2, 9)
		require.Equal(t, []int{4, 4, 9}, b.Stats().Queued)
		require.Equal(t, bulkhead.DeadlineTooClose, reason(3*pace-1))
		require.Equal(t, bulkhead.ContextEnded, reason(3*pace))
		time.Sleep(time.Minute)
		requireIdle(t, b)
	})
}

// inTime returns the share of callers that get their answer within 200 ms, around a burst
// of one second with twice as many calls as can be served.
func inTime(t *testing.T, order bulkhead.Order) (share float64) {
	synctest.Test(t, func(t *testing.T) {
		const patience = 200 * time.Millisecond
		b := bulkhead.New(bulkhead.Config{Limit: 10, MaxWait: -1, Queue: 1000, Order: order})
		var mu sync.Mutex
		made, good := 0, 0
		var wg sync.WaitGroup
		rng := rand.New(rand.NewPCG(3, 4))
		for start := time.Now(); time.Since(start) < 10*time.Second; {
			rate := 900.0 // of 1000 a second
			if since := time.Since(start); since > time.Second && since < 2*time.Second {
				rate = 2000
			}
			time.Sleep(time.Duration(rng.ExpFloat64() / rate * float64(time.Second)))
			made++
			wg.Go(func() {
				start := time.Now()
				err := b.Do(t.Context(), func(context.Context) error {
					time.Sleep(10 * time.Millisecond)
					return nil
				})
				if err == nil && time.Since(start) <= patience {
					mu.Lock()
					good++
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		requireIdle(t, b)
		share = float64(good) / float64(made)
	})
	return share
}

func TestCoDelAnswersMoreInTimeAfterABurst(t *testing.T) {
	fifo, lifo, codel := inTime(t, bulkhead.FIFO), inTime(t, bulkhead.LIFO), inTime(t, bulkhead.CoDel)
	t.Logf("in time: FIFO %.2f, LIFO %.2f, CoDel %.2f", fifo, lifo, codel)
	require.Less(t, fifo, 0.6)
	require.Greater(t, codel, 0.85)
	require.Greater(t, codel, fifo+0.25)
}

func TestCoDelRefusesCallsThatWaitedTooLongInAStandingQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 1, Queue: 9, MaxWait: 2 * time.Second, Order: bulkhead.CoDel}))
		c.start(t.Context(), "running")
		c.start(t.Context(), "old")
		time.Sleep(1990 * time.Millisecond)
		c.start(t.Context(), "new")
		c.finish("running") // the queue has not stood for MaxWait: by age
		require.Equal(t, "old", c.ran[1])
		time.Sleep(90 * time.Millisecond) // now it has
		c.start(t.Context(), "newer")
		c.start(t.Context(), "newest")
		time.Sleep(50 * time.Millisecond)
		c.finish("old")
		require.Equal(t, "newest", c.ran[2])
		require.Equal(t, bulkhead.StandingQueue, c.refusal("new"), "has waited for more than 100 ms")
		require.NoError(t, c.errs["newer"])
		c.finish("newest")
		require.Equal(t, "newer", c.ran[3])
		c.finishAll()
	})
}

// The newest gets the slot however long it has waited: refusing leaves none idle.
func TestCoDelNeverLeavesASlotIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 9, Order: bulkhead.CoDel}))
		c.start(t.Context(), "running")
		c.start(t.Context(), "a")
		c.start(t.Context(), "b")
		time.Sleep(time.Hour)
		c.finish("running")
		require.Equal(t, []string{"running", "b"}, c.ran)
		require.Equal(t, bulkhead.StandingQueue, c.refusal("a"))
		c.finishAll()
	})
}

// A waiter that gives up in a standing queue does not take the others along.
func TestCoDelRefusesOnlyWhenASlotIsHandedOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 9, Order: bulkhead.CoDel}))
		c.start(t.Context(), "running")
		c.start(t.Context(), "a")
		ctx, cancel := context.WithCancel(t.Context())
		c.start(ctx, "b")
		time.Sleep(time.Hour)
		cancel()
		synctest.Wait()
		require.Equal(t, bulkhead.ContextEnded, c.refusal("b"))
		require.Equal(t, []int{1}, c.b.Stats().Queued)
		c.finish("running")
		require.Equal(t, []string{"running", "a"}, c.ran)
		c.finishAll()
	})
}

func TestHooksMayCallBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b *bulkhead.Bulkhead
		var reasons []bulkhead.Reason
		b = bulkhead.New(bulkhead.Config{
			Limit: 1, Cost: costOf, Queue: 1, MaxWait: time.Second,
		})
		onRefuse(b, func(ctx context.Context, e *bulkhead.FullError) {
			require.Equal(t, "v", ctx.Value(levelKey{}))
			b.Stats()
			reasons = append(reasons, e.Reason)
			if e.Reason != bulkhead.NoSlot {
				_, err := b.TryBegin(costing(ctx, 1))
				require.ErrorIs(t, err, bulkhead.ErrFull)
			}
		})
		ctx := context.WithValue(t.Context(), levelKey{}, "v")
		release := hold(t, b)
		require.Error(t, b.Do(ctx, nothing))
		require.Error(t, b.Do(costing(ctx, 2), nothing))
		release()
		require.Equal(t, []bulkhead.Reason{bulkhead.WaitTooLong, bulkhead.NoSlot, bulkhead.TooCostly, bulkhead.NoSlot}, reasons)
	})
}

func TestTheTextOfARefusalTellsTheStory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Name: "users", Limit: 1, MaxWait: -1, Queue: 1})
		defer hold(t, b)()
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errors.New("client gone"))
		defer cancel()
		require.EqualError(t, b.Do(ctx, nothing),
			"bulkhead: users: full (context ended): 1 of 1 in flight, 0 waiting, waited 1s: context deadline exceeded: client gone")
	})
}

// A waiter that leaves is no reason to look through the others, while slots are free that
// are too few for any of them.
func TestLeavingALongQueueOfCostlyCallsIsCheap(t *testing.T) {
	const waiters = 2000
	for _, order := range []bulkhead.Order{bulkhead.FIFO, bulkhead.LIFO, bulkhead.CoDel} {
		for name, tc := range map[string]struct{ held, first, cost int }{
			"too few slots are free":           {held: 3, first: 2, cost: 2},
			"the first waiter costs yet more":  {held: 3, first: 4, cost: 2},
			"enough are free, but not to pass": {held: 2, first: 4, cost: 3},
		} {
			t.Run(fmt.Sprint(order, ", ", name), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := bulkhead.New(bulkhead.Config{Limit: 4, Cost: costOf, MaxWait: -1, Queue: waiters + 1, Order: order})
					done, err := b.Begin(costing(t.Context(), tc.held))
					require.NoError(t, err)
					ctx, cancel := context.WithCancel(t.Context())
					for i := range waiters + 1 {
						cost := tc.cost
						if i == 0 {
							cost = tc.first
						}
						go func() { _ = b.Do(costing(ctx, cost), nothing) }()
						synctest.Wait()
					}
					before := bulkhead.Looked(b)
					cancel()
					synctest.Wait()
					require.Zero(t, b.Stats().Queued[0])
					require.LessOrEqual(t, bulkhead.Looked(b)-before, 2*waiters)
					done(nil)
				})
			})
		}
	}
}

// Once it is known that all of a long queue cost too much, since those that cost less have left,
// it is not looked through again.
func TestALongQueueIsLookedThroughOnce(t *testing.T) {
	const waiters = 500
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 4, Cost: costOf, MaxWait: -1})
		running, err := b.Begin(costing(t.Context(), 3))
		require.NoError(t, err)
		release := hold(t, b)
		wait := func(cost int) (leave func()) {
			ctx, cancel := context.WithCancel(costing(t.Context(), cost))
			go func() { _ = b.Do(ctx, nothing) }()
			synctest.Wait()
			return func() { cancel(); synctest.Wait() }
		}
		leaves := []func(){wait(4), wait(1)}
		for range waiters {
			leaves = append(leaves, wait(3))
		}
		leaves[1]()
		release() // one slot is free
		for _, leave := range slices.Backward(leaves) {
			leave()
		}
		require.LessOrEqual(t, bulkhead.Looked(b), 2*waiters)
		running(nil)
		requireIdle(t, b)
	})
}

// The queue has stood for exactly MaxWait, and newer calls have waited for exactly a
// twentieth of that.
func TestCoDelAtItsBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: 100 * time.Millisecond, Order: bulkhead.CoDel}))
		c.start(t.Context(), "running")
		c.start(t.Context(), "first")
		time.Sleep(50 * time.Millisecond)
		c.start(t.Context(), "old")
		c.finish("running")
		time.Sleep(45 * time.Millisecond)
		c.start(t.Context(), "young")
		time.Sleep(5 * time.Millisecond)
		c.start(t.Context(), "newest")
		c.finish("first")
		require.Equal(t, []string{"running", "first", "newest"}, c.ran)
		require.Equal(t, bulkhead.StandingQueue, c.refusal("old"))
		require.NoError(t, c.errs["young"])
		c.finish("newest")
		require.Equal(t, "young", c.ran[3])
		c.finishAll()
	})
}

// A costly call that is refused in a standing queue has held up another, which gets the slot
// that is left.
func TestCoDelServesACallThatARefusedOneHeldUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 4, Cost: costOf, MaxWait: -1, Order: bulkhead.CoDel}))
		c.start(costing(t.Context(), 2), "running")
		c.start(t.Context(), "running too")
		c.start(costing(t.Context(), 4), "old")
		time.Sleep(time.Minute)
		c.start(costing(t.Context(), 3), "costly") // stays first: one slot is free
		time.Sleep(time.Second)
		for _, name := range []string{"light 1", "light 2"} {
			c.start(t.Context(), name)
			c.finish(name)
		}
		c.start(t.Context(), "light 3")
		c.start(t.Context(), "held up")
		c.start(t.Context(), "newest")
		c.finish("running") // one more slot may pass the costly call
		require.Equal(t, bulkhead.StandingQueue, c.refusal("costly"))
		require.ElementsMatch(t, []string{"light 3", "newest", "held up"}, c.ran[4:])
		c.finishAll()
	})
}

// A call that has to wait for the more important ones, and not for its own slots, does not stay
// first.
func TestACallBehindSlotsKeptForAnotherLevelDoesNotStayFirst(t *testing.T) {
	for _, cost := range []int{1, 2} {
		synctest.Test(t, func(t *testing.T) {
			c := newCallers(t, bulkhead.New(bulkhead.Config{
				Limit: 5, Cost: costOf, MaxWait: -1, Order: bulkhead.LIFO, Levels: 2, Priority: levelOf, Reserve: []float64{},
			}))
			low := atLevel(t.Context(), 1)
			c.start(costing(t.Context(), 3), "running")
			c.start(costing(t.Context(), 3), "important")
			for i := range 5 { // as many as may pass
				name := fmt.Sprint("light ", i)
				c.start(low, name)
				c.finish(name)
			}
			c.start(costing(low, cost), "older")
			c.start(costing(low, 2), "newer")
			require.Equal(t, []int{1, 2}, c.b.Stats().Queued)
			require.Equal(t, 3, c.b.Stats().InFlight)
			c.finish("running")
			require.ElementsMatch(t, []string{"important", "newer"}, c.ran[6:])
			c.finishAll()
		})
	}
}

// A costly call that was first as the newest is so no longer when the oldest is first.
func TestOrderHoldsForACostlyCallAfterAnUpdate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 2, Cost: costOf, MaxWait: -1, Order: bulkhead.LIFO}))
		c.start(t.Context(), "running")
		c.start(t.Context(), "running too")
		c.start(costing(t.Context(), 2), "older")
		c.start(costing(t.Context(), 2), "newer")
		c.finish("running") // is too little for the newer
		require.NoError(t, c.b.Update(func(cfg *bulkhead.Config) { cfg.Order = bulkhead.FIFO }))
		c.finish("running too")
		require.Equal(t, "older", c.ran[2])
		c.finishAll()
	})
}
