package storetest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/go-resilience/resilience/lease"
)

// Fenced is a store in a database, for [RunFencer].
type Fenced struct {
	Store     lease.Fencer // the store
	DB        *sql.DB      // the store's database, with at least 8 connections; the tests create a table storetest_write
	OneWriter bool         // whether a transaction that writes blocks all other writers, as in SQLite
}

// RunFencer runs the tests of a [lease.Fencer], each with a store from newStore. The store must have no leases.
func RunFencer(t *testing.T, newStore func(t *testing.T) Fenced) {
	t.Helper()
	for _, c := range []struct {
		name string
		test func(*suite, fencer)
	}{
		{"FenceOfCurrentTerm", fenceHolds},
		{"FenceOfOtherTerm", fenceOther},
		{"FenceOfPausedHolder", fencePaused},
		{"FenceOfOldSnapshot", fenceSnapshot},
		{"OpenFenceKeepsOthersFromLeading", fenceExcludes},
		{"OpenFenceDelaysNoRenewal", fenceRenews},
		{"OpenFenceDelaysRelease", fenceReleases},
		{"FencedWritesDoNotInterleave", fenceStress},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newStore(t)
			if _, err := f.DB.Exec("CREATE TABLE storetest_write (epoch bigint NOT NULL)"); err != nil {
				t.Fatal(err)
			}
			c.test(&suite{T: t, ctx: t.Context(), store: f.Store}, fencer{f.Store, f})
		})
	}
}

type fencer struct {
	lease.Fencer
	Fenced
}

// begin starts a transaction, which is rolled back when the test ends.
func (s *suite) begin(f fencer) *sql.Tx {
	s.Helper()
	tx, err := f.DB.BeginTx(s.ctx, nil)
	s.noError(err)
	s.Cleanup(func() { _ = tx.Rollback() })
	return tx
}

// fence starts a transaction and fences it with the epoch.
func (s *suite) fence(f fencer, epoch int64) (*sql.Tx, error) {
	s.Helper()
	tx := s.begin(f)
	return tx, f.Fence(s.ctx, tx, "a", epoch)
}

func fenceHolds(s *suite, f fencer) {
	x := s.get("x", long)
	for range 2 {
		tx, err := s.fence(f, x.Epoch)
		s.noError(err)
		s.noError(f.Fence(s.ctx, tx, "a", x.Epoch))
		s.noError(tx.Commit())
	}
	if f.OneWriter {
		return
	}
	one, err := s.fence(f, x.Epoch)
	s.noError(err)
	two, err := s.fence(f, x.Epoch)
	s.noError(err) // the second fence does not wait for the first transaction
	s.noError(two.Commit())
	s.noError(one.Commit())
}

func fenceOther(s *suite, f fencer) {
	refused := func(epoch int64) {
		s.Helper()
		tx, err := s.fence(f, epoch)
		s.lost(err)
		s.noError(tx.Rollback())
	}
	refused(1)
	x := s.get("x", long)
	refused(x.Epoch - 1)
	refused(x.Epoch + 1)
	s.release("x")
	refused(x.Epoch)
	refused(s.load().Epoch + 1)
	y := s.get("y", long)
	refused(x.Epoch)
	tx, err := s.fence(f, y.Epoch)
	s.noError(err)
	s.noError(tx.Commit())
}

// fencePaused tests a holder that starts a transaction when another process leads.
func fencePaused(s *suite, f fencer) {
	x := s.getShort("x")
	s.pause()
	s.get("y", long)
	_, err := s.fence(f, x.Epoch)
	s.lost(err)
}

// fenceSnapshot tests a transaction whose snapshot is older than the end of the term.
func fenceSnapshot(s *suite, f fencer) {
	if f.OneWriter {
		s.Skip("the transaction keeps others from leading")
	}
	for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		for _, released := range []bool{false, true} {
			x := s.getShort("x")
			tx, err := f.DB.BeginTx(s.ctx, &sql.TxOptions{Isolation: level})
			s.noError(err)
			s.noError(tx.QueryRowContext(s.ctx, "SELECT 1").Scan(new(int)))
			if level != sql.LevelSerializable { // in a serializable transaction, a read may lock rows
				s.noError(tx.QueryRowContext(s.ctx, "SELECT count(*) FROM storetest_write").Scan(new(int)))
			}
			if released {
				s.release("x")
			} else {
				s.pause()
				s.get("y", long)
			}
			err = f.Fence(s.ctx, tx, "a", x.Epoch)
			s.need(err != nil, "%v, released %v: the fence of a term that is over passes", level, released)
			_ = tx.Rollback()
			s.release("y")
		}
	}
}

// fenceExcludes tests that no other process leads while a holder pauses in a fenced transaction.
func fenceExcludes(s *suite, f fencer) {
	x := s.getShort("x")
	tx, err := s.fence(f, x.Epoch)
	s.noError(err)
	s.pause()
	for range 3 {
		s.cannotLead(f, "y")
	}
	rec := s.load()
	s.need(rec.Epoch == x.Epoch && rec.Token == "x", "%+v, not %+v", rec, x)
	s.noError(tx.Commit())
	s.leadsSoon("y")
}

// cannotLead requests the lease for another candidate, which must not get it. The store answers immediately, except if
// there is one writer. The request then waits until its ctx is done.
func (s *suite) cannotLead(f fencer, token string) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.ctx, short)
	if !f.OneWriter {
		ctx = s.ctx
	}
	defer cancel()
	rec, err := s.store.Acquire(ctx, request(token, long))
	s.need(err != nil || rec.Token != token, "%s leads while a fenced transaction is open: %+v", token, rec)
	s.need(err == nil || f.OneWriter, "error: %v", err)
}

func (s *suite) leadsSoon(token string) {
	s.Helper()
	for deadline := time.Now().Add(patience); s.ask(request(token, long)).Token != token; time.Sleep(short / 10) {
		s.need(time.Now().Before(deadline), "%s does not lead, and no fenced transaction is open", token)
	}
}

func fenceRenews(s *suite, f fencer) {
	if f.OneWriter {
		s.Skip("the database has one writer")
	}
	x := s.get("x", long/2)
	tx, err := s.fence(f, x.Epoch)
	s.noError(err)
	ctx, cancel := context.WithTimeout(s.ctx, patience/4)
	defer cancel()
	s.noError(s.store.Renew(ctx, lease.Request{Name: "a", Token: "x", TTL: long}))
	s.noError(f.Fence(s.ctx, tx, "a", x.Epoch))
	s.noError(tx.Commit())
	rec := s.load()
	s.need(rec.Epoch == x.Epoch && rec.Left > long/2, "%+v", rec)
}

func fenceReleases(s *suite, f fencer) {
	x := s.get("x", long)
	tx, err := s.fence(f, x.Epoch)
	s.noError(err)
	released := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(s.ctx, patience)
		defer cancel()
		released <- s.store.Release(ctx, "a", "x")
	}()
	time.Sleep(short)
	s.cannotLead(f, "y")
	s.noError(tx.Commit())
	if <-released != nil {
		s.release("x") // a failed release may be repeated
	}
	s.leadsSoon("y")
}

// fenceStress tests many holders that write in fenced transactions, while their terms end at any moment. No term may
// write after a later term has written.
func fenceStress(s *suite, f fencer) {
	ctx, cancel := context.WithTimeout(s.ctx, 3*time.Second)
	defer cancel()
	var mu sync.Mutex
	terms, writes, refused := make(map[int64]bool), 0, 0
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				req := request(fmt.Sprint(i, "-", n), 15*time.Millisecond)
				rec, err := s.store.Acquire(ctx, req)
				if err != nil || rec.Token != req.Token {
					time.Sleep(time.Millisecond)
					continue
				}
				for range 4 {
					wrote, err := fencedWrite(ctx, f, rec.Epoch)
					mu.Lock()
					terms[rec.Epoch] = true
					switch {
					case errors.Is(err, errInterleaved):
						s.Error(err)
					case errors.Is(err, lease.ErrLost):
						refused++
					case wrote:
						writes++
					}
					mu.Unlock()
				}
				if n%3 == 0 {
					_ = s.store.Release(ctx, "a", req.Token)
				}
			}
		})
	}
	wg.Wait()
	s.Logf("%d terms, %d fenced writes, %d refused", len(terms), writes, refused)
	s.need(len(terms) > 1 && writes > 0, "%d terms, %d writes", len(terms), writes)
}

var errInterleaved = errors.New("a later term has written before")

// fencedWrite writes the epoch. It returns errInterleaved if a later epoch was written before.
func fencedWrite(ctx context.Context, f fencer, epoch int64) (wrote bool, err error) {
	tx, err := f.DB.BeginTx(ctx, nil)
	if err != nil {
		return false, err
	}
	defer tx.Rollback()
	if err := f.Fence(ctx, tx, "a", epoch); err != nil {
		return false, err
	}
	time.Sleep(time.Duration(epoch%20) * time.Millisecond) // perhaps until after the end of the term
	var latest int64
	err = tx.QueryRowContext(ctx, "SELECT coalesce(max(epoch), 0) FROM storetest_write").Scan(&latest)
	if err != nil {
		return false, err
	}
	if latest > epoch {
		return false, fmt.Errorf("epoch %d: %w: %d", epoch, errInterleaved, latest)
	}
	insert := fmt.Sprintf("INSERT INTO storetest_write (epoch) VALUES (%d)", epoch)
	if _, err := tx.ExecContext(ctx, insert); err != nil {
		return false, err
	}
	return true, tx.Commit()
}
