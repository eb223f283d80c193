// Package storetest has the tests that every cacheaside.Store must pass.
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T, leaseTTL, writeTimeout time.Duration) storetest.Backend {
//			server := newServer(t)
//			return storetest.Backend{
//				Connect: func() cacheaside.Store { return newStore(server, leaseTTL, writeTimeout) },
//			}
//		})
//	}
//
// The tests run in real time, measured by the Store's own clock. The package depends on no assertion library.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may add tests.
package storetest

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/go-resilience/resilience/cacheaside"
)

// A Backend is an empty cache that the Stores of several processes share, for example a server.
type Backend struct {
	// Connect returns a new Store on the Backend, for one more process. Required.
	Connect func() cacheaside.Store

	// Break ends the subscriptions of all Stores, and makes all their calls fail until restore is called. If Break is
	// nil, the tests of an outage are skipped.
	Break func() (restore func())

	// Silent means that Watch does not report the changes of other processes. If Silent is true, the tests of Watch's
	// reports are skipped.
	Silent bool
}

const (
	// long is a duration that does not pass while a test runs.
	long = time.Minute
	// short is a duration for which a test can wait.
	short = 50 * time.Millisecond
	// patience is the time that a test waits before it fails.
	patience = 30 * time.Second
)

// Run runs all tests of this package, each on a separate Backend. The function open returns a Backend whose Stores
// grant leases for leaseTTL and allow a write to take writeTimeout.
func Run(t *testing.T, open func(t *testing.T, leaseTTL, writeTimeout time.Duration) Backend) {
	t.Helper()
	for _, c := range []struct {
		name         string
		lease, write time.Duration
		test         func(*suite)
	}{
		{"ShardOfAKeyNeverChanges", long, long, shardIsStable},
		{"FirstRequestTakesTheLease", long, long, firstRequestLeases},
		{"OneOfManyRequestsTakesTheLease", long, long, oneOfManyLeases},
		{"RefreshLeasesAFreshValue", long, long, refreshLeasesFresh},
		{"ReleaseIsForTheHolder", long, long, releaseIsForTheHolder},
		{"WaitingRequestsLearnOfAFailedLoad", long, long, failedIsReported},
		{"StaleValueIsServedAfterAFailedLoad", long, long, pauseServesStale},
		{"VersionsShareAKey", long, long, versions},
		{"LeaseExpires", short, long, leaseEnds},
		{"LoadLongerThanItsLeaseIsStored", short, long, slowFillIsStored},
		{"FirstFillOfAGenerationIsStored", long, long, firstFillIsStored},
		{"ValuesKeepTheirBytes", long, long, valuesKeepBytes},
		{"ValueIsGoneAfterKeep", long, long, valueIsGoneAfterKeep},
		{"SeveralKeysInOneCall", long, long, severalKeys},
		{"KeyTwiceInOneCall", long, long, keyTwice},
		{"InvalidateEndsTheGeneration", long, long, invalidateEndsGeneration},
		{"ExpireKeepsTheValue", long, long, expireKeepsValue},
		{"InvalidateAllEndsEveryGeneration", long, long, invalidateAll},
		{"FencesAreCounted", long, long, fencesAreCounted},
		{"FenceExpiresAfterTwiceTheWrite", long, short, fenceExpires},
		{"FenceAfterItsUnfenceHasNoEffect", long, long, lateFence},
		{"WatchReportsOtherProcesses", long, long, watchReports},
		{"WatchEndsWithItsContext", long, long, watchEnds},
		{"CallsFailInAnOutage", long, long, callsFail},
		{"WatchEndsInAnOutage", long, long, watchIsLost},
		{"NoGetIsOlderThanAReturnedWrite", long, long, noStaleGet},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := open(t, c.lease, c.write)
			c.test(&suite{T: t, ctx: t.Context(), backend: b, store: b.Connect()})
		})
	}
}

type suite struct {
	*testing.T
	ctx     context.Context
	backend Backend
	store   cacheaside.Store
}

// must ends the test if ok is false.
func (s *suite) must(ok bool, format string, args ...any) {
	s.Helper()
	if !ok {
		s.Fatalf(format, args...)
	}
}

func (s *suite) noError(err error) {
	s.Helper()
	s.must(err == nil, "unexpected error: %v", err)
}

func (s *suite) acquire(key, token string, refresh bool) cacheaside.Response {
	s.Helper()
	responses, err := s.store.Acquire(s.ctx, cacheaside.Request{Key: key, Token: token, Refresh: refresh})
	s.noError(err)
	s.must(len(responses) == 1, "%d responses to one Request", len(responses))
	return responses[0]
}

// state acquires key and checks the State of the response.
func (s *suite) state(want cacheaside.State, key, token string) cacheaside.Response {
	s.Helper()
	response := s.acquire(key, token, false)
	s.must(response.State == want, "key %q is %s for token %q, want %s", key, response.State, token, want)
	return response
}

// lease takes the lease of key and returns its Grant.
func (s *suite) lease(key, token string) string {
	s.Helper()
	response := s.state(cacheaside.Leased, key, token)
	s.must(response.Grant != "", "a lease without a Grant")
	return response.Grant
}

// fill stores value, fresh for a minute. want is the expected result of Fill: true if key has not been invalidated.
func (s *suite) fill(want bool, key, grant, value string) {
	s.Helper()
	current, err := s.store.Fill(s.ctx, filling(key, grant, value))
	s.noError(err)
	s.must(len(current) == 1 && current[0] == want,
		"Fill of %q with Grant %q returned %v, want [%v]", key, grant, current, want)
}

func filling(key, grant, value string) cacheaside.Entry {
	return cacheaside.Entry{Key: key, Grant: grant, Value: []byte(value), Fresh: time.Minute, Keep: time.Hour}
}

// lookup returns the response about key. If the Store granted the lease, lookup releases it.
func (s *suite) lookup(key string) cacheaside.Response {
	s.Helper()
	response := s.acquire(key, "lookup", false)
	s.noError(s.store.Release(s.ctx, cacheaside.Request{Key: key, Token: "lookup"}, false))
	return response
}

// holds checks that the Store has the value want for key, fresh or stale. "" means that it has no value.
func (s *suite) holds(key, want string) {
	s.Helper()
	got := string(s.lookup(key).Value)
	s.must(got == want, "the Store holds %q of key %q, want %q", got, key, want)
}

// eventually waits until ok returns true.
func (s *suite) eventually(what string, ok func() bool) {
	s.Helper()
	for begun := time.Now(); !ok(); time.Sleep(time.Millisecond) {
		s.must(time.Since(begun) < patience, "%s: not within %v", what, patience)
	}
}

// sameShard returns n keys of one shard.
func (s *suite) sameShard(n int) (keys []string) {
	for i := 0; len(keys) < n; i++ {
		if key := strconv.Itoa(i); s.store.Shard(key) == s.store.Shard("0") {
			keys = append(keys, key)
		}
	}
	return keys
}

func shardIsStable(s *suite) {
	other := s.backend.Connect()
	for i := range 1000 {
		key := strconv.Itoa(i)
		first, second := s.store.Shard(key), s.store.Shard(key)
		s.must(first == second, "the shard of %q changes", key)
		s.must(first == other.Shard(key), "the shard of %q differs between processes", key)
	}
}

func firstRequestLeases(s *suite) {
	a := s.lease("k", "a")
	response := s.state(cacheaside.Busy, "k", "b")
	s.must(response.Value == nil, "a Busy key has value %q", response.Value)
	s.must(response.Grant == "", "a Busy response has Grant %q", response.Grant)
	s.must(response.Wait > 0 && response.Wait <= long, "the lease lasts %v more, want at most %v", response.Wait, long)
	s.must(s.lease("k", "a") == a, "the holder got another Grant from its second Acquire")
	s.fill(false, "k", "b", "v")
	s.fill(true, "k", a, "v")
	response = s.state(cacheaside.Hit, "k", "b")
	s.must(string(response.Value) == "v", "a hit has value %q", response.Value)
	s.must(response.Fresh > 0 && response.Fresh <= time.Minute, "fresh for %v, want at most a minute", response.Fresh)
}

func oneOfManyLeases(s *suite) {
	var wg sync.WaitGroup
	states := make([]cacheaside.State, 32)
	stores := []cacheaside.Store{s.store, s.backend.Connect()}
	for i := range states {
		wg.Go(func() {
			responses, err := stores[i%2].Acquire(s.ctx, cacheaside.Request{Key: "k", Token: strconv.Itoa(i)})
			if err != nil {
				s.Errorf("unexpected error: %v", err)
				return
			}
			states[i] = responses[0].State
		})
	}
	wg.Wait()
	slices.Sort(states)
	s.must(states[0] == cacheaside.Busy && states[30] == cacheaside.Busy && states[31] == cacheaside.Leased,
		"responses to 32 processes: %v, want one leased and 31 busy", states)
}

func refreshLeasesFresh(s *suite) {
	s.fill(true, "k", s.lease("k", "a"), "of a")
	response := s.acquire("k", "b", true)
	s.must(response.State == cacheaside.Leased, "the response to Refresh is %s", response.State)
	s.must(string(response.Value) == "of a", "the response to Refresh has value %q", response.Value)
	s.must(s.acquire("k", "c", true).State == cacheaside.Busy, "a second Refresh took the lease too")
	s.state(cacheaside.Hit, "k", "c")
	s.fill(true, "k", response.Grant, "of b")
	s.holds("k", "of b")
}

func releaseIsForTheHolder(s *suite) {
	s.lease("k", "a")
	s.noError(s.store.Release(s.ctx, cacheaside.Request{Key: "k", Token: "b"}, false))
	s.state(cacheaside.Busy, "k", "b")
	s.noError(s.store.Release(s.ctx, cacheaside.Request{Key: "k", Token: "a"}, false))
	s.lease("k", "b")
	s.noError(s.store.Release(s.ctx, cacheaside.Request{Key: "nothing", Token: "a"}, false))
}

// request calls Acquire with one Request.
func (s *suite) request(r cacheaside.Request) cacheaside.Response {
	s.Helper()
	responses, err := s.store.Acquire(s.ctx, r)
	s.noError(err)
	s.must(len(responses) == 1, "%d responses to one Request", len(responses))
	return responses[0]
}

func failedIsReported(s *suite) {
	s.lease("k", "a")
	waits := s.state(cacheaside.Busy, "k", "b").WaitToken
	s.must(waits != "", "a Busy response without a WaitToken")
	b := cacheaside.Request{Key: "k", Token: "b", WaitToken: waits}
	s.must(s.request(b).State == cacheaside.Busy, "%s before the load has failed", s.request(b).State)
	time.Sleep(time.Millisecond)
	s.noError(s.store.Release(s.ctx, cacheaside.Request{Key: "k", Token: "a"}, true))
	s.must(s.request(b).State == cacheaside.Failed, "%s for a Request that waited for a load that failed",
		s.request(b).State)
	s.lease("k", "c") // it did not wait
	s.must(s.request(b).State == cacheaside.Failed, "%s although another load has started", s.request(b).State)

	time.Sleep(time.Millisecond)
	b.WaitToken = s.state(cacheaside.Busy, "k", "b").WaitToken
	s.noError(s.store.Release(s.ctx, cacheaside.Request{Key: "k", Token: "c"}, false))
	s.must(s.request(b).State == cacheaside.Leased, "%s after a load that was released, and has not failed",
		s.request(b).State)
	s.noError(s.store.Invalidate(s.ctx, "k"))
	d := s.lease("k", "d")
	s.must(s.request(b).State == cacheaside.Busy, "%s after an invalidation", s.request(b).State)
	s.fill(true, "k", d, "v")
	s.must(s.request(b).State == cacheaside.Hit, "%s of a value", s.request(b).State)
}

func pauseServesStale(s *suite) {
	s.fill(true, "k", s.lease("k", "a"), "old")
	s.noError(s.store.Expire(s.ctx, "k"))
	s.lease("k", "a")
	s.noError(s.store.Release(s.ctx, cacheaside.Request{Key: "k", Token: "a"}, true))
	response := s.request(cacheaside.Request{Key: "k", Token: "b", Pause: long})
	s.must(response.State == cacheaside.Failed && string(response.Value) == "old",
		"%s with %q in the pause", response.State, response.Value)
	s.lease("k", "b") // a Request without a pause
	s.noError(s.store.Invalidate(s.ctx, "k"))
	response = s.request(cacheaside.Request{Key: "k", Token: "b", Pause: long})
	s.must(response.State == cacheaside.Leased, "%s although there is no stale value to serve", response.State)
	s.noError(s.store.Release(s.ctx, cacheaside.Request{Key: "k", Token: "b"}, true))
	response = s.request(cacheaside.Request{Key: "k", Token: "b", Pause: long})
	s.must(response.State == cacheaside.Leased, "%s: a failure without a stale value has no pause", response.State)
}

func versions(s *suite) {
	old := cacheaside.Request{Key: "k", Version: 1, Token: "a"}
	young := cacheaside.Request{Key: "k", Version: 2, Token: "b"}
	of := func(r cacheaside.Request) {
		response := s.request(r)
		s.must(response.State == cacheaside.Leased,
			"Version %d is %s, although none of its processes loads", r.Version, response.State)
		f := filling("k", response.Grant, strconv.Itoa(int(r.Version)))
		f.Version = r.Version
		current, err := s.store.Fill(s.ctx, f)
		s.noError(err)
		s.must(current[0], "Fill of Version %d was refused", r.Version)
	}
	for range 2 {
		of(old)
		of(young)
		for _, r := range []cacheaside.Request{old, young, old} {
			response := s.request(r)
			s.must(response.State == cacheaside.Hit && string(response.Value) == strconv.Itoa(int(r.Version)),
				"Version %d is %s with %q", r.Version, response.State, response.Value)
		}
		s.noError(s.store.Invalidate(s.ctx, "k")) // reaches both
	}
	of(old)
	of(young)
	s.noError(s.store.Expire(s.ctx, "k"))
	for _, r := range []cacheaside.Request{old, young} {
		response := s.request(r)
		s.must(response.State == cacheaside.Leased && response.Fresh <= 0, "Version %d is %s after Expire", r.Version,
			response.State)
	}
	_, err := s.store.Fence(s.ctx, "k", "w")
	s.noError(err)
	for _, r := range []cacheaside.Request{old, young} {
		s.must(s.request(r).State == cacheaside.Fenced, "Version %d is not fenced", r.Version)
	}
}

func leaseEnds(s *suite) {
	grant := s.lease("k", "a")
	var response cacheaside.Response
	s.eventually("b takes the lease over", func() bool {
		response = s.acquire("k", "b", false)
		return response.State == cacheaside.Leased
	})
	s.must(response.Grant == grant, "the next holder got another Grant, although nothing was invalidated")
	s.noError(s.store.Release(s.ctx, cacheaside.Request{Key: "k", Token: "a"}, false))
	s.fill(true, "k", grant, "of a")
	s.holds("k", "of a")
	s.fill(true, "k", grant, "of b")
	s.holds("k", "of a")
}

func slowFillIsStored(s *suite) {
	grant := s.lease("k", "a")
	time.Sleep(short + short/4)
	s.fill(true, "k", grant, "v")
	s.holds("k", "v")
}

func firstFillIsStored(s *suite) {
	a := s.lease("k", "a")
	s.noError(s.store.Release(s.ctx, cacheaside.Request{Key: "k", Token: "a"}, false))
	s.must(s.lease("k", "b") == a, "Release ended the generation")
	s.fill(true, "k", a, "of a")
	s.fill(true, "k", a, "of b")
	s.holds("k", "of a")
	response := s.acquire("k", "c", true)
	s.must(response.State == cacheaside.Leased, "%s after a Fill, want the lease to have ended", response.State)
	s.must(response.Grant != a, "the generation continues after a Fill")
	s.fill(true, "k", a, "of b")
	s.holds("k", "of a")
	s.fill(true, "k", response.Grant, "of c")
	s.holds("k", "of c")
}

func valuesKeepBytes(s *suite) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	for i, value := range [][]byte{all, {0}, {'\n'}, bytes.Repeat([]byte{0xff, 0}, 100_000)} {
		for _, key := range []string{strconv.Itoa(i), "", "key {with} \x00 \n and ü " + strconv.Itoa(i)} {
			s.noError(s.store.Invalidate(s.ctx, key))
			s.fill(true, key, s.lease(key, "token"), string(value))
			response := s.state(cacheaside.Hit, key, "token")
			s.must(bytes.Equal(response.Value, value), "value %d changed under key %q", i, key)
		}
	}
}

func valueIsGoneAfterKeep(s *suite) {
	f := filling("k", s.lease("k", "a"), "v")
	f.Fresh, f.Keep = time.Millisecond, 4*short
	_, err := s.store.Fill(s.ctx, f)
	s.noError(err)
	s.eventually("the value is no longer fresh", func() bool { return s.lookup("k").State == cacheaside.Leased })
	s.eventually("the value is gone", func() bool { return s.lookup("k").Value == nil })

	f.Grant = s.lease("k", "a")
	_, err = s.store.Fill(s.ctx, f)
	s.noError(err)
	s.acquire("k", "b", true)
	s.eventually("the value is gone while a lease lasts", func() bool { return s.lookup("k").Value == nil })
	s.state(cacheaside.Busy, "k", "c")
}

func severalKeys(s *suite) {
	keys := s.sameShard(5)
	s.fill(true, keys[1], s.lease(keys[1], "a"), "v1")
	s.lease(keys[2], "a")
	_, err := s.store.Fence(s.ctx, keys[3], "w")
	s.noError(err)
	var requests []cacheaside.Request
	for _, key := range keys {
		requests = append(requests, cacheaside.Request{Key: key, Token: "b"})
	}
	responses, err := s.store.Acquire(s.ctx, requests...)
	s.noError(err)
	var states []cacheaside.State
	for _, response := range responses {
		states = append(states, response.State)
	}
	want := []cacheaside.State{cacheaside.Leased, cacheaside.Hit, cacheaside.Busy, cacheaside.Fenced, cacheaside.Leased}
	s.must(slices.Equal(states, want), "states %v, want %v", states, want)
	s.must(string(responses[1].Value) == "v1", "the hit has value %q", responses[1].Value)

	last := filling(keys[4], s.lease(keys[4], "b"), "v4")
	last.Fresh = time.Hour
	current, err := s.store.Fill(s.ctx, filling(keys[0], responses[0].Grant, "v0"), filling(keys[3], "none", "v3"), last)
	s.noError(err)
	s.must(slices.Equal(current, []bool{true, false, true}), "Fill returned %v", current)
	s.holds(keys[0], "v0")
	s.holds(keys[3], "")
	s.holds(keys[4], "v4")
	s.must(s.lookup(keys[4]).Fresh > 50*time.Minute, "the values of one Fill have the times of another")

	s.noError(s.store.Expire(s.ctx, keys[0], keys[4]))
	s.state(cacheaside.Leased, keys[0], "c")
	s.state(cacheaside.Leased, keys[4], "c")
	s.state(cacheaside.Hit, keys[1], "c")
	s.noError(s.store.Invalidate(s.ctx, keys...))
	for _, key := range keys {
		s.holds(key, "")
	}
}

func keyTwice(s *suite) {
	responses, err := s.store.Acquire(s.ctx,
		cacheaside.Request{Key: "k", Token: "a"}, cacheaside.Request{Key: "k", Token: "b"})
	s.noError(err)
	s.must(len(responses) == 2, "%d responses to two Requests", len(responses))
	s.must(responses[0].State == cacheaside.Leased && responses[1].State == cacheaside.Busy,
		"states %s and %s, want leased and busy", responses[0].State, responses[1].State)
	current, err := s.store.Fill(s.ctx, filling("k", responses[0].Grant, "first"),
		filling("k", responses[0].Grant, "second"))
	s.noError(err)
	s.must(slices.Equal(current, []bool{true, true}), "Fill returned %v", current)
	s.holds("k", "first")
	s.noError(s.store.Expire(s.ctx, "k", "k"))
	s.state(cacheaside.Leased, "k", "c")
	s.noError(s.store.Invalidate(s.ctx, "k", "k"))
	s.holds("k", "")
}

func invalidateEndsGeneration(s *suite) {
	a := s.lease("k", "a")
	s.noError(s.store.Invalidate(s.ctx, "k"))
	s.fill(false, "k", a, "v")
	b := s.lease("k", "a")
	s.must(a != b, "the generation outlived Invalidate")
	s.fill(false, "k", a, "v")
	s.fill(true, "k", b, "v")
	s.noError(s.store.Invalidate(s.ctx, "k"))
	s.holds("k", "")
	s.fill(false, "k", b, "v")
	s.holds("k", "")
	s.noError(s.store.Invalidate(s.ctx, "nothing"))
}

func expireKeepsValue(s *suite) {
	a := s.lease("k", "a")
	s.fill(true, "k", a, "of a")
	b := s.acquire("k", "b", true)
	s.noError(s.store.Expire(s.ctx, "k"))
	s.fill(false, "k", b.Grant, "of b")
	s.fill(false, "k", a, "of b")
	response := s.state(cacheaside.Leased, "k", "c")
	s.must(string(response.Value) == "of a", "Expire left value %q", response.Value)
	s.must(response.Fresh <= 0, "fresh for %v after Expire", response.Fresh)
	time.Sleep(2 * time.Millisecond)
	s.noError(s.store.Expire(s.ctx, "k"))
	fresh := s.lookup("k").Fresh
	s.must(fresh < -2*time.Millisecond, "fresh for %v after two calls to Expire, want the first to count", fresh)
	s.noError(s.store.Expire(s.ctx, "nothing"))
}

func invalidateAll(s *suite) {
	grants := make([]string, 300)
	for i := range grants {
		grants[i] = s.lease(strconv.Itoa(i), "a")
		if i%2 == 0 {
			s.fill(true, strconv.Itoa(i), grants[i], "v")
		}
	}
	_, err := s.store.Fence(s.ctx, "fenced", "w")
	s.noError(err)
	s.noError(s.store.InvalidateAll(s.ctx))
	for i, grant := range grants {
		key := strconv.Itoa(i)
		if i%3 == 0 {
			s.fill(false, key, grant, "v")
		}
		response := s.state(cacheaside.Leased, key, "b")
		s.must(response.Value == nil, "InvalidateAll left value %q of key %q", response.Value, key)
		s.fill(false, key, grant, "v")
		s.fill(true, key, response.Grant, "w")
		s.holds(key, "w")
	}
	s.state(cacheaside.Fenced, "fenced", "a")
	last := s.lease("last", "a")
	s.noError(s.store.InvalidateAll(s.ctx))
	s.fill(false, "last", last, "v")
}

func fencesAreCounted(s *suite) {
	a := s.lease("k", "a")
	s.fill(true, "k", a, "v")
	b := s.acquire("k", "b", true)
	for _, token := range []string{"1", "2"} {
		window, err := s.store.Fence(s.ctx, "k", token)
		s.noError(err)
		s.must(window == long, "a write may take %v, want %v", window, long)
	}
	s.fill(false, "k", b.Grant, "v")
	s.fill(false, "k", a, "v")
	s.noError(s.store.Unfence(s.ctx, "k", "1"))
	s.noError(s.store.Unfence(s.ctx, "k", "1"))
	s.noError(s.store.Invalidate(s.ctx, "k"))
	s.noError(s.store.Expire(s.ctx, "k"))
	response := s.acquire("k", "a", true)
	s.must(response.State == cacheaside.Fenced, "%s while the second fence is in place", response.State)
	s.must(response.Value == nil, "a fenced key has value %q", response.Value)
	s.noError(s.store.Unfence(s.ctx, "k", "2"))
	s.fill(false, "k", b.Grant, "v")
	c := s.lease("k", "a")
	s.noError(s.store.Unfence(s.ctx, "k", "never in place"))
	s.fill(false, "k", c, "v")
	s.holds("k", "")
}

func fenceExpires(s *suite) {
	s.fill(true, "k", s.lease("k", "a"), "old")
	begun := time.Now()
	window, err := s.store.Fence(s.ctx, "k", "dead")
	s.noError(err)
	var response cacheaside.Response
	s.eventually("the fence expires", func() bool {
		response = s.acquire("k", "b", false)
		return response.State != cacheaside.Fenced
	})
	s.must(time.Since(begun) > 2*window-window/10, "the fence expired after %v, want twice %v", time.Since(begun), window)
	s.must(response.State == cacheaside.Leased && response.Value == nil,
		"%s with value %q after the fence", response.State, response.Value)
}

func lateFence(s *suite) {
	s.noError(s.store.Unfence(s.ctx, "k", "1"))
	_, err := s.store.Fence(s.ctx, "k", "1")
	s.noError(err)
	s.lease("k", "a")
	_, err = s.store.Fence(s.ctx, "k", "2")
	s.noError(err)
	s.state(cacheaside.Fenced, "k", "a")
}

// A watch is a call to Watch in progress.
type watch struct {
	ready   chan struct{}
	changed chan string
	ended   chan error
	stop    context.CancelFunc
}

func (s *suite) watch(store cacheaside.Store) *watch {
	w := &watch{ready: make(chan struct{}, 100), changed: make(chan string, 1000), ended: make(chan error, 1)}
	ctx, cancel := context.WithCancel(s.ctx)
	w.stop = cancel
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		w.ended <- store.Watch(ctx, func() { w.ready <- struct{}{} }, func(key string) { w.changed <- key })
	}()
	s.Cleanup(func() { cancel(); <-returned })
	s.receive(w.ready, "Watch calls ready")
	return w
}

func (s *suite) receive(ch chan struct{}, what string) {
	s.Helper()
	select {
	case <-ch:
	case <-time.After(patience):
		s.Fatalf("%s: not within %v", what, patience)
	}
}

// expect checks that key is the next key that Watch reports.
func (s *suite) expect(w *watch, key string) {
	s.Helper()
	select {
	case got := <-w.changed:
		s.must(got == key, "Watch reported %q, want %q", got, key)
	case <-time.After(patience):
		s.Fatalf("Watch did not report %q within %v", key, patience)
	}
}

func watchReports(s *suite) {
	if s.backend.Silent {
		s.Skip("the Backend is Silent")
	}
	other := s.backend.Connect()
	mine, theirs := s.watch(s.store), s.watch(other)
	for i, change := range []func(st cacheaside.Store, key string) error{
		func(st cacheaside.Store, key string) error { return st.Invalidate(s.ctx, key) },
		func(st cacheaside.Store, key string) error { return st.Expire(s.ctx, key) },
		func(st cacheaside.Store, key string) error { _, err := st.Fence(s.ctx, key, "w"); return err },
		func(st cacheaside.Store, key string) error { return st.Unfence(s.ctx, key, "w") },
	} {
		key := fmt.Sprintf("key\n%d ü", i)
		s.noError(change(s.store, key))
		s.expect(theirs, key)
		s.noError(change(other, key))
		s.expect(mine, key) // the first change, made through the same Store, was not reported
	}
	s.noError(s.store.InvalidateAll(s.ctx))
	s.expect(theirs, "")
	keys := s.sameShard(2)
	s.noError(other.Invalidate(s.ctx, keys...))
	s.expect(mine, keys[0])
	s.expect(mine, keys[1])
	s.must(len(mine.changed) == 0, "Watch reports changes made through the same Store")
}

func watchEnds(s *suite) {
	w := s.watch(s.store)
	w.stop()
	select {
	case <-w.ended:
	case <-time.After(patience):
		s.Fatalf("Watch did not return within %v after its ctx was canceled", patience)
	}
	s.noError(s.backend.Connect().Invalidate(s.ctx, "k"))
	s.must(len(w.changed) == 0, "Watch called changed after it returned")
}

func (s *suite) breakable() (restore func()) {
	if s.backend.Break == nil {
		s.Skip("the Backend cannot be broken")
	}
	return s.backend.Break()
}

func callsFail(s *suite) {
	grant := s.lease("k", "a")
	restore := s.breakable()
	for name, call := range map[string]func() error{
		"Acquire": func() error {
			_, err := s.store.Acquire(s.ctx, cacheaside.Request{Key: "k", Token: "a"})
			return err
		},
		"Fill":          func() error { _, err := s.store.Fill(s.ctx, filling("k", grant, "v")); return err },
		"Release":       func() error { return s.store.Release(s.ctx, cacheaside.Request{Key: "k", Token: "a"}, false) },
		"Invalidate":    func() error { return s.store.Invalidate(s.ctx, "k") },
		"Expire":        func() error { return s.store.Expire(s.ctx, "k") },
		"InvalidateAll": func() error { return s.store.InvalidateAll(s.ctx) },
		"Fence":         func() error { _, err := s.store.Fence(s.ctx, "k", "w"); return err },
		"Unfence":       func() error { return s.store.Unfence(s.ctx, "k", "w") },
	} {
		s.must(call() != nil, "%s returns no error in an outage", name)
	}
	restore()
	s.eventually("the Store works again", func() bool {
		_, err := s.store.Acquire(s.ctx, cacheaside.Request{Key: "other"})
		return err == nil
	})
	s.fill(true, "new", s.lease("new", "a"), "v")
	s.holds("new", "v")
}

func watchIsLost(s *suite) {
	if s.backend.Silent {
		s.Skip("the Backend is Silent")
	}
	w := s.watch(s.store)
	restore := s.breakable()
	select {
	case err := <-w.ended:
		s.must(err != nil, "Watch returned no error in an outage")
	case <-time.After(patience):
		s.Fatalf("Watch did not return within %v after an outage", patience)
	}
	restore()
	other := s.backend.Connect()
	s.eventually("the Store works again", func() bool { return other.Invalidate(s.ctx, "other") == nil })
	again := s.watch(s.store)
	s.noError(other.Invalidate(s.ctx, "k"))
	for {
		select {
		case key := <-again.changed:
			if key == "k" {
				return
			}
		case <-time.After(patience):
			s.Fatalf("Watch reported no change within %v after the outage", patience)
		}
	}
}
