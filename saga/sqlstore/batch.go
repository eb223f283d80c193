package sqlstore

import (
	"cmp"
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/saga"
)

// A batcher makes the writes of several sagas, their starts or their commits, one
// transaction. While all its lanes are busy, the writes that arrive gather, and go as one
// batch when a lane is free. A write that finds a free lane goes immediately: none waits
// for others to arrive.
//
// A batch is a short cut that decides nothing but success. A write that the batch has
// skipped, and every write of a batch that failed, is then sent by itself, which settles
// it as if there were no batcher.
type batcher[Q, A any] struct {
	lanes int           // writes and batches under way at most
	limit time.Duration // for a batch; zero means none
	size  func(Q) int   // in bytes
	alone func(ctx context.Context, req Q) (A, error)
	// send writes a batch in one transaction, and marks the writes that it has made.
	send func(ctx context.Context, batch []*pending[Q, A]) error
	// settle corrects what alone returned after a batch that failed, and that may have
	// made the write nevertheless.
	settle func(req Q, answer A, err, failed error) (A, error)

	mu      sync.Mutex
	waiting []*pending[Q, A]
	busy    int // lanes in use
}

// The limits of a batch.
const (
	maxBatch = 64
	maxBytes = 1 << 20 // the write that exceeds it is the last of its batch
)

// maxHold is how long a single write keeps its lane, and how long a batch of starts may
// take. A write that waits for no row takes less.
const maxHold = 1500 * time.Millisecond

// A pending write waits for a batch, or is in one.
type pending[Q, A any] struct {
	req     Q
	answer  A
	written bool
	err     error              // of its batch, which may have been written
	sent    chan struct{}      // closed when its batch has returned
	stop    context.CancelFunc // ends its batch
}

type (
	pendingCommit = pending[saga.CommitRequest, saga.Receipt]
	pendingStart  = pending[saga.StartRequest, started]
)

// started is the answer to a start.
type started struct {
	rec     saga.Record
	created bool
}

// write writes req by itself if a lane is free, and otherwise in a batch.
func (b *batcher[Q, A]) write(ctx context.Context, req Q) (answer A, err error) {
	if ctx.Err() != nil {
		return answer, ended.Error(ctx)
	}
	b.mu.Lock()
	if b.busy < b.lanes {
		b.busy++
		b.mu.Unlock()
		leave := sync.OnceFunc(b.next)
		defer leave()
		// The write may wait for a locked row.
		defer time.AfterFunc(maxHold, leave).Stop()
		return b.alone(ctx, req)
	}
	p := &pending[Q, A]{req: req, sent: make(chan struct{})}
	b.waiting = append(b.waiting, p)
	b.mu.Unlock()
	select {
	case <-p.sent:
	case <-ctx.Done():
		if b.withdraw(p) {
			return answer, ended.Error(ctx)
		}
		<-p.sent // the batch reads req until then
	}
	if p.written {
		return p.answer, nil
	}
	answer, err = b.alone(ctx, req)
	if p.err != nil {
		return b.settle(req, answer, err, p.err)
	}
	return answer, err
}

// next passes a lane on to the writes that wait, or frees it.
func (b *batcher[Q, A]) next() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.waiting) > 0 {
		go b.run()
	} else {
		b.busy--
	}
}

// withdraw removes p from the queue and reports true, or ends the batch that p is in.
func (b *batcher[Q, A]) withdraw(p *pending[Q, A]) bool {
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
func (b *batcher[Q, A]) run() {
	for {
		ctx, stop := context.WithCancel(context.Background())
		batch := b.take(stop)
		if len(batch) == 0 {
			stop()
			return
		}
		var err error
		if len(batch) > 1 { // a single write goes by itself
			limit := time.AfterFunc(cmp.Or(b.limit, math.MaxInt64), stop)
			err = b.send(ctx, batch)
			limit.Stop()
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
func (b *batcher[Q, A]) take(stop context.CancelFunc) []*pending[Q, A] {
	b.mu.Lock()
	defer b.mu.Unlock()
	n, size := 0, 0
	for n < len(b.waiting) && n < maxBatch && size < maxBytes {
		p := b.waiting[n]
		p.stop = stop
		size += b.size(p.req)
		n++
	}
	batch := slices.Clone(b.waiting[:n])
	b.waiting = slices.Delete(b.waiting, 0, n)
	if n == 0 {
		b.busy--
	}
	return batch
}
