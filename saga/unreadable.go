package saga

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

// unreadableFor is the time after which a saga that no process can read is stuck. It is long because a deployment may
// take hours. During that time, only a few processes may have the build that can read the saga, so they claim it
// rarely.
const unreadableFor = 24 * time.Hour

// maxUnread is the maximum number of unreadable sagas that a runner remembers for its health check.
const maxUnread = 10_000

// An unreadable is a saga whose record does not match its definition, because another build of the program or another
// version of this package wrote the record.
type unreadable struct {
	why  error
	seen time.Time // the latest time, by the local clock, at which the runner claimed the saga
}

// noteReadable records whether a claimed saga can be read: err is nil if it can. It notifies the observers once of a
// saga that cannot be read.
func (r *Runner) noteReadable(rec *store.Record, err error) {
	r.mu.Lock()
	_, known := r.unread[rec.ID]
	if err == nil {
		delete(r.unread, rec.ID)
	} else if known || len(r.unread) < maxUnread {
		r.unread[rec.ID] = unreadable{err, time.Now()}
	}
	r.mu.Unlock()
	if err != nil && !known {
		r.counters.count(func(s *Stats) { s.Stalled++ })
		r.reportEvent(context.Background(), rec, Event{Kind: EventStalled, Err: err, At: rec.Now})
	}
}

// unreadSagas returns the number of sagas that this runner has recently claimed and could not read, and one of them. A
// saga that the runner has not claimed again since then was read by another process.
func (r *Runner) unreadSagas() (n int, id string, why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for saga, u := range r.unread {
		switch {
		case time.Since(u.seen) > 3*r.longestUnread():
			delete(r.unread, saga)
			continue
		case n == 0 || saga < id:
			id, why = saga, u.why
		}
		n++
	}
	return n, id, why
}

// longestUnread is the maximum pause, without its jitter, before a saga that could not be read is claimed again.
func (r *Runner) longestUnread() time.Duration { return 20 * r.cfg.LeaseTTL }

// unreadPause returns the pause before a saga is claimed again that no process has read for the time age. The jitter
// lets another runner claim the saga, even if the runners query the store in the same order each time.
func (r *Runner) unreadPause(age time.Duration) time.Duration {
	d := max(r.cfg.LeaseTTL, min(age/16, r.longestUnread()))
	return d + r.chance(d)
}

// leaveToOthers releases a saga that this program cannot read. Another build of the program may then claim the saga.
// leaveToOthers returns false if no process has read the saga for unreadableFor, or if the record cannot be marked. The
// mark in the record has the time since which the saga is unread, and whether an owner has crashed.
func (h *hold) leaveToOthers(why error) bool {
	var mark struct {
		Unread time.Time `json:"unread"`
		Orphan bool      `json:"orphan"`
	}
	list, isObject := members(h.rec.Progress)
	if !isObject {
		return false
	}
	_ = json.Unmarshal(h.rec.Progress, &mark) // fields of other types were not written by this package
	if mark.Unread.IsZero() {
		mark.Unread = h.rec.Now
	}
	age := h.rec.Now.Sub(mark.Unread)
	if age >= unreadableFor {
		return false
	}
	marked := list[:0]
	for _, m := range list {
		if m.name != "unread" && m.name != "orphan" {
			marked = append(marked, m)
		}
	}
	unread, _ := json.Marshal(mark.Unread)
	marked = append(marked, member{"unread", unread})
	if mark.Orphan || h.rec.Previous != "" {
		marked = append(marked, member{"orphan", json.RawMessage("true")})
	}
	why = fmt.Errorf("left to another build of the program: %w", why)
	req := store.CommitRequest{
		ID: h.rec.ID, Epoch: h.rec.Epoch, Seq: h.rec.Seq, Nonce: rand.Int64(),
		Status: h.rec.Status, Progress: object(marked), Failures: h.rec.Failures, Takeovers: h.rec.Takeovers,
		LastError: storable(why.Error()), Log: []store.Entry{{Kind: EventReleased, Error: storable(why.Error())}},
		Release: true, WakeIn: h.r.unreadPause(age),
	}
	h.write(req, true)
	return true
}

// survey finds, once, the waiting sagas that this build of the program cannot read, and makes them due. A runner then
// tries to read them. Otherwise a runner would claim them only when their wait ends, long after the deployment.
func (r *Runner) survey(ctx context.Context) {
	r.mu.Lock()
	names := make(map[string]bool)
	for d := range r.programs {
		names[d.Saga] = true
	}
	r.mu.Unlock()
	for name := range names {
		f := store.Filter{Saga: name, Status: []Status{Running, Compensating}, WithoutState: true}
		for more := true; more && ctx.Err() == nil; {
			call, cancel := context.WithTimeout(ctx, r.cfg.LeaseTTL)
			recs, next, err := r.store.List(call, f)
			cancel()
			if err == nil {
				err = r.wakeUnreadable(ctx, recs)
			}
			if err == nil {
				f.After, more = next, next != ""
			} else if ctx.Err() == nil {
				r.storeFailed(ctx, fmt.Errorf("saga: survey: %w", err))
			}
			if more {
				pause(ctx, r.cfg.Poll)
			}
		}
	}
}

// wakeUnreadable makes those sagas in recs due that wait and that this build cannot read. It omits sagas that a runner
// has already found unreadable.
func (r *Runner) wakeUnreadable(ctx context.Context, recs []store.Record) error {
	woken := false
	for i := range recs {
		rec := &recs[i]
		p, unknown := r.program(rec.Saga, rec.Version)
		if unknown != nil || rec.Owner != "" {
			continue
		}
		m, unread := load(p, rec)
		if unread == nil || !m.unread.IsZero() {
			continue
		}
		call, cancel := context.WithTimeout(ctx, r.cfg.LeaseTTL)
		_, err := r.store.Post(call, store.PostRequest{ID: rec.ID})
		cancel()
		if err != nil && !errors.Is(err, ErrNotFound) {
			return err
		}
		woken = true
	}
	if woken {
		r.Wake()
	}
	return nil
}

// pause waits for d, or until ctx is done.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
