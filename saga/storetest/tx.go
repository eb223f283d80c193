package storetest

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A Tx is a store in a database, for [RunTx].
type Tx struct {
	Store     store.TxStore // the store, without sagas and ready for use
	DB        *sql.DB       // the store's database, with at least two connections
	OneWriter bool          // whether a transaction that writes blocks all other writers, as in SQLite
}

// RunTx runs the tests for transactions, each as a subtest of t with a store from newStore. RunTx calls newStore once
// for each subtest, with the subtest's t, so newStore can register a cleanup. A [store.TxStore] must pass both RunTx
// and [Run].
func RunTx(t *testing.T, newStore func(t *testing.T) Tx) {
	t.Helper()
	for _, c := range []struct {
		name string
		test func(*suite, Tx)
	}{
		{"StartTxCommits", onStore(startTxCommits)},
		{"StartTxRollsBack", onStore(startTxRollsBack)},
		{"StartTxOfAnExistingID", onStore(startTxExisting)},
		{"StartTxWithOtherWrites", startTxOfCaller},
		{"SignalTxCommits", onStore(signalTxCommits)},
		{"SignalTxRollsBack", onStore(signalTxRollsBack)},
		{"CommitTxCommits", onStore(commitTxCommits)},
		{"CommitTxRollsBack", onStore(commitTxRollsBack)},
		{"CommitTxIsFenced", onStore(commitTxFenced)},
		{"CommitTxOfAPausedOwner", commitTxPaused},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Helper()
			tx := newStore(t)
			c.test(&suite{T: t, ctx: t.Context(), store: tx.Store}, tx)
		})
	}
}

func onStore(test func(*suite, store.TxStore)) func(*suite, Tx) {
	return func(s *suite, tx Tx) { test(s, tx.Store) }
}

func startTxCommits(s *suite, st store.TxStore) {
	tx, err := st.Begin(s.ctx)
	s.noError(err)
	rec, created, err := st.StartTx(s.ctx, tx, request("a"))
	s.noError(err)
	s.true(created)
	s.equal("a", rec.ID)
	s.noError(tx.Commit())
	s.same(rec, s.load("a"))
	s.len(s.claim("me", 1), 1)
}

func startTxRollsBack(s *suite, st store.TxStore) {
	tx, err := st.Begin(s.ctx)
	s.noError(err)
	_, _, err = st.StartTx(s.ctx, tx, request("a"))
	s.noError(err)
	s.noError(tx.Rollback())
	_, err = st.Load(s.ctx, "a")
	s.errorIs(err, store.ErrNotFound)
	log, err := st.History(s.ctx, "a", 0, 0)
	s.noError(err)
	s.empty(log)
}

func startTxExisting(s *suite, st store.TxStore) {
	rec := s.owned("a", "me", long)
	tx, err := st.Begin(s.ctx)
	s.noError(err)
	got, created, err := st.StartTx(s.ctx, tx, request("a"))
	s.noError(err)
	s.false(created)
	s.same(rec, got)
	_, created, err = st.StartTx(s.ctx, tx, request("b"))
	s.noError(err, "the transaction must stay usable")
	s.true(created)
	s.noError(tx.Commit())
	s.load("b")
}

func commitTxCommits(s *suite, st store.TxStore) {
	rec := s.owned("a", "me", long)
	tx, err := st.Begin(s.ctx)
	s.noError(err)
	req := commit(rec)
	receipt, err := st.CommitTx(s.ctx, tx, req)
	s.noError(err)
	s.zero(receipt)
	s.noError(tx.Commit())
	got := s.load("a")
	s.equal(req.After(), got.Seq)
	s.equal(req.Nonce, got.Nonce)
	s.equal(string(req.State), string(got.State))
	log, err := st.History(s.ctx, "a", 0, 0)
	s.noError(err)
	s.len(log, 2)
}

func commitTxRollsBack(s *suite, st store.TxStore) {
	rec := s.owned("a", "me", long)
	tx, err := st.Begin(s.ctx)
	s.noError(err)
	_, err = st.CommitTx(s.ctx, tx, commit(rec))
	s.noError(err)
	s.noError(tx.Rollback())
	s.same(rec, s.load("a"))
	log, err := st.History(s.ctx, "a", 0, 0)
	s.noError(err)
	s.len(log, 1)
}

func commitTxFenced(s *suite, st store.TxStore) {
	old := s.owned("a", "dead", short)
	s.len(s.claim("me", 1), 1)
	before := s.load("a")
	tx, err := st.Begin(s.ctx)
	s.noError(err)
	_, err = st.CommitTx(s.ctx, tx, commit(old))
	s.errorIs(err, store.ErrFenced)
	s.noError(tx.Rollback())
	s.same(before, s.load("a"))
}

// startTxOfCaller starts and signals sagas in transactions in which the caller also writes its own rows.
func startTxOfCaller(s *suite, db Tx) {
	st := db.Store
	_, err := db.DB.ExecContext(s.ctx, `CREATE TABLE storetest_order (id VARCHAR(10) PRIMARY KEY)`)
	s.noError(err)
	for _, id := range []string{"a", "b"} {
		tx, err := db.DB.BeginTx(s.ctx, nil)
		s.noError(err)
		_, err = tx.ExecContext(s.ctx, `INSERT INTO storetest_order (id) VALUES ('`+id+`')`)
		s.noError(err)
		_, created, err := st.StartTx(s.ctx, tx, request(id))
		s.noError(err)
		s.true(created)
		_, err = st.PostTx(s.ctx, tx, store.PostRequest{ID: id, Name: "paid", Payload: []byte("1")})
		s.noError(err)
		if id == "a" {
			s.noError(tx.Commit())
		} else {
			s.noError(tx.Rollback())
		}
	}
	s.load("a")
	_, err = st.Load(s.ctx, "b")
	s.errorIs(err, store.ErrNotFound)
	messages, err := st.Messages(s.ctx, "a")
	s.noError(err)
	s.len(messages, 1)
	var orders int
	s.noError(db.DB.QueryRowContext(s.ctx, `SELECT count(*) FROM storetest_order`).Scan(&orders))
	s.equal(1, orders)
}

// commitTxPaused pauses an owner within its transaction until another owner has claimed the saga. The transaction must
// not commit. If the database has a single writer, the claim must fail instead, and the transaction commits.
func commitTxPaused(s *suite, db Tx) {
	st := db.Store
	old := s.owned("a", "paused", short)
	tx, err := st.Begin(s.ctx)
	s.noError(err)
	_, _, err = st.StartTx(s.ctx, tx, request("effect"))
	s.noError(err)

	wait := long
	if db.OneWriter {
		wait = 500 * time.Millisecond
	}
	ctx, cancel := context.WithTimeout(s.ctx, wait)
	recs, claimErr := st.Claim(ctx, store.ClaimRequest{Owner: "me", LeaseTTL: long, Limit: 1, Definitions: defs})
	cancel()
	_, err = st.CommitTx(s.ctx, tx, commit(old))
	if db.OneWriter {
		s.error(claimErr, "a second writer has claimed")
		s.noError(err)
		s.noError(tx.Commit())
		s.equal64(2, s.load("a").Seq)
		return
	}
	s.noError(claimErr)
	s.len(recs, 1)
	s.error(err)
	s.noError(tx.Rollback())
	_, err = st.Load(s.ctx, "effect")
	s.true(errors.Is(err, store.ErrNotFound), "what a fenced owner did in its transaction was committed")
	s.equal64(2, s.load("a").Epoch)
}
