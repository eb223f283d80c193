package benchmarks

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	failsafe "github.com/failsafe-go/failsafe-go"
	failsafebulkhead "github.com/failsafe-go/failsafe-go/bulkhead"
	"golang.org/x/sync/semaphore"

	"github.com/go-resilience/resilience/bulkhead"
)

func BenchmarkBulkhead(b *testing.B) { benchmark(b, bulkheadCases) }

var bulkheadCases = []comparison{
	{"free", bulkheadFree(bulkheadOne)},
	{"free-parallel", bulkheadFree(bulkheadParallel)},
	{"full", bulkheadFull()},
	{"contended", bulkheadContended()},
}

const (
	bulkheadSlots   = 4
	bulkheadCallers = 64
)

func bulkheadWork(context.Context) error { return nil }

var errBulkheadRefused = errors.New("refused")

// A bulkheadCall makes one guarded call.
type bulkheadCall func(ctx context.Context) error

func resilienceCall(limit int) bulkheadCall {
	slots := bulkhead.New(bulkhead.Config{Limit: limit})
	return func(ctx context.Context) error { return slots.Do(ctx, bulkheadWork) }
}

func semaphoreCall(limit int) bulkheadCall {
	slots := semaphore.NewWeighted(int64(limit))
	return func(ctx context.Context) error {
		if err := slots.Acquire(ctx, 1); err != nil {
			return err
		}
		defer slots.Release(1)
		return bulkheadWork(ctx)
	}
}

func channelCall(limit int) bulkheadCall {
	slots := make(chan struct{}, limit)
	return func(ctx context.Context) error {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		defer func() { <-slots }()
		return bulkheadWork(ctx)
	}
}

func bulkheadFailsafe(limit uint) bulkheadCall {
	slots := failsafe.With(failsafebulkhead.New[any](limit))
	return func(ctx context.Context) error {
		return slots.WithContext(ctx).RunWithExecution(func(exec failsafe.Execution[any]) error {
			return bulkheadWork(exec.Context())
		})
	}
}

func bulkheadOne(b *testing.B, call bulkheadCall) {
	ctx := context.Background()
	for b.Loop() {
		if err := call(ctx); err != nil {
			b.Fatal(err)
		}
	}
}

func bulkheadParallel(b *testing.B, call bulkheadCall) {
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if err := call(context.Background()); err != nil {
				b.Error(err)
			}
		}
	})
}

// free: there is always a slot.
func bulkheadFree(drive func(*testing.B, bulkheadCall)) []impl {
	limit := runtime.GOMAXPROCS(0) + 1
	return []impl{
		{"resilience", func(b *testing.B) { drive(b, resilienceCall(limit)) }},
		{"semaphore", func(b *testing.B) { drive(b, semaphoreCall(limit)) }},
		{"channel", func(b *testing.B) { drive(b, channelCall(limit)) }},
		{"failsafe", func(b *testing.B) { drive(b, bulkheadFailsafe(uint(limit))) }},
	}
}

// full: every slot is taken, and nobody may wait.
func bulkheadFull() []impl {
	refused := func(b *testing.B, call bulkheadCall) {
		ctx := context.Background()
		for b.Loop() {
			if call(ctx) == nil {
				b.Fatal("admitted")
			}
		}
	}
	return []impl{
		{"resilience", func(b *testing.B) {
			slots := bulkhead.New(bulkhead.Config{Limit: 1})
			if _, err := slots.Begin(context.Background()); err != nil {
				b.Fatal(err)
			}
			refused(b, func(ctx context.Context) error { return slots.Do(ctx, bulkheadWork) })
		}},
		{"semaphore", func(b *testing.B) {
			slots := semaphore.NewWeighted(1)
			slots.TryAcquire(1)
			refused(b, func(ctx context.Context) error {
				if !slots.TryAcquire(1) {
					return errBulkheadRefused
				}
				defer slots.Release(1)
				return bulkheadWork(ctx)
			})
		}},
		{"channel", func(b *testing.B) {
			slots := make(chan struct{}, 1)
			slots <- struct{}{}
			refused(b, func(ctx context.Context) error {
				select {
				case slots <- struct{}{}:
				default:
					return errBulkheadRefused
				}
				defer func() { <-slots }()
				return bulkheadWork(ctx)
			})
		}},
		{"failsafe", func(b *testing.B) {
			full := failsafebulkhead.New[any](1)
			full.TryAcquirePermit()
			slots := failsafe.With(full)
			refused(b, func(ctx context.Context) error {
				return slots.WithContext(ctx).RunWithExecution(func(exec failsafe.Execution[any]) error {
					return bulkheadWork(exec.Context())
				})
			})
		}},
	}
}

// contended: 64 goroutines share 4 slots, which each of them holds until others
// have had a turn to run.
func bulkheadContended() []impl {
	contend := func(b *testing.B, call func(context.Context, func(context.Context) error) error) {
		work := func(context.Context) error {
			runtime.Gosched()
			return nil
		}
		var left sync.WaitGroup
		share := b.N/bulkheadCallers + 1
		b.ResetTimer()
		for range bulkheadCallers {
			left.Go(func() {
				for range share {
					if err := call(context.Background(), work); err != nil {
						b.Error(err)
					}
				}
			})
		}
		left.Wait()
	}
	return []impl{
		{"resilience", func(b *testing.B) {
			contend(b, bulkhead.New(bulkhead.Config{Limit: bulkheadSlots, MaxWait: -1, Queue: bulkheadCallers}).Do)
		}},
		{"semaphore", func(b *testing.B) {
			slots := semaphore.NewWeighted(bulkheadSlots)
			contend(b, func(ctx context.Context, work func(context.Context) error) error {
				if err := slots.Acquire(ctx, 1); err != nil {
					return err
				}
				defer slots.Release(1)
				return work(ctx)
			})
		}},
		{"channel", func(b *testing.B) {
			slots := make(chan struct{}, bulkheadSlots)
			contend(b, func(ctx context.Context, work func(context.Context) error) error {
				select {
				case slots <- struct{}{}:
				case <-ctx.Done():
					return ctx.Err()
				}
				defer func() { <-slots }()
				return work(ctx)
			})
		}},
		{"failsafe", func(b *testing.B) {
			// Without a longest wait it refuses at once.
			slots := failsafe.With(failsafebulkhead.NewBuilder[any](bulkheadSlots).WithMaxWaitTime(time.Hour).Build())
			contend(b, func(ctx context.Context, work func(context.Context) error) error {
				return slots.WithContext(ctx).RunWithExecution(func(exec failsafe.Execution[any]) error {
					return work(exec.Context())
				})
			})
		}},
	}
}
