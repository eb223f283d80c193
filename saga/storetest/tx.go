package storetest

import (
	"context"
	"errors"
	"time"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

func startTxCommits(s *suite, st store.TxStore) {
	tx, err := st.Begin(s.ctx)
	s.NoError(err)
	rec, created, err := st.StartTx(s.ctx, tx, request("a"))
	s.NoError(err)
	s.True(created)
	s.Equal("a", rec.ID)
	s.NoError(tx.Commit())
	s.same(rec, s.load("a"))
	s.Len(s.claim("me", 1), 1)
}

func startTxRollsBack(s *suite, st store.TxStore) {
	tx, err := st.Begin(s.ctx)
	s.NoError(err)
	_, _, err = st.StartTx(s.ctx, tx, request("a"))
	s.NoError(err)
	s.NoError(tx.Rollback())
	_, err = st.Load(s.ctx, "a")
	s.ErrorIs(err, store.ErrNotFound)
	log, err := st.History(s.ctx, "a", 0, 0)
	s.NoError(err)
	s.Empty(log)
}

func startTxExisting(s *suite, st store.TxStore) {
	rec := s.owned("a", "me", long)
	tx, err := st.Begin(s.ctx)
	s.NoError(err)
	got, created, err := st.StartTx(s.ctx, tx, request("a"))
	s.NoError(err)
	s.False(created)
	s.same(rec, got)
	_, created, err = st.StartTx(s.ctx, tx, request("b"))
	s.NoError(err, "the transaction must stay usable")
	s.True(created)
	s.NoError(tx.Commit())
	s.load("b")
}

func commitTxCommits(s *suite, st store.TxStore) {
	rec := s.owned("a", "me", long)
	tx, err := st.Begin(s.ctx)
	s.NoError(err)
	req := commit(rec)
	receipt, err := st.CommitTx(s.ctx, tx, req)
	s.NoError(err)
	s.Zero(receipt)
	s.NoError(tx.Commit())
	got := s.load("a")
	s.Equal(req.After(), got.Seq)
	s.Equal(req.Nonce, got.Nonce)
	s.Equal(string(req.State), string(got.State))
	log, err := st.History(s.ctx, "a", 0, 0)
	s.NoError(err)
	s.Len(log, 2)
}

func commitTxRollsBack(s *suite, st store.TxStore) {
	rec := s.owned("a", "me", long)
	tx, err := st.Begin(s.ctx)
	s.NoError(err)
	_, err = st.CommitTx(s.ctx, tx, commit(rec))
	s.NoError(err)
	s.NoError(tx.Rollback())
	s.same(rec, s.load("a"))
	log, err := st.History(s.ctx, "a", 0, 0)
	s.NoError(err)
	s.Len(log, 1)
}

func commitTxFenced(s *suite, st store.TxStore) {
	old := s.owned("a", "dead", short)
	s.Len(s.claim("me", 1), 1)
	before := s.load("a")
	tx, err := st.Begin(s.ctx)
	s.NoError(err)
	_, err = st.CommitTx(s.ctx, tx, commit(old))
	s.ErrorIs(err, store.ErrFenced)
	s.NoError(tx.Rollback())
	s.same(before, s.load("a"))
}

// commitTxPaused pauses an owner within its transaction until another owner has claimed the
// saga. The transaction must not commit. Where one writer excludes all others (SQLite),
// the claim fails and the transaction commits.
func commitTxPaused(s *suite, st store.TxStore) {
	old := s.owned("a", "paused", short)
	tx, err := st.Begin(s.ctx)
	s.NoError(err)
	_, _, err = st.StartTx(s.ctx, tx, request("effect"))
	s.NoError(err)

	ctx, cancel := context.WithTimeout(s.ctx, 500*time.Millisecond)
	recs, claimErr := st.Claim(ctx, store.ClaimRequest{Owner: "me", LeaseTTL: long, Limit: 1, Definitions: defs})
	cancel()
	_, err = st.CommitTx(s.ctx, tx, commit(old))
	if claimErr != nil {
		s.NoError(err)
		s.NoError(tx.Commit())
		s.EqualValues(2, s.load("a").Seq)
		return
	}
	s.Len(recs, 1)
	s.Error(err)
	s.NoError(tx.Rollback())
	_, err = st.Load(s.ctx, "effect")
	s.True(errors.Is(err, store.ErrNotFound), "what a fenced owner did in its transaction was committed")
	s.EqualValues(2, s.load("a").Epoch)
}
