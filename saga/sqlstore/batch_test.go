package sqlstore_test

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

var errBroken = errors.New("connection reset by peer")

func TestCommitsGatherWhileTheLanesAreBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		d.fill()
		require.Len(t, d.seen(), lanes, "at once, or after a moment")
		require.NotContains(t, strings.Join(d.seen(), " "), "batch")
		for _, o := range []*outcome{d.commit("a"), d.commit("b"), d.commit("c")} {
			require.NoError(t, o.wait())
			require.Equal(t, "for "+o.id, o.receipt.CancelNote)
			require.InDelta(t, 2, o.took.Seconds(), 0.02)
		}
		require.Equal(t, []string{"batch a b c"}, d.seen()[lanes:])
		d.fill()
		d.commit("e").wait()
		require.Equal(t, "alone e", d.seen()[2*lanes+1], "there was no other")
	})
}

// TestManyCommitsDoNotWaitForALane: few wait a moment for the one that is under way.
func TestManyCommitsDoNotWaitForALane(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		d.commit("first")
		for i := range 11 {
			d.commit(fmt.Sprint("c", i))
			require.Len(t, d.seen(), 1)
		}
		d.commit("c11")
		require.Len(t, d.seen(), 2)
		require.Len(t, strings.Fields(d.seen()[1]), 1+12)
		d.commit("d")
		require.Len(t, d.seen(), 2)
		time.Sleep(patience)
		synctest.Wait()
		require.Equal(t, "alone d", d.seen()[2])
		e := d.commit("e")
		time.Sleep(patience)
		synctest.Wait()
		require.Len(t, d.seen(), lanes, "no lane is free")
		require.NoError(t, e.wait())
	})
}

// TestCommitsOfOneMomentGather: a commit lets those go first that are ready to run.
func TestCommitsOfOneMomentGather(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		require.NoError(t, d.commit("first").wait()) // asks for the isolation
		var wg sync.WaitGroup
		for i := range 10 {
			wg.Go(func() {
				_, err := d.store.Commit(t.Context(), store.CommitRequest{ID: fmt.Sprint("c", i), Log: make([]store.Entry, 1)})
				require.NoError(t, err)
			})
		}
		wg.Wait()
		require.Less(t, len(d.seen())-1, lanes, "%v", d.seen())
	})
}

func TestCommitsOfManyGoroutinesAreAllWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		const many = 500
		outcomes := make(chan error, many)
		for i := range many {
			go func() {
				time.Sleep(time.Duration(i%3) * time.Second)
				rc, err := d.store.Commit(context.Background(), store.CommitRequest{ID: fmt.Sprint("c", i), Log: make([]store.Entry, 1)})
				if err == nil && rc.CancelNote != fmt.Sprint("for c", i) {
					err = errors.New(rc.CancelNote)
				}
				outcomes <- err
			}()
		}
		for range many {
			require.NoError(t, <-outcomes)
		}
		var ids []string
		for _, s := range d.seen() {
			ids = append(ids, strings.Fields(s)[1:]...)
		}
		slices.Sort(ids)
		require.Len(t, slices.Compact(ids), many)
		require.Len(t, ids, many, "each once")
	})
}

func TestACommitThatItsBatchSkipsIsSentByItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		d.passes = map[string]bool{"locked": true, "fenced": true}
		d.fenced = map[string]bool{"fenced": true}
		d.fill()
		locked, a, fenced := d.commit("locked"), d.commit("a"), d.commit("fenced")
		require.NoError(t, locked.wait())
		require.Equal(t, "for locked", locked.receipt.CancelNote)
		require.InDelta(t, 3, locked.took.Seconds(), 0.02)
		require.NoError(t, a.wait())
		require.InDelta(t, 2, a.took.Seconds(), 0.02)
		require.Equal(t, store.ErrFenced, fenced.wait())
		require.ElementsMatch(t, []string{"batch locked a fenced", "alone locked", "alone fenced"}, d.seen()[lanes:])
	})
}

// TestABatchThatFailsIsSettledOneByOne: a batch may have been written although it failed.
func TestABatchThatFailsIsSettledOneByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		d.breaks = true
		d.fenced = map[string]bool{"b": true}
		d.fill()
		a, b := d.commit("a"), d.commit("b")
		require.NoError(t, a.wait())
		err := b.wait()
		require.ErrorIs(t, err, errBroken)
		require.NotErrorIs(t, err, store.ErrFenced, "which would mean that it was not written")
		require.ElementsMatch(t, []string{"batch a b", "alone a", "alone b"}, d.seen()[lanes:])
	})
}

func TestACommitWaitsNoLongerThanItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		d.fill()
		a, b, c := d.commitFor(400*time.Millisecond, "a"), d.commit("b"), d.commit("c")
		require.ErrorIs(t, a.wait(), context.DeadlineExceeded)
		require.Equal(t, 400*time.Millisecond, a.took)
		require.NoError(t, b.wait())
		require.NoError(t, c.wait())
		require.Equal(t, []string{"batch b c"}, d.seen()[lanes:], "a was withdrawn")

		// A commit whose ctx ends within a batch does not affect the others. Otherwise each
		// caller that gives up would make many writes of one, the more the slower they are.
		d.fill()
		e, f := d.commitFor(1500*time.Millisecond, "e"), d.commit("f")
		require.ErrorIs(t, e.wait(), context.DeadlineExceeded)
		require.Equal(t, 1500*time.Millisecond, e.took)
		require.NoError(t, f.wait())
		require.InDelta(t, 2, f.took.Seconds(), 0.02)
		require.Equal(t, []string{"batch e f"}, d.seen()[2*lanes+1:])
	})
}

// TestABatchThatNobodyWaitsForEnds: its lane is for the next one.
func TestABatchThatNobodyWaitsForEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		d.fill()
		d.mu.Lock()
		d.takes = time.Hour
		d.mu.Unlock()
		for _, o := range []*outcome{d.commitFor(1500*time.Millisecond, "a"), d.commitFor(1800*time.Millisecond, "b")} {
			require.ErrorIs(t, o.wait(), context.DeadlineExceeded)
		}
		d.mu.Lock()
		d.takes = time.Second
		d.mu.Unlock()
		d.fill()
		for _, o := range []*outcome{d.commit("c"), d.commit("d")} {
			require.NoError(t, o.wait())
			require.InDelta(t, 2, o.took.Seconds(), 0.02)
		}
	})
}

// TestABatchTakesNoLongerThanTenSeconds: a caller without a deadline, whose connection hangs,
// keeps no lane from the others.
func TestABatchTakesNoLongerThanTenSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		d.fill()
		d.mu.Lock()
		d.takes = time.Hour
		d.mu.Unlock()
		a, b := d.commitFor(5*time.Second, "a"), d.commit("b")
		require.ErrorIs(t, a.wait(), context.DeadlineExceeded)
		d.mu.Lock()
		d.takes = time.Second
		d.mu.Unlock()
		require.NoError(t, b.wait())
		require.InDelta(t, 12, b.took.Seconds(), 0.02)
		require.Equal(t, []string{"batch a b", "alone b"}, d.seen()[lanes:])
	})
}

// TestABatchHasItsOwnDataWhenItsCallerLeaves, who may use it for something else. The first
// attempt of the batch loses to another transaction.
func TestABatchHasItsOwnDataWhenItsCallerLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		d.level = "serializable"
		d.data = []byte("own")
		var transactions atomic.Int64
		d.onCommit = func() error {
			if transactions.Add(1) != lanes+1 {
				return nil
			}
			copy(d.data, "new")
			return stateError("40001")
		}
		d.fill()
		a, b := d.commitFor(1500*time.Millisecond, "a"), d.commit("b")
		require.ErrorIs(t, a.wait(), context.DeadlineExceeded)
		require.NoError(t, b.wait())
		own := `{"\\x6f776e","\\x6f776e"}`
		require.Equal(t, []string{own, own}, d.datas)
	})
}

// TestACommitThatTakesLongGivesUpItsLane: it waits for a row that another keeps
// locked, and the others do not wait for it.
func TestACommitThatTakesLongGivesUpItsLane(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		d.takes = time.Hour
		d.fill()
		d.mu.Lock()
		d.takes = time.Second
		d.mu.Unlock()
		outcomes := []*outcome{d.commit("a"), d.commit("b"), d.commit("c")}
		for _, o := range outcomes {
			require.NoError(t, o.wait())
			require.Less(t, o.took, 3*time.Second)
		}
		require.Equal(t, []string{"batch a b c"}, d.seen()[lanes:])
		time.Sleep(time.Hour)
		d.fill() // no more at once than before
		e, f := d.commit("e"), d.commit("f")
		require.Equal(t, 2*lanes+1, len(d.seen()))
		require.NoError(t, e.wait())
		require.NoError(t, f.wait())
		require.Equal(t, "batch e f", d.seen()[2*lanes+1])
	})
}

func TestABatchHasItsLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		d.fill()
		for i := range 100 {
			d.commit(fmt.Sprint("c", i))
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		var sizes []int
		for _, s := range d.seen()[lanes:] {
			sizes = append(sizes, len(strings.Fields(s))-1)
		}
		require.ElementsMatch(t, []int{64, 36}, sizes)

		d.data = make([]byte, 600_000)
		d.fill()
		for i := range 6 {
			d.commit(fmt.Sprint("d", i))
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.ElementsMatch(t, []string{"batch d0 d1", "batch d2 d3", "batch d4 d5"}, d.seen()[2*lanes+2:])
	})
}

// TestABatchThatIsRepeatedForgets what it has written before: its transaction was rolled back.
func TestABatchThatIsRepeatedForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		d.level = "serializable"
		var transactions atomic.Int64
		d.onCommit = func() error {
			if transactions.Add(1) != lanes+1 {
				return nil
			}
			d.passes, d.fenced = map[string]bool{"b": true}, map[string]bool{"b": true} // another owner claims b
			return stateError("40001")
		}
		d.fill()
		a, b := d.commit("a"), d.commit("b")
		require.NoError(t, a.wait())
		require.ErrorIs(t, b.wait(), store.ErrFenced)
		require.Equal(t, []string{"batch a b", "batch a b", "alone b"}, d.seen()[lanes:])
	})
}

// A desk is a PostgreSQL that takes a second for each statement and keeps the
// statements.
type desk struct {
	store  *sqlstore.Store
	passes map[string]bool // ids that a batch skips
	fenced map[string]bool // ids that are fenced
	breaks bool            // batches fail
	level  string          // the default isolation; "": read committed
	data   []byte

	onCommit func() error // of the transactions that another level needs; optional

	mu    sync.Mutex
	log   []string
	datas []string      // of the batches
	takes time.Duration // 0: a second
}

func newDesk(t *testing.T) *desk {
	d := new(desk)
	db := sql.OpenDB(d)
	t.Cleanup(func() { _ = db.Close() })
	d.store = sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{})
	return d
}

// An outcome is the result of one commit.
type outcome struct {
	id      string
	receipt store.Receipt
	err     error
	took    time.Duration
	done    chan struct{}
}

func (o *outcome) wait() error { <-o.done; return o.err }

const lanes = 3 // of commits to PostgreSQL

// patience is how long a commit waits at most while there is a free lane.
const patience = 5 * time.Millisecond

// fill starts a commit on every lane.
func (d *desk) fill() {
	for i := range lanes {
		d.commit(fmt.Sprint(i + 1))
		time.Sleep(patience)
		synctest.Wait()
	}
}

func (d *desk) commit(id string) *outcome { return d.commitCtx(context.Background(), id) }

func (d *desk) commitFor(timeout time.Duration, id string) *outcome {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	o := d.commitCtx(ctx, id)
	go func() { <-o.done; cancel() }()
	return o
}

// commitCtx starts a commit and returns when it waits.
func (d *desk) commitCtx(ctx context.Context, id string) *outcome {
	o := &outcome{id: id, done: make(chan struct{})}
	begun := time.Now()
	go func() {
		o.receipt, o.err = d.store.Commit(ctx, store.CommitRequest{ID: id, Data: d.data, Log: make([]store.Entry, 1)})
		o.took = time.Since(begun)
		close(o.done)
	}()
	synctest.Wait()
	return o
}

func (d *desk) seen() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]string(nil), d.log...)
}

func (d *desk) Connect(context.Context) (driver.Conn, error) { return d, nil }
func (d *desk) Driver() driver.Driver                        { return nil }
func (d *desk) Close() error                                 { return nil }
func (d *desk) Prepare(string) (driver.Stmt, error)          { return nil, errBroken }
func (d *desk) Begin() (driver.Tx, error)                    { return nil, errBroken }

func (d *desk) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) { return d, nil }
func (d *desk) Rollback() error                                              { return nil }
func (d *desk) Commit() error {
	if d.onCommit != nil {
		return d.onCommit()
	}
	return nil
}

func (d *desk) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	var batch []struct {
		I  int64
		ID string
	}
	what, out := "alone", new(written)
	if len(args) == 0 { // SHOW
		out.rows = append(out.rows, []driver.Value{cmp.Or(d.level, "read committed")})
		return out, nil
	}
	if ids := args[1].Value; strings.HasPrefix(fmt.Sprint(ids), "{") { // arrays
		what = "batch"
		var list []string
		if err := json.Unmarshal([]byte("["+strings.Trim(ids.(string), "{}")+"]"), &list); err != nil {
			return nil, err
		}
		for i, id := range list {
			batch = append(batch, struct {
				I  int64
				ID string
			}{int64(i), id})
		}
	} else {
		batch = append(batch, struct {
			I  int64
			ID string
		}{-1, args[0].Value.(string)})
	}
	asked := what
	for _, c := range batch {
		asked += " " + c.ID
		note := "for " + c.ID
		switch {
		case what == "batch" && !d.passes[c.ID]:
			out.rows = append(out.rows, []driver.Value{c.I, true, note})
		case what == "alone" && !d.fenced[c.ID]:
			out.rows = append(out.rows, []driver.Value{true, note})
		}
	}
	d.mu.Lock()
	d.log = append(d.log, asked)
	if what == "batch" {
		d.datas = append(d.datas, fmt.Sprint(args[6].Value))
	}
	takes := cmp.Or(d.takes, time.Second)
	d.mu.Unlock()
	select {
	case <-time.After(takes):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if what == "batch" && d.breaks {
		return nil, errBroken
	}
	return out, nil
}

type written struct{ rows [][]driver.Value }

func (w *written) Columns() []string {
	if len(w.rows) == 0 {
		return []string{"i", "cancel_requested", "cancel_note"}
	}
	return []string{"i", "cancel_requested", "cancel_note"}[3-len(w.rows[0]):]
}
func (w *written) Close() error { return nil }
func (w *written) Next(dest []driver.Value) error {
	if len(w.rows) == 0 {
		return io.EOF
	}
	copy(dest, w.rows[0])
	w.rows = w.rows[1:]
	return nil
}
