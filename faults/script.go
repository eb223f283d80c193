package faults

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Script decides what happens to calls. It is safe for concurrent use.
type Script struct {
	setting settings.Setting[Config] // whose lock is taken before mu

	mu       sync.Mutex
	cfg      *Config
	calls    int64
	begun    time.Time
	progress []progress // of each plan
	injected map[Kind]int64
}

// A progress is what a script knows of one plan.
type progress struct {
	applied int64      // calls that the plan has applied to
	rand    *rand.Rand // of this plan alone, so that other plans do not shift its decisions
}

// New returns a Script. It panics if cfg is not valid.
func New(cfg Config) *Script {
	s := &Script{injected: map[Kind]int64{}}
	s.setting.Init(cfg, func(c Config) Config { return c }, func(c *Config) { c.Plans = slices.Clone(c.Plans) })
	s.begin(s.setting.Load())
	return s
}

// begin puts cfg into effect and starts times, counts and random decisions again. Calls under
// way go on with the plans before.
func (s *Script) begin(cfg *Config) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cfg = cfg
	s.begun = time.Now()
	s.progress = make([]progress, len(cfg.Plans))
	for i := range s.progress {
		s.progress[i].rand = rand.New(rand.NewPCG(cfg.Seed, uint64(i)))
	}
}

func (s *Script) Name() string { return s.setting.Load().Name }

func (s *Script) Kind() string { return "faults" }

func (s *Script) Config() Config { return s.setting.Config() }

// Update calls change, which must not use s, with the Config. If the result is not valid, it changes
// nothing and returns the error. The script starts from its beginning, but for Stats. A call under way
// ends by the Config with which it began.
func (s *Script) Update(change func(*Config)) error {
	return s.setting.Update(change, sameName, s.begin)
}

func (s *Script) Change(dry bool, f func(cfg any) error) error {
	return s.setting.Change(dry, f, sameName, s.begin)
}

func sameName(was, next *Config) error { return invalid.Renamed("faults.Config", was.Name, next.Name) }

func (s *Script) Settings() any { return s.Config() }

// Figures returns faults.calls, and faults.injected by the kind of fault.
func (s *Script) Figures() []describe.Figure {
	stats := s.Stats()
	all := []describe.Figure{describe.Count("faults.calls", stats.Calls)}
	for _, kind := range kinds {
		name := "faults.injected{kind=" + strings.ReplaceAll(string(kind), " ", "_") + "}"
		all = append(all, describe.Count(name, stats.Injected[kind]))
	}
	return all
}

// Stats counts what a [Script] has done since New.
type Stats struct {
	Calls    int64          // all calls, made or not, and while the script was off
	Injected map[Kind]int64 // calls that plans of each kind applied to
}

func (s *Script) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Stats{Calls: s.calls, Injected: maps.Clone(s.injected)}
}

// A fault is what happens to one call.
type fault struct {
	delay time.Duration // before anything else
	plan  *Plan         // how the call ends; nil: as it would without a script
}

// next counts a call and decides about it.
func (s *Script) next() (f fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	if !s.cfg.Enabled {
		return fault{}
	}
	now := time.Since(s.begun)
	for i := range s.cfg.Plans {
		p, done := &s.cfg.Plans[i], &s.progress[i]
		if f.plan != nil && p.Kind != Latency || !p.applies(done, now) {
			continue
		}
		if p.Kind == Latency {
			f.delay = sum(f.delay, p.latency(done))
		} else {
			f.plan = p
		}
		done.applied++
		s.injected[p.Kind]++
	}
	return f
}

// applies reports whether the plan applies to a call at the time now of the script.
func (p *Plan) applies(done *progress, now time.Duration) bool {
	switch {
	case now < p.At, p.For > 0 && now-p.At >= p.For:
		return false
	case p.Count > 0 && done.applied >= int64(p.Count):
		return false
	}
	return p.Share == 0 || p.Share == 1 || done.rand.Float64() < p.Share
}

// latency returns the delay of a call that a Latency applies to.
func (p *Plan) latency(done *progress) time.Duration {
	if p.Spread == 0 {
		return p.Delay
	}
	return sum(p.Delay, time.Duration(done.rand.Uint64N(uint64(p.Spread)+1)))
}

const longest = time.Duration(1<<63 - 1)

// sum returns a+b, neither of which is negative, or longest.
func sum(a, b time.Duration) time.Duration {
	if a > longest-b {
		return longest
	}
	return a + b
}

// wait waits for d, or until ctx ends. If both happen at the same instant, ctx has ended,
// so that a test in a bubble of testing/synctest always sees the same. The ctx of a
// resiliencehttp.Transport may live on after its Deadline.
func wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		if deadline, ok := ctx.Deadline(); !ok || time.Now().Before(deadline) {
			return nil
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
		}
	case <-ctx.Done():
	}
	return ended.Error(ctx)
}
