package sqlstore

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/saga"
)

// A group commits together what comes while it is busy: as long as a few commits
// are on their way to the database, those of other sagas gather, and go as one
// batch when a lane is free. None waits for company: it goes at once if it can.
//
// A batch is a short cut and decides nothing but success. What it has passed
// over, and all of it if it fails, is then committed by itself, which settles
// it as if there were no group.
type group struct {
	lanes int // commits and batches on their way at most
	alone func(ctx context.Context, req saga.CommitRequest) (saga.Receipt, error)
	// send writes a batch in one transaction, without waiting for a row that
	// another has locked, and marks as written what it wrote.
	send func(ctx context.Context, batch []*pending) error

	mu      sync.Mutex
	waiting []*pending
	busy    int // lanes in use
}

// The most that a batch holds.
const (
	maxBatch = 64
	maxBytes = 1 << 20 // reached by the last one that is taken
)

// maxHold is how long a single commit keeps its lane at most: longer than one
// takes that waits for no row.
const maxHold = 1500 * time.Millisecond

// A pending commit is one that waits for a batch, or is in one.
type pending struct {
	req     saga.CommitRequest
	receipt saga.Receipt
	written bool
	err     error              // of its batch: whether that was written is open
	sent    chan struct{}      // closed when its batch has come back
	stop    context.CancelFunc // ends its batch
}

// commit writes req at once if a lane is free, and else in a batch.
func (g *group) commit(ctx context.Context, req saga.CommitRequest) (saga.Receipt, error) {
	if ctx.Err() != nil {
		return saga.Receipt{}, ended.Error(ctx)
	}
	g.mu.Lock()
	if g.busy < g.lanes {
		g.busy++
		g.mu.Unlock()
		leave := sync.OnceFunc(g.next)
		defer leave()
		// It may wait for a row that somebody keeps locked.
		defer time.AfterFunc(maxHold, leave).Stop()
		return g.alone(ctx, req)
	}
	p := &pending{req: req, sent: make(chan struct{})}
	g.waiting = append(g.waiting, p)
	g.mu.Unlock()
	select {
	case <-p.sent:
	case <-ctx.Done():
		if g.withdraw(p) {
			return saga.Receipt{}, ended.Error(ctx)
		}
		<-p.sent // what is written must stay as it is until then
	}
	if p.written {
		return p.receipt, nil
	}
	rc, err := g.alone(ctx, req)
	if err == saga.ErrFenced && p.err != nil {
		err = p.err // perhaps the fence has moved because the batch was written
	}
	return rc, err
}

// next hands a lane on to what waits, or gives it up.
func (g *group) next() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.waiting) > 0 {
		go g.run()
	} else {
		g.busy--
	}
}

// withdraw takes p back, or else ends the batch that it is in.
func (g *group) withdraw(p *pending) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	i := slices.Index(g.waiting, p)
	if i < 0 {
		p.stop()
		return false
	}
	g.waiting = slices.Delete(g.waiting, i, i+1)
	return true
}

// run sends batches until nothing waits.
func (g *group) run() {
	for {
		ctx, stop := context.WithCancel(context.Background())
		batch := g.take(stop)
		if len(batch) == 0 {
			stop()
			return
		}
		var err error
		if len(batch) > 1 { // one has nothing to gain
			err = g.send(ctx, batch)
		}
		stop()
		for _, p := range batch {
			if err != nil {
				p.written, p.err = false, err
			}
			close(p.sent)
		}
	}
}

// take returns the next batch, or gives the lane up.
func (g *group) take(stop context.CancelFunc) []*pending {
	g.mu.Lock()
	defer g.mu.Unlock()
	n, size := 0, 0
	for n < len(g.waiting) && n < maxBatch && size < maxBytes {
		p := g.waiting[n]
		p.stop = stop
		size += len(p.req.Data) + len(p.req.Steps)
		n++
	}
	batch := slices.Clone(g.waiting[:n])
	g.waiting = slices.Delete(g.waiting, 0, n)
	if n == 0 {
		g.busy--
	}
	return batch
}
