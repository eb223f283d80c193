// Package storetest provides the tests that every [lease.Store] must pass.
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) lease.Store { return newStore(t) })
//	}
//
// The tests run in real time, with the store's own clock. Some tests wait until a term with a TTL of 100 ms has ended.
// If the store rounds a TTL of 100 ms up, these tests wait longer.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may add tests.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-resilience/resilience/lease"
)

const (
	long  = time.Hour
	short = 100 * time.Millisecond
	// patience is the maximum time that a test waits. It is longer than one call takes on a slow machine.
	patience = 20 * time.Second
)

// Run runs the tests, each with a store from newStore. The store must have no leases.
func Run(t *testing.T, newStore func(t *testing.T) lease.Store) {
	t.Helper()
	for _, c := range []struct {
		name string
		test func(*suite)
	}{
		{"NeverHeld", neverHeld},
		{"FreeLeaseIsGranted", granted},
		{"HeldLeaseIsNotGranted", held},
		{"RepeatedAcquireRenews", repeated},
		{"RenewExtends", renews},
		{"RenewNeedsToken", renewsNot},
		{"ReleaseFrees", releases},
		{"ReleaseNeedsToken", releasesNot},
		{"TermEndsAfterTTL", ends},
		{"PausedHolderHasLost", paused},
		{"LateRenewalOfFreeLease", late},
		{"RepeatedAcquireAfterTTL", repeatedLate},
		{"RunIsRecorded", runs},
		{"RunNotLaterIsTaken", runsTaken},
		{"RunOfManyIsTakenOnce", runsOfMany},
		{"OneOfManyLeads", oneOfMany},
		{"NamesAreSeparate", names},
		{"CtxHasEnded", endedContext},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.test(&suite{T: t, ctx: t.Context(), store: newStore(t)})
		})
	}
}

type suite struct {
	*testing.T
	ctx   context.Context
	store lease.Store
}

// need ends the test unless ok is true. The package uses no assertion library, so that the tests of a store need no
// more dependencies than the store.
func (s *suite) need(ok bool, format string, args ...any) {
	s.Helper()
	if !ok {
		s.Fatalf(format, args...)
	}
}

func (s *suite) noError(err error) {
	s.Helper()
	s.need(err == nil, "error: %v", err)
}

func (s *suite) lost(err error) {
	s.Helper()
	s.need(errors.Is(err, lease.ErrLost), "the error is %v, not lease.ErrLost", err)
}

func request(token string, ttl time.Duration) lease.Request {
	return lease.Request{Name: "a", Token: token, Holder: "holder of " + token, TTL: ttl}
}

func (s *suite) ask(req lease.Request) lease.Record {
	s.Helper()
	rec, err := s.store.Acquire(s.ctx, req)
	s.noError(err)
	return rec
}

// get requests the lease and ends the test if it is not granted.
func (s *suite) get(token string, ttl time.Duration) lease.Record {
	s.Helper()
	rec := s.ask(request(token, ttl))
	s.need(rec.Token == token, "%s does not get the lease: %+v", token, rec)
	s.need(rec.Held() && rec.Holder == "holder of "+token && rec.Name == "a", "not a term of %s: %+v", token, rec)
	return rec
}

// getShort gets the lease for a short time. It first requests the lease for a long time and then shortens it, because
// on a slow machine a short term may be over when the store's answer arrives.
func (s *suite) getShort(token string) lease.Record {
	s.Helper()
	rec := s.get(token, long)
	s.noError(s.renew(token, short))
	return rec
}

// getNot requests the lease and ends the test if it is granted.
func (s *suite) getNot(token string) lease.Record {
	s.Helper()
	rec := s.ask(request(token, long))
	s.need(rec.Token != token, "%s gets the lease: %+v", token, rec)
	return rec
}

func (s *suite) load() lease.Record {
	s.Helper()
	rec, err := s.store.Load(s.ctx, "a")
	s.noError(err)
	return rec
}

func (s *suite) release(token string) {
	s.Helper()
	s.noError(s.store.Release(s.ctx, "a", token))
}

func (s *suite) renew(token string, ttl time.Duration) error {
	return s.store.Renew(s.ctx, lease.Request{Name: "a", Token: token, TTL: ttl})
}

// pause waits until the term is over.
func (s *suite) pause() {
	s.Helper()
	for deadline := time.Now().Add(patience); s.load().Held(); time.Sleep(short / 10) {
		s.need(time.Now().Before(deadline), "the lease does not end")
	}
}

func neverHeld(s *suite) {
	rec := s.load()
	s.need(rec == lease.Record{Name: "a"}, "%+v", rec)
}

func granted(s *suite) {
	rec := s.get("x", long)
	s.need(rec.Epoch > 0, "epoch %d", rec.Epoch)
	s.need(rec.Left <= long && rec.Left > long-patience, "lasts for %v", rec.Left)
	s.need(rec.LastRun == 0, "a run at %v", rec.LastRun)
	got := s.load()
	s.need(got.Held() && got.Left <= long && got.Left > long-patience, "lasts for %v", got.Left)
	s.same(got, rec)
}

// same ends the test unless both records are equal in all fields except Left.
func (s *suite) same(got, want lease.Record) {
	s.Helper()
	got.Left = want.Left
	s.need(got == want, "%+v, not %+v", got, want)
}

func held(s *suite) {
	x := s.get("x", long)
	rec := s.getNot("y")
	s.same(rec, x)
	s.need(rec.Held() && rec.Left > long-patience, "lasts for %v", rec.Left)
}

func repeated(s *suite) {
	first := s.get("x", long/2)
	again := s.get("x", long)
	s.same(again, first)
	s.need(again.Left > long-patience, "lasts for %v", again.Left)
	left := s.load().Left
	s.need(left > long-patience, "lasts for %v", left)
}

func renews(s *suite) {
	first := s.get("x", long/2)
	s.noError(s.renew("x", long))
	rec := s.load()
	s.same(rec, first)
	s.need(rec.Left > long-patience && rec.Left <= long, "lasts for %v", rec.Left)
	s.noError(s.renew("x", long/4))
	rec = s.load()
	s.need(rec.Left <= long/4, "lasts for %v", rec.Left)
}

func renewsNot(s *suite) {
	s.lost(s.renew("x", long))
	s.get("x", long/2)
	s.lost(s.renew("y", long))
	s.need(s.load().Left <= long/2, "another token has renewed the lease")
	s.release("x")
	s.lost(s.renew("x", long))
	s.need(!s.load().Held(), "held after its release")
}

func releases(s *suite) {
	x := s.get("x", long)
	s.release("x")
	rec := s.load()
	s.need(rec.Token == "" && rec.Holder == "" && !rec.Held() && rec.Left == 0 && rec.Epoch >= x.Epoch, "%+v", rec)
	s.release("x")
	y := s.get("y", long)
	s.need(y.Epoch > rec.Epoch && y.Epoch > x.Epoch, "epoch %d after %d", y.Epoch, x.Epoch)
}

func releasesNot(s *suite) {
	s.release("nobody")
	s.get("x", long)
	s.release("y")
	s.need(s.load().Token == "x", "released by another token")
}

func ends(s *suite) {
	x := s.get("x", long)
	sent := time.Now()
	s.noError(s.renew("x", short))
	s.pause()
	// Clocks may differ in speed.
	s.need(time.Since(sent) > short*9/10, "over after %v, not %v", time.Since(sent), short)
	s.need(s.load().Left == 0, "%v are left of a term that is over", s.load().Left)
	y := s.get("y", long)
	s.need(y.Epoch > x.Epoch, "epoch %d after %d", y.Epoch, x.Epoch)
}

// paused tests a holder that continues after its term, when another term has started.
func paused(s *suite) {
	s.getShort("x")
	s.pause()
	y := s.get("y", long)
	s.lost(s.renew("x", long))
	s.lost(s.run("x", 1))
	s.release("x")
	rec := s.getNot("x")
	s.same(rec, y)
	s.need(rec.Left > long-patience, "lasts for %v", rec.Left)
	s.noError(s.renew("y", long))
}

// late tests a holder that continues after its term, before another term starts.
func late(s *suite) {
	x := s.getShort("x")
	s.pause()
	s.noError(s.renew("x", long))
	s.same(s.getNot("y"), x)
}

// repeatedLate tests a holder that requests the lease again after its term, which starts another term.
func repeatedLate(s *suite) {
	x := s.getShort("x")
	s.pause()
	s.need(s.get("x", long).Epoch > x.Epoch, "the epoch does not grow")
}

func (s *suite) run(token string, run int64) error {
	return s.store.Renew(s.ctx, lease.Request{Name: "a", Token: token, TTL: long, Run: run})
}

// runs tests that the last run of Every is recorded in one term, and known in the next term.
func runs(s *suite) {
	const first, second int64 = 1_000_000_000_000, 1_000_000_000_001
	s.lost(s.run("x", first))
	s.get("x", long/2)
	s.noError(s.renew("x", long/2))
	s.need(s.load().LastRun == 0, "a renewal is no run")
	s.noError(s.run("x", first))
	rec := s.load()
	s.need(rec.LastRun == first, "the last run is %d, not %d", rec.LastRun, first)
	s.need(rec.Left > long/2, "a run does not renew")
	s.lost(s.run("y", second))
	s.noError(s.renew("x", long))
	s.need(s.get("x", long).LastRun == first, "a renewal loses the run")
	s.release("x")
	s.need(s.load().LastRun == first, "a release loses the run")
	s.need(s.get("y", long).LastRun == first, "a new term loses the run")
	s.noError(s.run("y", second))
	s.need(s.load().LastRun == second, "a later run is not recorded")
}

func runsTaken(s *suite) {
	s.get("x", long/2)
	s.noError(s.run("x", 10))
	s.noError(s.renew("x", long/2))
	for _, run := range []int64{10, 9, 1} {
		err := s.run("x", run)
		s.need(errors.Is(err, lease.ErrRunTaken), "run %d after 10: the error is %v, not lease.ErrRunTaken", run, err)
	}
	rec := s.load()
	s.need(rec.LastRun == 10 && rec.Token == "x", "a run that is taken changes the record: %+v", rec)
	s.noError(s.run("x", 11))
}

// runsOfMany tests that one of many calls that record the same run succeeds.
func runsOfMany(s *suite) {
	s.get("x", long)
	for run := range int64(10) {
		var recorded atomic.Int64
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				switch err := s.run("x", run+1); {
				case err == nil:
					recorded.Add(1)
				case !errors.Is(err, lease.ErrRunTaken):
					s.Errorf("the error is %v, not lease.ErrRunTaken", err)
				}
			})
		}
		wg.Wait()
		s.need(recorded.Load() == 1, "run %d is recorded %d times", run+1, recorded.Load())
	}
}

// oneOfMany tests that one of many candidates gets the lease if they request it concurrently, and that the epochs grow.
func oneOfMany(s *suite) {
	var last int64
	for round := range 20 {
		var got atomic.Int64
		var epoch atomic.Int64
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() {
				req := request(fmt.Sprintf("%d of %d", i, round), long)
				rec, err := s.store.Acquire(s.ctx, req)
				if err != nil {
					s.Error(err)
					return
				}
				if rec.Token == req.Token {
					got.Add(1)
					epoch.Store(rec.Epoch)
				}
			})
		}
		wg.Wait()
		rec := s.load()
		s.need(got.Load() == 1 && rec.Epoch == epoch.Load(),
			"%d of 16 got the lease in epoch %d: %+v", got.Load(), epoch.Load(), rec)
		s.need(rec.Epoch > last, "epoch %d after %d", rec.Epoch, last)
		last = rec.Epoch
		s.release(rec.Token)
	}
}

func names(s *suite) {
	epochs := make(map[string]int64)
	all := []string{
		"a", "A", "a ", " a", "ä", "a'; --", "a\\", "{a}", "a}b{c", "%", "a\n",
		strings.Repeat("x", 200), strings.Repeat("x", 199),
	}
	for i, name := range all {
		req := lease.Request{Name: name, Token: fmt.Sprint(i), Holder: fmt.Sprint("é", i), TTL: long}
		rec, err := s.store.Acquire(s.ctx, req)
		s.noError(err)
		s.need(rec.Token == fmt.Sprint(i) && rec.Name == name && rec.Holder == fmt.Sprint("é", i), "%q: %+v", name, rec)
		epochs[name] = rec.Epoch
	}
	for i, name := range all {
		rec, err := s.store.Load(s.ctx, name)
		s.noError(err)
		s.need(rec.Token == fmt.Sprint(i) && rec.Epoch == epochs[name] && rec.Name == name, "%q: %+v", name, rec)
	}
}

func endedContext(s *suite) {
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	_, err := s.store.Acquire(ctx, request("x", long))
	s.need(err != nil, "Acquire: no error")
	_, err = s.store.Load(ctx, "a")
	s.need(err != nil, "Load: no error")
	err = s.store.Renew(ctx, lease.Request{Name: "a", Token: "x", TTL: long})
	s.need(err != nil && !errors.Is(err, lease.ErrLost), "Renew: %v", err)
	s.need(s.store.Release(ctx, "a", "x") != nil, "Release: no error")
	s.get("y", long)
}
