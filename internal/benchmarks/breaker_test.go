package benchmarks

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	eapache "github.com/eapache/go-resiliency/breaker"
	"github.com/failsafe-go/failsafe-go"
	"github.com/failsafe-go/failsafe-go/circuitbreaker"
	"github.com/sony/gobreaker/v2"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
)

func BenchmarkBreaker(b *testing.B) { benchmark(b, breakerCases) }

// Every breaker opens after 5 failures in a row, for an hour.
var breakerCases = []comparison{
	{"closed", []impl{
		{"resilience", breakerSequential(ourBreaker)},
		{"gobreaker", breakerSequential(goBreaker)},
		{"failsafe", breakerSequential(failsafeBreaker)},
		{"eapache", breakerSequential(eapacheBreaker)},
	}},
	{"closed-parallel", []impl{
		{"resilience", breakerParallel(ourBreaker)},
		{"gobreaker", breakerParallel(goBreaker)},
		{"failsafe", breakerParallel(failsafeBreaker)},
		{"eapache", breakerParallel(eapacheBreaker)},
	}},
	{"open", []impl{
		{"resilience", breakerSequential(breakerOpened(ourBreaker))},
		{"gobreaker", breakerSequential(breakerOpened(goBreaker))},
		{"failsafe", breakerSequential(breakerOpened(failsafeBreaker))},
		{"eapache", breakerSequential(breakerOpened(eapacheBreaker))},
	}},
	{"open-parallel", []impl{
		{"resilience", breakerParallel(breakerOpened(ourBreaker))},
		{"gobreaker", breakerParallel(breakerOpened(goBreaker))},
		{"failsafe", breakerParallel(breakerOpened(failsafeBreaker))},
		{"eapache", breakerParallel(breakerOpened(eapacheBreaker))},
	}},
	{"keyed", []impl{
		{"resilience", keyedBreakers(ourGroup)},
		{"gobreaker", keyedBreakers(goBreakerMap)},
	}},
	{"keyed-parallel", []impl{
		{"resilience", keyedBreakersParallel(ourGroup)},
		{"gobreaker", keyedBreakersParallel(goBreakerMap)},
	}},
}

// A keyedCall runs work under the breaker of a key.
type keyedCall func(key string) error

const breakerKeys = 10_000

// ourGroup counts, bounds and evicts its breakers; the map below keeps each of them forever.
func ourGroup() keyedCall {
	g := resilience.NewGroup(func(string) *breaker.Breaker {
		return breaker.New(breaker.Config{ConsecutiveFailures: 5, OpenFor: time.Hour})
	}, resilience.GroupConfig{MaxKeys: breakerKeys})
	ctx := context.Background()
	return func(key string) error { return g.Do(ctx, key, answer) }
}

func goBreakerMap() keyedCall {
	var all sync.Map // of *gobreaker.CircuitBreaker[struct{}] by key
	ctx := context.Background()
	run := func() (struct{}, error) { return struct{}{}, answer(ctx) }
	return func(key string) error {
		b, ok := all.Load(key)
		if !ok {
			b, _ = all.LoadOrStore(key, gobreaker.NewCircuitBreaker[struct{}](gobreaker.Settings{
				Timeout:     time.Hour,
				ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= 5 },
			}))
		}
		_, err := b.(*gobreaker.CircuitBreaker[struct{}]).Execute(run)
		return err
	}
}

// knownKeys returns a call and the keys for which it has a breaker.
func knownKeys(b *testing.B, build func() keyedCall) (keyedCall, []string) {
	call, keys := build(), make([]string, breakerKeys)
	for i := range keys {
		keys[i] = "tenant-" + strconv.Itoa(1e9+i)
		succeeded(b, call(keys[i]))
	}
	return call, keys
}

func keyedBreakers(build func() keyedCall) func(*testing.B) {
	return func(b *testing.B) {
		call, keys := knownKeys(b, build)
		order := rand.NewPCG(1, 2)
		for b.Loop() {
			_ = call(keys[order.Uint64()%breakerKeys])
		}
	}
}

func keyedBreakersParallel(build func() keyedCall) func(*testing.B) {
	return func(b *testing.B) {
		call, keys := knownKeys(b, build)
		var goroutines atomic.Uint64
		b.ResetTimer()
		b.RunParallel(func(pb *testing.PB) {
			order := rand.NewPCG(1, goroutines.Add(1))
			for pb.Next() {
				_ = call(keys[order.Uint64()%breakerKeys])
			}
		})
	}
}

// A guarded call runs work under a breaker.
type guarded func() error

func ourBreaker(work func(context.Context) error) guarded {
	b := breaker.New(breaker.Config{ConsecutiveFailures: 5, OpenFor: time.Hour})
	ctx := context.Background()
	return func() error { return b.Do(ctx, work) }
}

func goBreaker(work func(context.Context) error) guarded {
	b := gobreaker.NewCircuitBreaker[struct{}](gobreaker.Settings{
		Timeout:     time.Hour,
		ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= 5 },
	})
	ctx := context.Background()
	return func() error {
		_, err := b.Execute(func() (struct{}, error) { return struct{}{}, work(ctx) })
		return err
	}
}

func failsafeBreaker(work func(context.Context) error) guarded {
	b := failsafe.With(circuitbreaker.NewBuilder[any]().WithFailureThreshold(5).WithDelay(time.Hour).Build())
	ctx := context.Background()
	run := func() error { return work(ctx) }
	return func() error { return b.Run(run) }
}

func eapacheBreaker(work func(context.Context) error) guarded {
	b := eapache.New(5, 1, time.Hour)
	ctx := context.Background()
	run := func() error { return work(ctx) }
	return func() error { return b.Run(run) }
}

// breakerOpened returns the breaker after five failures.
func breakerOpened(breakerOf func(func(context.Context) error) guarded) func(func(context.Context) error) guarded {
	return func(work func(context.Context) error) guarded {
		down := errors.New("down")
		failing := true
		call := breakerOf(func(ctx context.Context) error {
			if failing {
				return down
			}
			return work(ctx)
		})
		for range 5 {
			_ = call()
		}
		failing = false
		return call
	}
}

func breakerSequential(breakerOf func(func(context.Context) error) guarded) func(*testing.B) {
	return func(b *testing.B) {
		call := breakerChecked(b, breakerOf)
		for b.Loop() {
			_ = call()
		}
	}
}

func breakerParallel(breakerOf func(func(context.Context) error) guarded) func(*testing.B) {
	return func(b *testing.B) {
		call := breakerChecked(b, breakerOf)
		b.ResetTimer()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				_ = call()
			}
		})
	}
}

// breakerChecked returns a call that is known to pass always, or never.
func breakerChecked(b *testing.B, breakerOf func(func(context.Context) error) guarded) guarded {
	made := 0
	counting := true
	call := breakerOf(func(context.Context) error {
		if counting {
			made++
		}
		return nil
	})
	passes := call() == nil
	for range 10 {
		if (call() == nil) != passes {
			b.Fatal("neither open nor closed")
		}
	}
	if passes != (made > 0) {
		b.Fatalf("%d calls made", made)
	}
	counting = false
	return call
}
