package sqlstore

import (
	"context"
	"database/sql"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/internal/sqldb"
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
	send  func(ctx context.Context, batch []*pending) error // sets what is written

	mu      sync.Mutex
	busy    int // lanes in use
	waiting []*pending
}

// A pending commit waits for a lane.
type pending struct {
	req     store.CommitRequest // shares nothing with the caller, which may have left
	written bool
	receipt store.Receipt
	err     error         // of its batch, which may have been written
	lane    bool          // it goes by itself, and has the lane
	done    chan struct{} // closed when it has the lane, or its batch has returned
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
	own := req
	own.Data, own.Steps, own.Log = slices.Clone(req.Data), slices.Clone(req.Steps), slices.Clone(req.Log)
	p := &pending{req: own, done: make(chan struct{})}
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
	case p.written:
		return p.receipt, nil
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
		size += len(b.waiting[n].req.Data) + len(b.waiting[n].req.Steps)
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
	ctx, cancel := context.WithTimeout(context.Background(), maxSend)
	defer cancel()
	err := b.send(ctx, batch)
	for _, p := range batch {
		if err != nil {
			p.written, p.err = false, err
		}
		close(p.done)
	}
	b.next()
}

// sendTogether makes the commits of a batch one statement of PostgreSQL. It leaves out rows that do not
// match the fence, and rows that are locked: since it never waits, neither a slow owner nor a deadlock
// holds up a batch.
func (s *Store) sendTogether(ctx context.Context, batch []*pending) error {
	type row struct {
		ID        string  `json:"id"`
		Epoch     int64   `json:"epoch"`
		Seq       int64   `json:"seq"`
		Nonce     int64   `json:"nonce"`
		Status    string  `json:"status"`
		Data      []byte  `json:"data"`
		Steps     string  `json:"steps"`
		After     int64   `json:"after"`
		Failures  int     `json:"failures"`
		Takeovers int     `json:"takeovers"`
		LastError string  `json:"last_error"`
		WakeIn    int64   `json:"wake_in"`
		Log       []entry `json:"log"`
	}
	rows := make([]row, len(batch))
	byID := make(map[string]*pending, len(batch))
	for i, p := range batch {
		byID[p.req.ID] = p
		rows[i] = row{
			p.req.ID, p.req.Epoch, p.req.Seq, p.req.Nonce, string(p.req.Status), p.req.Data, string(p.req.Steps), p.req.After(),
			p.req.Failures, p.req.Takeovers, p.req.LastError, wakeIn(&p.req), entriesOf(p.req.Log, p.req.Seq),
		}
	}
	return s.single(ctx, func(ctx context.Context, q sqldb.Querier) error {
		forget(batch)
		found, err := q.QueryContext(ctx, s.sql(s.d.batch), jsonOf(rows))
		_, err = collect(found, err, func(rows *sql.Rows) (id string, err error) {
			var rc store.Receipt
			err = rows.Scan(&id, &rc.CancelRequested, &rc.CancelNote, &rc.Woken)
			if p := byID[id]; p != nil {
				rc.Woken = rc.Woken && wakeIn(&p.req) > 0
				p.receipt, p.written = rc, true
			}
			return id, err
		})
		return err
	})
}

// sendInTurn makes the commits of a batch one transaction of SQLite, where no row is locked.
func (s *Store) sendInTurn(ctx context.Context, batch []*pending) error {
	return s.single(ctx, func(ctx context.Context, q sqldb.Querier) error {
		forget(batch)
		for _, p := range batch {
			rc, err := s.commit(ctx, q, p.req)
			if err == nil {
				p.receipt, p.written = rc, true
			} else if err != store.ErrFenced {
				return err
			}
		}
		return nil
	})
}

// forget takes back what a try before has written, which was rolled back.
func forget(batch []*pending) {
	for _, p := range batch {
		p.written = false
	}
}
