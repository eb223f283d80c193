package sqlstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A desk is what a batcher sends to: each commit and each batch takes a second, unless it is told
// otherwise.
type desk struct {
	*batcher
	mu      sync.Mutex
	seen    []string // "a", or "a b" for a batch
	skip    string   // the id that a batch leaves out
	fail    error    // of each batch
	single  func(id string) error
	takes   time.Duration // a commit
	sends   time.Duration // a batch
	ctxEnds int           // batches whose ctx has ended
}

func newDesk() *desk {
	d := &desk{takes: time.Second, sends: time.Second, single: func(string) error { return nil }}
	d.batcher = &batcher{lanes: 1, alone: func(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
		d.see(req.ID)
		time.Sleep(d.takes)
		return store.Receipt{CancelNote: "alone"}, d.single(req.ID)
	}, send: func(ctx context.Context, batch []store.CommitRequest) ([]*store.Receipt, error) {
		text := ""
		for _, req := range batch {
			text += req.ID + string(req.State) + " "
		}
		d.see(text[:len(text)-1])
		select {
		case <-time.After(d.sends):
		case <-ctx.Done():
			d.ctxEnds++
			return nil, ctx.Err()
		}
		receipts := make([]*store.Receipt, len(batch))
		for i, req := range batch {
			if req.ID != d.skip {
				receipts[i] = &store.Receipt{CancelNote: "together"}
			}
		}
		return receipts, d.fail
	}}
	return d
}

func (d *desk) see(text string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seen = append(d.seen, text)
}

type outcome struct {
	store.Receipt
	err  error
	took time.Duration
}

// ask commits ids one after the other, each on a goroutine of its own.
func (d *desk) ask(ctx context.Context, ids ...string) map[string]chan outcome {
	outcomes := make(map[string]chan outcome)
	for _, id := range ids {
		out := make(chan outcome, 1)
		outcomes[id] = out
		begun := time.Now()
		go func() {
			rc, err := d.commit(ctx, store.CommitRequest{ID: id})
			out <- outcome{rc, err, time.Since(begun)}
		}()
		synctest.Wait()
	}
	return outcomes
}

func TestBatchOfWaitingCommits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk()
		outs := d.ask(t.Context(), "a", "b", "c", "d")
		require.Equal(t, outcome{store.Receipt{CancelNote: "alone"}, nil, time.Second}, <-outs["a"])
		for _, id := range []string{"b", "c", "d"} {
			require.Equal(t, outcome{store.Receipt{CancelNote: "together"}, nil, 2 * time.Second}, <-outs[id])
		}
		synctest.Wait()
		require.Equal(t, []string{"a", "b c d"}, d.seen)
		outs = d.ask(t.Context(), "e", "f")
		require.Equal(t, time.Second, (<-outs["e"]).took, "the lane is free again")
		require.Equal(t, outcome{store.Receipt{CancelNote: "alone"}, nil, 2 * time.Second}, <-outs["f"],
			"it is passed to one")
	})
}

func TestSkippedCommitIsExecutedAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk()
		d.skip = "c"
		d.single = func(id string) error {
			if id == "c" {
				return store.ErrFenced
			}
			return nil
		}
		outs := d.ask(t.Context(), "a", "b", "c")
		require.NoError(t, (<-outs["b"]).err)
		require.Equal(t, store.ErrFenced, (<-outs["c"]).err)
		require.Equal(t, []string{"a", "b c", "c"}, d.seen)
	})
}

// TestCommitsOfFailedBatchExecutedAlone: it may have been written all the same, and has moved the fence
// then.
func TestCommitsOfFailedBatchExecutedAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk()
		d.fail = errors.New("connection reset")
		d.single = func(id string) error {
			if id == "c" {
				return store.ErrFenced
			}
			return nil
		}
		outs := d.ask(t.Context(), "a", "b", "c")
		require.Equal(t, outcome{store.Receipt{CancelNote: "alone"}, nil, 3 * time.Second}, <-outs["b"])
		require.Equal(t, d.fail, (<-outs["c"]).err)
	})
}

func TestWaitingCommitReturnsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk()
		d.takes, d.sends = 5*time.Second, 5*time.Second
		first := d.ask(t.Context(), "a", "b", "c")
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second) // waits, and then is in the batch
		defer cancel()
		short, stop := context.WithTimeout(t.Context(), time.Second) // waits
		defer stop()
		waits, leaves := d.ask(ctx, "d"), d.ask(short, "e")
		out := <-leaves["e"]
		require.ErrorIs(t, out.err, context.DeadlineExceeded)
		require.Equal(t, time.Second, out.took)
		require.ErrorIs(t, (<-waits["d"]).err, context.DeadlineExceeded)
		for _, id := range []string{"a", "b", "c"} {
			require.NoError(t, (<-first[id]).err)
		}
		synctest.Wait()
		require.NotContains(t, d.seen, "e")
		require.Zero(t, d.busy)
		require.Empty(t, d.waiting)
	})
}

// TestLaneOfCanceledCommitIsPassedOn: its caller has left at the moment at which it got it.
func TestLaneOfCanceledCommitIsPassedOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for range 50 {
			d := newDesk()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			outs, left := d.ask(t.Context(), "a"), d.ask(ctx, "b")
			<-outs["a"]
			<-left["b"]
			cancel()
			time.Sleep(time.Minute)
			synctest.Wait()
			require.Zero(t, d.busy)
		}
	})
}

func TestBatchTimesOutAfterTenSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk()
		d.sends = time.Hour // a connection that hangs
		outs := d.ask(t.Context(), "a", "b", "c")
		<-outs["a"]
		synctest.Wait()
		later := d.ask(t.Context(), "d")
		for _, out := range []chan outcome{outs["b"], outs["c"], later["d"]} {
			o := <-out
			require.NoError(t, o.err)
			require.LessOrEqual(t, o.took, maxSend+2*time.Second)
		}
		synctest.Wait()
		require.Equal(t, 1, d.ctxEnds)
	})
}

func TestBatchCopiesItsRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk()
		outs := d.ask(t.Context(), "a")
		data := []byte("-own")
		go func() { _, _ = d.commit(t.Context(), store.CommitRequest{ID: "b", State: data}) }()
		synctest.Wait()
		more := d.ask(t.Context(), "c")
		copy(data, "-new")
		<-outs["a"]
		<-more["c"]
		require.Equal(t, []string{"a", "b-own c"}, d.seen)
	})
}

// TestSlowCommitPassesItsLaneOn: its row is locked, perhaps for minutes.
func TestSlowCommitPassesItsLaneOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk()
		d.takes = time.Hour
		slow := d.ask(t.Context(), "slow")
		d.takes = time.Second
		outs := d.ask(t.Context(), "a", "b")
		require.Equal(t, maxHold+time.Second, (<-outs["a"]).took)
		<-outs["b"]
		<-slow["slow"]
		synctest.Wait()
		require.Zero(t, d.busy, "the lane was given up once")
	})
}

func TestBatchStress(t *testing.T) {
	var mu sync.Mutex
	seen := make(map[string]int)
	count := func(id string) {
		mu.Lock()
		defer mu.Unlock()
		seen[id]++
	}
	b := &batcher{lanes: 2, alone: func(_ context.Context, req store.CommitRequest) (store.Receipt, error) {
		count(req.ID)
		return store.Receipt{}, nil
	}, send: func(_ context.Context, batch []store.CommitRequest) ([]*store.Receipt, error) {
		receipts := make([]*store.Receipt, len(batch))
		for i, req := range batch {
			receipts[i] = new(store.Receipt)
			count(req.ID)
		}
		return receipts, nil
	}}
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			for k := range 200 {
				if _, err := b.commit(t.Context(), store.CommitRequest{ID: fmt.Sprint(i, " ", k)}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.Len(t, seen, 64*200)
	for id, n := range seen {
		require.Equal(t, 1, n, id)
	}
	require.Zero(t, b.busy)
	require.False(t, slices.ContainsFunc(b.waiting, func(p *pending) bool { return p != nil }))
}
