// Package storetest provides the tests that every sagastore.Store must pass:
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) sagastore.Store { return newStore(t) })
//	}
//
// [RunTx] has more tests for stores in a database. The tests call each method and compare the records, logs and
// messages that the store returns. The tests run in real time, with the store's own clock. Leases last for an hour or
// for a nanosecond, and pauses between calls are 3 milliseconds. A failed test reports the first difference.
//
// # Limits
//
// The package does not test the following properties of a store, which need other tests:
//
//   - whether writes survive a crash, and the results of writes whose response was lost
//   - several processes, and processes whose clocks differ
//   - rows that another transaction has locked: Claim and DeleteEnded skip them, and Heartbeat returns Locked
//   - a Heartbeat for a lease that has ended but was not claimed, or a Heartbeat that is concurrent with a Claim
//   - a Commit that is concurrent with Claim, DeleteEnded or the Admit of a Post
//   - the limit of the numbers that Counts returns, and the order of several definitions in Counts
//   - texts and payloads of the maximum length
//   - the pages of List while sagas start or are deleted
//   - the optional interfaces Checker and Notifier, TxStore's method Exclusive, and the ctx of TxStore's method Begin
//   - the duration of calls of a store with many sagas
//
// # Stability
//
// The package is unstable until 1.0.0, as package sagastore is. A minor version may add tests.
package storetest

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

const (
	long = time.Hour
	// short is the duration of a lease that has ended when the test makes its next call.
	short = time.Nanosecond
)

// Run runs the tests, each as a subtest of t with a store from newStore. The store must have no sagas and be ready for
// use. Run calls newStore once for each subtest, with the subtest's t, so newStore can register a cleanup. A test makes
// up to 32 concurrent calls.
//
// [RunTx] tests the transactions of a [store.TxStore].
func Run(t *testing.T, newStore func(t *testing.T) store.Store) {
	t.Helper()
	for _, c := range []struct {
		name string
		test func(*suite)
	}{
		{"StartKeepsWhatItIsGiven", startKeeps},
		{"StartClaimsForAnOwner", startClaims},
		{"StartLeavesAnExistingIDAlone", startExisting},
		{"StartOnceOfMany", startOnce},
		{"ClaimTakesWhatIsDue", claimDue},
		{"ClaimOfACrashedOwner", claimCrashed},
		{"ClaimOrderAndLimit", claimOrder},
		{"ClaimTheOldestFirst", claimOldest},
		{"ClaimTwoTenants", claimTwoTenants},
		{"ClaimManyTenants", claimManyTenants},
		{"ClaimTenantsOfDefinitions", claimTenantsOfDefinitions},
		{"ClaimOnlyRegistered", claimRegistered},
		{"ClaimOncePerEpoch", claimOnce},
		{"HeartbeatExtendsOnlyWhatIsHeld", heartbeat},
		{"CommitWritesEverything", commitWrites},
		{"CommitChangesTheVersion", commitVersion},
		{"CommitIsFencedByEpoch", commitEpoch},
		{"CommitIsFencedBySeq", commitSeq},
		{"CommitOnceOfMany", commitOnce},
		{"CommitOfManyAtOnce", commitMany},
		{"CommitReleases", commitReleases},
		{"CommitKeepsTheLease", commitKeepsLease},
		{"CommitOfARecordThatWasWoken", commitWoken},
		{"CancelReachesTheOwner", cancelOwned},
		{"CancelMakesAParkedSagaDue", cancelParked},
		{"CancelKeepsPastWakeAt", cancelDue},
		{"CancelOnlyWhatRuns", cancelEnded},
		{"SignalIsKeptOnce", signalOnce},
		{"SignalMakesAParkedSagaDue", signalParked},
		{"SignalThatIsRefused", signalRefused},
		{"SignalOnceOfMany", signalMany},
		{"HastenOnlyWhatWaits", hasten},
		{"LoadOfNothing", loadNothing},
		{"ListHasTheNewestFirst", listNewest},
		{"CountsByDefinitionAndStatus", counts},
		{"HistoryHasNoGap", history},
		{"ChildrenOfAStep", children},
		{"DeleteEnded", deleteEnded},
		{"DeleteEndedDeletesChildrenBeforeTheirParent", deleteChildren},
		{"TextAndBytesSurvive", roundTrip},
		{"EndedContext", endedContext},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.test(&suite{T: t, ctx: t.Context(), store: newStore(t)})
		})
	}
}

var defs = []store.Definition{{Saga: "trip", Version: 1}}

func request(id string) store.StartRequest {
	return store.StartRequest{
		ID: id, Saga: "trip", Version: 1, Status: store.Running,
		State: []byte(`{"a":1}`), Progress: []byte(`{"steps":[]}`), Nonce: math.MinInt64, Tenant: "acme",
		Log: []store.Entry{{Kind: saga.EventCreated}},
	}
}

func (s *suite) start(req store.StartRequest) store.Record {
	s.Helper()
	rec, created, err := s.store.Start(s.ctx, req)
	s.noError(err)
	s.true(created)
	return rec
}

// owned starts a saga that owner holds for the duration lease.
func (s *suite) owned(id, owner string, lease time.Duration) store.Record {
	s.Helper()
	req := request(id)
	req.Owner, req.LeaseTTL = owner, lease
	return s.start(req)
}

func (s *suite) load(id string) store.Record {
	s.Helper()
	rec, err := s.store.Load(s.ctx, id)
	s.noError(err)
	return rec
}

func (s *suite) claim(owner string, limit int) []store.Record {
	s.Helper()
	recs, err := s.store.Claim(s.ctx, store.ClaimRequest{Owner: owner, LeaseTTL: long, Limit: limit, Definitions: defs})
	s.noError(err)
	return recs
}

func commit(rec store.Record) store.CommitRequest {
	return store.CommitRequest{
		ID: rec.ID, Epoch: rec.Epoch, Seq: rec.Seq, Nonce: math.MaxInt64 - rec.Seq, Status: store.Running,
		State: []byte(`{"a":2}`), Progress: []byte(`{"steps":[1]}`),
		Log: []store.Entry{{Step: "flight", Op: saga.OpDo, Kind: saga.EventStepDone, Attempt: 1}},
	}
}

func (s *suite) commit(req store.CommitRequest) store.Record {
	s.Helper()
	_, err := s.store.Commit(s.ctx, req)
	s.noError(err)
	return s.load(req.ID)
}

// same checks that two records are equal, except for Now and Previous. Times are compared in microseconds, because
// databases store no more precise times.
func (s *suite) same(want, got store.Record) {
	s.Helper()
	for _, r := range []*store.Record{&want, &got} {
		r.Now, r.Previous = time.Time{}, ""
		for _, t := range []*time.Time{&r.WakeAt, &r.CompleteBy, &r.CreatedAt, &r.UpdatedAt} {
			if !t.IsZero() {
				*t = t.UTC().Truncate(time.Microsecond).Round(0)
			}
		}
	}
	s.equal(want, got)
}

// around checks that a time is about d after the record was read. The tolerance of 5 minutes is for slow machines.
func (s *suite) around(at time.Time, rec store.Record, d time.Duration) {
	s.Helper()
	s.withinDuration(rec.Now.Add(d), at, 5*time.Minute)
}

func startKeeps(s *suite) {
	req := request("a")
	req.CompleteIn = long
	req.Log = []store.Entry{
		{Kind: saga.EventCreated},
		{Step: "flight", Op: saga.OpDo, Kind: saga.EventStepSkipped, Attempt: 3, Error: "why"},
	}
	rec := s.start(req)
	s.equal("acme", rec.Tenant)
	s.equal("a", rec.ID)
	s.equal("trip", rec.Saga)
	s.equal(1, rec.Version)
	s.equal(store.Running, rec.Status)
	s.equal(`{"a":1}`, string(rec.State))
	s.equal(`{"steps":[]}`, string(rec.Progress))
	s.equal64(2, rec.Seq)
	s.equal(req.Nonce, rec.Nonce)
	s.zero(rec.Epoch)
	s.empty(rec.Owner)
	s.empty(rec.Previous)
	s.zero(rec.Failures)
	s.zero(rec.Takeovers)
	s.empty(rec.LastError)
	s.false(rec.CancelRequested)
	s.false(rec.WakeAt.After(rec.Now), "due at once")
	s.around(rec.CreatedAt, rec, 0)
	s.equal(rec.CreatedAt.UnixMicro(), rec.UpdatedAt.UnixMicro())
	s.around(rec.CompleteBy, rec, long)
	s.same(rec, s.load("a"))
	log, err := s.store.History(s.ctx, "a", 0, 0)
	s.noError(err)
	s.len(log, 2)
	for i := range log {
		s.around(log[i].At, rec, 0)
		log[i].At = time.Time{}
	}
	s.equal([]store.Entry{
		{Seq: 1, Kind: saga.EventCreated},
		{Seq: 2, Step: "flight", Op: saga.OpDo, Kind: saga.EventStepSkipped, Attempt: 3, Error: "why"},
	}, log)
	s.true(s.start(request("b")).CompleteBy.IsZero(), "no deadline")
}

func startClaims(s *suite) {
	rec := s.owned("a", "me", long)
	s.equal("me", rec.Owner)
	s.equal64(1, rec.Epoch)
	s.around(rec.WakeAt, rec, long)
	s.same(rec, s.load("a"))
	s.empty(s.claim("other", 10))
	log, err := s.store.History(s.ctx, "a", 0, 0)
	s.noError(err)
	s.equal64(1, log[0].Epoch)
}

func startExisting(s *suite) {
	rec := s.owned("a", "me", long)
	req := request("a")
	req.Saga, req.State, req.Owner, req.LeaseTTL = "other", []byte("x"), "other", short
	got, created, err := s.store.Start(s.ctx, req)
	s.noError(err)
	s.false(created)
	s.same(rec, got)
	s.same(rec, s.load("a"))
	log, err := s.store.History(s.ctx, "a", 0, 0)
	s.noError(err)
	s.len(log, 1)
}

func startOnce(s *suite) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	winners := 0
	for i := range 8 {
		wg.Go(func() {
			req := request("a")
			req.Owner, req.LeaseTTL = fmt.Sprint("owner-", i), long
			rec, created, err := s.store.Start(s.ctx, req)
			mu.Lock()
			defer mu.Unlock()
			if s.check(err == nil, "%v", err) && created {
				winners++
				s.check(rec.Owner == req.Owner, "the one that was created is another's")
			}
		})
	}
	wg.Wait()
	s.equal(1, winners)
}

func claimDue(s *suite) {
	started := s.start(request("a"))
	recs := s.claim("me", 10)
	s.len(recs, 1)
	got := recs[0]
	s.equal("me", got.Owner)
	s.empty(got.Previous)
	s.equal64(1, got.Epoch)
	s.zero(got.Takeovers)
	s.equal(started.Seq, got.Seq)
	s.equal(started.Nonce, got.Nonce)
	s.equal(started.UpdatedAt.UnixMicro(), got.UpdatedAt.UnixMicro())
	s.around(got.WakeAt, got, long)
	s.same(got, s.load("a"))
	s.empty(s.claim("me", 10), "not due before its lease is over")
}

func claimCrashed(s *suite) {
	s.owned("a", "dead", short)
	got := s.claim("me", 10)
	s.len(got, 1)
	s.equal("dead", got[0].Previous)
	s.equal("me", got[0].Owner)
	s.equal64(2, got[0].Epoch)
	s.equal(1, got[0].Takeovers)
	s.same(got[0], s.load("a"))

	// The owner's commit writes the number of takeovers.
	req := commit(got[0])
	req.Takeovers, req.Release = 7, true
	s.commit(req)
	got = s.claim("me", 10)
	s.len(got, 1)
	s.empty(got[0].Previous)
	s.equal(7, got[0].Takeovers)
	s.equal64(3, got[0].Epoch)

	// An owner that claims its own saga again has not crashed.
	s.owned("b", "me", short)
	got = s.claim("me", 10)
	s.len(got, 1)
	s.equal("me", got[0].Previous)
	s.equal64(2, got[0].Epoch)
	s.zero(got[0].Takeovers)
}

func claimOrder(s *suite) {
	s.start(request("new-1"))
	s.start(request("new-2"))
	s.owned("crashed", "dead", short)
	s.start(request("new-3"))
	ids := func(recs []store.Record) []string {
		var list []string
		for _, r := range recs {
			list = append(list, r.ID)
		}
		slices.Sort(list)
		return list
	}
	s.empty(s.claim("me", 0))
	s.equal([]string{"crashed"}, ids(s.claim("me", 1)))
	s.equal([]string{"new-1", "new-2"}, ids(s.claim("me", 2)))
	s.equal([]string{"new-3"}, ids(s.claim("me", 2)))
	s.empty(s.claim("me", 2))
}

// claimOldest tests that definitions take turns, starting with the definition whose first saga was due first, and that
// the saga of a crashed owner is claimed before all others.
func claimOldest(s *suite) {
	order := []store.Definition{{Saga: "late"}, {Saga: "soon"}}
	for _, id := range []string{"soon-0", "soon-1", "soon-2", "late-0", "late-1", "late-2"} {
		req := request(id)
		req.Saga, req.Version = strings.Split(id, "-")[0], 0
		if id == "late-2" {
			req.Owner, req.LeaseTTL = "dead", short
		}
		s.start(req)
		time.Sleep(3 * time.Millisecond) // because a store may truncate times to milliseconds
	}
	claim := func(limit int) string {
		recs, err := s.store.Claim(s.ctx, store.ClaimRequest{Owner: "me", LeaseTTL: long, Limit: limit, Definitions: order})
		s.noError(err)
		var ids []string
		for _, r := range recs {
			ids = append(ids, r.ID)
		}
		slices.Sort(ids)
		return strings.Join(ids, " ")
	}
	s.equal("late-2", claim(1))
	s.equal("soon-0", claim(1))
	s.equal("late-0 soon-1", claim(2))
	s.equal("late-1 soon-2", claim(3))
}

func claimRegistered(s *suite) {
	for i, d := range []store.Definition{
		{Saga: "trip", Version: 1}, {Saga: "trip", Version: 2}, {Saga: "order", Version: 1},
	} {
		req := request(fmt.Sprint("saga-", i))
		req.Saga, req.Version = d.Saga, d.Version
		s.start(req)
	}
	claim := func(d ...store.Definition) []store.Record {
		recs, err := s.store.Claim(s.ctx, store.ClaimRequest{Owner: "me", LeaseTTL: long, Limit: 10, Definitions: d})
		s.noError(err)
		return recs
	}
	s.empty(claim())
	s.empty(claim(store.Definition{Saga: "order", Version: 2}))
	recs := claim(store.Definition{Saga: "trip", Version: 2}, store.Definition{Saga: "order", Version: 1})
	s.len(recs, 2)
	recs = claim(defs...)
	s.len(recs, 1)
	s.equal("saga-0", recs[0].ID)
}

func claimOnce(s *suite) {
	const sagas, owners = 40, 4
	for i := range sagas {
		s.start(request(fmt.Sprintf("saga-%02d", i)))
	}
	var mu sync.Mutex
	seen := make(map[string]string)
	var wg sync.WaitGroup
	for o := range owners {
		owner := fmt.Sprint("owner-", o)
		wg.Go(func() {
			for range sagas {
				recs, err := s.store.Claim(s.ctx, store.ClaimRequest{Owner: owner, LeaseTTL: long, Limit: 3, Definitions: defs})
				if !s.check(err == nil, "%v", err) {
					return
				}
				mu.Lock()
				for _, r := range recs {
					s.check(seen[r.ID] == "", "%s claimed by %s and %s", r.ID, seen[r.ID], owner)
					s.check(r.Epoch == 1, "epoch %d", r.Epoch)
					seen[r.ID] = owner
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	s.len(seen, sagas)
}

func heartbeat(s *suite) {
	mine := s.owned("mine", "me", short)
	s.owned("other", "other", short)
	old := s.owned("taken", "me", short)
	s.start(request("free"))
	taken := false
	for _, r := range s.claim("thief", 10) { // claims all due sagas, those of crashed owners first
		taken = taken || r.ID == "taken"
	}
	s.true(taken)
	// The first owner claims "mine" again.
	req := commit(s.load("mine"))
	req.Release = true
	s.commit(req)
	recs := s.claim("me", 1)
	s.len(recs, 1)
	s.equal("mine", recs[0].ID)

	renewed, err := s.store.Heartbeat(s.ctx, store.HeartbeatRequest{Owner: "me", LeaseTTL: 2 * long, Held: []store.Held{
		{ID: "mine", Epoch: recs[0].Epoch},
		{ID: "taken", Epoch: old.Epoch}, // another owner has claimed it
		{ID: "other", Epoch: 1},
		{ID: "free", Epoch: 0},
		{ID: "none", Epoch: 1},
	}})
	s.noError(err)
	s.equal([]store.Renewed{{ID: "mine", Epoch: recs[0].Epoch}}, renewed)
	got := s.load("mine")
	s.around(got.WakeAt, got, 2*long)
	s.equal(recs[0].Seq, got.Seq)
	s.equal(recs[0].Nonce, got.Nonce)

	held := []store.Held{{ID: "mine", Epoch: mine.Epoch}}
	renewed, err = s.store.Heartbeat(s.ctx, store.HeartbeatRequest{Owner: "me", LeaseTTL: long, Held: held})
	s.noError(err)
	s.empty(renewed, "an earlier epoch of the same owner")
	renewed, err = s.store.Heartbeat(s.ctx, store.HeartbeatRequest{Owner: "me", LeaseTTL: long})
	s.noError(err)
	s.empty(renewed)
}

func commitWrites(s *suite) {
	rec := s.owned("a", "me", long)
	req := commit(rec)
	req.Status, req.Failures, req.Takeovers, req.LastError = store.Compensating, 3, 2, "card declined"
	undo := store.Entry{Step: "hotel", Op: saga.OpUndo, Kind: saga.EventStepUndoFailed, Attempt: 4, Error: "no"}
	req.Log = append(req.Log, undo)
	receipt, err := s.store.Commit(s.ctx, req)
	s.noError(err)
	s.zero(receipt)
	got := s.load("a")
	s.around(got.UpdatedAt, got, 0)
	s.false(got.UpdatedAt.Before(rec.UpdatedAt))
	want := rec
	want.Status, want.State, want.Progress = req.Status, req.State, req.Progress
	want.Failures, want.Takeovers, want.LastError = 3, 2, "card declined"
	want.Seq, want.Nonce, want.UpdatedAt = 3, req.Nonce, got.UpdatedAt
	s.same(want, got)
	log, err := s.store.History(s.ctx, "a", 0, 0)
	s.noError(err)
	s.len(log, 3)
	s.around(log[2].At, got, 0)
	log[2].At = time.Time{}
	undo.Seq, undo.Epoch = 3, 1
	s.equal(undo, log[2])
}

func commitVersion(s *suite) {
	req := commit(s.owned("a", "me", long))
	req.Version, req.Release = 2, true
	got := s.commit(req)
	s.equal(2, got.Version)
	s.equal("trip", got.Saga)
	s.empty(s.claim("me", 1), "by runners that have only version 1")
	recs, err := s.store.Claim(s.ctx, store.ClaimRequest{
		Owner: "other", LeaseTTL: long, Limit: 1, Definitions: []store.Definition{{Saga: "trip", Version: 2}},
	})
	s.noError(err)
	s.len(recs, 1)
	req = commit(recs[0])
	s.equal(2, s.commit(req).Version, "zero leaves it as it is")
}

func commitEpoch(s *suite) {
	old := s.owned("a", "dead", short)
	s.len(s.claim("me", 1), 1)
	before := s.load("a")
	_, err := s.store.Commit(s.ctx, commit(old))
	s.errorIs(err, store.ErrFenced)
	future := commit(before)
	future.Epoch++
	_, err = s.store.Commit(s.ctx, future)
	s.errorIs(err, store.ErrFenced)
	s.same(before, s.load("a"))
	s.commit(commit(before))
	log, err := s.store.History(s.ctx, "a", 0, 0)
	s.noError(err)
	s.len(log, 2, "a fenced commit writes nothing")
}

func commitSeq(s *suite) {
	rec := s.owned("a", "me", long)
	s.commit(commit(rec))
	before := s.load("a")
	_, err := s.store.Commit(s.ctx, commit(rec)) // the same commit again
	s.errorIs(err, store.ErrFenced)
	s.same(before, s.load("a"))
	none := commit(rec)
	none.ID = "none"
	_, err = s.store.Commit(s.ctx, none)
	s.errorIs(err, store.ErrFenced)
}

func commitOnce(s *suite) {
	rec := s.owned("a", "me", long)
	var wg sync.WaitGroup
	var mu sync.Mutex
	won := 0
	for range 8 {
		wg.Go(func() {
			_, err := s.store.Commit(s.ctx, commit(rec))
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				won++
			}
		})
	}
	wg.Wait()
	s.equal(1, won)
	s.equal64(2, s.load("a").Seq)
}

// commitMany commits many sagas concurrently. A store may write them together, but each commit must have its own
// result. One in four commits is fenced, and one in four sagas is canceled.
func commitMany(s *suite) {
	const sagas, commits = 32, 5
	var recs []store.Record
	for i := range sagas {
		rec := s.owned(fmt.Sprintf("%02d", sagas-i), "me", long)
		switch i % 4 {
		case 1:
			rec.Epoch++
		case 2:
			_, err := s.store.Post(s.ctx, store.PostRequest{ID: rec.ID, Payload: []byte("note of " + rec.ID), Cancel: true})
			s.noError(err)
		}
		recs = append(recs, rec)
	}
	last := func(rec store.Record, n int) store.CommitRequest {
		req := commit(rec)
		word := fmt.Sprint(rec.ID, " ", n)
		req.State, req.Progress = []byte(word), []byte(`{"steps":["`+word+`"]}`)
		req.LastError = "error of \\ '{" + word + ",NULL}'"
		req.Failures, req.Takeovers, req.Nonce = n, n+1, int64(-n)
		for k := range n % 3 {
			req.Log = append(req.Log, store.Entry{
				Step: word, Op: saga.OpUndo, Kind: saga.EventStepUndone, Attempt: k, Error: word,
			})
		}
		if n == commits-1 && rec.ID[1]%2 == 1 {
			req.Release, req.WakeIn = true, 2*long
		}
		return req
	}
	receipts := make([]store.Receipt, sagas)
	errs := make([]error, sagas)
	var wg sync.WaitGroup
	for i, rec := range recs {
		wg.Go(func() {
			for n := 0; n < commits && errs[i] == nil; n++ {
				req := last(rec, n)
				receipts[i], errs[i] = s.store.Commit(s.ctx, req)
				rec.Seq = req.After()
			}
		})
	}
	wg.Wait()
	for i, rec := range recs {
		got := s.load(rec.ID)
		log, err := s.store.History(s.ctx, rec.ID, 0, 0)
		s.noError(err)
		s.len(log, int(got.Seq))
		if i%4 == 1 {
			s.errorIs(errs[i], store.ErrFenced)
			s.same(func() store.Record { rec.Epoch--; return rec }(), got)
			continue
		}
		s.noError(errs[i])
		want := last(rec, commits-1)
		// Start adds one entry. The five commits add one entry each, and 0, 1, 2, 0 and 1 additional entries.
		s.equal64(1+commits+4, got.Seq)
		s.equal(string(want.State), string(got.State))
		s.equal(string(want.Progress), string(got.Progress))
		s.equal(want.LastError, got.LastError)
		s.equal(want.Nonce, got.Nonce)
		s.equal(want.Failures, got.Failures)
		s.equal(want.Takeovers, got.Takeovers)
		if want.Release {
			s.empty(got.Owner)
			s.around(got.WakeAt, got, 2*long)
		} else {
			s.equal("me", got.Owner)
			s.around(got.WakeAt, got, long)
		}
		seq := 1
		for n := range commits {
			for _, w := range last(rec, n).Log {
				e := log[seq]
				seq++
				s.equal64(seq, e.Seq)
				s.equal64(1, e.Epoch)
				s.equal([]any{w.Step, w.Op, w.Kind, w.Attempt, w.Error}, []any{e.Step, e.Op, e.Kind, e.Attempt, e.Error})
			}
		}
		receipt := store.Receipt{}
		if i%4 == 2 {
			receipt = store.Receipt{CancelRequested: true, CancelNote: "note of " + rec.ID}
		}
		s.equal(receipt, receipts[i])
	}
}

func commitReleases(s *suite) {
	rec := s.owned("a", "me", long)
	req := commit(rec)
	req.Release, req.WakeIn = true, 2*long
	got := s.commit(req)
	s.empty(got.Owner)
	s.equal64(1, got.Epoch)
	s.around(got.WakeAt, got, 2*long)
	s.empty(s.claim("me", 1), "not due yet")

	req = commit(got)
	req.Release, req.WakeIn = true, 0
	s.commit(req)
	recs := s.claim("me", 1)
	s.len(recs, 1)
	s.equal64(2, recs[0].Epoch)

	for _, status := range []store.Status{store.Completed, store.Compensated, store.Stuck, store.Abandoned} {
		req = commit(s.load("a"))
		req.Status, req.Release = status, true
		s.commit(req)
		s.empty(s.claim("me", 1), "%s is never due", status)
	}
	req = commit(s.load("a"))
	req.Status, req.Release = store.Compensating, true
	s.commit(req)
	s.len(s.claim("me", 1), 1, "an operator has released it")
}

func commitKeepsLease(s *suite) {
	rec := s.owned("a", "me", long)
	got := s.commit(commit(rec))
	s.equal("me", got.Owner)
	s.equal(rec.WakeAt.UnixMicro(), got.WakeAt.UnixMicro())
	rec = s.owned("b", "me", short)
	got = s.commit(commit(rec)) // the lease has ended, but no other owner has claimed the saga
	s.equal(rec.WakeAt.UnixMicro(), got.WakeAt.UnixMicro())
	recs := s.claim("other", 1)
	s.len(recs, 1)
	s.equal("me", recs[0].Previous)
}

// commitWoken tests that a saga is due after a Commit with Release and a WakeIn if it was woken since its last claim.
func commitWoken(s *suite) {
	for name, wake := range map[string]func(id string) error{
		"signal": func(id string) error {
			_, err := s.store.Post(s.ctx, store.PostRequest{ID: id, Name: "paid"})
			return err
		},
		"signal that is kept already": func(id string) error {
			_, err := s.store.Post(s.ctx, store.PostRequest{ID: id, Name: "early"})
			return err
		},
		"cancel": func(id string) error {
			_, err := s.store.Post(s.ctx, store.PostRequest{ID: id, Cancel: true})
			return err
		},
		"hasten": func(id string) error { _, err := s.store.Post(s.ctx, store.PostRequest{ID: id}); return err },
	} {
		s.start(request(name))
		_, err := s.store.Post(s.ctx, store.PostRequest{ID: name, Name: "early"})
		s.noError(err)
		claim := func(want int) {
			s.Helper()
			s.len(s.claim("me", 1), want)
		}
		release := func(wakeIn time.Duration, woken bool) {
			s.Helper()
			req := commit(s.load(name))
			req.Release, req.WakeIn = true, wakeIn
			rc, err := s.store.Commit(s.ctx, req)
			s.noError(err)
			s.equal(woken, rc.Woken)
		}
		claim(1) // the new owner reads the messages that arrived before
		release(long, false)
		claim(0)
		s.wake(name)
		claim(1)
		before := s.load(name)
		s.noError(wake(name))
		s.equal(before.WakeAt.UnixMicro(), s.load(name).WakeAt.UnixMicro(), "its owner keeps it")
		rc, err := s.store.Commit(s.ctx, commit(s.load(name)))
		s.noError(err)
		s.false(rc.Woken, "it is not released")
		release(long, true)
		claim(1) // after this claim, the record is no longer woken
		release(long, false)
		claim(0)
		s.wake(name)
		claim(1)
		s.noError(wake(name))
		release(0, false) // the saga is due even if it was not woken
		claim(1)
		s.end(name, store.Stuck)
	}
}

func cancelOwned(s *suite) {
	rec := s.owned("a", "me", long)
	got, err := s.store.Post(s.ctx, store.PostRequest{ID: "a", Payload: []byte("changed my mind"), Cancel: true})
	s.noError(err)
	s.true(got.CancelRequested)
	s.equal("changed my mind", got.CancelNote)
	s.equal(rec.Seq, got.Seq)
	s.equal(rec.Epoch, got.Epoch)
	s.equal(rec.Nonce, got.Nonce)
	s.equal(rec.WakeAt.UnixMicro(), got.WakeAt.UnixMicro())
	got, err = s.store.Post(s.ctx, store.PostRequest{ID: "a", Payload: []byte("again"), Cancel: true})
	s.noError(err)
	s.equal("changed my mind", got.CancelNote)
	s.same(got, s.load("a"))

	receipt, err := s.store.Commit(s.ctx, commit(rec))
	s.noError(err)
	s.equal(store.Receipt{CancelRequested: true, CancelNote: "changed my mind"}, receipt)
	held := []store.Held{{ID: "a", Epoch: 1}}
	renewed, err := s.store.Heartbeat(s.ctx, store.HeartbeatRequest{Owner: "me", LeaseTTL: long, Held: held})
	s.noError(err)
	s.equal([]store.Renewed{{ID: "a", Epoch: 1, CancelRequested: true, CancelNote: "changed my mind"}}, renewed)

	_, err = s.store.Post(s.ctx, store.PostRequest{ID: "none", Cancel: true})
	s.errorIs(err, store.ErrNotFound)
	s.owned("b", "me", long)
	got, err = s.store.Post(s.ctx, store.PostRequest{ID: "b", Cancel: true})
	s.noError(err)
	s.true(got.CancelRequested, "a note may be empty")
	s.true(s.load("b").CancelRequested)
}

func cancelParked(s *suite) {
	req := commit(s.owned("a", "me", long))
	req.Release, req.WakeIn = true, long
	s.commit(req)
	s.empty(s.claim("me", 1))
	_, err := s.store.Post(s.ctx, store.PostRequest{ID: "a", Payload: []byte("why wait"), Cancel: true})
	s.noError(err)
	recs := s.claim("me", 1)
	s.len(recs, 1)
	s.true(recs[0].CancelRequested)
	s.equal("why wait", recs[0].CancelNote)
}

// cancelDue tests that a cancellation does not change the WakeAt of a saga that is already due.
func cancelDue(s *suite) {
	due := s.start(request("a")).WakeAt
	time.Sleep(3 * time.Millisecond) // because a store may truncate times to milliseconds
	got, err := s.store.Post(s.ctx, store.PostRequest{ID: "a", Cancel: true})
	s.noError(err)
	s.equal(due.UnixMicro(), got.WakeAt.UnixMicro())
	s.equal(due.UnixMicro(), s.load("a").WakeAt.UnixMicro())
}

func cancelEnded(s *suite) {
	req := commit(s.owned("a", "me", long))
	req.Status = store.Compensating
	before := s.commit(req)
	got, err := s.store.Post(s.ctx, store.PostRequest{ID: "a", Payload: []byte("late"), Cancel: true})
	s.noError(err)
	s.false(got.CancelRequested)
	s.same(before, got)
}

func loadNothing(s *suite) {
	for _, id := range []string{"none", "no\x00text", "\xff"} { // an id may come from a client's request
		_, err := s.store.Load(s.ctx, id)
		s.errorIs(err, store.ErrNotFound)
		_, err = s.store.Post(s.ctx, store.PostRequest{ID: id, Cancel: true})
		s.errorIs(err, store.ErrNotFound)
		_, err = s.store.Post(s.ctx, store.PostRequest{ID: id, Name: "paid"})
		s.errorIs(err, store.ErrNotFound)
		_, err = s.store.Post(s.ctx, store.PostRequest{ID: id})
		s.noError(err)
		_, err = s.store.Commit(s.ctx, commit(store.Record{ID: id}))
		s.errorIs(err, store.ErrFenced)
		held := []store.Held{{ID: id, Epoch: 1}}
		renewed, err := s.store.Heartbeat(s.ctx, store.HeartbeatRequest{Owner: "me", LeaseTTL: long, Held: held})
		s.noError(err)
		s.empty(renewed)
		log, err := s.store.History(s.ctx, id, 0, 0)
		s.noError(err)
		s.empty(log)
		messages, err := s.store.Messages(s.ctx, id)
		s.noError(err)
		s.empty(messages)
		for _, req := range []store.ChildrenRequest{{Parent: id, Step: "parcels"}, {Parent: "order", Step: id}} {
			children, err := s.store.Children(s.ctx, req)
			s.noError(err)
			s.empty(children)
		}
		for _, f := range []store.Filter{{}, {ID: id}, {Saga: id}} {
			recs, next, err := s.store.List(s.ctx, f)
			s.noError(err)
			s.empty(recs)
			s.empty(next)
		}
	}
	counts, err := s.store.Counts(s.ctx)
	s.noError(err)
	s.empty(counts.Sagas)
	s.false(counts.Now.IsZero())
}

// list returns the ids of the first page that the filter selects.
func (s *suite) list(f store.Filter) (ids []string) {
	s.Helper()
	recs, _, err := s.store.List(s.ctx, f)
	s.noError(err)
	for _, r := range recs {
		want := s.load(r.ID)
		if f.WithoutState {
			s.empty(r.State)
			want.State, r.State = nil, nil
		}
		s.same(want, r)
		ids = append(ids, r.ID)
	}
	return ids
}

// all returns the ids of all pages that the filter selects.
func (s *suite) all(f store.Filter) string {
	s.Helper()
	var ids []string
	for {
		recs, next, err := s.store.List(s.ctx, f)
		s.noError(err)
		s.true(len(recs) <= f.Limit, "a page is larger than its limit")
		for _, r := range recs {
			ids = append(ids, r.ID)
		}
		if f.After = next; next == "" {
			return strings.Join(ids, " ")
		}
	}
}

// sorted returns the sorted ids of all sagas.
func (s *suite) sorted() string {
	s.Helper()
	ids := strings.Fields(s.all(store.Filter{Limit: 10}))
	slices.Sort(ids)
	return strings.Join(ids, " ")
}

func listNewest(s *suite) {
	// Pause after each start, because a store may truncate CreatedAt to milliseconds.
	for i, id := range []string{"m-1", "c", "m-2", "M-3", "m%", "z"} {
		req := request(id)
		req.Saga = []string{"trip", "order"}[i%2]
		s.start(req)
		time.Sleep(3 * time.Millisecond)
	}
	stuck := commit(s.load("m-2"))
	stuck.Status, stuck.Release = store.Stuck, true
	s.commit(stuck)
	before := s.load("z").CreatedAt
	for limit := range 7 {
		if limit == 0 {
			continue
		}
		all := func(f store.Filter) string { f.Limit = limit; return s.all(f) }
		s.equal("z m% M-3 m-2 c m-1", all(store.Filter{}))
		s.equal("m% m-2 m-1", all(store.Filter{Saga: "trip"}))
		s.equal("m-2", all(store.Filter{Status: []store.Status{store.Stuck}}))
		s.equal("m-2", all(store.Filter{Saga: "trip", Status: []store.Status{store.Stuck}}))
		s.equal("z m% M-3 m-2 c m-1", all(store.Filter{Status: []store.Status{store.Stuck, store.Running, store.Stuck}}))
		s.equal("m-2 m-1", all(store.Filter{ID: "m-"}))
		s.equal("m-1", all(store.Filter{ID: "m-1"}))
		s.equal("m% m-2 m-1", all(store.Filter{ID: "m"}))
		s.equal("m-2", all(store.Filter{ID: "m", Status: []store.Status{store.Stuck}}))
		s.equal("", all(store.Filter{ID: "-"}))
		s.equal("m% M-3 m-2 c m-1", all(store.Filter{CreatedBefore: before}))
		s.equal("", all(store.Filter{Saga: "none"}))
		s.equal("", all(store.Filter{Status: []store.Status{store.Abandoned}}))
	}
	s.equal([]string{"z", "m%"}, s.list(store.Filter{Limit: 2, WithoutState: true}))
	s.equal(6, len(s.list(store.Filter{Limit: math.MaxInt})))
	_, next, err := s.store.List(s.ctx, store.Filter{Limit: 6})
	s.noError(err)
	s.empty(next, "the page has them all")
}

func counts(s *suite) {
	for i, c := range []struct {
		saga   string
		status store.Status
		owner  string
		lease  time.Duration
	}{
		{"trip", store.Running, "", 0},
		{"trip", store.Running, "me", long},
		{"trip", store.Running, "dead", short},
		{"trip", store.Compensating, "", 0},
		{"trip", store.Stuck, "", 0},
		{"trip", store.Completed, "", 0},
		{"trip", store.Completed, "", 0},
		{"a trip", store.Compensated, "", 0},
		{"a trip", store.Abandoned, "", 0},
	} {
		req := request(fmt.Sprint(i))
		req.Saga, req.Version, req.Owner, req.LeaseTTL = c.saga, 1+i%2, c.owner, c.lease
		rec := s.start(req)
		if c.status != store.Running {
			end := commit(rec)
			end.Status, end.Release = c.status, true
			s.commit(end)
		}
	}
	parked := commit(s.start(request("parked")))
	parked.Release, parked.WakeIn = true, long
	s.commit(parked)
	got, err := s.store.Counts(s.ctx)
	s.noError(err)
	s.len(got.Sagas, 1)
	s.withinDuration(got.Now, got.Sagas[0].OldestDue, 5*time.Minute)
	s.equal(s.load("0").WakeAt.UnixMilli(), got.Sagas[0].OldestDue.UnixMilli())
	got.Sagas[0].OldestDue = time.Time{}
	s.equal([]store.Count{
		{Saga: "trip", Running: 4, Compensating: 1, Stuck: 1, Due: 3},
	}, got.Sagas)
}

func history(s *suite) {
	rec := s.owned("a", "me", long)
	for range 5 {
		req := commit(rec)
		req.Log = append(req.Log, store.Entry{Kind: "parked"})
		rec = s.commit(req)
	}
	s.owned("b", "me", long)
	log, err := s.store.History(s.ctx, "a", 0, 0)
	s.noError(err)
	s.len(log, int(rec.Seq))
	for i, e := range log {
		s.equal64(i+1, e.Seq)
		if i > 0 {
			s.false(e.At.Before(log[i-1].At))
		}
	}
	var pages []store.Entry
	for {
		page, err := s.store.History(s.ctx, "a", int64(len(pages)), 4)
		s.noError(err)
		if len(page) == 0 {
			break
		}
		s.true(len(page) <= 4)
		pages = append(pages, page...)
	}
	s.equal(log, pages)
	rest, err := s.store.History(s.ctx, "a", rec.Seq-1, 0)
	s.noError(err)
	s.equal(log[rec.Seq-1:], rest)
}

func deleteEnded(s *suite) {
	end := func(id string, status store.Status) {
		s.start(request(id))
		_, err := s.store.Post(s.ctx, store.PostRequest{ID: id, Name: "paid"})
		s.noError(err)
		req := commit(s.load(id))
		req.Status, req.Release = status, true
		s.commit(req)
		time.Sleep(3 * time.Millisecond) // because a store may truncate times to milliseconds
	}
	end("first", store.Completed)
	end("second", store.Completed)
	end("undone", store.Compensated)
	end("stuck", store.Stuck)
	s.start(request("running"))
	for _, c := range []struct {
		status store.Status
		age    time.Duration
		limit  int
		want   int
		left   string
	}{
		{store.Completed, long, 10, 0, "first running second stuck undone"},
		{store.Completed, 0, 0, 0, "first running second stuck undone"},
		{store.Stuck, 0, 10, 0, "first running second stuck undone"},
		{store.Running, 0, 10, 0, "first running second stuck undone"},
		{store.Completed, 0, 1, 1, "running second stuck undone"},
		{store.Abandoned, 0, 10, 0, "running second stuck undone"},
		{store.Compensated, 0, 10, 1, "running second stuck"},
		{store.Completed, 0, 10, 1, "running stuck"},
	} {
		n, err := s.store.DeleteEnded(s.ctx, c.status, c.age, c.limit)
		s.noError(err)
		s.equal(c.want, n)
		s.equal(c.left, s.sorted())
	}
	log, err := s.store.History(s.ctx, "first", 0, 0)
	s.noError(err)
	s.empty(log)
	signals, err := s.store.Messages(s.ctx, "first")
	s.noError(err)
	s.empty(signals)
	s.equal64(1, s.start(request("first")).Seq, "its id is free")
	_, err = s.store.DeleteEnded(s.ctx, store.Completed, 0, -1)
	s.error(err)
	_, err = s.store.DeleteEnded(s.ctx, store.Completed, -1, 1)
	s.error(err)
}

// child starts a child of the step "parcels" of the saga parent.
func (s *suite) child(id, parent string) store.Record {
	s.Helper()
	req := request(id)
	req.Parent, req.ParentStep = parent, "parcels"
	return s.start(req)
}

// end commits a status, final or not, and releases the saga.
func (s *suite) end(id string, status store.Status) {
	s.Helper()
	req := commit(s.load(id))
	req.Status, req.Release = status, true
	s.commit(req)
}

func children(s *suite) {
	for _, id := range []string{"a", "B", "c", "d", "e"} {
		rec := s.child(id, "order")
		s.equal("order", rec.Parent)
		s.equal("parcels", rec.ParentStep)
		s.same(rec, s.load(id))
	}
	s.child("of another", "Order")
	s.start(request("order"))
	of := request("of another step")
	of.Parent, of.ParentStep = "order", "letters"
	s.start(of)
	s.end("B", store.Completed)
	s.end("c", store.Stuck)
	s.end("d", store.Compensated)
	_, err := s.store.Post(s.ctx, store.PostRequest{ID: "e", Cancel: true})
	s.noError(err)
	find := func(req store.ChildrenRequest) (texts []string) {
		list, err := s.store.Children(s.ctx, req)
		s.noError(err)
		for _, c := range list {
			texts = append(texts, fmt.Sprint(c.ID, " ", c.Status, " ", c.CancelRequested))
		}
		slices.Sort(texts)
		return texts
	}
	s.equal([]string{"B completed false", "a running false", "c stuck false", "d compensated false", "e running true"},
		find(store.ChildrenRequest{Parent: "order", Step: "parcels"}))
	s.equal([]string{"a running false", "c stuck false", "e running true"},
		find(store.ChildrenRequest{
			Parent: "order", Step: "parcels",
			Status: []store.Status{store.Running, store.Compensating, store.Stuck},
		}))
	s.len(find(store.ChildrenRequest{Parent: "order", Step: "parcels", Limit: 2}), 2)
	s.equal([]string{"of another step running false"},
		find(store.ChildrenRequest{Parent: "order", Step: "letters", Limit: 2}))
	s.empty(find(store.ChildrenRequest{Parent: "order", Step: "none"}))
	s.empty(find(store.ChildrenRequest{Parent: "a", Step: "parcels"}))
}

// deleteChildren tests that children remain until their parent is to be deleted, and that they are deleted before it.
// Children may have children.
func deleteChildren(s *suite) {
	s.start(request("order"))
	s.child("order/1", "order")
	s.child("order/2", "order")
	s.child("order/1/1", "order/1")
	s.start(request("other"))
	s.child("other/1", "other")
	sweep := func(status store.Status, limit, want int, left string) {
		s.Helper()
		n, err := s.store.DeleteEnded(s.ctx, status, 0, limit)
		s.noError(err)
		s.equal(want, n)
		s.equal(left, s.sorted())
	}
	for _, id := range []string{"order/1/1", "order/1", "other/1"} {
		s.end(id, store.Completed)
	}
	sweep(store.Completed, 10, 0, "order order/1 order/1/1 order/2 other other/1")
	s.end("order", store.Abandoned)
	sweep(store.Completed, 10, 0, "order order/1 order/1/1 order/2 other other/1")
	sweep(store.Abandoned, 10, 3, "order/2 other other/1")
	rec := s.load("order/2")
	s.equal("", rec.Parent)
	s.equal("", rec.ParentStep)
	list, err := s.store.Children(s.ctx, store.ChildrenRequest{Parent: "order", Step: "parcels"})
	s.noError(err)
	s.empty(list)
	s.end("order/2", store.Completed)
	sweep(store.Completed, 10, 1, "other other/1")
	s.child("other/2", "other")
	s.end("other/2", store.Compensated)
	s.end("other", store.Completed)
	for _, left := range []int{2, 1, 0} { // one saga per call, and the parent last
		n, err := s.store.DeleteEnded(s.ctx, store.Completed, 0, 1)
		s.noError(err)
		s.equal(1, n)
		page, _, err := s.store.List(s.ctx, store.Filter{})
		s.noError(err)
		s.len(page, left)
		s.true(left == 0 || slices.ContainsFunc(page, func(r store.Record) bool { return r.ID == "other" }))
	}
}

func roundTrip(s *suite) {
	req := request("größe/'\";--%$1?\\" + strings.Repeat("x", 150))
	req.State = []byte{0, 1, 255, '\'', '"', 0}
	req.Progress = []byte(`{"e":"'; DROP TABLE saga; -- ü ` + "\\u0000" + `"}`)
	req.Owner, req.LeaseTTL = "o'wner \"ö\"", long
	req.Parent, req.ParentStep = "its 'parent' "+strings.Repeat("x", 180), strings.Repeat("'ö\"", 25)
	req.Tenant = strings.Repeat("'ü\"", 25)
	rec := s.start(req)
	s.equal(req.ID, rec.ID)
	s.equal(req.Tenant, rec.Tenant)
	s.true(bytes.Equal(req.State, rec.State))
	s.equal(string(req.Progress), string(rec.Progress))
	s.equal(req.Parent, rec.Parent)
	s.equal(req.ParentStep, rec.ParentStep)
	next := commit(rec)
	next.LastError = "it's \"bad\" — §\n\ttwo lines"
	next.Log[0].Error = next.LastError
	next.State = bytes.Repeat([]byte{0, 255, '$'}, 100_000)
	got := s.commit(next)
	s.equal(next.LastError, got.LastError)
	s.equal(req.Owner, got.Owner)
	s.true(bytes.Equal(next.State, got.State))
	log, err := s.store.History(s.ctx, req.ID, 0, 0)
	s.noError(err)
	s.equal(next.LastError, log[1].Error)
	same := commit(got)
	same.State = nil
	got = s.commit(same)
	s.true(bytes.Equal(next.State, got.State), "nil leaves the data as it is")
	empty := commit(got)
	empty.State = []byte{}
	s.empty(s.commit(empty).State)
}

func endedContext(s *suite) {
	rec := s.owned("a", "me", long)
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	_, _, err := s.store.Start(ctx, request("b"))
	s.error(err)
	_, err = s.store.Commit(ctx, commit(rec))
	s.error(err)
	s.notErrorIs(err, store.ErrFenced)
	_, err = s.store.Claim(ctx, store.ClaimRequest{Owner: "me", LeaseTTL: long, Limit: 1, Definitions: defs})
	s.error(err)
	held := []store.Held{{ID: "a", Epoch: 1}}
	_, err = s.store.Heartbeat(ctx, store.HeartbeatRequest{Owner: "me", LeaseTTL: long, Held: held})
	s.error(err)
	_, err = s.store.Post(ctx, store.PostRequest{ID: "a", Cancel: true})
	s.error(err)
	_, err = s.store.Post(ctx, store.PostRequest{ID: "a", Name: "paid"})
	s.error(err)
	_, err = s.store.Messages(ctx, "a")
	s.error(err)
	_, err = s.store.Post(ctx, store.PostRequest{ID: "a"})
	s.error(err)
	_, err = s.store.Children(ctx, store.ChildrenRequest{Parent: "a", Step: "b"})
	s.error(err)
	_, err = s.store.Load(ctx, "a")
	s.error(err)
	s.notErrorIs(err, store.ErrNotFound)
	_, _, err = s.store.List(ctx, store.Filter{})
	s.error(err)
	_, err = s.store.Counts(ctx)
	s.error(err)
	_, err = s.store.History(ctx, "a", 0, 0)
	s.error(err)
	s.same(rec, s.load("a"))
	_, err = s.store.Load(s.ctx, "b")
	s.errorIs(err, store.ErrNotFound)
}
