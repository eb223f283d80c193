package storetest

import (
	"fmt"
	"sync"

	"github.com/go-resilience/resilience/saga"
)

func (s *suite) signal(name, payload string) (saga.Record, bool) {
	s.Helper()
	rec, kept, err := s.store.Signal(s.ctx, saga.SignalRequest{ID: "a", Name: name, Payload: []byte(payload)})
	s.NoError(err)
	return rec, kept
}

// signals returns the signals of a saga as "name payload".
func (s *suite) signals(id string) []string {
	s.Helper()
	list, err := s.store.Signals(s.ctx, id)
	s.NoError(err)
	var texts []string
	for _, sig := range list {
		s.around(sig.At, s.load(id), 0)
		texts = append(texts, sig.Name+" "+string(sig.Payload))
	}
	return texts
}

func signalOnce(s *suite) {
	before := s.owned("a", "me", long)
	s.start(request("b"))
	s.Empty(s.signals("a"))
	for _, payload := range []string{"by card \x00\xff", "again"} {
		rec, kept := s.signal("paid", payload)
		s.True(kept)
		s.same(before, rec)
	}
	_, kept := s.signal("Packed", "")
	s.True(kept)
	s.Equal([]string{"Packed ", "paid by card \x00\xff"}, s.signals("a"), "the first payload, in byte order")
	s.same(before, s.load("a"))
	s.Empty(s.signals("b"))
	_, _, err := s.store.Signal(s.ctx, saga.SignalRequest{ID: "none", Name: "paid"})
	s.ErrorIs(err, saga.ErrNotFound)
	s.Empty(s.signals("none"))
	log, err := s.store.History(s.ctx, "a", 0, 0)
	s.NoError(err)
	s.Len(log, 1)
}

func signalParked(s *suite) {
	req := commit(s.owned("a", "me", long))
	req.Release, req.WakeIn = true, long
	s.commit(req)
	s.Empty(s.claim("me", 1))
	got, kept := s.signal("paid", "")
	s.True(kept)
	s.Equal(req.After(), got.Seq)
	s.Len(s.claim("me", 1), 1)

	again := commit(s.load("a"))
	again.Release, again.WakeIn = true, long
	s.commit(again)
	s.Empty(s.claim("me", 1))
	s.signal("paid", "")
	s.Len(s.claim("me", 1), 1, "the sender says it again, since it does not know")

	back := commit(s.load("a"))
	back.Status, back.Release, back.WakeIn = saga.Compensating, true, long
	s.commit(back)
	_, kept = s.signal("packed", "")
	s.False(kept, "a saga that turns back takes no signal")
	_, kept = s.signal("paid", "")
	s.True(kept)
	s.Empty(s.claim("me", 1), "and waits for none")
	s.Equal([]string{"paid "}, s.signals("a"))
}

func signalEnded(s *suite) {
	rec := s.owned("a", "me", long)
	s.signal("paid", "")
	req := commit(rec)
	req.Status, req.Release = saga.Completed, true
	ended := s.commit(req)
	got, kept := s.signal("packed", "")
	s.False(kept)
	s.same(ended, got)
	_, kept = s.signal("paid", "")
	s.True(kept)
	s.Equal([]string{"paid "}, s.signals("a"))
	s.same(ended, s.load("a"))
}

func signalStuck(s *suite) {
	rec := s.owned("a", "me", long)
	s.signal("paid", "")
	req := commit(rec)
	req.Status, req.Release = saga.Stuck, true
	stuck := s.commit(req)
	keep := func(name string, seq int64) bool {
		got, kept, err := s.store.Signal(s.ctx, saga.SignalRequest{ID: "a", Name: name, StuckSeq: seq})
		s.NoError(err)
		s.same(stuck, got)
		return kept
	}
	s.False(keep("packed", 0), "nobody knows whether it has turned back")
	s.False(keep("packed", stuck.Seq-1), "it was read before it got stuck")
	s.True(keep("paid", 0), "it is there")
	s.Equal([]string{"paid "}, s.signals("a"))
	s.True(keep("packed", stuck.Seq))
	s.Equal([]string{"packed ", "paid "}, s.signals("a"))
	s.same(stuck, s.load("a"))
}

func signalMany(s *suite) {
	s.start(request("a"))
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			_, kept, err := s.store.Signal(s.ctx, saga.SignalRequest{ID: "a", Name: "paid", Payload: fmt.Append(nil, i)})
			s.Check(err == nil && kept, "kept is %v, with the error %v", kept, err)
		})
	}
	wg.Wait()
	s.Len(s.signals("a"), 1)
}

func hasten(s *suite) {
	park := func(id string, status saga.Status) {
		req := commit(s.owned(id, "me", long))
		req.Status, req.Release, req.WakeIn = status, true, long
		s.commit(req)
	}
	park("a", saga.Running)
	park("b", saga.Compensating)
	park("c", saga.Stuck)
	park("d", saga.Running)
	held, waits, stuck := s.owned("e", "me", long), s.load("d"), s.load("c")
	for _, id := range []string{"a", "b", "c", "e", "none"} {
		s.NoError(s.store.Hasten(s.ctx, id))
	}
	s.same(held, s.load("e"))
	s.same(waits, s.load("d"))
	s.same(stuck, s.load("c"))
	s.Len(s.claim("me", 10), 2, "a and b")

	before := s.start(request("f")) // due already
	s.NoError(s.store.Hasten(s.ctx, "f"))
	s.same(before, s.load("f"))
}

func signalTxCommits(s *suite, store saga.TxStore) {
	tx, err := store.Begin(s.ctx)
	s.NoError(err)
	_, _, err = store.StartTx(s.ctx, tx, request("a"))
	s.NoError(err)
	for range 2 {
		rec, kept, err := store.SignalTx(s.ctx, tx, saga.SignalRequest{ID: "a", Name: "paid", Payload: []byte("cash")})
		s.NoError(err)
		s.True(kept)
		s.Equal("a", rec.ID)
	}
	_, _, err = store.SignalTx(s.ctx, tx, saga.SignalRequest{ID: "none", Name: "paid"})
	s.ErrorIs(err, saga.ErrNotFound)
	s.NoError(tx.Commit())
	s.Equal([]string{"paid cash"}, s.signals("a"))
}

func signalTxRollsBack(s *suite, store saga.TxStore) {
	req := commit(s.owned("a", "me", long))
	req.Release, req.WakeIn = true, long
	before := s.commit(req)
	tx, err := store.Begin(s.ctx)
	s.NoError(err)
	_, kept, err := store.SignalTx(s.ctx, tx, saga.SignalRequest{ID: "a", Name: "paid"})
	s.NoError(err)
	s.True(kept)
	s.NoError(tx.Rollback())
	s.Empty(s.signals("a"))
	s.same(before, s.load("a"))
}
