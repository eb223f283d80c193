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

// unreadableFor is how long no process may be able to read a saga before it is stuck. A deployment may take hours, with
// a few processes of the build that can read the saga, which then claim it rarely.
const unreadableFor = 24 * time.Hour

// maxUnread bounds the sagas that a runner remembers for Health.
const maxUnread = 10_000

// An unreadable saga has a record that is not one of the definition, because another build of the program or of this
// package has written it.
type unreadable struct {
	why  error
	seen time.Time // by the local clock
}

// noteReadable notes whether a claimed saga can be read, and reports one that cannot, once.
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

// unreadSagas returns how many sagas this runner has met lately that it cannot read, and one of them. A saga that it
// has not met again is one that another process has read.
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

// longestUnread is the longest pause, without its jitter, before a saga that could not be read is claimed again.
func (r *Runner) longestUnread() time.Duration { return 20 * r.cfg.LeaseTTL }

// unreadPause returns the pause before a saga is claimed again that nobody has read for age. The jitter lets another
// runner claim it, although runners may ask the store in the same order each time.
func (r *Runner) unreadPause(age time.Duration) time.Duration {
	d := max(r.cfg.LeaseTTL, min(age/16, r.longestUnread()))
	return d + r.chance(d)
}

// leaveToOthers writes back a saga that cannot be read here, so that another build of the program may claim it. It
// reports false if none has read it for long, or if the record cannot be marked. In the record, it marks since when it
// is unread, and whether an owner had crashed.
func (h *hold) leaveToOthers(why error) bool {
	var mark struct {
		Unread time.Time `json:"unread"`
		Orphan bool      `json:"orphan"`
	}
	list, isObject := members(h.rec.Progress)
	if !isObject {
		return false
	}
	_ = json.Unmarshal(h.rec.Progress, &mark) // if its fields have other types, it was not this package that wrote them
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
	_ = h.write(req, true)
	return true
}

// survey finds the sagas that wait and that this build of the program cannot read, once. They would be met only when
// their wait ends, long after the deployment. They are made due, so that a runner tries them.
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

// wakeUnreadable makes those sagas of a page due that wait, that this build cannot read, and that none has met yet.
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

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
