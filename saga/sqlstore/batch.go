package sqlstore

import (
	"context"
	"database/sql"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/sqldb"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A batcher combines concurrent commits into batches: one statement on PostgreSQL, or one transaction on SQLite. A
// batch of 64 commits costs as much as ten separate commits. The number of commits and batches that run at the same
// time is limited; each of them runs in a lane. If a lane is free, a new commit is executed immediately and by itself.
// Otherwise, it waits for a free lane, and is then executed together with the other waiting commits.
//
// If a batch skips a commit, or the whole batch fails, the commit is executed again by itself, which determines its
// result.
type batcher struct {
	lanes int // the maximum number of commits and batches that run at the same time
	alone func(ctx context.Context, req store.CommitRequest) (store.Receipt, error)
	// send executes a batch and returns the receipts of its commits. The receipt of a skipped commit is nil.
	send func(ctx context.Context, batch []store.CommitRequest) ([]*store.Receipt, error)

	mu      sync.Mutex
	busy    int // the number of lanes in use
	waiting []*pending
}

// A pending is a commit that waits for a lane.
type pending struct {
	req     store.CommitRequest // a copy, because the caller may have returned
	done    chan struct{}       // closed when the commit has got a lane, or when its batch has returned
	lane    bool                // whether the commit has got a lane, in which it is executed by itself
	receipt *store.Receipt      // the commit's result; nil if the batch has not written the commit
	err     error               // the batch's error; the commit may have been written despite the error
}

const (
	maxBatch = 64
	maxBytes = 1 << 20 // the size in bytes after which no further commit is added to a batch
	// maxHold is the maximum time for which a commit occupies a lane. A commit that waits for a locked row may continue
	// without a lane.
	maxHold = 1500 * time.Millisecond
	// maxSend is the timeout of a batch. A batch does not wait for locked rows, but a connection may hang, and the
	// callers may have no deadline.
	maxSend = 10 * time.Second
)

func (b *batcher) commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	b.mu.Lock()
	if b.busy < b.lanes {
		b.busy++
		b.mu.Unlock()
		return b.single(ctx, req)
	}
	p := &pending{req: req, done: make(chan struct{})}
	p.req.State, p.req.Progress, p.req.Log = slices.Clone(req.State), slices.Clone(req.Progress), slices.Clone(req.Log)
	b.waiting = append(b.waiting, p)
	b.mu.Unlock()
	select {
	case <-p.done:
	case <-ctx.Done():
		b.mu.Lock()
		lane := p.lane
		if i := slices.Index(b.waiting, p); i >= 0 {
			b.waiting = slices.Delete(b.waiting, i, i+1)
		}
		b.mu.Unlock()
		if lane {
			b.next()
		}
		return store.Receipt{}, ended.Error(ctx)
	}
	switch {
	case p.lane:
		return b.single(ctx, req)
	case p.receipt != nil:
		return *p.receipt, nil
	}
	rc, err := b.alone(ctx, req)
	if err == store.ErrFenced && p.err != nil {
		err = p.err // the batch may have written the commit, which would explain ErrFenced
	}
	return rc, err
}

// single executes a commit by itself in a lane, and then passes the lane on.
func (b *batcher) single(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	leave := sync.OnceFunc(b.next)
	defer leave()
	defer time.AfterFunc(maxHold, leave).Stop()
	return b.alone(ctx, req)
}

// next passes a lane on to waiting commits, or frees it.
func (b *batcher) next() {
	b.mu.Lock()
	defer b.mu.Unlock()
	n, size := 0, 0
	for n < len(b.waiting) && n < maxBatch && size < maxBytes {
		size += len(b.waiting[n].req.State) + len(b.waiting[n].req.Progress)
		n++
	}
	batch := slices.Clone(b.waiting[:n])
	b.waiting = slices.Delete(b.waiting, 0, n)
	switch n {
	case 0:
		b.busy--
	case 1:
		batch[0].lane = true
		close(batch[0].done)
	default:
		go b.run(batch)
	}
}

func (b *batcher) run(batch []*pending) {
	defer b.next()
	ctx, cancel := context.WithTimeout(context.Background(), maxSend)
	defer cancel()
	reqs := make([]store.CommitRequest, len(batch))
	for i, p := range batch {
		reqs[i] = p.req
	}
	receipts, err := b.send(ctx, reqs)
	for i, p := range batch {
		if p.err = err; err == nil {
			p.receipt = receipts[i]
		}
		close(p.done)
	}
}

// sendTogether executes the commits of a batch as one statement of PostgreSQL. It skips rows whose epoch or seq does
// not match, and rows that are locked. Because it never waits for a row, neither a slow owner nor a deadlock delays a
// batch.
func (s *tables) sendTogether(ctx context.Context, batch []store.CommitRequest) (receipts []*store.Receipt, err error) {
	type row struct {
		store.CommitRequest
		Place  int           `json:"place"`
		Steps  string        `json:"steps"`
		After  int64         `json:"after"`
		WakeIn int64         `json:"wake_in"`
		Log    []store.Entry `json:"log"`
	}
	rows := make([]row, len(batch))
	for i := range batch {
		req := &batch[i]
		rows[i] = row{*req, i, string(req.Progress), req.After(), wakeIn(req), numbered(req.Log, req.Seq)}
	}
	err = s.single(ctx, func(ctx context.Context, q sqldb.Querier) error {
		receipts = make([]*store.Receipt, len(batch)) // reset here, because fn may be repeated after a rollback
		written, err := q.QueryContext(ctx, s.sql(s.d.batch), jsonOf(rows))
		_, err = collect(written, err, func(row *sql.Rows) (i int, err error) {
			var rc store.Receipt
			if err = row.Scan(&i, &rc.CancelRequested, &rc.CancelNote, &rc.Woken); err == nil {
				rc.Woken = rc.Woken && rows[i].WakeIn > 0
				receipts[i] = &rc
			}
			return i, err
		})
		return err
	})
	return receipts, err
}

// sendInTurn executes the commits of a batch as one transaction of SQLite, which has no row locks.
func (s *tables) sendInTurn(ctx context.Context, batch []store.CommitRequest) (receipts []*store.Receipt, err error) {
	err = s.single(ctx, func(ctx context.Context, q sqldb.Querier) error {
		receipts = make([]*store.Receipt, len(batch))
		for i := range batch {
			rc, err := s.commit(ctx, q, batch[i])
			if err == nil {
				receipts[i] = &rc
			} else if err != store.ErrFenced {
				return err
			}
		}
		return nil
	})
	return receipts, err
}
