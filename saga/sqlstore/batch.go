package sqlstore

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/saga"
)

// A batcher commits several sagas in one transaction. While all its lanes are busy, the
// commits that arrive gather, and go as one batch when a lane is free. A commit that finds
// a free lane goes immediately: none waits for others to arrive.
//
// A batch is a short cut that decides nothing but success. A commit that the batch has
// skipped, and every commit of a batch that failed, is then sent by itself, which settles
// it as if there were no batcher.
type batcher struct {
	lanes int // commits and batches under way at most
	alone func(ctx context.Context, req saga.CommitRequest) (saga.Receipt, error)
	// send writes a batch in one transaction, and marks the commits that it wrote. It
	// does not wait for locked rows.
	send func(ctx context.Context, batch []*pending) error

	mu      sync.Mutex
	waiting []*pending
	busy    int // lanes in use
}

// The limits of a batch.
const (
	maxBatch = 64
	maxBytes = 1 << 20 // the commit that exceeds it is the last of its batch
)

// maxHold is how long a single commit keeps its lane at most. A commit that waits for no
// row takes less.
const maxHold = 1500 * time.Millisecond

// A pending commit waits for a batch, or is in one.
type pending struct {
	req     saga.CommitRequest
	receipt saga.Receipt
	written bool
	err     error              // of its batch, which may have been written
	sent    chan struct{}      // closed when its batch has returned
	stop    context.CancelFunc // ends its batch
}

// commit writes req by itself if a lane is free, and otherwise in a batch.
func (b *batcher) commit(ctx context.Context, req saga.CommitRequest) (saga.Receipt, error) {
	if ctx.Err() != nil {
		return saga.Receipt{}, ended.Error(ctx)
	}
	b.mu.Lock()
	if b.busy < b.lanes {
		b.busy++
		b.mu.Unlock()
		leave := sync.OnceFunc(b.next)
		defer leave()
		// The commit may wait for a locked row.
		defer time.AfterFunc(maxHold, leave).Stop()
		return b.alone(ctx, req)
	}
	p := &pending{req: req, sent: make(chan struct{})}
	b.waiting = append(b.waiting, p)
	b.mu.Unlock()
	select {
	case <-p.sent:
	case <-ctx.Done():
		if b.withdraw(p) {
			return saga.Receipt{}, ended.Error(ctx)
		}
		<-p.sent // the batch reads req until then
	}
	if p.written {
		return p.receipt, nil
	}
	rc, err := b.alone(ctx, req)
	if err == saga.ErrFenced && p.err != nil {
		err = p.err // the batch itself may have moved the fence
	}
	return rc, err
}

// next passes a lane on to the commits that wait, or frees it.
func (b *batcher) next() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.waiting) > 0 {
		go b.run()
	} else {
		b.busy--
	}
}

// withdraw removes p from the queue and reports true, or ends the batch that p is in.
func (b *batcher) withdraw(p *pending) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	i := slices.Index(b.waiting, p)
	if i < 0 {
		p.stop()
		return false
	}
	b.waiting = slices.Delete(b.waiting, i, i+1)
	return true
}

// run sends batches until nothing waits.
func (b *batcher) run() {
	for {
		ctx, stop := context.WithCancel(context.Background())
		batch := b.take(stop)
		if len(batch) == 0 {
			stop()
			return
		}
		var err error
		if len(batch) > 1 { // a single commit goes by itself
			err = b.send(ctx, batch)
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

// take returns the next batch. It frees the lane if there is none.
func (b *batcher) take(stop context.CancelFunc) []*pending {
	b.mu.Lock()
	defer b.mu.Unlock()
	n, size := 0, 0
	for n < len(b.waiting) && n < maxBatch && size < maxBytes {
		p := b.waiting[n]
		p.stop = stop
		size += len(p.req.Data) + len(p.req.Steps)
		n++
	}
	batch := slices.Clone(b.waiting[:n])
	b.waiting = slices.Delete(b.waiting, 0, n)
	if n == 0 {
		b.busy--
	}
	return batch
}
