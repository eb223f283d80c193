package main

import (
	"bytes"
	"context"
	"net/http"
	"regexp"
	"runtime/pprof"
	"strconv"
	"sync"
	"time"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/registry"
)

// A scenario runs all phases, for the plain client and for the client with policies.
type scenario struct {
	plain, resilient *side
	sides            []*side            // both
	policies         *registry.Registry // the policies of the resilient client
}

// newScenario starts the backends of a new scenario. The seed determines at which requests they fail.
func newScenario(seed uint64) *scenario {
	s := &scenario{policies: registry.New()}
	s.plain = newSide("plain", seed, newPlain)
	s.resilient = newSide("resilient", seed, func(base http.RoundTripper) *http.Client {
		return newResilient(base, s.policies)
	})
	s.sides = []*side{s.plain, s.resilient}
	for e := range s.policies.All() {
		b, ok := e.Policy.(interface {
			Observe(func(context.Context, breaker.Event)) func()
		})
		if !ok {
			continue
		}
		b.Observe(func(_ context.Context, c breaker.Event) {
			if c.Kind == breaker.EventChanged {
				s.resilient.mu.Lock()
				defer s.resilient.mu.Unlock()
				s.resilient.changes = append(s.resilient.changes, c)
			}
		})
	}
	return s
}

func (s *scenario) close() {
	s.plain.close()
	s.resilient.close()
}

// run runs all phases, for both sides at the same time. Ten times a second, it calls each with the index of the current
// phase. The seed determines which products are requested. If ctx is done, run stops early. After run has returned, it
// may be called again.
//
// Each goroutine has the name of its side as a profiler label. countGoroutines uses the label to count the goroutines
// of each side.
func (s *scenario) run(ctx context.Context, seed uint64, each func(phase int)) error {
	for _, side := range s.sides {
		if err := side.backend.enter(0); err != nil {
			return err
		}
		side.warmUp()
	}
	ctx, stop := context.WithCancel(ctx)
	start := time.Now()
	var loads sync.WaitGroup
	defer loads.Wait()
	defer stop()
	for _, side := range s.sides {
		loads.Go(func() {
			pprof.Do(ctx, pprof.Labels("side", side.name), func(ctx context.Context) { side.load(ctx, seed, start) })
		})
	}
	watched, over := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		countGoroutines(s.sides, over)
	}()
	defer func() {
		close(over)
		<-watched
	}()
	end := start
	for i, p := range badHalfMinute {
		for _, side := range s.sides {
			if err := side.backend.enter(i); err != nil {
				return err
			}
		}
		end = end.Add(p.Lasts)
		for time.Until(end) > 0 {
			if !sleepUntil(ctx, time.Now().Add(min(time.Until(end), 100*time.Millisecond))) {
				return context.Cause(ctx)
			}
			each(i)
		}
	}
	loads.Wait()
	return nil
}

// outage returns the number of requests that the side's backend received during outages.
func (s *side) outage() (requests int64) {
	for i, p := range badHalfMinute {
		if p.Outage {
			requests += s.tallies[i].reached.Load()
		}
	}
	return requests
}

// sleepUntil waits until t and returns true. If ctx is done earlier, it returns false.
func sleepUntil(ctx context.Context, t time.Time) bool {
	timer := time.NewTimer(time.Until(t))
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

var labeled = regexp.MustCompile(`(?m)^(\d+) @.*\n# labels: \{"side":"(\w+)"\}`)

// countGoroutines records the largest number of goroutines of each side, until over is closed.
func countGoroutines(sides []*side, over <-chan struct{}) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var profile bytes.Buffer
	for {
		select {
		case <-over:
			return
		case <-tick.C:
		}
		profile.Reset()
		_ = pprof.Lookup("goroutine").WriteTo(&profile, 1)
		counts := map[string]int64{}
		for _, m := range labeled.FindAllStringSubmatch(profile.String(), -1) {
			n, _ := strconv.ParseInt(m[1], 10, 64)
			counts[m[2]] += n
		}
		for _, s := range sides {
			raise(&s.tallies[s.backend.now.Load()].maxGoroutine, counts[s.name])
		}
	}
}
