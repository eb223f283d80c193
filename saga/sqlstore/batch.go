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

// A batcher combines concurrent commits into one statement, or on SQLite one transaction. A batch of 64 commits costs
// as much as ten separate commits. A commit that finds a free lane is executed alone. The other commits wait until a
// lane is free, and are then executed together.
//
// A batch only decides that a commit succeeds. A commit that the batch has skipped, and each commit of a batch that
// has failed, is then executed alone.
type batcher struct {
	lanes int // the maximum number of concurrent commits and batches
	alone func(ctx context.Context, req store.CommitRequest) (store.Receipt, error)
	// send executes a batch and returns its receipts. The receipt of a commit that was skipped is nil.
	send func(ctx context.Context, batch []store.CommitRequest) ([]*store.Receipt, error)

	mu      sync.Mutex
	busy    int // the number of lanes in use
	waiting []*pending
}

// A pending commit waits for a lane.
type pending struct {
	req     store.CommitRequest // a copy, because the caller may have returned
	done    chan struct{}       // closed when the commit has a lane, or its batch has returned
	lane    bool                // whether the commit has a lane, in which it is executed alone
	receipt *store.Receipt      // nil if the batch has not written the commit
	err     error               // the batch's error, after which the commit may have been written all the same
}

const (
	maxBatch = 64
	maxBytes = 1 << 20 // the commit that exceeds the limit is the last one in its batch
	// maxHold is the time after which a commit's lane is passed on, because the commit may wait for a locked row.
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
		err = p.err // the batch may have written the commit, and so changed its fence
	}
	return rc, err
}

// single executes a commit alone, in a lane that it then passes on.
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

// sendTogether executes the commits of a batch as one statement of PostgreSQL. It skips rows that do not match the
// fence, and rows that are locked. It never waits, so that neither a slow owner nor a deadlock delays a batch.
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
		receipts = make([]*store.Receipt, len(batch)) // fn may be repeated after a rollback
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

// sendInTurn executes the commits of a batch as one transaction of SQLite, which has no locks of rows.
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
