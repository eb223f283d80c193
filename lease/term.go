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

// A Term is a period of leadership, from the election until the term is lost or resigned. A copy of a Term represents
// the same term. The zero Term is over.
type Term struct{ h *holding }

// Holder returns the [Config].Holder of the candidate, which other processes see in [HeldError] and [Record].
func (t Term) Holder() string { return t.holding().c.cfg.Holder }

// Epoch returns the term's fencing token, which is greater than the epochs of all earlier terms. Epochs are not
// consecutive.
func (t Term) Epoch() int64 { return t.holding().rec.Epoch }

// Context returns a ctx that is canceled when the term is over, with a cause that matches [ErrLost]. Run, Loop and
// Every pass this ctx to their functions. If their own ctx is done first, this ctx is done with the same cause,
// although the term is not over.
func (t Term) Context() context.Context { return t.holding().ctx }

// Err returns nil until the term is over, and then a [*LostError]. Because Err reads the clock, it may report the end
// of the term before Context does, for example after a pause of the process.
func (t Term) Err() error {
	if why := t.holding().endedBecause(); why != nil {
		return why
	}
	return nil
}

// Fence returns an error if the term is over. If Fence succeeds, no other term can start until tx ends. So if a fenced
// tx commits, the process was the leader at the time of the commit. Call Fence before the first savepoint of tx,
// because a ROLLBACK TO SAVEPOINT silently removes a fence that was set after that savepoint. If Fence returns an
// error, roll tx back.
//
// If the process is stopped or disconnected, tx ends only when the database closes the connection of tx.
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

// Resign ends the term: it cancels the term's Context and then releases the lease in the store. Then another candidate
// can lead immediately. Resign waits for fenced transactions of the term that are still open. If Resign returns an
// error, the lease ends only after its TTL, unless Resign is called again. Do not pass the term's ctx, because Resign
// cancels it.
func (t Term) Resign(ctx context.Context) error {
	if t.h == nil {
		return nil
	}
	h := t.h
	// given reports whether this call has ended the term. Otherwise the term was lost at the same time.
	given := h.endedBecause() == nil && h.end(resigned).reason == resigned
	err := h.c.store.Release(ctx, h.c.cfg.Name, h.rec.Token)
	if err != nil {
		h.c.countFailure(ctx)
		err = fmt.Errorf("lease: %s: resign: %w", h.c.cfg.Name, err)
	}
	if given {
		h.notify(Event{Kind: EventResigned, Took: time.Since(h.began), Err: err})
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

// holding returns the state of t. For the zero Term, it returns the state of a term that is over.
func (t Term) holding() *holding {
	if t.h != nil {
		return t.h
	}
	h := &holding{c: &Candidate{}, why: &LostError{reason: neverBegan}}
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(h.why)
	h.ctx = ctx
	return h
}

// A holding is the state of a term. A single timer renews the lease and ends the term, so no goroutine has to wait
// during the term.
type holding struct {
	c     *Candidate
	rec   Record    // the lease's record when the term started
	began time.Time // time at which the lease was requested

	ctx    context.Context // the ctx of the work, which is also done when the ctx of Run is
	cancel context.CancelCauseFunc

	mu       sync.Mutex
	timer    *time.Timer
	until    time.Time          // the time when the term ends, unless it is renewed
	why      *LostError         // why the term is over; nil until it is
	failed   error              // the error of the last renewal
	renewing chan struct{}      // closed when the timer's renewal is complete; nil if no renewal of the timer is in flight
	stop     context.CancelFunc // cancels the timer's renewal
}

// begin starts a term that was requested at the time sent. base is the parent of the term's ctx.
func (c *Candidate) begin(base context.Context, rec Record, sent time.Time, waited time.Duration) Term {
	h := &holding{c: c, rec: rec, began: sent, until: c.endOf(sent)}
	h.ctx, h.cancel = context.WithCancelCause(base)
	c.count(func(s *Stats) { s.Elected++; s.Leading++ })
	h.mu.Lock()
	h.timer = time.AfterFunc(time.Until(sent.Add(c.cfg.TTL/3)), h.tick)
	h.mu.Unlock()
	returned := false
	defer func() {
		if !returned { // an observer has panicked, so the caller gets no Term; without Resign, the lease would be renewed
			release, cancel := context.WithTimeout(context.WithoutCancel(base), c.cfg.TTL/3)
			defer cancel()
			_ = Term{h}.Resign(release)
		}
	}()
	h.notify(Event{Kind: EventElected, Waited: waited})
	returned = true
	return Term{h}
}

// tick is called by the timer on a separate goroutine. It renews the lease, or ends the term if its time is over. The
// first try of a renewal has a short timeout, because a half-open connection must not cost the lease. The next tries
// have a longer timeout, because the store may be slow.
func (h *holding) tick() {
	defer recoverHook()
	if h.endedBecause() != nil {
		return
	}
	ttl := h.c.cfg.TTL
	h.mu.Lock()
	if h.why != nil || h.renewing != nil {
		if h.why == nil {
			h.timer.Reset(time.Until(h.until)) // a run of Every may have extended the lease
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
		defer recoverHook()
		renewed = h.renew(call, 0) == nil
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

// recoverHook recovers a panic of an observer that is called on a goroutine of this package, where no caller could
// recover the panic. It is deferred.
func recoverHook() {
	if v := recover(); v != nil {
		log.Printf("lease: observer panicked: %v\n%s", v, debug.Stack())
	}
}

// renew renews the lease once. run is the scheduled instant of the run of Every that starts, or 0.
func (h *holding) renew(ctx context.Context, run int64) error {
	sent := time.Now()
	err := h.renewOnce(ctx, run)
	if err == nil {
		h.c.count(func(s *Stats) { s.Renewed++; h.c.lastRun = max(h.c.lastRun, run) })
	}
	if errors.Is(err, ErrLost) {
		h.end(endedThere)
	}
	if errors.Is(err, ErrRunTaken) {
		return err
	}
	h.mu.Lock()
	h.failed = err
	// Two renewals may return in another order than they were sent, so until must not go back.
	if until := h.c.endOf(sent); err == nil && until.After(h.until) {
		h.until = until
	}
	h.mu.Unlock()
	if err != nil && ctx.Err() != context.Canceled { // the renewal was not canceled by the end of the term
		h.c.storeFailed(context.WithoutCancel(h.ctx), h.rec.Epoch, "renew", err)
	}
	return err
}

func (h *holding) renewOnce(ctx context.Context, run int64) error {
	if run == 0 {
		defer close(h.renewing) // closed before observers are called, because they may call Resign, which waits for it
	}
	return h.c.store.Renew(ctx, Request{Name: h.c.cfg.Name, Token: h.rec.Token, TTL: h.c.cfg.TTL, Run: run})
}

// startRun records that the run of Every with the scheduled instant at starts. It repeats the call to the store until
// the store answers or ctx is done. It reports whether the run may be made.
func (h *holding) startRun(ctx context.Context, at time.Time) bool {
	for repeated := false; ctx.Err() == nil; repeated = true { // ctx is done when the term is over
		// Do not cancel the call when ctx is done. Otherwise a run could be recorded that no process makes.
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.c.cfg.TTL/4)
		err := h.renew(call, at.UnixMilli())
		cancel()
		taken := errors.Is(err, ErrRunTaken)
		// A run that is taken after a repetition was recorded by an earlier try whose answer was lost, because no other call
		// records runs in this term.
		if err == nil || taken && repeated {
			return h.endedBecause() == nil
		}
		if taken {
			return false
		}
		select {
		case <-time.After(h.c.cfg.TTL / 30):
		case <-ctx.Done():
		}
	}
	return false
}

// endedBecause returns why the term is over, or nil.
func (h *holding) endedBecause() *LostError {
	h.mu.Lock()
	why, late := h.why, !time.Now().Before(h.until)
	h.mu.Unlock()
	if late {
		return h.end(notRenewed)
	}
	return why
}

// end ends the term unless it is already over, and returns why it is over.
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
	h.c.saw(Record{})
	h.c.count(func(s *Stats) {
		s.Leading--
		if because == resigned {
			s.Resigned++
		} else {
			s.Lost++
		}
	})
	if because != resigned {
		h.notify(Event{Kind: EventLost, Took: took, Err: why})
	}
	return why
}

func (h *holding) notify(e Event) {
	e.Epoch = h.rec.Epoch
	h.c.notify(h.ctx, e)
}
