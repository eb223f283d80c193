package cacheaside_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// A scripted Store records the calls about one key. It returns the given responses, and then the responses of the Store
// within.
type scripted struct {
	cacheaside.Store
	answers []cacheaside.Response
	asks    []cacheaside.Request
	failed  []bool // failed of each Release
}

func (s *scripted) Acquire(ctx context.Context, asks ...cacheaside.Request) ([]cacheaside.Response, error) {
	s.asks = append(s.asks, asks...)
	if len(s.answers) == 0 {
		return s.Store.Acquire(ctx, asks...)
	}
	answer := s.answers[0]
	s.answers = s.answers[1:]
	return []cacheaside.Response{answer}, nil
}

func (s *scripted) Release(ctx context.Context, ask cacheaside.Request, failed bool) error {
	s.failed = append(s.failed, failed)
	return s.Store.Release(ctx, ask, failed)
}

// inStore returns the encoding of value that a Cache stores.
func inStore(t *testing.T, value int) []byte {
	shared := newFakeStore()
	c := newCache(t, config{Load: func(context.Context, int) (int, error) { return value, nil },
		Store: shared.connect()})
	mustGet(t, c, 1)
	return shared.items["1"].of(0).value
}

// The result of a Get for each sequence of responses. The value in the Store is 7, and Load returns 1.
func TestAnswersOfTheStore(t *testing.T) {
	value, damaged := inStore(t, 7), []byte("damaged")
	const busy, failed = cacheaside.Busy, cacheaside.Failed
	for name, test := range map[string]struct {
		answers []cacheaside.Response
		staleOK bool
		want    int
		wantErr string
		refresh []bool // Refresh of each Request
		waits   bool
	}{
		"a failure that it waited for": {
			answers: []cacheaside.Response{{State: busy, Wait: time.Second, WaitToken: "0"}, {State: failed}}, waits: true,
			refresh: []bool{false, false}, wantErr: "cacheaside: users: 1: load of another process failed"},
		"a failure with a stale value": {
			answers: []cacheaside.Response{{State: failed, Value: value, Fresh: -time.Second}}, staleOK: true,
			refresh: []bool{false}, want: 7},
		"a failure with a value that is unusable here": {
			answers: []cacheaside.Response{{State: failed, Value: value, Fresh: -time.Second}},
			refresh: []bool{false, true}, want: 1},
		"a failure with a value that cannot be read": {
			answers: []cacheaside.Response{{State: failed, Value: damaged, Fresh: -time.Second}}, staleOK: true,
			refresh: []bool{false, true}, want: 1},
		"a value that cannot be read, and that another process replaces": {
			answers: []cacheaside.Response{{State: cacheaside.Hit, Value: damaged, Fresh: time.Second},
				{State: busy, Wait: time.Second, WaitToken: "0"}, {State: cacheaside.Hit, Value: value, Fresh: time.Second}},
			refresh: []bool{false, true, false}, want: 7, waits: true},
		"a state that there is not": {
			answers: []cacheaside.Response{{State: "odd"}}, refresh: []bool{false},
			wantErr: `cacheaside: users: Store returned the unknown State "odd"`},
	} {
		bubble(t, name, func(t *testing.T) {
			store := &scripted{Store: newFakeStore().connect(), answers: test.answers}
			cfg := config{Name: "users", TTL: time.Minute, Store: store,
				Load: func(context.Context, int) (int, error) { return 1, nil }}
			if test.staleOK {
				cfg.StaleIfError = time.Hour
			}
			c := newCache(t, cfg)
			begun := time.Now()
			v, err := c.Get(t.Context(), 1)
			if test.wantErr != "" {
				require.EqualError(t, err, test.wantErr)
			} else {
				require.NoError(t, err)
			}
			require.Equal(t, test.want, v)
			require.Equal(t, test.waits, time.Since(begun) > 0)
			var refresh []bool
			for _, ask := range store.asks {
				refresh = append(refresh, ask.Refresh)
			}
			require.Equal(t, test.refresh, refresh)
		})
	}
}

// A stale value whose load has failed in another process is served for ErrorPause without a query.
func TestRemoteFailurePausesRefresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old := cacheaside.Response{State: cacheaside.Failed, Value: inStore(t, 7), Fresh: -time.Second}
		store := &scripted{Store: newFakeStore().connect(), answers: []cacheaside.Response{old, old}}
		c := newCache(t, config{Load: identity, StaleIfError: time.Hour, ErrorPause: time.Second, Store: store})
		synctest.Wait()
		for range 10 {
			require.Equal(t, 7, mustGet(t, c, 1))
		}
		require.Len(t, store.asks, 1)
		time.Sleep(time.Second)
		require.Equal(t, 7, mustGet(t, c, 1))
		require.Len(t, store.asks, 2)
	})
}

// Callers that wait for a lease learn about a failure, but not about an answer or a refusal, which are this process's
// own.
func TestFailuresReportedToOthers(t *testing.T) {
	for name, test := range map[string]struct {
		load   func() error
		failed bool
	}{
		"a failure": {func() error { return errLoad }, true},
		"a panic":   {func() error { panic("boom") }, true},
		"an answer": {func() error { return forbidden{} }, false},
		"a refusal": {func() error { return refusal{} }, false},
	} {
		bubble(t, name, func(t *testing.T) {
			store := &scripted{Store: newFakeStore().connect()}
			c := newCache(t, config{Store: store, Load: func(context.Context, int) (int, error) { return 0, test.load() }})
			_, err := c.Get(t.Context(), 1)
			require.Error(t, err)
			require.Equal(t, []bool{test.failed}, store.failed)
		})
	}
}

// When the last caller cancels, the flight stops polling the Store for another process's load.
func TestCallersDoNotPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		_, err := shared.connect().Acquire(t.Context(), cacheaside.Request{Key: "1", Token: "another process"})
		require.NoError(t, err)
		c := newCache(t, config{Load: identity, Store: shared.connect()})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second+time.Microsecond)
		defer cancel()
		_, err = c.Get(ctx, 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		asked := shared.called("Acquire")
		time.Sleep(time.Minute)
		require.Equal(t, asked, shared.called("Acquire"))
	})
}

// A caller may cancel at the moment at which the Store responds that a write is in progress. The race detector checks
// this test.
func TestCallerCancelsAtFence(t *testing.T) {
	for range 100 {
		synctest.Test(t, func(t *testing.T) {
			shared := newFakeStore()
			c := newCache(t, config{Load: identity, FinishLoads: true,
				Store: slowly{Store: shared.connect(), takes: time.Millisecond}})
			_, err := shared.connect().Fence(t.Context(), "1", "another process")
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			_, _ = c.Get(ctx, 1)
		})
	}
}

// With a ReplicaLag, values are shared as well. The exception is a value that another process invalidated during its
// load, because it may be from before that change.
func TestLagKeepsInvalidatedLoadOutOfStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		w := &telling{Store: shared.connect(), heard: make(chan func(string), 1)}
		var change func(string)
		c := newCache(t, config{Store: w, ReplicaLag: time.Minute, Load: func(_ context.Context, key int) (int, error) {
			if key == 2 {
				change("2")
			}
			return key, nil
		}})
		change = <-w.heard
		require.Equal(t, 1, mustGet(t, c, 1))
		require.Equal(t, 1, shared.called("Fill"))
		require.Equal(t, 2, mustGet(t, c, 2))
		require.Equal(t, 1, shared.called("Fill"))
		require.Equal(t, 1, shared.called("Release"))
	})
}

// What ReplicaLag needs to know of changes may change at any time: this is for the race detector.
func TestLagWhileKeysAndSettingsChange(t *testing.T) {
	conn := newFakeStore().connect()
	conn.yield = true
	w := &telling{Store: conn, heard: make(chan func(string), 1)}
	c := newCache(t, config{Load: identity, Store: w, ReplicaLag: time.Hour})
	heard := <-w.heard
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for n := range 500 {
				if v, err := c.Get(t.Context(), n%7); err != nil || v != n%7 {
					t.Errorf("%d, %v", v, err)
				}
				switch i {
				case 0:
					heard("1")
				case 1:
					_ = c.Update(func(cfg *config) { cfg.ReplicaLag++ })
				case 2:
					_ = c.Invalidate(t.Context(), n%7)
				}
			}
		})
	}
	all.Wait()
}

// Fences that could not be taken down are taken down later, of one key the last ones.
func TestFencesAreRemovedLater(t *testing.T) {
	for writes, unfenced := range map[int]int{3: 3, 100: 100, 150: 50} {
		synctest.Test(t, func(t *testing.T) {
			shared := newFakeStore()
			var failing atomic.Bool
			failing.Store(true)
			c := newCache(t, config{Load: identity, Store: unwatched{flaky{shared.connect(), func(call string) bool {
				return call == "Unfence" && failing.Load()
			}}}})
			for range writes {
				write(t, c, 1)
			}
			failing.Store(false)
			time.Sleep(2 * time.Second)
			require.Zero(t, c.Stats().PendingInvalidations)
			require.Equal(t, unfenced, shared.called("Unfence"))
		})
	}
}
