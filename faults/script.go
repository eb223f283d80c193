package faults

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/policy"
)

// A Script decides which faults each call gets. Use [New] to create a Script. A Script is safe for concurrent
// use.
type Script struct {
	setting settings.Setting[Config] // setting's lock is acquired before mu

	mu       sync.Mutex
	cfg      *Config
	calls    int64
	begun    time.Time
	progress []progress // the progress of each plan
	injected map[Kind]int64
}

// A progress is the state of one plan since the script started.
type progress struct {
	applied int64      // number of calls that the plan has applied to
	rand    *rand.Rand // separate for each plan, so other plans do not affect its decisions
}

// New returns a Script. New panics if cfg is invalid; see [Config.Validate].
func New(cfg Config) *Script {
	s := &Script{injected: map[Kind]int64{}}
	s.setting.Init(cfg, func(c Config) Config { return c }, func(c *Config) { c.Plans = slices.Clone(c.Plans) })
	s.begin(s.setting.Load())
	return s
}

// begin starts the script with cfg. It resets the plans' times, counts and random decisions. Calls in flight
// continue with the previous plans.
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

// Config returns a copy of the configuration.
func (s *Script) Config() Config { return s.setting.Config() }

// Update calls change with the configuration, and then applies the modified configuration. change must not call
// methods of s. All plans start again, at time 0, but the counts of Stats are not reset. Calls in flight
// continue with the previous plans. If the modified configuration is invalid or has another Name, Update
// changes nothing and returns an error.
func (s *Script) Update(change func(*Config)) error {
	return s.setting.Update(change, sameName, s.begin)
}

func (s *Script) change(dryRun bool, f func(cfg any) error) error {
	return s.setting.Change(dryRun, f, sameName, s.begin)
}

func sameName(was, next *Config) error { return invalid.Renamed("faults.Config", was.Name, next.Name) }

// Stats holds the statistics of a [Script] since New.
type Stats struct {
	Calls    int64          `counter:"calls"`            // all calls, including calls while the script was disabled
	Injected map[Kind]int64 `counter:"injected{kind=*}"` // number of times that a plan applied to a call, by kind of plan
}

// Stats returns the statistics.
func (s *Script) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Stats{Calls: s.calls, Injected: maps.Clone(s.injected)}
}

// Describe returns the description of the script for a registry.
func (s *Script) Describe() policy.Description {
	return policy.Description{
		Kind:    "faults",
		Name:    s.setting.Load().Name,
		Metrics: s.metrics,
		Config:  func() any { return s.Config() },
		Update:  s.change,
	}
}

// metrics returns the statistics as metrics. It includes the kinds of faults that no call has had, with the
// value 0.
func (s *Script) metrics() []policy.Metric {
	stats := s.Stats()
	for _, kind := range kinds {
		stats.Injected[kind] += 0
	}
	return policy.Metrics("faults", stats)
}

var _ policy.Describer = (*Script)(nil)

// A fault describes the faults of one call.
type fault struct {
	delay time.Duration // the delay before the call
	plan  *Plan         // decides how the call ends; nil if it ends normally
}

// next counts a call and returns the fault that the script chooses for it.
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

// applies reports whether the plan applies to a call. now is the time since the script started.
func (p *Plan) applies(done *progress, now time.Duration) bool {
	switch {
	case now < p.At, p.For > 0 && now-p.At >= p.For:
		return false
	case p.Count > 0 && done.applied >= int64(p.Count):
		return false
	}
	return p.Share == 0 || p.Share == 1 || done.rand.Float64() < p.Share
}

// latency returns the delay that a Latency plan adds to a call.
func (p *Plan) latency(done *progress) time.Duration {
	if p.Spread == 0 {
		return p.Delay
	}
	return sum(p.Delay, time.Duration(done.rand.Uint64N(uint64(p.Spread)+1)))
}

const longest = time.Duration(1<<63 - 1)

// sum returns a+b, or longest if a+b overflows. a and b must not be negative.
func sum(a, b time.Duration) time.Duration {
	if a > longest-b {
		return longest
	}
	return a + b
}

// wait waits for d or until ctx is done. If d ends exactly at ctx's deadline, ctx counts as done, so tests in
// a bubble of testing/synctest are deterministic. In that case, wait gives ctx up to 1ms to become done,
// because the ctx of a resiliencehttp.Transport may be canceled slightly after its deadline.
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
