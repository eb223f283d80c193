package storetest

import (
	"errors"
	"fmt"
	"sync"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

func (s *suite) signal(name, payload string) store.Record {
	s.Helper()
	admit := func(*store.Record) error { return nil }
	rec, err := s.store.Post(s.ctx, store.PostRequest{ID: "a", Name: name, Payload: []byte(payload), Admit: admit})
	s.noError(err)
	return rec
}

// wake wakes a saga without a message.
func (s *suite) wake(id string) {
	s.Helper()
	_, err := s.store.Post(s.ctx, store.PostRequest{ID: id})
	s.noError(err)
}

var errRefused = errors.New("refused")

// refuse returns an Admit that returns errRefused, and checks the record that Admit receives.
func (s *suite) refuse(want store.Record) func(*store.Record) error {
	return func(rec *store.Record) error {
		s.same(want, *rec)
		return errRefused
	}
}

// signals returns the signals of a saga as "name payload".
func (s *suite) signals(id string) []string {
	s.Helper()
	list, err := s.store.Messages(s.ctx, id)
	s.noError(err)
	var texts []string
	for _, sig := range list {
		texts = append(texts, sig.Name+" "+string(sig.Payload))
	}
	return texts
}

func signalOnce(s *suite) {
	before := s.owned("a", "me", long)
	s.start(request("b"))
	s.empty(s.signals("a"))
	for _, payload := range []string{"by card \x00\xff", "again"} {
		s.same(before, s.signal("paid", payload))
	}
	s.signal("Packed", "")
	s.equal([]string{"Packed ", "paid by card \x00\xff"}, s.signals("a"), "the first payload, in byte order")
	s.same(before, s.load("a"))
	s.empty(s.signals("b"))
	_, err := s.store.Post(s.ctx, store.PostRequest{ID: "none", Name: "paid"})
	s.errorIs(err, store.ErrNotFound)
	s.empty(s.signals("none"))
	log, err := s.store.History(s.ctx, "a", 0, 0)
	s.noError(err)
	s.len(log, 1)
}

func signalParked(s *suite) {
	req := commit(s.owned("a", "me", long))
	req.Release, req.WakeIn = true, long
	s.commit(req)
	s.empty(s.claim("me", 1))
	s.equal(req.After(), s.signal("paid", "").Seq)
	s.len(s.claim("me", 1), 1)

	again := commit(s.load("a"))
	again.Release, again.WakeIn = true, long
	s.commit(again)
	s.empty(s.claim("me", 1))
	s.signal("paid", "")
	s.len(s.claim("me", 1), 1, "the sender says it again, since it does not know")

	back := commit(s.load("a"))
	back.Status, back.Release, back.WakeIn = store.Compensating, true, long
	s.commit(back)
	s.signal("packed", "")
	s.signal("paid", "")
	s.empty(s.claim("me", 1), "a saga that turns back waits for none")
	s.equal([]string{"packed ", "paid "}, s.signals("a"))
}

// signalRefused tests that a message is not stored if Admit returns an error, and that Admit is not called for a
// message that the saga already has.
func signalRefused(s *suite) {
	rec := s.owned("a", "me", long)
	s.signal("paid", "cash")
	refused := func(want store.Record) {
		s.Helper()
		got, err := s.store.Post(s.ctx, store.PostRequest{ID: "a", Name: "packed", Admit: s.refuse(want)})
		s.true(err == errRefused)
		s.same(want, got)
		got, err = s.store.Post(s.ctx, store.PostRequest{ID: "a", Name: "paid", Admit: s.refuse(want)})
		s.noError(err)
		s.same(want, got)
		s.same(want, s.load("a"))
		s.equal([]string{"paid cash"}, s.signals("a"))
	}
	refused(rec)
	for _, status := range []store.Status{store.Stuck, store.Completed} {
		req := commit(s.load("a"))
		req.Status, req.Release = status, true
		refused(s.commit(req))
	}
}

func signalMany(s *suite) {
	s.start(request("a"))
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			_, err := s.store.Post(s.ctx, store.PostRequest{ID: "a", Name: "paid", Payload: fmt.Append(nil, i)})
			s.check(err == nil, "the error is %v", err)
		})
	}
	wg.Wait()
	s.len(s.signals("a"), 1)
}

func hasten(s *suite) {
	park := func(id string, status store.Status) {
		req := commit(s.owned(id, "me", long))
		req.Status, req.Release, req.WakeIn = status, true, long
		s.commit(req)
	}
	park("a", store.Running)
	park("b", store.Compensating)
	park("c", store.Stuck)
	park("d", store.Running)
	held, waits, stuck := s.owned("e", "me", long), s.load("d"), s.load("c")
	for _, id := range []string{"a", "b", "c", "e", "none"} {
		s.wake(id)
	}
	s.same(held, s.load("e"))
	s.same(waits, s.load("d"))
	s.same(stuck, s.load("c"))
	s.len(s.claim("me", 10), 2, "a and b")

	before := s.start(request("f")) // the saga is already due
	s.wake("f")
	s.same(before, s.load("f"))
}

func signalTxCommits(s *suite, st store.TxStore) {
	tx, err := st.Begin(s.ctx)
	s.noError(err)
	_, _, err = st.StartTx(s.ctx, tx, request("a"))
	s.noError(err)
	for range 2 {
		rec, err := st.PostTx(s.ctx, tx, store.PostRequest{ID: "a", Name: "paid", Payload: []byte("cash")})
		s.noError(err)
		s.equal("a", rec.ID)
	}
	_, err = st.PostTx(s.ctx, tx, store.PostRequest{ID: "a", Name: "packed", Admit: func(rec *store.Record) error {
		s.equal("a", rec.ID)
		return errRefused
	}})
	s.true(err == errRefused)
	_, err = st.PostTx(s.ctx, tx, store.PostRequest{ID: "none", Name: "paid"})
	s.errorIs(err, store.ErrNotFound)
	s.noError(tx.Commit())
	s.equal([]string{"paid cash"}, s.signals("a"))
}

func signalTxRollsBack(s *suite, st store.TxStore) {
	req := commit(s.owned("a", "me", long))
	req.Release, req.WakeIn = true, long
	before := s.commit(req)
	tx, err := st.Begin(s.ctx)
	s.noError(err)
	_, err = st.PostTx(s.ctx, tx, store.PostRequest{ID: "a", Name: "paid"})
	s.noError(err)
	s.noError(tx.Rollback())
	s.empty(s.signals("a"))
	s.same(before, s.load("a"))
}
