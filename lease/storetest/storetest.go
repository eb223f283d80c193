// Package storetest has the tests that every lease.Store must pass.
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) lease.Store { return newStore(t) })
//	}
//
// It runs against the store's own clock, in real time. Holders are paused until their
// terms have ended: a test takes some tenths of a second for it.
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
	// patience is longer than the slowest machine takes for one call.
	patience = 20 * time.Second
)

// Run runs the suite, each test on a store of its own from newStore. The tests use a few
// names of leases, so that the store must be empty.
func Run(t *testing.T, newStore func(t *testing.T) lease.Store) {
	t.Helper()
	for _, c := range []struct {
		name string
		test func(*suite)
	}{
		{"NobodyAtFirst", nobody},
		{"AFreeLeaseIsGiven", given},
		{"AHeldLeaseIsNot", held},
		{"ARepeatedAcquireRenews", repeated},
		{"RenewExtends", renews},
		{"RenewNeedsTheToken", renewsNot},
		{"ReleaseFrees", releases},
		{"ReleaseNeedsTheToken", releasesNot},
		{"TheTTLEnds", ends},
		{"APausedHolderHasLost", paused},
		{"ALateRenewalOfAFreeLease", late},
		{"ARepeatedAcquireAfterTheTTL", repeatedLate},
		{"ARunIsRecorded", runs},
		{"EpochsIncludeTheTime", epochTime},
		{"OneOfMany", oneOfMany},
		{"NamesAreApart", names},
		{"EndedContext", endedContext},
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

// need ends the test unless ok. The package has no library for it, so that the tests of
// a store link no more than the store does.
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

// get asks for the lease, and gets it.
func (s *suite) get(token string, ttl time.Duration) lease.Record {
	s.Helper()
	rec := s.ask(request(token, ttl))
	s.need(rec.Token == token, "%s does not get the lease: %+v", token, rec)
	s.need(rec.Held() && rec.Holder == "holder of "+token && rec.Name == "a", "not a term of %s: %+v", token, rec)
	return rec
}

// getShort gets the lease for a short time. It asks for a long one first: on a slow machine a
// short one may be over when its answer arrives.
func (s *suite) getShort(token string) lease.Record {
	s.Helper()
	rec := s.get(token, long)
	s.noError(s.renew(token, short))
	return rec
}

// getNot asks for the lease, and does not get it.
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

// pause waits until the lease is over.
func (s *suite) pause() {
	s.Helper()
	for deadline := time.Now().Add(patience); s.load().Held(); time.Sleep(short / 10) {
		s.need(time.Now().Before(deadline), "the lease does not end")
	}
}

func nobody(s *suite) {
	rec := s.load()
	s.need(rec.Token == "" && rec.Holder == "" && rec.Epoch == 0 && !rec.Held() && rec.Name == "a", "%+v", rec)
}

func given(s *suite) {
	rec := s.get("x", long)
	s.need(rec.Epoch > 0, "epoch %d", rec.Epoch)
	left := rec.Until.Sub(rec.Now)
	s.need(left <= long && left > long-patience, "lasts until %v, now is %v", rec.Until, rec.Now)
	s.need(!rec.Since.After(rec.Now) && rec.Now.Sub(rec.Since) < patience, "since %v, now is %v", rec.Since, rec.Now)
	s.need(rec.Ran.IsZero(), "a run at %v", rec.Ran)
	got := s.load()
	same := got.Token == "x" && got.Holder == rec.Holder && got.Epoch == rec.Epoch && got.Since.Equal(rec.Since)
	s.need(same && got.Held(), "%+v, not %+v", got, rec)
}

func held(s *suite) {
	x := s.get("x", long)
	rec := s.getNot("y")
	same := rec.Token == "x" && rec.Holder == "holder of x" && rec.Epoch == x.Epoch
	s.need(same && rec.Held(), "%+v, not %+v", rec, x)
	s.need(rec.Until.Sub(rec.Now) > long-patience, "lasts until %v, now is %v", rec.Until, rec.Now)
}

func repeated(s *suite) {
	first := s.get("x", long/2)
	again := s.get("x", long)
	s.need(again.Epoch == first.Epoch, "epoch %d, not %d", again.Epoch, first.Epoch)
	s.need(s.load().Until.Sub(first.Until) > long/2-patience, "until %v after %v", again.Until, first.Until)
}

func renews(s *suite) {
	first := s.get("x", long/2)
	s.noError(s.renew("x", long))
	rec := s.load()
	s.need(rec.Epoch == first.Epoch && rec.Since.Equal(first.Since), "%+v, not the term of %+v", rec, first)
	s.need(rec.Until.Sub(rec.Now) > long-patience, "lasts until %v, now is %v", rec.Until, rec.Now)
	s.noError(s.renew("x", long/4))
	rec = s.load()
	s.need(rec.Until.Sub(rec.Now) <= long/4, "lasts until %v, now is %v", rec.Until, rec.Now)
}

func renewsNot(s *suite) {
	s.lost(s.renew("x", long))
	x := s.get("x", long/2)
	s.lost(s.renew("y", long))
	s.need(s.load().Until.Equal(x.Until) || s.load().Until.Sub(x.Until) < time.Second, "another has renewed the lease")
	s.release("x")
	s.lost(s.renew("x", long))
	s.need(!s.load().Held(), "held after its release")
}

func releases(s *suite) {
	x := s.get("x", long)
	time.Sleep(2 * time.Millisecond) // to which a clock may round
	s.release("x")
	rec := s.load()
	s.need(rec.Token == "" && rec.Holder == "" && !rec.Held() && rec.Epoch >= x.Epoch, "%+v", rec)
	free := rec.Now.Sub(rec.Until)
	s.need(free >= 0 && free < patience, "free since %v, now is %v", rec.Until, rec.Now)
	s.need(rec.Since.After(x.Since), "free since %v, held since %v", rec.Since, x.Since)
	s.release("x")
	y := s.get("y", long)
	s.need(y.Epoch > rec.Epoch && y.Epoch > x.Epoch, "epoch %d after %d", y.Epoch, x.Epoch)
}

func releasesNot(s *suite) {
	s.release("nobody")
	s.get("x", long)
	s.release("y")
	s.need(s.load().Token == "x", "released by another")
}

func ends(s *suite) {
	x := s.getShort("x")
	s.pause()
	y := s.get("y", long)
	s.need(y.Epoch > x.Epoch, "epoch %d after %d", y.Epoch, x.Epoch)
	s.need(!y.Since.Before(x.Since.Add(short)), "y since %v, x since %v for %v", y.Since, x.Since, short)
}

// paused has a holder go on after its term, when another's has begun.
func paused(s *suite) {
	s.getShort("x")
	s.pause()
	y := s.get("y", long)
	s.lost(s.renew("x", long))
	s.release("x")
	rec := s.getNot("x")
	s.need(rec.Token == "y" && rec.Epoch == y.Epoch && rec.Until.Sub(rec.Now) > long-patience, "%+v, not %+v", rec, y)
	s.noError(s.renew("y", long))
}

// late has a holder go on after its term, before another's begins.
func late(s *suite) {
	x := s.getShort("x")
	s.pause()
	s.noError(s.renew("x", long))
	s.need(s.getNot("y").Epoch == x.Epoch, "another term")
}

// repeatedLate has a holder whose term is over ask again: that is another term.
func repeatedLate(s *suite) {
	x := s.getShort("x")
	s.pause()
	s.need(s.get("x", long).Epoch > x.Epoch, "the epoch does not grow")
}

// runs has runs begin in one term, and be known in the next.
func runs(s *suite) {
	run := func(token string) error {
		return s.store.Renew(s.ctx, lease.Request{Name: "a", Token: token, TTL: long, Run: true})
	}
	s.lost(run("x"))
	x := s.get("x", long/2)
	s.noError(s.renew("x", long/2))
	s.need(s.load().Ran.IsZero(), "a renewal is no run")
	s.noError(run("x"))
	rec := s.load()
	s.need(!rec.Ran.Before(x.Now) && !rec.Ran.After(rec.Now), "the run began at %v, and it is %v", rec.Ran, rec.Now)
	s.need(rec.Until.Sub(rec.Now) > long/2, "a run is no renewal")
	s.lost(run("y"))
	s.noError(s.renew("x", long))
	s.release("x")
	s.need(s.load().Ran.Equal(rec.Ran), "the run is forgotten with the release")
	y := s.get("y", long)
	s.need(y.Ran.Equal(rec.Ran), "the next term has the run at %v, not at %v", y.Ran, rec.Ran)
	s.need(s.get("y", long).Ran.Equal(rec.Ran), "the run is forgotten with a renewal")
	time.Sleep(2 * time.Millisecond)
	s.noError(run("y"))
	s.need(s.load().Ran.After(rec.Ran), "a later run is not recorded")
}

func epochTime(s *suite) {
	x := s.get("x", long)
	s.need(x.Epoch >= x.Since.UnixMicro()-1000, "epoch %d at %v", x.Epoch, x.Since) // rounded, perhaps
	s.need(x.Epoch <= x.Now.UnixMicro()+patience.Microseconds(), "epoch %d at %v", x.Epoch, x.Now)
}

// oneOfMany has many ask at once, again and again: in each round one gets the lease, and
// the epochs grow.
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
