package bulkhead

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/go-resilience/resilience/policy"
)

// Stats are the metrics of a [Bulkhead].
type Stats struct {
	Admitted int64            `counter:"calls{outcome=admitted,reason=}"`
	Refused  int64            // refused calls; a call whose ctx was done before Do or Begin is not counted
	Refusals map[Reason]int64 `counter:"calls{outcome=refused,reason=*}"` // each reason has an entry
	Waited   int64            `counter:"waits"`                           // number of admitted calls that had to wait
	WaitTime time.Duration    `counter:"wait.time_seconds"`               // total time that admitted calls waited

	Limit       int           `gauge:"limit"`
	InFlight    int           `gauge:"in_flight"`            // number of slots taken
	Queued      []int         `gauge:"queued{level=*}"`      // number of waiting calls, by level
	LongestWait time.Duration `gauge:"wait.longest_seconds"` // longest time that a waiting call has waited so far
	Shares      []ShareStats  // the ten shares with the most slots and waiting calls
}

// ShareStats are the metrics of one share.
type ShareStats struct {
	Share    string // name of the share, at most 100 bytes
	InFlight int    // number of slots that the share's calls hold
	Queued   int    // number of the share's waiting calls
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

// An Event reports that a call was refused, or that a call got its slots after a wait.
type Event struct {
	Kind    EventKind
	Name    string        // the bulkhead's name
	Waited  time.Duration // the time that the call waited
	Refusal *FullError    // set for EventRefused
}

// An EventKind is the kind of an [Event].
type EventKind string

const (
	EventWaited  EventKind = "waited"  // a call got its slots after a wait
	EventRefused EventKind = "refused" // a call was refused
)

// Observe calls f with each event until stop is called. f runs on the goroutine of the call, with the call's ctx,
// before the call's function is called. If f panics, Do or Begin panics.
func (b *Bulkhead) Observe(f func(context.Context, Event)) (stop func()) {
	return b.observers.Observe(f)
}

// Config returns the configuration of b, with defaults filled in.
func (b *Bulkhead) Config() Config { return b.setting.Config() }

// Describe implements [policy.Describer]. The Health of a Bulkhead is a warning while no slot is free.
func (b *Bulkhead) Describe() policy.Description {
	name := b.setting.Load().Name
	return policy.Description{
		Kind:    "bulkhead",
		Name:    name,
		Metrics: func() []policy.Metric { return policy.Metrics("bulkhead", b.Stats()) },
		Health:  b.health,
		Config:  func() any { return b.Config() },
		Update: func(dryRun bool, change func(cfg any) error) error {
			return b.setting.Change(dryRun, change, allow, b.applyConfig)
		},
		Observe: policy.Events(b.Observe, Event.describe),
		InUse:   b.inUse,
	}
}

func (b *Bulkhead) health(context.Context) policy.Health {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.running < b.limit {
		return policy.Health{}
	}
	return policy.Health{
		Status: policy.Warn, // not Fail, because a slot may become free at any moment
		State:  "full",
		Detail: fmt.Sprintf("%d of %d in flight", b.running, b.limit),
	}
}

// inUse reports whether a call holds a slot or waits for a slot.
func (b *Bulkhead) inUse() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.running > 0 // calls wait only while other calls run
}

func (e Event) describe() policy.Event {
	d := policy.Event{Kind: "bulkhead", Name: e.Name, What: string(e.Kind), Level: slog.LevelDebug}
	if e.Kind == EventRefused {
		d.Level, d.Err = slog.LevelWarn, e.Refusal
		d.Attrs = append(d.Attrs, slog.String("reason", string(e.Refusal.Reason)))
		if e.Refusal.Share != "" {
			d.Attrs = append(d.Attrs, slog.String("share", e.Refusal.Share))
		}
	}
	if e.Waited > 0 {
		d.Attrs = append(d.Attrs, slog.Duration("waited", e.Waited))
	}
	return d
}
