package saga

import (
	"errors"
	"fmt"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/machine"
)

// record writes what has changed, and gives the saga up if nothing is to be done for a
// while. It reports false if the saga is lost.
func (e *execution) record(now time.Time) bool {
	release, wakeIn := e.m.Release(now, e.waits())
	if !e.m.Changed { // a release has an entry that says so
		return true
	}
	req := e.request(release, wakeIn)
	if err := e.write(req, false); err != nil {
		return err != errLost && e.halt(err)
	}
	e.written(req)
	return true
}

// halt makes a saga stuck whose state cannot be recorded. The state remains as it was
// last recorded, and steps that had started then are in doubt. halt reports false if the
// saga is lost before this is recorded.
func (e *execution) halt(why error) bool {
	m, err := machine.Load(e.plan, &e.rec)
	if err != nil {
		m, why = e.m, err
	}
	m.Doubt()
	m.Stick("", why)
	e.m, e.data = m, e.rec.Data
	req := e.request(true, 0)
	return e.writeLast(req)
}

// writeLast writes a commit in whose place nothing less can be written.
func (e *execution) writeLast(req store.CommitRequest) bool {
	if e.write(req, true) != nil {
		return false
	}
	e.written(req)
	return true
}

// A commit is given up after so many failures, if they have also lasted for a lease. In
// that time the store has accepted the saga's heartbeats, so the fault is in the commit.
const unwritable = 10

// write commits req. If the answer is lost, it finds out whether the commit has
// happened, and repeats it if not. It returns errLost if the saga is lost, and another
// error if the commit cannot be written, unless it is the last resort.
func (e *execution) write(req store.CommitRequest, last bool) error {
	since := time.Now()
	for tries := 0; ; tries++ {
		ctx, cancel := e.storeCtx()
		receipt, err := e.r.store.Commit(ctx, req)
		cancel()
		if err == nil {
			e.receive(receipt)
			return nil
		}
		if receipt, happened := e.happened(req, err); happened {
			e.receive(receipt)
			return nil
		}
		if e.lost() {
			return errLost
		}
		if !last && tries >= unwritable && time.Since(since) >= e.term {
			return fmt.Errorf("saga: the state cannot be recorded: %w", err)
		}
		e.pause(since)
	}
}

// happened finds out whether a commit that returned err has happened, and returns its receipt:
// then the record has its nonce.
//
// A record that has not changed may be written again, even if an earlier try is still
// under way: the fence admits only one of them. Any other record was written by another
// owner, or by a transaction of this one whose COMMIT arrived late. In both cases this
// execution no longer knows the saga's state, and loses it.
func (e *execution) happened(req store.CommitRequest, err error) (receipt store.Receipt, yes bool) {
	if !errors.Is(err, store.ErrFenced) {
		e.r.storeFailed(e.ctx, fmt.Errorf("saga: commit of %q: %w", req.ID, err))
	}
	for since := time.Now(); !e.lost(); {
		ctx, cancel := e.storeCtx()
		rec, err := e.r.store.Load(ctx, req.ID)
		cancel()
		switch {
		case errors.Is(err, ErrNotFound):
			e.lose()
		case err != nil:
			e.r.storeFailed(e.ctx, fmt.Errorf("saga: commit of %q: %w", req.ID, err))
			e.pause(since)
		case rec.Nonce == req.Nonce:
			return store.Receipt{CancelRequested: rec.CancelRequested, CancelNote: rec.CancelNote}, true
		case rec.Epoch == req.Epoch && rec.Seq == req.Seq:
			return receipt, false
		default:
			e.lose()
		}
	}
	return receipt, false
}

func (e *execution) receive(rc store.Receipt) {
	if rc.CancelRequested {
		e.cancel(rc.CancelNote)
	}
}

// written notes that req is committed, and calls the hooks.
func (e *execution) written(req store.CommitRequest) {
	e.seq = req.After()
	e.over.Store(req.Release)
	e.m.Committed()
	if req.Data != nil {
		e.rec.Data = req.Data
	}
	e.rec.Status, e.rec.Steps = req.Status, req.Steps
	e.r.figures.count(func(s *Stats) { s.Commits++ })
	e.r.tellLog(e.ctx, &e.rec, req, e.now())
	if req.Status.Ended() {
		e.r.tellParent(e.ctx, &e.rec)
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
	before, data := e.m.Clone(), e.data
	if res.err = e.keep(res); res.err != nil {
		_ = res.tx.Rollback()
		e.conclude(res)
		return
	}
	if e.lost() {
		_ = res.tx.Rollback()
		e.attempted(res, OutcomeInterrupted)
		return
	}
	e.end(res, machine.End{})
	now := e.now()
	if e.m.TimeUp(now) {
		e.m.Signals = nil // until hear has taken the last look
	}
	e.m.Advance(now)
	req := e.request(e.m.Release(now, e.waits()))

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
		receipt, happened = e.happened(req, err)
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
	e.conclude(res)
}
