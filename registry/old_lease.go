package registry

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/go-resilience/resilience/lease"
)

func init() {
	oldReaders = append(oldReaders, func(p Policy) any {
		c, ok := p.(candidate)
		if !ok {
			return nil
		}
		return &oldLease{read(p, "lease", leaseFigures, leaseEvent, nil).(*oldReader[lease.Stats, lease.Event]), c, time.Now()}
	})
}

func leaseFigures(s lease.Stats, to emit) {
	terms := func(state string, n int64) {
		to.counter("lease.terms", "{term}", "Terms that have begun, and how they ended.", n, Attr{"state", state})
	}
	terms("elected", s.Elected)
	terms("lost", s.Lost)
	terms("resigned", s.Resigned)
	to.counter("lease.refusals", "{call}", "Calls of TryCampaign that found the lease held.", s.Refused)
	to.counter("lease.asks", "{call}", "Times that the store was asked for the lease.", s.Asked)
	to.counter("lease.renewals", "{call}", "Renewals that have succeeded.", s.Renewed)
	to.counter("lease.store.errors", "{error}", "Calls of the store that have failed.", s.StoreErrors)
	to.seconds(true, "lease.wait.time", "Time of all waits that have ended, together.", s.WaitTime)
	to.seconds(true, "lease.term.time", "Time of all terms that have ended, together.", s.LeadTime)
	to.gauge("lease.queued", "{call}", "Calls that wait for the lease.", float64(s.Queued))
	to.gauge("lease.leading", "{term}", "Terms that hold.", float64(s.Leading))
}

func leaseEvent(e lease.Event) oldEvent {
	attrs := []slog.Attr{slog.String("holder", e.Holder), slog.Int64("epoch", e.Epoch)}
	if e.Waited > 0 {
		attrs = append(attrs, slog.Duration("waited", e.Waited))
	}
	if e.Took > 0 {
		attrs = append(attrs, slog.Duration("took", e.Took))
	}
	return happened(e.Kind, "", e.Err, attrs...).warn(e.Kind == lease.EventLost || e.Err != nil)
}

type candidate interface {
	observed[lease.Stats, lease.Event]
	Look(context.Context) (lease.State, error)
	Config() lease.Config
}

type oldLease struct {
	*oldReader[lease.Stats, lease.Event]
	candidate candidate
	added     time.Time
}

func (o *oldLease) Health(ctx context.Context) error {
	held, err := o.candidate.Look(ctx)
	if err != nil {
		return &ailment{state: "store down", fails: true, err: err}
	}
	if ill := leaseHealth(held, o.candidate.Stats(), time.Since(o.added), o.candidate.Config().TTL); ill != nil {
		return ill
	}
	return nil
}

// leaseHealth judges a lease whose Candidate has been there for a time. One that was asked for
// by TryCampaign alone is a lock, which nobody needs to hold.
func leaseHealth(held lease.State, s lease.Stats, there, ttl time.Duration) *ailment {
	lock := s.Asked > 0 && s.Queued == 0 && s.WaitTime == 0
	vacant := held.Now.Sub(held.Since)
	if held.Since.IsZero() { // forever
		vacant = there
	}
	if !held.Until.IsZero() || lock || vacant <= ttl {
		return nil
	}
	return &ailment{state: "vacant", fails: true, detail: fmt.Sprintf("nobody has held it for %v", vacant.Round(time.Second))}
}
