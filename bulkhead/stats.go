package bulkhead

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
)

// Stats are the metrics of a [Bulkhead].
type Stats struct {
	Admitted int64            `counter:"calls{outcome=admitted,reason=}"`
	Refused  int64            // calls; a call whose ctx had already ended is in neither
	Refusals map[Reason]int64 `counter:"calls{outcome=refused,reason=*}"` // every reason has an entry
	Waited   int64            `counter:"waits"`                           // admitted calls that had to wait
	WaitTime time.Duration    `counter:"wait.time_seconds"`               // of these, in total

	Limit       int           `gauge:"limit"`
	InFlight    int           `gauge:"in_flight"`            // slots taken
	Queued      []int         `gauge:"queued{level=*}"`      // calls waiting, by level
	LongestWait time.Duration `gauge:"wait.longest_seconds"` // so far, of the calls waiting
	Shares      []ShareStats  // the ten with the most slots and waiting calls
}

// ShareStats are the metrics of one share.
type ShareStats struct {
	Share    string // at most 100 bytes
	InFlight int    // slots
	Queued   int    // calls
}

// Stats returns the metrics of b.
func (b *Bulkhead) Stats() Stats {
	cfg := b.setting.Load()
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.stats
	s.Refusals, s.Limit, s.InFlight, s.Queued = maps.Clone(s.Refusals), b.limit, b.running, make([]int, cfg.Levels)
	for _, l := range b.queue.lines {
		s.Queued[l.level] += l.waiting
		s.LongestWait = max(s.LongestWait, now()-l.oldest.since)
	}
	for _, share := range b.queue.shares {
		s.Shares = append(s.Shares, ShareStats{short(share.name), share.held, share.waiting})
	}
	if common := &b.queue.common; cfg.Share != nil && common.held+common.waiting > 0 {
		s.Shares = append(s.Shares, ShareStats{"", common.held, common.waiting})
	}
	slices.SortFunc(s.Shares, func(a, b ShareStats) int {
		return cmp.Or(b.InFlight+b.Queued-a.InFlight-a.Queued, b.Queued-a.Queued, strings.Compare(a.Share, b.Share))
	})
	s.Shares = slices.Clip(s.Shares[:min(len(s.Shares), 10)])
	return s
}

// short returns at most the first 100 bytes of a text, without a partial character.
func short(text string) string {
	if len(text) <= 100 {
		return text
	}
	return strings.Clone(strings.ToValidUTF8(text[:100], ""))
}

// An Event is a call that was refused, or that got its slots after a wait.
type Event struct {
	Kind    EventKind
	Name    string        // of the bulkhead
	Waited  time.Duration // by the call
	Refusal *FullError    // of EventRefused
}

// An EventKind says what an [Event] is.
type EventKind string

const (
	EventWaited  EventKind = "waited"  // a call got its slots after a wait
	EventRefused EventKind = "refused" // a call was refused
)

func (e Event) Level() int {
	if e.Refusal != nil {
		return 4
	}
	return -4
}

func (e Event) Fields(yield func(name string, value any)) {
	if e.Refusal == nil {
		yield("event", string(e.Kind))
		yield("waited", e.Waited)
		return
	}
	yield("event", string(e.Kind))
	yield("reason", string(e.Refusal.Reason))
	if e.Refusal.Share != "" {
		yield("share", e.Refusal.Share)
	}
	if e.Waited > 0 {
		yield("waited", e.Waited)
	}
	yield("err", e.Refusal)
}

// Observe has f called with each event, until stop is: on the call's goroutine, with its ctx,
// before it runs. If f panics, so does the call.
func (b *Bulkhead) Observe(f func(context.Context, Event)) (stop func()) {
	return b.observers.Observe(f)
}

func (b *Bulkhead) ObserveAny(f func(context.Context, any)) (stop func()) {
	return b.observers.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

func (b *Bulkhead) Name() string { return b.setting.Load().Name }

func (b *Bulkhead) Kind() string { return "bulkhead" }

// Config has its defaults filled in.
func (b *Bulkhead) Config() Config { return b.setting.Config() }

func (b *Bulkhead) Settings() any {
	c := b.Config()
	c.Priority, c.Cost, c.Share = nil, nil, nil
	return c
}

// Change is Update with a *Config. If f returns an error or dry is true, nothing changes.
func (b *Bulkhead) Change(dry bool, f func(cfg any) error) error {
	return b.setting.Change(dry, f, allow, b.applyConfig)
}

func (b *Bulkhead) Figures() []describe.Figure {
	s := b.Stats()
	figures := []describe.Figure{
		{Name: "bulkhead.calls{outcome=admitted,reason=}", Counter: true, Value: float64(s.Admitted)},
	}
	for _, r := range reasons {
		name := "bulkhead.calls{outcome=refused,reason=" + string(r) + "}"
		figures = append(figures, describe.Figure{Name: name, Counter: true, Value: float64(s.Refusals[r])})
	}
	for level, n := range s.Queued {
		figures = append(figures, describe.Figure{Name: fmt.Sprintf("bulkhead.queued{level=%d}", level), Value: float64(n)})
	}
	return append(figures,
		describe.Figure{Name: "bulkhead.waits", Counter: true, Value: float64(s.Waited)},
		describe.Figure{Name: "bulkhead.wait.time_seconds", Counter: true, Value: s.WaitTime.Seconds()},
		describe.Figure{Name: "bulkhead.wait.longest_seconds", Value: s.LongestWait.Seconds()},
		describe.Figure{Name: "bulkhead.limit", Value: float64(s.Limit)},
		describe.Figure{Name: "bulkhead.in_flight", Value: float64(s.InFlight)})
}

// Health is an error while no slot is free.
func (b *Bulkhead) Health() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.running < b.limit {
		return nil
	}
	return &fullNow{b.running, b.limit}
}

// fullNow is the error of Health. Calls may pass again at any moment.
type fullNow struct{ running, limit int }

func (f *fullNow) Error() string        { return "full: " + f.HealthDetail() }
func (f *fullNow) HealthState() string  { return "full" }
func (f *fullNow) HealthDetail() string { return fmt.Sprintf("%d of %d in flight", f.running, f.limit) }

// Needed reports whether a call has a slot or waits for one.
func (b *Bulkhead) Needed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.running > 0 // a call waits only while others run
}
