package lease

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"runtime/debug"
	"sync"
	"time"
)

// A Term is one time that a candidate holds the lease, from its election until it is
// lost or given up. Copies are the same Term.
type Term struct{ h *holding }

// Holder returns [Config.Holder], as others see it.
func (t Term) Holder() string { return t.h.c.cfg.Holder }

// Epoch returns the number of the term, a fencing token: it is greater than that of every earlier
// term of this lease. Epochs do not count terms.
func (t Term) Epoch() int64 { return t.h.rec.Epoch }

// Context returns a ctx that ends when the term is over, with a cause that matches [ErrLost]: that
// of the function that Run calls.
func (t Term) Context() context.Context { return t.h.ctx }

// Err returns nil while the term holds, and then a [*LostError]. It looks at the clock: after a
// pause of the process it may know sooner than Context.
func (t Term) Err() error {
	if err := t.h.over(); err != nil {
		return err
	}
	return nil
}

// Fence returns an error unless the term holds. After it no other term can begin until tx ends: a
// tx that commits was written by the leader. Call it before the first savepoint of tx: ROLLBACK TO
// SAVEPOINT removes a later fence, and nothing tells. After an error, roll tx back.
//
// Another leader waits for tx, even if its process is stopped or cut off, for as long as the
// database keeps its connection.
func (t Term) Fence(ctx context.Context, tx *sql.Tx) error {
	if err := t.Err(); err != nil {
		return err
	}
	f, ok := t.h.c.store.(Fencer)
	if !ok {
		return ErrNoFence
	}
	err := f.Fence(ctx, tx, t.h.c.cfg.Name, t.Epoch())
	if errors.Is(err, ErrLost) {
		return t.h.end(endedThere)
	}
	if err != nil {
		return fmt.Errorf("lease: %s: fence: %w", t.h.c.cfg.Name, err)
	}
	return nil
}

// Resign ends the term: first its Context, then in the store, so that another candidate can lead
// immediately. It waits for transactions of the term that are fenced and still open. If it returns
// an error, the lease lasts until the TTL is over, unless Resign is called again. ctx must not be
// that of the term.
func (t Term) Resign(ctx context.Context) error {
	h := t.h
	given := h.over() == nil && h.end(resigned).reason == resigned // not lost at the same time
	err := h.c.store.Release(ctx, h.c.cfg.Name, h.rec.Token)
	if err != nil {
		h.c.failed(ctx)
		err = fmt.Errorf("lease: %s: resign: %w", h.c.cfg.Name, err)
	}
	if given {
		h.tell(Event{Kind: EventResigned, Took: time.Since(h.began), Err: err})
	}
	h.mu.Lock()
	renewing := h.renewing
	h.mu.Unlock()
	if renewing != nil {
		select {
		case <-renewing:
		case <-ctx.Done():
		}
	}
	return err
}

// A holding is a term that a candidate keeps. One timer renews the lease and ends the term: no
// goroutine waits while it holds.
type holding struct {
	c     *Candidate
	rec   Record    // the answer of the store
	began time.Time // when it was asked for
	heard time.Time // when the answer was there

	ctx    context.Context // of the work: ends with that of Run, too
	cancel context.CancelCauseFunc

	mu       sync.Mutex
	timer    *time.Timer
	until    time.Time          // when the term is over, unless it is renewed
	why      *LostError         // nil while the term holds
	failed   error              // of the last renewal
	renewing chan struct{}      // of the renewal under way, closed when the store has answered; nil: none is
	stop     context.CancelFunc // of the renewal under way
}

// begin begins a term that was asked for then. Its ctx is made from base.
func (c *Candidate) begin(base context.Context, rec Record, sent time.Time, waited time.Duration) Term {
	h := &holding{c: c, rec: rec, began: sent, heard: time.Now(), until: c.endOf(sent)}
	h.ctx, h.cancel = context.WithCancelCause(base)
	c.count(func(s *Stats) { s.Elected++; s.Leading++ })
	h.mu.Lock()
	h.timer = time.AfterFunc(time.Until(sent.Add(c.cfg.TTL/3)), h.tick)
	h.mu.Unlock()
	returned := false
	defer func() {
		if !returned { // the hook has panicked: nobody has the Term, and the lease would last until its TTL
			release, cancel := context.WithTimeout(context.WithoutCancel(base), c.cfg.TTL/3)
			defer cancel()
			_ = Term{h}.Resign(release)
		}
	}()
	h.tell(Event{Kind: EventElected, Waited: waited})
	returned = true
	return Term{h}
}

// tick is called by the timer, on a goroutine of its own: a renewal is due, or the term is over
// while one is under way. A connection that is half open must not cost the lease: the first try has
// little time, the next ones more, in case it is the store that is slow.
func (h *holding) tick() {
	defer survive()
	if h.over() != nil {
		return
	}
	ttl := h.c.cfg.TTL
	h.mu.Lock()
	if h.why != nil || h.renewing != nil {
		if h.why == nil {
			h.timer.Reset(time.Until(h.until)) // which a run of Every has moved
		}
		h.mu.Unlock()
		return
	}
	timeout := ttl / 8
	if h.failed != nil {
		timeout = ttl / 4
	}
	call, cancel := context.WithTimeout(context.WithoutCancel(h.ctx), timeout)
	defer cancel()
	h.renewing, h.stop = make(chan struct{}), cancel
	h.timer.Reset(time.Until(h.until))
	h.mu.Unlock()

	next, renewed := time.Now().Add(ttl/3), false
	func() {
		defer survive()
		renewed = h.renew(call, false) == nil
	}()
	if !renewed {
		next = time.Now().Add(ttl / 30)
	}
	h.mu.Lock()
	h.renewing, h.stop = nil, nil
	if h.why == nil {
		h.timer.Reset(min(time.Until(next), time.Until(h.until)))
	}
	h.mu.Unlock()
}

// survive is deferred around a hook on a goroutine of this package: there is no caller to pass its
// panic on to.
func survive() {
	if v := recover(); v != nil {
		log.Printf("lease: a hook has panicked: %v\n%s", v, debug.Stack())
	}
}

// renew renews the lease once. run says that a run of Every begins.
func (h *holding) renew(ctx context.Context, run bool) error {
	sent := time.Now()
	err := h.askToRenew(ctx, run)
	if err == nil {
		h.c.count(func(s *Stats) { s.Renewed++ })
	}
	if errors.Is(err, ErrLost) {
		h.end(endedThere)
	}
	h.mu.Lock()
	h.failed = err
	if err == nil {
		h.until = h.c.endOf(sent)
	}
	over := h.why != nil
	h.mu.Unlock()
	if err != nil && !over && ctx.Err() != context.Canceled { // by the end of Run, as it records a run of Every
		h.c.storeFailed(context.WithoutCancel(h.ctx), "renew", err)
	}
	return err
}

func (h *holding) askToRenew(ctx context.Context, run bool) error {
	if !run {
		defer close(h.renewing) // before the hooks, which may call Resign
	}
	return h.c.store.Renew(ctx, Request{Name: h.c.cfg.Name, Token: h.rec.Token, TTL: h.c.cfg.TTL, Run: run})
}

// recordRun records that a run of Every begins, until it has succeeded or the term is over.
func (h *holding) recordRun(ctx context.Context) bool {
	for ctx.Err() == nil { // which ends with the term
		call, cancel := context.WithTimeout(ctx, h.c.cfg.TTL/4)
		err := h.renew(call, true)
		cancel()
		if err == nil {
			return h.over() == nil
		}
		select {
		case <-time.After(h.c.cfg.TTL / 30):
		case <-ctx.Done():
		}
	}
	return false
}

// over returns why the term is over, or nil.
func (h *holding) over() *LostError {
	h.mu.Lock()
	why, late := h.why, !time.Now().Before(h.until)
	h.mu.Unlock()
	if late {
		return h.end(notRenewed)
	}
	return why
}

// end ends the term, if it is not over yet, and returns why it is.
func (h *holding) end(because reason) *LostError {
	h.mu.Lock()
	if h.why != nil {
		defer h.mu.Unlock()
		return h.why
	}
	why := &LostError{Name: h.c.cfg.Name, Epoch: h.rec.Epoch, reason: because}
	if because == notRenewed {
		why.Err = h.failed
	}
	h.why = why
	h.timer.Stop()
	if h.stop != nil {
		h.stop()
	}
	h.mu.Unlock()
	h.cancel(why)
	took := time.Since(h.began)
	h.c.count(func(s *Stats) {
		s.Leading--
		if because == resigned {
			s.Resigned++
		} else {
			s.Lost++
		}
	})
	if because != resigned {
		h.tell(Event{Kind: EventLost, Took: took, Err: why})
	}
	return why
}

func (h *holding) tell(e Event) {
	e.Name, e.Holder, e.Epoch = h.c.cfg.Name, h.c.cfg.Holder, h.rec.Epoch
	h.c.tell(h.ctx, e)
}
