package sqlstore

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	store "github.com/go-resilience/resilience/internal/sagastore"
)

// A batcher makes the writes of several sagas, their starts or their commits, one
// transaction, since a transaction costs as much as ten of its writes. A write that finds
// none under way goes immediately, together with those of the goroutines that are ready to
// run. Others gather until a transaction has returned. They go beside it if there are many
// of them, or after a moment, while there is a free lane.
//
// A batch is a short cut that decides nothing but success. A write that the batch has
// skipped, and every write of a batch that failed, is then sent by itself, which settles
// it as if there were no batcher.
type batcher[Q, A any] struct {
	lanes int           // writes and batches under way at most; zero means no batches
	limit time.Duration // for a batch
	size  func(Q) int   // in bytes
	own   func(Q) Q     // a copy that shares nothing
	alone func(ctx context.Context, req Q) (A, error)
	// send writes a batch in one transaction, and marks the writes that it has made.
	send func(ctx context.Context, batch []*pending[Q, A]) error
	// settle corrects what alone returned after a batch that failed, and that may have
	// made the write nevertheless.
	settle func(req Q, answer A, err, failed error) (A, error)

	mu        sync.Mutex
	waiting   []*pending[Q, A]
	busy      int  // lanes in use
	timed     bool // the moment of spread has begun
	gathering bool // one of them takes what is waiting, and what arrives
}

// The limits of a batch.
const (
	maxBatch = 64
	maxBytes = 1 << 20 // the write that exceeds it is the last of its batch
)

// Writes that wait use another lane if there are so many of them, or after that time.
const (
	many     = 12
	patience = 5 * time.Millisecond
)

// maxHold is how long a single write keeps its lane, and how long a batch of starts may
// take. A write that waits for no row takes less.
const maxHold = 1500 * time.Millisecond

// maxHang is how long a batch of commits may take, which waits for no row. Without it, a
// connection that hangs would keep the lane for a caller that has no deadline.
const maxHang = 10 * time.Second

// A pending write waits for a batch, or is in one.
type pending[Q, A any] struct {
	req     Q
	answer  A
	written bool
	single  bool          // it has the lane, and is to go by itself
	err     error         // of its batch, which may have been written
	sent    chan struct{} // closed when its batch has returned
	left    func()        // its caller has left its batch
}

type (
	pendingCommit = pending[store.CommitRequest, store.Receipt]
	pendingStart  = pending[store.StartRequest, started]
)

// started is the answer to a start.
type started struct {
	rec     store.Record
	created bool
}

// forget forgets what a batch has written: its transaction may be a repeated one.
func forget[Q, A any](batch []*pending[Q, A]) {
	for _, p := range batch {
		p.written = false
	}
}

// write writes req by itself if a lane is free, and otherwise in a batch.
func (b *batcher[Q, A]) write(ctx context.Context, req Q) (answer A, err error) {
	if ctx.Err() != nil {
		return answer, ended.Error(ctx)
	}
	if b.lanes == 0 {
		return b.alone(ctx, req)
	}
	b.mu.Lock()
	if b.busy == 0 && !b.gathering {
		b.busy++
		b.gather()
		if len(b.waiting) == 0 {
			b.mu.Unlock()
			return b.single(ctx, req)
		}
		go b.run()
	}
	p := &pending[Q, A]{req: b.own(req), sent: make(chan struct{})}
	b.waiting = append(b.waiting, p)
	b.spread()
	b.mu.Unlock()
	select {
	case <-p.sent:
	case <-ctx.Done():
		if b.leave(p) {
			return answer, ended.Error(ctx)
		}
		<-p.sent
	}
	if p.written {
		return p.answer, nil
	}
	if p.single {
		return b.single(ctx, req)
	}
	answer, err = b.alone(ctx, req)
	if p.err != nil {
		return b.settle(req, answer, err, p.err)
	}
	return answer, err
}

// gather lets other goroutines run for as long as that brings more writes. The caller
// holds b.mu.
func (b *batcher[Q, A]) gather() {
	b.gathering = true
	for n := -1; n < len(b.waiting) && n < maxBatch; {
		n = len(b.waiting)
		b.mu.Unlock()
		runtime.Gosched()
		b.mu.Lock()
	}
	b.gathering = false
}

// spread uses a free lane for the writes that wait, immediately if there are many, and
// otherwise after a moment. The caller holds b.mu.
func (b *batcher[Q, A]) spread() {
	switch {
	case len(b.waiting) == 0 || b.busy >= b.lanes || b.gathering:
	case len(b.waiting) >= many:
		b.busy++
		go b.run()
	case !b.timed:
		b.timed = true
		time.AfterFunc(patience, func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.timed = false
			if len(b.waiting) > 0 && b.busy < b.lanes {
				b.busy++
				go b.run()
			}
		})
	}
}

// single writes req by itself, on a lane that it then passes on.
func (b *batcher[Q, A]) single(ctx context.Context, req Q) (A, error) {
	leave := sync.OnceFunc(b.next)
	defer leave()
	// The write may wait for a locked row.
	defer time.AfterFunc(maxHold, leave).Stop()
	return b.alone(ctx, req)
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

// leave removes p from the queue, or lets its batch go on without its caller: to end it would
// make many writes of one, and the more so the slower they are. It reports false if p has the
// lane.
func (b *batcher[Q, A]) leave(p *pending[Q, A]) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := slices.Index(b.waiting, p); i >= 0 {
		b.waiting = slices.Delete(b.waiting, i, i+1)
	} else if !p.single {
		p.left()
	}
	return !p.single
}

// run sends batches until nothing waits, or until it passes the lane on to a single write.
func (b *batcher[Q, A]) run() {
	for {
		ctx, stop := context.WithCancel(context.Background())
		batch := b.take(stop)
		if len(batch) < 2 {
			stop()
			for _, p := range batch {
				close(p.sent)
			}
			return
		}
		limit := time.AfterFunc(b.limit, stop)
		err := b.send(ctx, batch)
		limit.Stop()
		stop()
		for _, p := range batch {
			if err != nil {
				p.written, p.err = false, err
			}
			close(p.sent)
		}
	}
}

// take returns the next batch, which stop ends when all callers have left it. If it is a
// single write, that has the lane from now on. If there is none, take frees the lane.
func (b *batcher[Q, A]) take(stop context.CancelFunc) []*pending[Q, A] {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.gather()
	n, size := 0, 0
	for n < len(b.waiting) && n < maxBatch && size < maxBytes {
		size += b.size(b.waiting[n].req)
		n++
	}
	batch := slices.Clone(b.waiting[:n])
	callers := n
	for _, p := range batch {
		p.single = n == 1
		p.left = func() {
			if callers--; callers == 0 {
				stop()
			}
		}
	}
	b.waiting = slices.Delete(b.waiting, 0, n)
	if n == 0 {
		b.busy--
	} else {
		b.spread()
	}
	return batch
}
