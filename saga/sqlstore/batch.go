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

// A batcher makes the commits that wait for each other one statement, or on SQLite one transaction: that
// costs as much as ten of the commits in it. A commit that finds a free lane goes by itself. The others
// wait until one has returned, and go together.
//
// A batch is a short cut that decides nothing but success. A commit that it has skipped, and every one of
// a batch that has failed, then goes by itself, as if there were no batcher.
type batcher struct {
	lanes int // commits and batches under way at most
	alone func(ctx context.Context, req store.CommitRequest) (store.Receipt, error)
	// send returns the receipts of a batch, each nil if its commit was skipped.
	send func(ctx context.Context, batch []store.CommitRequest) ([]*store.Receipt, error)

	mu      sync.Mutex
	busy    int // lanes in use
	waiting []*pending
}

// A pending commit waits for a lane.
type pending struct {
	req     store.CommitRequest // shares nothing with the caller, which may have left
	done    chan struct{}       // closed when it has the lane, or its batch has returned
	lane    bool                // it goes by itself, and has the lane
	receipt *store.Receipt      // nil if its batch has not written it
	err     error               // of its batch, which may have written it all the same
}

const (
	maxBatch = 64
	maxBytes = 1 << 20 // the commit that exceeds it is the last of its batch
	// maxHold is how long a commit keeps its lane. It may wait for a locked row.
	maxHold = 1500 * time.Millisecond
	// maxSend is how long a batch may take, which waits for no row: a connection that hangs must not keep
	// the lane for callers without a deadline.
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
		err = p.err // the batch itself may have moved the fence
	}
	return rc, err
}

// single makes a commit by itself, on a lane that it then passes on.
func (b *batcher) single(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	leave := sync.OnceFunc(b.next)
	defer leave()
	defer time.AfterFunc(maxHold, leave).Stop()
	return b.alone(ctx, req)
}

// next passes a lane on to the commits that wait, or frees it.
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

// sendTogether makes the commits of a batch one statement of PostgreSQL. It leaves out rows that do not
// match the fence, and rows that are locked: since it never waits, neither a slow owner nor a deadlock
// holds up a batch.
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
		receipts = make([]*store.Receipt, len(batch)) // of a try before, which was rolled back, none is true
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

// sendInTurn makes the commits of a batch one transaction of SQLite, where no row is locked.
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
