package lease

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"
)

// A Term is one time that a candidate holds the lease, from its election until it is
// lost or given up. It is safe for concurrent use. Copies are the same Term.
type Term struct{ h *holding }

// Holder returns [Config.Holder], as others see it.
func (t Term) Holder() string { return t.h.cfg.Holder }

// Epoch returns the number of the term, which is greater than that of every earlier term
// of this lease. It is a fencing token: a resource that has seen a higher one refuses the
// request. Epochs do not count terms.
func (t Term) Epoch() int64 { return t.h.epoch }

// Context returns a ctx that ends when the term is over, before the store lets another
// candidate have the lease. Its cause then matches [ErrLost]. In a function that Run has
// called it is the function's ctx, which also ends with that of Run.
func (t Term) Context() context.Context { return t.h.ctx }

// Err returns nil while the term holds, and then a [*LostError]. It looks at the clock:
// after a pause of the process it may know sooner than Context.
func (t Term) Err() error {
	if err := t.h.over(); err != nil {
		return err
	}
	return nil
}

// Fence returns an error unless the term holds. After it no other term can begin until tx
// ends, however long that takes: a tx that commits was written by the leader. Fence can be
// called anywhere in tx; at the beginning, it saves work that would be rolled back.
//
// ROLLBACK TO SAVEPOINT removes a fence that was taken after the savepoint, and nothing
// tells: call Fence before the first savepoint.
//
// The error matches [ErrLost] if the term is over. It is [ErrNoFence] if the store is not
// in a database of package database/sql. After any error, roll tx back.
//
// Another leader waits for tx, even if the process that has begun it is stopped or cut
// off, for as long as the database keeps its connection.
func (t Term) Fence(ctx context.Context, tx *sql.Tx) error {
	if err := t.Err(); err != nil {
		return err
	}
	f, ok := t.h.c.store.(Fencer)
	if !ok {
		return ErrNoFence
	}
	err := f.Fence(ctx, tx, t.h.cfg.Name, t.Epoch())
	if errors.Is(err, ErrLost) {
		return t.h.end(endedThere)
	}
	if err != nil {
		return fmt.Errorf("lease: %s: fence: %w", t.h.cfg.Name, err)
	}
	return nil
}

// Resign ends the term: first its Context, then in the store, so that another candidate
// can lead immediately. It waits for transactions of the term that are fenced and still
// open, and for a renewal under way. If it returns an error, the store may not know: the
// lease then lasts until the TTL is over, and Resign may be called again. The Resign of a
// term that is over frees what the store still holds for it. ctx must not be that of the
// term, which Resign ends.
func (t Term) Resign(ctx context.Context) error { return t.h.resign(ctx) }

// lost reports whether the term is over although nobody has given it up.
func (t Term) lost() bool {
	err := t.h.over()
	return err != nil && err.reason != resigned
}

// A holding is a term that a candidate keeps.
type holding struct {
	c     *Candidate
	cfg   *Config // as the campaign had it
	token string
	epoch int64
	began time.Time

	ctx      context.Context // of the work: ends with that of Run, too
	cancel   context.CancelCauseFunc
	renewals context.Context // ends when the term is over
	stop     context.CancelFunc
	done     chan struct{} // closed when no renewal is under way any more

	mu     sync.Mutex
	alarm  *time.Timer
	until  time.Time  // when the term is over, unless it is renewed
	why    *LostError // nil while the term holds
	failed error      // of the last renewal
}

// newHolding is for a lease that was asked for then, by the local clock.
func newHolding(c *Candidate, cfg *Config, rec Record, sent time.Time) *holding {
	return &holding{c: c, cfg: cfg, token: rec.Token, epoch: rec.Epoch, began: sent, until: endOf(cfg, sent)}
}

// begin begins the term.
func (h *holding) begin(base context.Context, waited time.Duration) {
	h.ctx, h.cancel = context.WithCancelCause(base)
	h.renewals, h.stop = context.WithCancel(context.WithoutCancel(base))
	h.done = make(chan struct{})
	h.c.count.elected.Add(1)
	h.c.count.leading.Add(1)
	h.mu.Lock()
	h.alarm = time.AfterFunc(time.Until(h.until), h.ring)
	h.mu.Unlock()
	go h.renew()
	h.tell(Event{Kind: EventElected, Waited: waited})
}

// ring ends the term if it was not renewed in time.
func (h *holding) ring() {
	if h.over() != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.alarm.Reset(time.Until(h.until))
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
	why := &LostError{Name: h.cfg.Name, Epoch: h.epoch, reason: because}
	if because == notRenewed {
		why.Err = h.failed
	}
	h.why = why
	h.alarm.Stop()
	h.mu.Unlock()
	h.cancel(why)
	h.stop()
	h.c.count.leading.Add(-1)
	h.c.count.leadTime.Add(int64(time.Since(h.began)))
	if because == resigned {
		h.c.count.resigned.Add(1)
		return why
	}
	h.c.count.lost.Add(1)
	h.tell(Event{Kind: EventLost, Took: time.Since(h.began), Err: why})
	return why
}

// renew renews the lease until the term is over. A connection that is half open must not
// cost the lease: the first try has little time, the next ones more, in case it is the
// store that is slow.
func (h *holding) renew() {
	defer close(h.done)
	timeout := h.cfg.TTL / 8
	t := time.NewTimer(time.Until(h.began.Add(h.cfg.TTL / 3)))
	for {
		select {
		case <-h.renewals.Done():
			return
		case <-t.C:
		}
		sent := time.Now()
		call, cancel := context.WithTimeout(h.renewals, timeout)
		err := h.c.store.Renew(call, h.cfg.Name, h.token, h.cfg.TTL)
		cancel()
		switch {
		case err == nil:
			h.extend(sent)
			timeout = h.cfg.TTL / 8
			t.Reset(time.Until(sent.Add(h.cfg.TTL / 3)))
		case errors.Is(err, ErrLost):
			h.end(endedThere)
			return
		case h.renewals.Err() != nil:
			return
		default:
			h.mu.Lock()
			h.failed = err
			h.mu.Unlock()
			timeout = h.cfg.TTL / 4
			t.Reset(h.cfg.TTL / 30)
			h.c.storeFailed(h.renewals, "renew", err)
		}
	}
}

// extend extends a term whose renewal was sent then and has succeeded.
func (h *holding) extend(sent time.Time) {
	h.c.count.renewed.Add(1)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.until, h.failed = endOf(h.cfg, sent), nil
}

func (h *holding) resign(ctx context.Context) error {
	given := h.over() == nil && h.end(resigned).reason == resigned // not lost at the same time
	err := h.c.store.Release(ctx, h.cfg.Name, h.token)
	if err != nil {
		err = fmt.Errorf("lease: %s: resign: %w", h.cfg.Name, err)
	}
	if given {
		h.tell(Event{Kind: EventResigned, Took: time.Since(h.began), Err: err})
	}
	select {
	case <-h.done:
	case <-ctx.Done():
	}
	return err
}

func (h *holding) tell(e Event) {
	e.Name, e.Holder, e.Epoch = h.cfg.Name, h.cfg.Holder, h.epoch
	h.c.tell(h.ctx, e)
}
