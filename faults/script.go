package faults

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Script decides what happens to calls. Make one with [New] and share it: it is safe
// for concurrent use.
type Script struct {
	setting settings.Setting[Config] // whose lock is taken before mu
	enabled atomic.Bool
	calls   atomic.Int64

	mu       sync.Mutex
	cfg      *Config
	begun    time.Time
	progress []progress // of each plan
	injected map[Kind]int64
}

// A progress is what a script knows of one plan.
type progress struct {
	applied int64      // calls that the plan has applied to
	rand    *rand.Rand // of this plan alone, so that other plans do not shift its decisions
}

// New returns a Script. It panics with the error of cfg.Validate, if there is one.
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
	s.enabled.Store(cfg.Enabled)
}

// Name returns the Name of the Config.
func (s *Script) Name() string { return s.setting.Load().Name }

// Kind returns "faults", the kind of policy that a Script is in a registry.
func (s *Script) Kind() string { return "faults" }

// Config returns the present Config.
func (s *Script) Config() Config { return s.setting.Config() }

// Update changes the Config of a script in use. It calls change with the present Config.
// If the result is not valid, Update returns the error of Validate and nothing changes.
//
//   - The script starts from its beginning, whatever has changed: the times, counts and
//     random decisions of all plans start again. Stats are kept.
//   - A call under way ends by the Config with which it began.
//   - Name cannot change: Update returns an error.
//
// Updates run one at a time. change must not use the script.
func (s *Script) Update(change func(*Config)) error {
	return s.setting.Update(change, (*Config).fixed, s.begin)
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (s *Script) Change(dry bool, f func(cfg any) error) error {
	return s.setting.Change(dry, f, (*Config).fixed, s.begin)
}

// Settings returns Config.
func (s *Script) Settings() any { return s.Config() }

// Figures returns faults.calls, and faults.injected by the kind of fault, also of kinds that have had
// none: what makes an instrument of each figure at the start of a program must find it.
func (s *Script) Figures() []describe.Figure {
	stats := s.Stats()
	all := []describe.Figure{{Name: "faults.calls", Counter: true, Value: float64(stats.Calls)}}
	for _, kind := range kinds {
		all = append(all, describe.Figure{
			Name:    "faults.injected{kind=" + strings.ReplaceAll(string(kind), " ", "_") + "}",
			Counter: true, Value: float64(stats.Injected[kind]),
		})
	}
	return all
}

// Stats is a snapshot of what a [Script] has done since New. The counters never go back.
type Stats struct {
	Calls    int64          // all calls, made or not, and while the script was off
	Injected map[Kind]int64 // calls that plans of each kind applied to
}

// Stats returns a snapshot.
func (s *Script) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Stats{Calls: s.calls.Load(), Injected: maps.Clone(s.injected)}
}

// A fault is what happens to one call.
type fault struct {
	delay time.Duration // before anything else
	plan  *Plan         // how the call ends; nil: as it would without a script
}

// next counts a call and decides about it.
func (s *Script) next() (f fault) {
	s.calls.Add(1)
	if !s.enabled.Load() {
		return fault{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.cfg.Enabled {
		return fault{}
	}
	now := time.Since(s.begun)
	for i := range s.cfg.Plans {
		p, state := &s.cfg.Plans[i], &s.progress[i]
		if f.plan != nil && p.Kind != Latency || !p.applies(state, now) {
			continue
		}
		if p.Kind == Latency {
			f.delay = sum(f.delay, p.latency(state))
		} else {
			f.plan = p
		}
		state.applied++
		s.injected[p.Kind]++
	}
	return f
}

// applies reports whether the plan applies to a call at the time now of the script.
func (p *Plan) applies(state *progress, now time.Duration) bool {
	switch {
	case now < p.At, p.For > 0 && now-p.At >= p.For:
		return false
	case p.Count > 0 && state.applied >= int64(p.Count):
		return false
	}
	return p.Share == 0 || p.Share == 1 || state.rand.Float64() < p.Share
}

// latency returns the delay of a call that a Latency applies to.
func (p *Plan) latency(state *progress) time.Duration {
	if p.Spread == 0 {
		return p.Delay
	}
	return sum(p.Delay, time.Duration(state.rand.Uint64N(uint64(p.Spread)+1)))
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

// fixed returns an error if Name has changed.
func (c *Config) fixed(next *Config) error {
	f := invalid.Fields{Type: "faults.Config"}
	f.Same("Name", c.Name, next.Name)
	return f.Err()
}
