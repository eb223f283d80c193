package storetest

import (
	"context"
	"errors"
	"time"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

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

// commitTxPaused pauses an owner within its transaction until another owner has claimed the
// saga. The transaction must not commit. Where one writer excludes all others (SQLite),
// the claim fails and the transaction commits.
func commitTxPaused(s *suite, st store.TxStore) {
	old := s.owned("a", "paused", short)
	tx, err := st.Begin(s.ctx)
	s.noError(err)
	_, _, err = st.StartTx(s.ctx, tx, request("effect"))
	s.noError(err)

	ctx, cancel := context.WithTimeout(s.ctx, 500*time.Millisecond)
	recs, claimErr := st.Claim(ctx, store.ClaimRequest{Owner: "me", LeaseTTL: long, Limit: 1, Definitions: defs})
	cancel()
	_, err = st.CommitTx(s.ctx, tx, commit(old))
	if claimErr != nil {
		s.noError(err)
		s.noError(tx.Commit())
		s.equal64(2, s.load("a").Seq)
		return
	}
	s.len(recs, 1)
	s.error(err)
	s.noError(tx.Rollback())
	_, err = st.Load(s.ctx, "effect")
	s.true(errors.Is(err, store.ErrNotFound), "what a fenced owner did in its transaction was committed")
	s.equal64(2, s.load("a").Epoch)
}
