package saga

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// record writes what has changed, and gives the saga up if nothing is to be done for a
// while. It reports false if the saga is lost.
func (e *execution) record(now time.Time) bool {
	release, wakeIn := e.release(now)
	if !release && (!e.m.changed || e.later(now)) {
		return true
	}
	req := e.request(release, wakeIn)
	if err := e.write(req, false); err != nil {
		return err != ErrLost && e.halt(err)
	}
	e.written(req)
	return true
}

// What may be recorded later is recorded after so many entries, and after so long.
const (
	laterEntries = 16
	laterFor     = time.Second
)

// later reports whether what has changed may be recorded together with what comes next,
// since nothing of it must be known before another attempt begins.
func (e *execution) later(now time.Time) bool {
	if e.unwritten.IsZero() {
		e.unwritten = now
	}
	return !e.m.pressing && len(e.m.log) < laterEntries && now.Sub(e.unwritten) < laterFor
}

// halt makes a saga stuck whose state cannot be recorded. The state remains as it was
// last recorded, and steps that had started then are in doubt. halt reports false if the
// saga is lost before this is recorded.
func (e *execution) halt(why error) bool {
	m, err := loadMachine(e.plan, &e.rec)
	if err != nil {
		m, why = e.m, err
	}
	m.doubt()
	m.stick("", why)
	e.m, e.data = m, e.rec.Data
	req := e.request(true, 0)
	return e.writeLast(req)
}

// writeLast writes a commit in whose place nothing less can be written.
func (e *execution) writeLast(req CommitRequest) bool {
	if e.write(req, true) != nil {
		return false
	}
	e.written(req)
	return true
}

// release reports whether to give the saga up, and when it is due again.
func (e *execution) release(now time.Time) (release bool, wakeIn time.Duration) {
	if e.m.status != Running && e.m.status != Compensating {
		return true, 0
	}
	if e.m.busy() > 0 {
		return false, 0
	}
	cfg := e.r.config()
	park, wakeIn := e.m.park(now, cfg.Park, cfg.LeaseTTL)
	switch {
	case e.r.isDraining():
		e.m.note(Entry{Kind: EventReleased})
		return true, wakeIn
	case park:
		e.m.note(Entry{Kind: EventParked, Error: cmp.Or(e.m.waitsFor(), e.m.lastError)})
		return true, wakeIn
	}
	return false, 0
}

// request returns the commit of the machine's present state.
func (e *execution) request(release bool, wakeIn time.Duration) CommitRequest {
	if len(e.m.log) == 0 {
		e.m.note(Entry{Kind: EventResumed})
	}
	if release {
		e.m.forsake()
	}
	var data []byte // nil if it has not changed
	if !bytes.Equal(e.data, e.rec.Data) {
		data = append([]byte{}, e.data...)
	}
	return CommitRequest{
		ID: e.rec.ID, Epoch: e.rec.Epoch, Seq: e.seq, Nonce: rand.Int64(),
		Status: e.m.status, Data: data, Steps: e.m.encode(),
		Failures: e.m.failures, Takeovers: e.m.takeovers, LastError: e.m.lastError,
		Log: e.m.log, Release: release, WakeIn: wakeIn,
	}
}

// A commit is given up after so many failures, if they have also lasted for a lease. In
// that time the store has accepted the saga's heartbeats, so the fault is in the commit.
const unwritable = 10

// write commits req. If the answer is lost, it finds out whether the commit has
// happened, and repeats it if not. It returns ErrLost if the saga is lost, and another
// error if the commit cannot be written, unless it is the last resort.
func (e *execution) write(req CommitRequest, last bool) error {
	since := time.Now()
	for tries := 0; ; tries++ {
		ctx, cancel := e.storeCtx()
		receipt, err := e.r.store.Commit(ctx, req)
		cancel()
		if err == nil {
			e.receive(receipt)
			return nil
		}
		rec, happened := e.settle(req, err)
		if happened {
			e.receive(Receipt{rec.CancelRequested, rec.CancelNote})
			return nil
		}
		if e.lost() {
			return ErrLost
		}
		if !last && tries >= unwritable && time.Since(since) >= e.term() {
			return fmt.Errorf("saga: the state cannot be recorded: %w", err)
		}
		e.pause(since)
	}
}

// settle finds out whether a commit that returned err has happened: then the record has
// its nonce.
//
// A record that has not changed may be written again, even if an earlier try is still
// under way: the fence admits only one of them. Any other record was written by another
// owner, or by a transaction of this one whose COMMIT arrived late. In both cases this
// execution no longer knows the saga's state, and loses it.
func (e *execution) settle(req CommitRequest, err error) (rec Record, happened bool) {
	if !errors.Is(err, ErrFenced) {
		e.r.storeFailed(e.ctx, fmt.Errorf("saga: commit of %q: %w", req.ID, err))
	}
	for since := time.Now(); !e.lost(); {
		ctx, cancel := e.storeCtx()
		rec, err = e.r.store.Load(ctx, req.ID)
		cancel()
		switch {
		case errors.Is(err, ErrNotFound):
			e.lose()
		case err != nil:
			e.r.storeFailed(e.ctx, fmt.Errorf("saga: commit of %q: %w", req.ID, err))
			e.pause(since)
		case rec.Nonce == req.Nonce:
			return rec, true
		case rec.Epoch == req.Epoch && rec.Seq == req.Seq:
			return rec, false
		default:
			e.lose()
		}
	}
	return rec, false
}

// storeCtx returns the ctx of one call of the store. It outlives that of the attempts,
// and has a timeout, since a database may not answer.
func (e *execution) storeCtx() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(e.ctx), e.term()/2)
}

// pause waits before the next call of a store that has failed since then: for up to as long
// as it has failed. In the first lease, which may be all the time that is left, the pause is
// at most a 20th of it, and after that 20 leases, unless the saga is lost.
func (e *execution) pause(since time.Time) {
	term, failed := e.term(), time.Since(since)
	soon := max(min(failed, term/20), time.Millisecond)
	t := time.NewTimer(rand.N(max(soon, min(failed-term, 20*term))) + 1)
	defer t.Stop()
	select {
	case <-t.C:
	case <-e.ctx.Done():
		time.Sleep(rand.N(soon) + 1) // the lease may last for a while
	}
}

func (e *execution) receive(rc Receipt) {
	if rc.CancelRequested && !e.m.canceled {
		e.cancel(rc.CancelNote)
	}
}

// written notes that req is committed, and calls the hooks.
func (e *execution) written(req CommitRequest) {
	first := e.seq + 1
	e.seq, e.over = req.After(), req.Release
	e.m.log, e.m.changed, e.m.pressing = nil, false, false
	e.unwritten = time.Time{}
	if req.Data != nil {
		e.rec.Data = req.Data
	}
	e.rec.Status, e.rec.Steps = req.Status, req.Steps
	e.r.count.commits.Add(1)
	now := e.now()
	for i, entry := range req.Log {
		entry.Seq, entry.Epoch, entry.At = first+int64(i), e.rec.Epoch, now
		e.r.happened(e.ctx, &e.rec, entry)
	}
	if req.Status.Ended() {
		e.r.tellParent(e.ctx, &e.rec)
	}
	if req.Status == Stuck {
		rec := e.rec
		rec.Seq, rec.Owner = e.seq, ""
		rec.Failures, rec.Takeovers, rec.LastError = req.Failures, req.Takeovers, req.LastError
		rec.UpdatedAt, rec.WakeAt, rec.Now = now, now, now
		e.r.isStuck(e.ctx, newInstance(rec, e.plan))
	}
}

// commitOpen commits the transaction of a DoTx or UndoTx that has succeeded, together
// with everything else that is to be recorded. The fenced statement comes last. If the
// transaction does not commit, the attempt has failed without effect.
func (e *execution) commitOpen() {
	res := e.open
	_ = e.heed() // a cancellation that came while the attempt ran
	e.open, e.txUnit = nil, -1
	defer res.end()
	before, data := e.m.clone(), e.data
	if res.err = e.keep(res); res.err != nil {
		_ = res.tx.Rollback()
		e.attempted(res, e.outcome(res))
		e.conclude(res)
		return
	}
	if e.lost() {
		_ = res.tx.Rollback()
		e.attempted(res, OutcomeInterrupted)
		return
	}
	e.conclude(res)
	now := e.now()
	e.m.advance(now)
	req := e.request(e.release(now))

	ctx, cancel := e.storeCtx()
	receipt, err := e.r.tx.CommitTx(ctx, res.tx, req)
	cancel()
	if err == nil {
		err = res.tx.Commit()
	} else {
		if endedItself(res.ctx, err) {
			err = Abort(errTxEnded)
		}
		_ = res.tx.Rollback()
	}
	happened := err == nil
	if !happened {
		var rec Record
		rec, happened = e.settle(req, err)
		receipt = Receipt{rec.CancelRequested, rec.CancelNote}
	}
	if happened {
		e.receive(receipt)
		e.attempted(res, OutcomeDone)
		e.written(req)
		return
	}
	e.m, e.data = before, data
	e.restore()
	res.err, res.cut = err, false
	e.attempted(res, e.outcome(res))
	e.conclude(res)
}
