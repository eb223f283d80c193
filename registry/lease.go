package registry

import (
	"log/slog"

	"github.com/go-resilience/resilience/lease"
)

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
	to.counter("lease.hook.panics", "{panic}", "Panics of hooks and observers.", s.HookPanics)
	to.seconds(true, "lease.wait.time", "Time of all waits that have ended, together.", s.WaitTime)
	to.seconds(true, "lease.term.time", "Time of all terms that have ended, together.", s.LeadTime)
	to.gauge("lease.queued", "{call}", "Calls that wait for the lease.", float64(s.Queued))
	to.gauge("lease.leading", "{term}", "Terms that hold.", float64(s.Leading))
}

func leaseEvent(e lease.Event) Event {
	attrs := []slog.Attr{slog.String("holder", e.Holder), slog.Int64("epoch", e.Epoch)}
	if e.Waited > 0 {
		attrs = append(attrs, slog.Duration("waited", e.Waited))
	}
	if e.Took > 0 {
		attrs = append(attrs, slog.Duration("took", e.Took))
	}
	return happened(e.Kind, "", e.Err, attrs...).warn(e.Kind == lease.EventLost || e.Err != nil)
}
