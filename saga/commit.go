package saga

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// This file is how an execution writes: fenced, settled when an answer was
// lost, and only as long as the lease lasts.

// now is the store's clock, as well as it is known here.
func (e *execution) now() time.Time { return e.rec.Now.Add(time.Since(e.since)) }

// renew moves the end of the lease, which was extended by a call made then.
func (e *execution) renew(since time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lease.Stop() {
		e.until = since.Add(e.r.cfg.Lease)
		e.lease.Reset(time.Until(e.until))
	}
}

// lose ends the attempts of a saga that another has, or may have by now.
func (e *execution) lose() {
	e.mu.Lock()
	e.gone = true
	e.mu.Unlock()
	e.stop(ErrLost)
	e.nudge()
}

// lost reports whether this owner may no longer act. A process that was stopped
// finds out here before its timers do.
func (e *execution) lost() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.gone || !time.Now().Before(e.until)
}

// cancel hands on that somebody has asked for a cancellation.
func (e *execution) cancel(note string) {
	e.mu.Lock()
	e.asked = &note
	e.mu.Unlock()
	e.nudge()
}

func (e *execution) nudge() {
	select {
	case e.signal <- struct{}{}:
	default:
	}
}

// record writes what has changed, and gives the saga up if there is nothing to
// do for a while. It reports false if the saga was lost.
func (e *execution) record(now time.Time) bool {
	release, wakeIn := e.release(now)
	if !release && !e.m.changed {
		return true
	}
	req := e.request(release, wakeIn)
	if err := e.write(req); err != nil {
		return err != ErrLost && e.halt(err)
	}
	e.written(req)
	return true
}

// halt makes a saga stuck whose state cannot be recorded. It is left as it was
// recorded last, and what was started then is in doubt. It reports false if this
// cannot be recorded either: then the lease runs out.
func (e *execution) halt(why error) bool {
	m, err := loadMachine(e.plan, &e.rec)
	if err != nil {
		m, why = e.m, err
	}
	m.doubt()
	m.stick("", why)
	e.m, e.data = m, e.rec.Data
	req := e.request(true, 0)
	if e.write(req) != nil {
		e.lose()
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
	at, ok := e.m.wake(now)
	if ok && at.After(now) {
		wakeIn = at.Sub(now)
	}
	switch {
	case e.r.isDraining():
		e.m.note(Entry{Event: EventReleased})
		return true, wakeIn
	case wakeIn > e.r.cfg.Park:
		e.m.note(Entry{Event: EventParked, Error: e.m.lastError})
		return true, wakeIn
	}
	return false, 0
}

// request is the commit of what the machine has come to.
func (e *execution) request(release bool, wakeIn time.Duration) CommitRequest {
	if len(e.m.log) == 0 {
		e.m.note(Entry{Event: EventResumed})
	}
	if release {
		e.m.forsake()
	}
	return CommitRequest{
		ID: e.rec.ID, Epoch: e.rec.Epoch, Seq: e.seq, Nonce: rand.Int64(),
		Status: e.m.status, Data: e.data, Steps: e.m.encode(),
		Failures: e.m.failures, Takeovers: e.m.takeovers, LastError: e.m.lastError,
		Log: e.m.log, Release: release, WakeIn: wakeIn,
	}
}

// unwritable is after how many failures a commit is given up, if they have also
// lasted for a whole lease: the store then took the heartbeats of the saga all the
// while, so that it is the commit that cannot be written.
const unwritable = 10

// write commits req. Where the answer was lost it finds out, and commits the
// same again if it has not happened. It returns ErrLost if the saga is lost, and
// another error if this commit cannot be written.
func (e *execution) write(req CommitRequest) error {
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
		if tries >= unwritable && time.Since(since) >= e.r.cfg.Lease {
			return fmt.Errorf("saga: the state cannot be recorded: %w", err)
		}
		e.pause(tries)
	}
}

// settle finds out whether a commit that returned err has happened: the record
// then has its nonce. A record that has not changed at all may be written again,
// whatever is still under way: the fence lets only one write through. Any other
// record was written by another owner, or by a transaction of this one whose
// COMMIT arrived after it was given up. Either way this execution does not know
// the saga's state any more, and loses it.
func (e *execution) settle(req CommitRequest, err error) (rec Record, happened bool) {
	if !errors.Is(err, ErrFenced) {
		e.r.storeFailed(e.ctx, fmt.Errorf("saga: commit of %q: %w", req.ID, err))
	}
	for tries := 0; !e.lost(); tries++ {
		ctx, cancel := e.storeCtx()
		rec, err = e.r.store.Load(ctx, req.ID)
		cancel()
		switch {
		case errors.Is(err, ErrNotFound):
			e.lose()
		case err != nil:
			e.r.storeFailed(e.ctx, fmt.Errorf("saga: commit of %q: %w", req.ID, err))
			e.pause(tries)
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

// storeCtx is the ctx of one call of the store: not that of the attempts, which
// may end first, and bounded, for a database may not answer.
func (e *execution) storeCtx() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(e.ctx), e.r.cfg.Lease/2)
}

func (e *execution) pause(tries int) {
	time.Sleep(min(e.r.cfg.Lease/20, time.Millisecond<<min(tries, 20)))
}

func (e *execution) receive(rc Receipt) {
	if rc.CancelRequested && !e.m.canceled {
		e.cancel(rc.CancelNote)
	}
}

// written takes note that req was committed, and tells the hooks.
func (e *execution) written(req CommitRequest) {
	first := e.seq + 1
	e.seq, e.over = req.After(), req.Release
	e.m.log, e.m.changed = nil, false
	e.rec.Status, e.rec.Data, e.rec.Steps = req.Status, req.Data, req.Steps
	e.r.count.commits.Add(1)
	now := e.now()
	for i, entry := range req.Log {
		entry.Seq, entry.Epoch, entry.At = first+int64(i), e.rec.Epoch, now
		e.r.happened(e.ctx, &e.rec, entry)
	}
	if req.Status == Stuck {
		rec := e.rec
		rec.Status, rec.Data, rec.Steps, rec.Seq, rec.Owner = req.Status, req.Data, req.Steps, e.seq, ""
		rec.Failures, rec.Takeovers, rec.LastError = req.Failures, req.Takeovers, req.LastError
		rec.UpdatedAt, rec.WakeAt, rec.Now = now, now, now
		e.r.isStuck(e.ctx, newInstance(rec, e.plan))
	}
}

// commitOpen commits the transaction of a DoTx or UndoTx that has succeeded,
// together with all that there is to record, in which the fenced statement
// comes last. If it does not commit the attempt has failed, without effect.
func (e *execution) commitOpen() {
	res := e.open
	e.open, e.txUnit = nil, -1
	defer res.end()
	before, data := e.m.clone(), e.data
	if res.err = e.keep(res); res.err != nil || e.lost() {
		_ = res.tx.Rollback()
		if res.err != nil {
			e.conclude(res)
		}
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
	if err == nil {
		e.receive(receipt)
		e.written(req)
		return
	}
	rec, happened := e.settle(req, err)
	if happened {
		e.receive(Receipt{rec.CancelRequested, rec.CancelNote})
		e.written(req)
		return
	}
	e.m, e.data = before, data
	e.restore()
	res.err, res.cut = err, false
	e.conclude(res)
}

// happened counts an entry of a log, and tells the hook.
func (r *Runner) happened(ctx context.Context, rec *Record, entry Entry) {
	switch entry.Event {
	case EventCompleted:
		r.count.completed.Add(1)
	case EventCompensated:
		r.count.compensated.Add(1)
	case EventStuck:
		r.count.stuck.Add(1)
	case EventParked:
		r.count.parked.Add(1)
	case EventReleased:
		r.count.released.Add(1)
	}
	hook(ctx, "OnEvent", r.cfg.OnEvent, Event{r.cfg.Name, rec.Saga, rec.Version, rec.ID, entry})
}
