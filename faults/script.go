package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Kind is a kind of fault. A Config holds it as its text.
type Kind string

const (
	// Latency delays the call by Delay, and by up to Spread more at random. Growth adds
	// to that for each call that the plan has met before.
	Latency Kind = "latency"
	// Fail ends the call with Err: instead of the call or, of a Handler, with Status.
	Fail Kind = "fail"
	// Status answers with Status, and with Retry-After if RetryAfter is set, without the
	// call. From Func it is a *StatusError.
	Status Kind = "status"
	// Hang ends when the ctx of the call does, and with its error.
	Hang Kind = "hang"
	// Refuse ends the call like a port on which nobody listens: with an error that wraps
	// syscall.ECONNREFUSED. A Handler closes the connection before it answers.
	Refuse Kind = "refuse"
	// Reset makes the call and breaks the response off after Bytes of its body, with an
	// error that wraps syscall.ECONNRESET. From Func the call has been made, and its
	// result is lost.
	Reset Kind = "reset"
	// SlowBody makes the call and delivers the body of its response at Rate bytes a
	// second. Func takes it for a Latency of Delay after the call.
	SlowBody Kind = "slow body"
)

var kinds = []Kind{Latency, Fail, Status, Hang, Refuse, Reset, SlowBody}

// A Plan says which fault happens to which calls.
type Plan struct {
	Kind Kind

	// At is when the plan begins, counted from when the script was enabled. Zero means
	// at once.
	At time.Duration
	// For is how long the plan lasts. Zero means that it does not end.
	For time.Duration
	// Share is the share of the calls that the plan applies to, in (0, 1]. Zero means 1.
	Share float64
	// Count is how many calls it applies to at most. Zero means no limit.
	Count int

	// Delay, Spread and Growth are the delay of a Latency: see there.
	Delay, Spread, Growth time.Duration
	// Err is the error of a Fail. Nil means ErrInjected.
	Err error
	// Status is the status of a Status, and of a Fail in a Handler. Zero means 503.
	Status int
	// RetryAfter is the Retry-After of a Status, in whole seconds. Zero means none.
	RetryAfter time.Duration
	// Bytes is how much of a body there is before a Reset.
	Bytes int64
	// Rate is the bytes a second of a SlowBody. Zero means 1000.
	Rate int
}

// ErrInjected is the error of a Fail without an Err.
var ErrInjected = errors.New("faults: injected failure")

// A StatusError is what Func returns for a Status.
type StatusError struct {
	Code  int
	After time.Duration
}

func (e *StatusError) Error() string { return fmt.Sprintf("faults: injected status %d", e.Code) }

// RetryAfter returns the plan's RetryAfter.
func (e *StatusError) RetryAfter() time.Duration { return e.After }

// Config says what a [Script] does.
type Config struct {
	// Name appears in events.
	Name string
	// Enabled switches the script on. Switching it on again begins it anew.
	Enabled bool
	// Seed makes the random decisions repeat. Zero is a seed like any other.
	Seed uint64
	// Plans are looked at in their order.
	Plans []Plan
}

// Validate returns an error that names each field whose value cannot mean anything.
func (c Config) Validate() error {
	var errs []error
	for i, p := range c.Plans {
		f := invalid.Fields{Type: fmt.Sprintf("faults.Config.Plans[%d]", i)}
		f.Need(slices.Contains(kinds, p.Kind), "Kind", fmt.Sprintf("%q", p.Kind), fmt.Sprintf("one of %q", kinds))
		f.Need(p.At >= 0, "At", p.At, "0 or more")
		f.Need(p.For >= 0, "For", p.For, "0 (for no end) or more")
		f.Need(p.Share >= 0 && p.Share <= 1, "Share", p.Share, "in [0, 1]")
		f.Need(p.Count >= 0, "Count", p.Count, "0 (for no limit) or more")
		f.Need(p.Delay >= 0, "Delay", p.Delay, "0 or more")
		f.Need(p.Spread >= 0, "Spread", p.Spread, "0 or more")
		f.Need(p.Growth >= 0, "Growth", p.Growth, "0 or more")
		f.Need(p.Status == 0 || p.Status >= 200 && p.Status <= 599, "Status", p.Status, "0 (for 503) or in [200, 599]")
		f.Need(p.RetryAfter >= 0, "RetryAfter", p.RetryAfter, "0 or more")
		f.Need(p.Bytes >= 0, "Bytes", p.Bytes, "0 or more")
		f.Need(p.Rate >= 0, "Rate", p.Rate, "0 (for 1000) or more")
		errs = append(errs, f.Err())
	}
	return errors.Join(errs...)
}

// An EventKind is the kind of an [Event].
type EventKind string

const (
	Injected EventKind = "injected" // a fault has happened to a call
	Switched EventKind = "switched" // the script was switched on or off
)

// An Event is something that a [Script] did.
type Event struct {
	Kind    EventKind
	Name    string // of the script
	Fault   Kind   // of an Injected
	Enabled bool   // of a Switched
}

// Stats is a snapshot of what a [Script] has done.
type Stats struct {
	Calls    int64 // that the script has seen, enabled or not
	Injected map[Kind]int64
	Enabled  bool
}

// A Script decides what happens to calls. Make one with [New] and share it: it is safe
// for concurrent use.
type Script struct {
	observers notify.Observers[Event]
	updating  sync.Mutex

	mu       sync.Mutex
	cfg      Config
	rand     *rand.Rand
	begun    time.Time
	met      []int // calls that each plan has applied to
	calls    int64
	injected map[Kind]int64
}

// New returns a Script. It panics with the error of cfg.Validate if that is not nil.
func New(cfg Config) *Script {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	s := &Script{injected: map[Kind]int64{}}
	s.begin(cfg)
	return s
}

// begin takes cfg and begins the script anew.
func (s *Script) begin(cfg Config) {
	cfg.Plans = slices.Clone(cfg.Plans)
	s.cfg = cfg
	s.rand = rand.New(rand.NewPCG(cfg.Seed, 0))
	s.begun = time.Now()
	s.met = make([]int, len(cfg.Plans))
}

// Name returns the name of the script.
func (s *Script) Name() string { return s.Config().Name }

// Kind returns "faults", which is the kind of a Script in a registry.
func (s *Script) Kind() string { return "faults" }

// Config returns the present configuration.
func (s *Script) Config() Config {
	s.mu.Lock()
	defer s.mu.Unlock()
	cfg := s.cfg
	cfg.Plans = slices.Clone(cfg.Plans)
	return cfg
}

// Update changes the configuration and begins the script anew: times and counts of its
// plans start again. Calls under way end as they began. If the new configuration is not
// valid, or has another Name, Update returns the error and changes nothing. change must
// not use the script.
func (s *Script) Update(change func(*Config)) error {
	s.updating.Lock()
	defer s.updating.Unlock()
	was := s.Config()
	cfg := settings.Change(was, s.Config(), change)
	if err := cfg.Validate(); err != nil {
		return err
	}
	if cfg.Name != was.Name {
		return fmt.Errorf("faults: %s: Name cannot change", was.Name)
	}
	s.mu.Lock()
	s.begin(cfg)
	s.mu.Unlock()
	if cfg.Enabled != was.Enabled {
		s.observers.Tell(context.Background(), Event{Kind: Switched, Name: cfg.Name, Enabled: cfg.Enabled})
	}
	return nil
}

// Enable switches the script on from its beginning, or off.
func (s *Script) Enable(on bool) {
	_ = s.Update(func(c *Config) { c.Enabled = on }) // the rest is valid
}

// Observe calls f with each event until stop is called: on the goroutine of the call,
// without a lock, perhaps on several at once.
func (s *Script) Observe(f func(context.Context, Event)) (stop func()) {
	return s.observers.Observe(f)
}

// Stats returns what the script has done so far.
func (s *Script) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Stats{Calls: s.calls, Injected: map[Kind]int64{}, Enabled: s.cfg.Enabled}
	for k, n := range s.injected {
		st.Injected[k] = n
	}
	return st
}

// A fault is what happens to one call.
type fault struct {
	delay time.Duration
	plan  *Plan // how the call ends; nil: as it would
}

// next decides about a call.
func (s *Script) next(ctx context.Context) fault {
	f, name, acted := s.decide()
	for _, k := range acted {
		s.observers.Tell(ctx, Event{Kind: Injected, Name: name, Fault: k})
	}
	return f
}

func (s *Script) decide() (f fault, name string, acted []Kind) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	if !s.cfg.Enabled {
		return f, "", nil
	}
	now := time.Since(s.begun)
	for i := range s.cfg.Plans {
		p := &s.cfg.Plans[i]
		if f.plan != nil && p.Kind != Latency || !s.applies(i, now) {
			continue
		}
		if p.Kind == Latency {
			f.delay += p.Delay + time.Duration(s.met[i])*p.Growth
			if p.Spread > 0 {
				f.delay += time.Duration(s.rand.Int64N(int64(p.Spread) + 1))
			}
		} else {
			f.plan = p
		}
		s.met[i]++
		s.injected[p.Kind]++
		acted = append(acted, p.Kind)
	}
	return f, s.cfg.Name, acted
}

// applies reports whether the plan applies to a call now.
func (s *Script) applies(i int, now time.Duration) bool {
	p := &s.cfg.Plans[i]
	switch {
	case now < p.At, p.For > 0 && now >= p.At+p.For:
		return false
	case p.Count > 0 && s.met[i] >= p.Count:
		return false
	}
	return p.Share == 0 || p.Share == 1 || s.rand.Float64() < p.Share
}

// wait waits for d, or until ctx ends.
func wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
