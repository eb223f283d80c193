package lease_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/policy"
)

const ttl = 15 * time.Second

var billing = lease.Config{Name: "billing", TTL: ttl}

// A faulty is a Store whose calls go through functions that may delay, lose and fail them.
type faulty struct {
	lease.Store
	acquire, renew, release fault

	mu sync.Mutex
}

type fault = func(ctx context.Context, do func() error) error

// set sets one of the functions, in the middle of a test.
func (s *faulty) set(which *fault, to fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	*which = to
}

func (s *faulty) through(which *fault, ctx context.Context, do func() error) error {
	s.mu.Lock()
	f := *which
	s.mu.Unlock()
	if f == nil {
		return do()
	}
	return f(ctx, do)
}

func (s *faulty) Acquire(ctx context.Context, req lease.Request) (rec lease.Record, err error) {
	err = s.through(&s.acquire, ctx, func() (err error) { rec, err = s.Store.Acquire(ctx, req); return err })
	return rec, err
}

func (s *faulty) Renew(ctx context.Context, req lease.Request) error {
	return s.through(&s.renew, ctx, func() error { return s.Store.Renew(ctx, req) })
}

func (s *faulty) Release(ctx context.Context, name, token string) error {
	return s.through(&s.release, ctx, func() error { return s.Store.Release(ctx, name, token) })
}

var errDown = errors.New("the store is down")

func down(context.Context, func() error) error { return errDown }

func hanging(ctx context.Context, _ func() error) error { <-ctx.Done(); return ctx.Err() }

// quiet returns a Candidate whose store may fail without a warning.
func quiet(store lease.Store, cfg lease.Config) *lease.Candidate {
	c := lease.New(store, cfg)
	c.Observe(func(context.Context, lease.Event) {})
	return c
}

func campaign(t *testing.T, store lease.Store, cfg lease.Config) lease.Term {
	t.Helper()
	term, err := quiet(store, cfg).Campaign(t.Context())
	require.NoError(t, err)
	return term
}

// look returns the lease, without a Holder if no process holds it.
func look(t *testing.T, store lease.Store) lease.Record {
	t.Helper()
	rec, err := store.Load(t.Context(), "billing")
	require.NoError(t, err)
	if !rec.Held() {
		rec.Holder = ""
	}
	return rec
}

// exactly runs a test in a bubble of fake time, where every store answers immediately.
func exactly(t *testing.T, test func(t *testing.T)) { synctest.Test(t, test) }

func TestRunReturnsErrorOfFn(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store, failed := lease.NewMemory(), errors.New("failed")
		for _, want := range []error{nil, failed} {
			err := lease.New(store, billing).Run(t.Context(), func(ctx context.Context, term lease.Term) error {
				require.NoError(t, term.Err())
				require.NoError(t, ctx.Err())
				require.Equal(t, look(t, store).Holder, term.Holder())
				require.Equal(t, look(t, store).Epoch, term.Epoch())
				time.Sleep(10 * ttl)
				return want
			})
			require.Equal(t, want, err)
			require.Empty(t, look(t, store).Holder, "not given up")
		}
	})
}

func TestNewPanicsOnInvalidArguments(t *testing.T) {
	require.PanicsWithError(t, "lease: Store is nil: must be set", func() { lease.New(nil, billing) })
	require.Panics(t, func() { lease.New(lease.NewMemory(), lease.Config{}) })
}

func TestRunWaitsForTheLease(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := lease.NewMemory()
		term := campaign(t, store, billing)
		var wg sync.WaitGroup
		var led time.Time
		wg.Go(func() {
			require.NoError(t, lease.New(store, billing).Run(t.Context(), func(context.Context, lease.Term) error {
				led = time.Now()
				return nil
			}))
		})
		time.Sleep(time.Hour)
		require.True(t, led.IsZero(), "two lead")
		resigned := time.Now()
		require.NoError(t, term.Resign(t.Context()))
		wg.Wait()
		require.LessOrEqual(t, led.Sub(resigned), time.Second+time.Second/8, "within a Poll")
	})
}

func TestDeadLeaderIsSucceededAfterTTL(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := lease.NewMemory()
		_, err := store.Acquire(t.Context(), lease.Request{Name: "billing", Token: "dead", TTL: ttl})
		require.NoError(t, err)
		began := time.Now()
		require.NoError(t, campaign(t, store, billing).Resign(t.Context()))
		require.GreaterOrEqual(t, time.Since(began), ttl)
		require.LessOrEqual(t, time.Since(began), ttl+2*time.Millisecond)
	})
}

// Renewals fail, or hang.
func TestCtxEndsBeforeTheLease(t *testing.T) {
	for name, fault := range map[string]func(context.Context, func() error) error{"failing": down, "hanging": hanging} {
		t.Run(name, func(t *testing.T) {
			exactly(t, func(t *testing.T) {
				store := &faulty{Store: lease.NewMemory()}
				cfg := billing
				cfg.Margin = 2 * time.Second
				term := campaign(t, store, cfg)
				time.Sleep(time.Hour)
				synctest.Wait()
				ends := time.Now().Add(look(t, store).Left - 2*time.Second)
				store.set(&store.renew, fault)
				<-term.Context().Done()
				require.Equal(t, ends, time.Now())
				var lost *lease.LostError
				require.ErrorAs(t, context.Cause(term.Context()), &lost)
				require.ErrorIs(t, lost, lease.ErrLost)
				require.Error(t, lost.Err)
				require.ErrorContains(t, lost, "is over: not renewed in time: "+lost.Err.Error())
				require.False(t, lost.Retryable())
				require.ErrorIs(t, term.Err(), lease.ErrLost)
				require.ErrorIs(t, term.Fence(t.Context(), nil), lease.ErrLost)
			})
		})
	}
}

// The store answers late.
func TestTTLCountsFromTheRequest(t *testing.T) {
	exactly(t, func(t *testing.T) {
		const late = time.Second
		store := &faulty{Store: lease.NewMemory()}
		answerLate := func(_ context.Context, do func() error) error { err := do(); time.Sleep(late); return err }
		store.set(&store.acquire, answerLate)
		store.set(&store.renew, answerLate)
		sent := time.Now()
		term := campaign(t, store, billing)
		require.Equal(t, late, time.Since(sent))
		store.set(&store.renew, hanging)
		<-term.Context().Done()
		require.Equal(t, ttl-ttl/10, time.Since(sent), "of the election")

		store.set(&store.renew, answerLate)
		sent = time.Now()
		term = campaign(t, store, billing)
		synctest.Wait()
		require.Less(t, time.Since(sent), ttl)
		var renewing atomic.Value
		store.set(&store.renew, func(ctx context.Context, do func() error) error {
			renewing.Store(time.Now())
			store.set(&store.renew, hanging)
			return answerLate(ctx, do)
		})
		<-term.Context().Done()
		require.Equal(t, ttl-ttl/10, time.Since(renewing.Load().(time.Time)), "of a renewal")
		require.True(t, look(t, store).Holder != "", "the lease has ended before the ctx")
	})
}

func TestTermSurvivesFaultsOfStore(t *testing.T) {
	for name, test := range map[string]struct {
		margin time.Duration
		renew  func(ctx context.Context, n int, do func() error) error
	}{
		"failures and a connection that is half open": {0, func(ctx context.Context, n int, do func() error) error {
			switch n % 3 {
			case 1:
				return hanging(ctx, do)
			case 2:
				return errDown
			}
			return do()
		}},
		// A store that takes longer than the first try allows gets more time at the next.
		"slow": {0, func(ctx context.Context, _ int, do func() error) error {
			select {
			case <-time.After(ttl / 5):
				return do()
			case <-ctx.Done():
				return ctx.Err()
			}
		}},
		// The first try of each renewal gets little time, so that there is time for another before the term is over.
		"each other try hangs": {ttl / 2, func(ctx context.Context, n int, do func() error) error {
			if n%2 == 1 {
				return hanging(ctx, do)
			}
			return do()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			exactly(t, func(t *testing.T) {
				n, cfg := 0, billing
				cfg.Margin = test.margin
				c := quiet(&faulty{Store: lease.NewMemory(), renew: func(ctx context.Context, do func() error) error {
					n++
					return test.renew(ctx, n, do)
				}}, cfg)
				term, err := c.Campaign(t.Context())
				require.NoError(t, err)
				time.Sleep(time.Hour)
				require.NoError(t, term.Err())
				require.NoError(t, term.Resign(t.Context()))
				stats := c.Stats()
				require.NotZero(t, stats.Renewed)
				require.InDelta(t, int64(n)-stats.Renewed, stats.StoreErrors, 2)
			})
		})
	}
}

func TestTermEndedByStoreIsLostAtRenewal(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory()}
		term := campaign(t, store, billing)
		store.set(&store.renew, func(context.Context, func() error) error { return lease.ErrLost })
		began := time.Now()
		<-term.Context().Done()
		require.Equal(t, ttl/3, time.Since(began))
		require.ErrorContains(t, term.Err(), "ended by the store")
	})
}

// The first term is lost. It does not matter what fn then returns.
func TestRunLeadsAgainAfterLoss(t *testing.T) {
	for _, result := range []error{nil, errDown} {
		exactly(t, func(t *testing.T) {
			store := &faulty{Store: lease.NewMemory(), renew: down}
			var epochs []int64
			err := quiet(store, billing).Run(t.Context(), func(ctx context.Context, term lease.Term) error {
				epochs = append(epochs, term.Epoch())
				if len(epochs) == 2 {
					store.set(&store.renew, nil)
					time.Sleep(10 * ttl)
					return nil
				}
				<-ctx.Done()
				return result
			})
			require.NoError(t, err)
			require.Len(t, epochs, 2)
			require.Greater(t, epochs[1], epochs[0])
		})
	}
}

// An elsewhere store is in another database than the transactions that are fenced.
type elsewhere struct{ lease.Store }

func (elsewhere) Fence(context.Context, *sql.Tx, string, int64) error { return lease.ErrLost }

// Each term is lost as soon as it has begun.
func TestRunPausesAfterLoss(t *testing.T) {
	exactly(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		terms := 0
		require.NoError(t, quiet(elsewhere{lease.NewMemory()}, billing).Loop(ctx,
			func(ctx context.Context, term lease.Term) error {
				if terms++; terms > 1000 {
					cancel()
				}
				return term.Fence(ctx, nil)
			}))
		require.InDelta(t, time.Minute/time.Second, terms, 1)
	})
}

func TestRunEndsWithItsCtx(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store, why := lease.NewMemory(), errors.New("shutdown")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Minute, func() { cancel(why) })
		var finished time.Time
		err := lease.New(store, billing).Run(ctx, func(ctx context.Context, term lease.Term) error {
			<-ctx.Done()
			require.ErrorIs(t, context.Cause(ctx), why)
			time.Sleep(10 * ttl) // it finishes in peace
			require.NoError(t, term.Err(), "not renewed while fn finishes")
			finished = time.Now()
			return errDown
		})
		require.Equal(t, errDown, err)
		require.Equal(t, finished, time.Now())
		require.Empty(t, look(t, store).Holder)

		err = lease.New(store, billing).Run(ctx, nil)
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, why)
	})
}

// A term is lost, and then ctx ends, before fn returns: Run does not compete again.
func TestRunEndsWithCtxAfterLoss(t *testing.T) {
	exactly(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		store := &faulty{Store: lease.NewMemory(), renew: down}
		err := quiet(store, billing).Run(ctx, func(ctx context.Context, term lease.Term) error {
			<-ctx.Done()
			cancel()
			return errDown
		})
		require.Equal(t, errDown, err)
	})
}

func TestRunReleasesLeaseIfFnPanics(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := lease.NewMemory()
		require.PanicsWithValue(t, "oh", func() {
			_ = lease.New(store, billing).Run(t.Context(), func(context.Context, lease.Term) error { panic("oh") })
		})
		require.Empty(t, look(t, store).Holder)
		var wg sync.WaitGroup
		wg.Go(func() {
			_ = lease.New(store, billing).Run(t.Context(), func(context.Context, lease.Term) error {
				runtime.Goexit()
				return nil
			})
		})
		wg.Wait()
		require.Empty(t, look(t, store).Holder)
	})
}

// A campaign whose answers are lost leads by its first request.
func TestElectionWithLostAnswer(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory()}
		lose := func(_ context.Context, do func() error) error { return errors.Join(do(), errDown) }
		store.set(&store.acquire, lose)
		time.AfterFunc(time.Minute, func() { store.set(&store.acquire, nil) })
		term := campaign(t, store, billing)
		require.Equal(t, look(t, store).Epoch, term.Epoch())
		require.NoError(t, term.Resign(t.Context()))

		store.set(&store.acquire, lose)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := quiet(store, billing).Campaign(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Empty(t, look(t, store).Holder, "a lease that nobody knows of")
	})
}

// The lease is released.
func TestElectionAfterCtxEnds(t *testing.T) {
	exactly(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		store := &faulty{Store: lease.NewMemory(), acquire: func(_ context.Context, do func() error) error {
			defer cancel()
			return do()
		}}
		require.ErrorIs(t, lease.New(store, billing).Run(ctx, nil), context.Canceled)
		require.Empty(t, look(t, store).Holder)
	})
}

// The answer takes longer than the term, as it does if the process is stopped.
func TestElectionAnsweredTooLate(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory()}
		var asked int
		store.set(&store.acquire, func(_ context.Context, do func() error) error {
			err := do()
			if asked++; asked == 1 {
				time.Sleep(2 * ttl)
			}
			return err
		})

		term := campaign(t, store, billing)
		require.NoError(t, term.Err())
		require.Equal(t, 2, asked)
		require.NotEmpty(t, look(t, store).Holder)
		require.NoError(t, term.Resign(t.Context()))
	})
}

func TestWaitingCandidateRequestsOncePerPoll(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory()}
		term := campaign(t, store, billing)
		c := lease.New(store, billing)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_, err := c.Campaign(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "lease: billing: campaign: ")
		require.LessOrEqual(t, c.Stats().Asked, int64(time.Hour/time.Second+1))
		require.Equal(t, time.Hour, c.Stats().WaitTime)
		require.NoError(t, term.Resign(t.Context()))
	})
}

func TestTryCampaignDoesNotWait(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory()}
		c := lease.New(store, lease.Config{Name: "billing", TTL: ttl, Holder: "me"})
		term, err := c.TryCampaign(t.Context())
		require.NoError(t, err)
		_, err = c.TryCampaign(t.Context())
		require.ErrorIs(t, err, lease.ErrHeld)
		var held *lease.HeldError
		require.ErrorAs(t, err, &held)
		require.Equal(t, lease.HeldError{Name: "billing", Holder: "me", After: ttl}, *held)
		require.True(t, held.Refused())
		require.Equal(t, ttl, held.RetryAfter())
		require.EqualError(t, err, "lease: billing: held by me")
		require.NoError(t, term.Resign(t.Context()))
		require.EqualError(t, &lease.HeldError{Name: "billing"},
			"lease: billing: another process is getting it, or a fenced transaction of the last holder is open")

		store.set(&store.acquire, down)
		_, err = c.TryCampaign(t.Context())
		require.ErrorIs(t, err, errDown)
		store.set(&store.acquire, nil)
		term, err = c.TryCampaign(t.Context())
		require.NoError(t, err)
		require.NoError(t, term.Resign(t.Context()))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = c.TryCampaign(ctx)
		require.ErrorIs(t, err, context.Canceled)
	})
}

type key struct{}

// The term continues when the ctx of Campaign ends.
func TestCampaignWaitsUntilItsCtxEnds(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := lease.NewMemory()
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
		term, err := lease.New(store, billing).Campaign(ctx)
		require.NoError(t, err)
		cancel()
		time.Sleep(10 * ttl)
		require.NoError(t, term.Err())
		require.NoError(t, term.Context().Err())
		require.Equal(t, "value", term.Context().Value(key{}))
		require.NoError(t, term.Resign(t.Context()))
		require.ErrorIs(t, context.Cause(term.Context()), lease.ErrLost)
		require.ErrorContains(t, term.Err(), "resigned")
		require.NoError(t, term.Resign(t.Context()), "twice")
	})
}

func TestResignReturnsErrorOfStore(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory(), release: down}
		c := quiet(store, billing)
		var told []error
		c.Observe(func(_ context.Context, e lease.Event) { told = append(told, e.Err) })
		term, err := c.Campaign(t.Context())
		require.NoError(t, err)
		err = term.Resign(t.Context())
		require.EqualError(t, err, "lease: billing: resign: the store is down")
		require.ErrorIs(t, err, errDown)
		require.Error(t, term.Context().Err())
		require.NotEmpty(t, look(t, store).Holder)
		store.set(&store.release, nil)
		require.NoError(t, term.Resign(t.Context()))
		require.Empty(t, look(t, store).Holder)
		require.Equal(t, []error{nil, err}, told, "elected, and resigned once")
	})
}

func TestResignWaitsForRenewalInFlight(t *testing.T) {
	exactly(t, func(t *testing.T) {
		renewed := false
		store := &faulty{Store: lease.NewMemory(), renew: func(context.Context, func() error) error {
			time.Sleep(time.Second)
			renewed = true
			return nil
		}}
		term := campaign(t, store, billing)
		time.Sleep(ttl/3 + time.Millisecond)
		require.NoError(t, term.Resign(t.Context()))
		require.True(t, renewed)
	})
}

// An observer that the renewal itself calls would wait for it forever.
func TestObserverMayResign(t *testing.T) {
	for _, fails := range []fault{down, func(context.Context, func() error) error { return lease.ErrLost }} {
		exactly(t, func(t *testing.T) {
			store, resigned := &faulty{Store: lease.NewMemory(), renew: fails}, 0
			c, terms := lease.New(store, billing), make(chan lease.Term, 1)
			c.Observe(func(_ context.Context, e lease.Event) {
				if e.Kind == lease.EventLost || e.Kind == lease.EventStoreFailed {
					resigned++
					require.NoError(t, (<-terms).Resign(context.Background()))
				}
			})
			term, err := c.Campaign(t.Context())
			require.NoError(t, err)
			terms <- term
			<-term.Context().Done()
			synctest.Wait()
			require.Equal(t, 1, resigned)
			require.NoError(t, term.Resign(t.Context()))
		})
	}
}

// Many calls end a term concurrently: one of them has resigned.
func TestConcurrentResign(t *testing.T) {
	c := lease.New(lease.NewMemory(), billing)
	for range 20 {
		term, err := c.Campaign(t.Context())
		require.NoError(t, err)
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() { require.NoError(t, term.Resign(t.Context())) })
		}
		wg.Wait()
	}
	require.EqualValues(t, 20, c.Stats().Resigned)
	require.Zero(t, c.Stats().Leading)
}

// fn may resign and continue without the lease: that is no loss.
func TestRunReturnsIfFnResigns(t *testing.T) {
	exactly(t, func(t *testing.T) {
		calls := 0
		err := lease.New(lease.NewMemory(), billing).Run(t.Context(), func(_ context.Context, term lease.Term) error {
			calls++
			require.NoError(t, term.Resign(t.Context()))
			return errDown
		})
		require.Equal(t, errDown, err)
		require.Equal(t, 1, calls)
	})
}

type fencing struct {
	lease.Store
	err error
}

func (f *fencing) Fence(_ context.Context, _ *sql.Tx, name string, epoch int64) error {
	if name != "billing" || epoch == 0 {
		panic(fmt.Sprint(name, epoch))
	}
	return f.err
}

func TestFailedFenceEndsTerm(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := &fencing{Store: lease.NewMemory()}
		term := campaign(t, store, billing)
		require.NoError(t, term.Fence(t.Context(), nil))
		store.err = errDown
		require.ErrorIs(t, term.Fence(t.Context(), nil), errDown)
		require.NoError(t, term.Err(), "an error of the database does not say that the term is over")
		store.err = lease.ErrLost
		var lost *lease.LostError
		require.ErrorAs(t, term.Fence(t.Context(), nil), &lost)
		require.ErrorContains(t, lost, "is over: ended by the store")
		require.ErrorIs(t, context.Cause(term.Context()), lease.ErrLost)
		require.NoError(t, term.Resign(t.Context()))

		term = campaign(t, lease.NewMemory(), billing)
		require.ErrorIs(t, term.Fence(t.Context(), nil), lease.ErrNoFence)
		require.NoError(t, term.Resign(t.Context()))
	})
}

// Many candidates lead for random times, with a store that is slow and loses requests and answers. Two never work at
// the same time, and the epochs grow.
func TestNeverTwo(t *testing.T) {
	exactly(t, func(t *testing.T) {
		fault := func(ctx context.Context, do func() error) error {
			time.Sleep(rand.N(ttl / 20))
			if rand.N(5) == 0 {
				return errDown
			}
			err := do()
			switch rand.N(5) {
			case 0:
				return errors.Join(err, errDown)
			case 1:
				return errors.Join(err, hanging(ctx, nil))
			}
			time.Sleep(rand.N(ttl / 20))
			return err
		}
		store := &faulty{Store: lease.NewMemory(), acquire: fault, renew: fault, release: fault}
		ctx, cancel := context.WithTimeout(t.Context(), 6*time.Hour)
		defer cancel()
		var working, terms, last atomic.Int64
		var wg sync.WaitGroup
		for range 5 {
			c := quiet(store, billing)
			wg.Go(func() {
				for ctx.Err() == nil {
					_ = c.Run(ctx, func(ctx context.Context, term lease.Term) error {
						if working.Add(1) != 1 {
							t.Error("two work")
						}
						defer working.Add(-1)
						if last.Swap(term.Epoch()) >= term.Epoch() {
							t.Error("an epoch does not grow")
						}
						terms.Add(1)
						work := time.NewTimer(rand.N(10 * ttl))
						defer work.Stop()
						select {
						case <-ctx.Done():
						case <-work.C:
						}
						return nil
					})
				}
			})
		}
		wg.Wait()
		require.Greater(t, terms.Load(), int64(100))
	})
}

func TestStatsAndEvents(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory()}
		var observed []lease.Event
		c := lease.New(store, lease.Config{Name: "billing", TTL: ttl, Holder: "me"})
		leading := []int{}
		stop := c.Observe(func(_ context.Context, e lease.Event) {
			observed = append(observed, e)
			leading = append(leading, c.Stats().Leading) // an observer may call the candidate
		})
		term, err := c.Campaign(t.Context())
		require.NoError(t, err)
		first := term.Epoch()
		const led = time.Minute - time.Second
		time.Sleep(led)
		require.Equal(t, lease.Stats{Elected: 1, Asked: 1, Renewed: 11, Leading: 1}, c.Stats())
		require.NoError(t, term.Resign(t.Context()))
		term, err = c.Campaign(t.Context())
		require.NoError(t, err)
		store.set(&store.renew, func(context.Context, func() error) error { return lease.ErrLost })
		<-term.Context().Done()
		synctest.Wait()
		_ = term.Resign(t.Context())
		require.Equal(t, lease.Stats{
			Elected: 2, Lost: 1, Resigned: 1, Asked: 2, Renewed: 11,
		}, c.Stats())
		second, lost := term.Epoch(), term.Err()
		require.ErrorContains(t, lost, "ended by the store")
		require.Equal(t, []lease.Event{
			{Kind: lease.EventElected, Name: "billing", Holder: "me", Epoch: first},
			{Kind: lease.EventResigned, Name: "billing", Holder: "me", Epoch: first, Took: led},
			{Kind: lease.EventElected, Name: "billing", Holder: "me", Epoch: second},
			{Kind: lease.EventLost, Name: "billing", Holder: "me", Epoch: second, Took: ttl / 3, Err: lost},
		}, observed)
		require.Equal(t, []int{1, 0, 1, 0}, leading)
		stop()
		term, err = c.Campaign(t.Context())
		require.NoError(t, err)
		require.NoError(t, term.Resign(t.Context()))
		require.Len(t, observed, 4)
	})
}

// panics returns a Candidate with an observer that panics at events of a kind.
func panics(store lease.Store, kind lease.EventKind) *lease.Candidate {
	c := lease.New(store, billing)
	c.Observe(func(_ context.Context, e lease.Event) {
		if e.Kind == kind {
			panic(string(kind))
		}
	})
	return c
}

// A panic of an observer on a goroutine of the package is printed with its stack. It costs no term, and does not end
// the program when the timer ends a term.
func TestObserverPanicIsPrinted(t *testing.T) {
	for kind, test := range map[lease.EventKind]struct {
		takes time.Duration // of each renewal that fails; it ignores its ctx
		lost  bool
	}{
		lease.EventStoreFailed: {0, false}, lease.EventLost: {ttl, true},
	} {
		t.Run(string(kind), func(t *testing.T) {
			var printed strings.Builder
			log.SetOutput(&printed)
			defer log.SetOutput(os.Stderr)
			exactly(t, func(t *testing.T) {
				renewals := 0
				store := &faulty{Store: lease.NewMemory(), renew: func(_ context.Context, do func() error) error {
					if renewals++; renewals%2 == 1 {
						time.Sleep(test.takes)
						return errDown
					}
					return do()
				}}
				term, err := panics(store, kind).Campaign(t.Context())
				require.NoError(t, err)
				time.Sleep(2 * ttl)
				if test.lost {
					require.ErrorContains(t, term.Err(), "not renewed in time")
					return
				}
				require.NoError(t, term.Err())
				require.NoError(t, term.Resign(t.Context()))
			})
			require.Contains(t, printed.String(), "lease: observer panicked: "+string(kind))
			require.Contains(t, printed.String(), "lease_test.go")
		})
	}
}

// A panic of an observer on the caller's goroutine reaches the caller, and no term remains.
func TestObserverPanicReachesCaller(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := lease.NewMemory()
		c := panics(store, lease.EventElected)
		require.PanicsWithValue(t, "elected", func() { _ = c.Run(t.Context(), nil) })
		require.Empty(t, look(t, store).Holder)
	})
}

// lines counts what is logged.
type lines struct{ n atomic.Int64 }

func (l *lines) Write(p []byte) (int, error) { l.n.Add(1); return len(p), nil }

func TestStoreFailureIsReported(t *testing.T) {
	logged, before := &lines{}, slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(logged, nil)))
	defer slog.SetDefault(before)
	exactly(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory(), acquire: down, release: down}
		cfg := billing
		cfg.Poll, cfg.Holder = 10*time.Millisecond, "me"
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		c := lease.New(store, cfg)
		require.Error(t, c.Run(ctx, nil))
		require.Greater(t, c.Stats().StoreErrors, int64(800))
		require.InDelta(t, 10, logged.n.Load(), 1, "once a second")

		var events []lease.Event
		stop := c.Observe(func(_ context.Context, e lease.Event) { events = append(events, e) })
		ctx, cancel = context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		logged.n.Store(0)
		require.Error(t, c.Run(ctx, nil))
		stop()
		require.Zero(t, logged.n.Load(), "no warning while the candidate is observed")
		require.Greater(t, len(events), 800)
		first, last := events[0], events[len(events)-1]
		require.ErrorIs(t, first.Err, errDown)
		require.EqualError(t, first.Err, "lease: billing: campaign: the store is down")
		require.EqualError(t, last.Err, "lease: billing: withdraw: the store is down")
		first.Err = nil
		require.Equal(t, lease.Event{Kind: lease.EventStoreFailed, Name: "billing", Holder: "me"}, first)
	})
}

func TestRenewalFailureHasEpoch(t *testing.T) {
	exactly(t, func(t *testing.T) {
		c := lease.New(&faulty{Store: lease.NewMemory(), renew: down}, billing)
		var failed []lease.Event
		c.Observe(func(_ context.Context, e lease.Event) {
			if e.Kind == lease.EventStoreFailed {
				failed = append(failed, e)
			}
		})
		term, err := c.Campaign(t.Context())
		require.NoError(t, err)
		<-term.Context().Done()
		require.NotEmpty(t, failed)
		require.Equal(t, term.Epoch(), failed[0].Epoch)
		require.EqualError(t, failed[0].Err, "lease: billing: renew: the store is down")
		require.NoError(t, term.Resign(t.Context()))
	})
}

func TestStatusOfLease(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := lease.NewMemory()
		c := lease.New(store, lease.Config{Name: "billing", TTL: ttl, Holder: "me"})
		status := func(want lease.Record) {
			t.Helper()
			rec, err := c.Status(t.Context())
			require.NoError(t, err)
			rec.Token = ""
			require.Equal(t, want, rec)
		}
		status(lease.Record{Name: "billing"})
		term, err := c.Campaign(t.Context())
		require.NoError(t, err)
		time.Sleep(time.Second)
		status(lease.Record{Name: "billing", Holder: "me", Epoch: term.Epoch(), Left: ttl - time.Second})
		require.NoError(t, term.Resign(t.Context()))
		status(lease.Record{Name: "billing", Epoch: term.Epoch()})
		_, err = store.Acquire(t.Context(), lease.Request{Name: "billing", Token: "dead", Holder: "dead", TTL: ttl})
		require.NoError(t, err)
		time.Sleep(time.Minute)
		rec, err := c.Status(t.Context())
		require.NoError(t, err)
		require.False(t, rec.Held())
		require.Equal(t, "dead", rec.Holder)
		require.Zero(t, rec.Left)
	})
}

func TestZeroTermIsOver(t *testing.T) {
	var term lease.Term
	require.ErrorIs(t, term.Err(), lease.ErrLost)
	require.EqualError(t, term.Err(), "lease: zero Term is over")
	require.Error(t, term.Context().Err())
	require.ErrorIs(t, context.Cause(term.Context()), lease.ErrLost)
	require.ErrorIs(t, term.Fence(t.Context(), nil), lease.ErrLost)
	require.NoError(t, term.Resign(t.Context()))
	require.Zero(t, term.Epoch())
	require.Empty(t, term.Holder())
}

// An over store grants a lease that has ended by the store's clock.
type over struct{ lease.Store }

func (s over) Acquire(ctx context.Context, req lease.Request) (lease.Record, error) {
	rec, err := s.Store.Acquire(ctx, req)
	rec.Left = 0
	return rec, err
}

func TestEndedLeaseIsNoTerm(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := lease.NewMemory()
		_, err := lease.New(over{store}, billing).TryCampaign(t.Context())
		require.ErrorIs(t, err, lease.ErrLost)
		require.Empty(t, look(t, store).Holder)
	})
}

// A request whose answer was lost may grant the lease later, regardless of later answers.
func TestFailedWaitWithdrawsGrant(t *testing.T) {
	exactly(t, func(t *testing.T) {
		for failures, want := range map[int]int{0: 0, 1: 1} {
			asked, released := 0, 0
			store := &faulty{Store: lease.NewMemory()}
			term := campaign(t, store, billing)
			store.set(&store.acquire, func(_ context.Context, do func() error) error {
				if asked++; asked <= failures {
					return errDown
				}
				return do()
			})
			store.set(&store.release, func(_ context.Context, do func() error) error { released++; return do() })
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			_, err := quiet(store, billing).Campaign(ctx)
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, want, released)
			require.NoError(t, term.Resign(t.Context()))
		}
	})
}

var _ policy.Describer = (*lease.Candidate)(nil)

func TestCandidateDescribesItself(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory()}
		c := lease.New(store, lease.Config{Name: "billing", TTL: ttl, Holder: "me"})
		d := c.Describe()
		require.Equal(t, "lease", d.Kind)
		require.Equal(t, billing.Name, d.Name)
		require.Equal(t, time.Second, d.Config().(lease.Config).Poll)
		require.Equal(t, time.Second, c.Config().Poll)

		var seen []policy.Event
		stop := d.Observe(func(_ context.Context, e policy.Event) { seen = append(seen, e) })
		term, err := c.Campaign(t.Context())
		require.NoError(t, err)
		time.Sleep(ttl - time.Second) // not at the instant of a renewal
		metrics := make(map[string]float64)
		for _, m := range d.Metrics() {
			metrics[m.Name] = m.Value
			require.Equal(t, m.Name != "lease.queued" && m.Name != "lease.leading", m.Counter, m.Name)
		}
		require.Len(t, metrics, 9)
		require.Equal(t, 1.0, metrics["lease.terms{event=elected}"])
		require.Equal(t, 1.0, metrics["lease.leading"])
		require.Equal(t, 1.0, metrics["lease.requests"])
		require.Equal(t, 2.0, metrics["lease.renewals"])
		require.NoError(t, term.Resign(t.Context()))
		stop()
		for _, m := range d.Metrics() {
			metrics[m.Name] = m.Value
		}
		require.Equal(t, 1.0, metrics["lease.terms{event=resigned}"])
		require.Len(t, seen, 2)
		require.Equal(t, policy.Event{
			Kind: "lease", Name: billing.Name, What: "resigned", Level: slog.LevelDebug, Attrs: []slog.Attr{
				slog.String("holder", "me"), slog.Int64("epoch", seen[0].Attr("epoch").Int64()),
				slog.Duration("took", ttl-time.Second),
			},
		}, seen[1])
	})
}

func TestEventsAreDescribed(t *testing.T) {
	for _, test := range []struct {
		event lease.Event
		level slog.Level
		attrs string
	}{
		{lease.Event{Kind: lease.EventElected, Waited: time.Second}, slog.LevelDebug, "[holder= epoch=0 waited=1s]"},
		{lease.Event{Kind: lease.EventLost, Err: errDown}, slog.LevelWarn, "[holder= epoch=0]"},
		{lease.Event{Kind: lease.EventLost}, slog.LevelWarn, "[holder= epoch=0]"},
		{lease.Event{Kind: lease.EventResigned, Err: errDown}, slog.LevelWarn, "[holder= epoch=0]"},
	} {
		d := lease.DescribeEvent(test.event)
		require.Equal(t, string(test.event.Kind), d.What)
		require.Equal(t, test.level, d.Level)
		require.Equal(t, test.event.Err, d.Err)
		require.Equal(t, test.attrs, fmt.Sprint(d.Attrs))
	}
}

// A lease that no process holds is a fault only while a call waits to lead. A candidate counts from when it has first
// seen the vacancy while a call waited.
func TestHealthFailsWhileLeaseIsVacant(t *testing.T) {
	exactly(t, func(t *testing.T) {
		health := func(c *lease.Candidate) policy.Health { return c.Describe().Health(t.Context()) }
		vacant := func(detail string) policy.Health {
			return policy.Health{Status: policy.Fail, State: "vacant", Detail: "no process has held it for " + detail}
		}
		store := &faulty{Store: lease.NewMemory()}
		c := quiet(store, billing)
		healthy := func(why string) {
			t.Helper()
			require.Zero(t, health(c), why)
			time.Sleep(time.Hour)
			require.Zero(t, health(c), why)
		}
		healthy("not used yet")
		term, err := c.TryCampaign(t.Context())
		require.NoError(t, err)
		require.NoError(t, term.Resign(t.Context()))
		healthy("a lock that is free")
		require.NoError(t, c.Run(t.Context(), func(context.Context, lease.Term) error { return nil }))
		healthy("the work is done")

		store.set(&store.acquire, down)
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		go func() { _, _ = c.Campaign(ctx) }()
		synctest.Wait()
		require.Zero(t, health(c), "the vacancy before the wait does not count")
		time.Sleep(ttl)
		require.Zero(t, health(c))
		time.Sleep(time.Second)
		require.Equal(t, vacant("16s"), health(c))
		term = campaign(t, store.Store, billing)
		require.Zero(t, health(c))
		require.NoError(t, term.Resign(t.Context()))
		require.Zero(t, health(c))
		time.Sleep(time.Minute)
		require.Equal(t, vacant("1m0s"), health(c))
		leave()
		synctest.Wait()
		healthy("no call waits")

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.Equal(t, policy.Health{Status: policy.Fail, State: "store_down", Err: context.DeadlineExceeded},
			lease.New(lost{store}, billing).Describe().Health(ctx))
	})
}

// While the store refuses connections, the end of a term is the last thing that its candidate knows of the lease.
func TestHealthAfterTermOfSameCandidate(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory()}
		c := quiet(store, billing)
		term, err := c.TryCampaign(t.Context())
		require.NoError(t, err)
		go func() { _, _ = c.Campaign(t.Context()) }()
		var calls sync.WaitGroup
		soon, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		for range 4 {
			calls.Go(func() { require.Zero(t, c.Describe().Health(t.Context())) })
			calls.Go(func() { _, _ = c.Campaign(soon) })
		}
		calls.Wait()
		store.set(&store.acquire, down)
		store.set(&store.renew, down)
		<-term.Context().Done()
		time.Sleep(ttl + time.Second)
		require.Equal(t, "vacant", c.Describe().Health(t.Context()).State)
	})
}

// A candidate that waits behind a fenced transaction sees that no process holds the lease.
func TestHealthOfWaitingCandidate(t *testing.T) {
	exactly(t, func(t *testing.T) {
		c := lease.New(fencedOff{lease.NewMemory()}, billing)
		go func() { _, _ = c.Campaign(t.Context()) }()
		time.Sleep(ttl + time.Second)
		require.Equal(t, "vacant", c.Describe().Health(t.Context()).State)
	})
}

// A lost store hangs until its ctx ends.
type lost struct{ lease.Store }

func (lost) Load(ctx context.Context, _ string) (lease.Record, error) {
	<-ctx.Done()
	return lease.Record{}, ctx.Err()
}

func TestValidate(t *testing.T) {
	for _, c := range []struct {
		field string
		cfg   lease.Config
	}{
		{"Name", lease.Config{}},
		{"Name", lease.Config{Name: strings.Repeat("x", 201)}},
		{"Name", lease.Config{Name: "a\x00"}},
		{"Name", lease.Config{Name: "\xff"}},
		{"Holder", lease.Config{Name: "a", Holder: "\xff"}},
		{"TTL", lease.Config{Name: "a", TTL: -1}},
		{"TTL", lease.Config{Name: "a", TTL: time.Millisecond}},
		{"Margin", lease.Config{Name: "a", Margin: -1}},
		{"Margin", lease.Config{Name: "a", Margin: 8 * time.Second}},
		{"Poll", lease.Config{Name: "a", Poll: -1}},
	} {
		require.ErrorContains(t, c.cfg.Validate(), "lease.Config."+c.field+" is")
	}
	require.NoError(t, lease.Config{Name: strings.Repeat("x", 200)}.Validate())
	require.NoError(t, lease.Config{Name: "a", TTL: 10 * time.Millisecond, Margin: 5 * time.Millisecond}.Validate())
}

// An answer that takes longer than the term must not keep the lease from other candidates.
func TestTryCampaignWithdrawsLateElection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory()}
		store.set(&store.acquire, func(_ context.Context, do func() error) error {
			err := do()
			time.Sleep(ttl - ttl/20)
			return err
		})
		c := lease.New(store, billing)
		_, err := c.TryCampaign(t.Context())
		require.ErrorIs(t, err, lease.ErrLost)
		require.NotErrorIs(t, err, lease.ErrHeld)
		require.Empty(t, look(t, store).Holder)
	})
}

// The store may have granted the lease although it returned an error.
func TestTryCampaignWithdrawsAfterError(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory(), acquire: func(_ context.Context, do func() error) error {
			return errors.Join(do(), errDown)
		}}
		_, err := lease.New(store, billing).TryCampaign(t.Context())
		require.ErrorIs(t, err, errDown)
		require.Empty(t, look(t, store).Holder)
	})
}

// A program that uses a lease as a lock makes no other calls to the store.
func TestStatsCountReturnedFailures(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory(), acquire: hanging}
		c := quiet(store, billing)
		_, err := c.TryCampaign(t.Context())
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.EqualValues(t, 1, c.Stats().StoreErrors)
		canceled, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		_, err = c.TryCampaign(canceled)
		require.ErrorIs(t, err, context.Canceled)
		require.EqualValues(t, 1, c.Stats().StoreErrors, "the caller has left")
		store.set(&store.acquire, nil)
		term, err := c.TryCampaign(t.Context())
		require.NoError(t, err)
		store.set(&store.release, down)
		require.ErrorIs(t, term.Resign(t.Context()), errDown)
		require.EqualValues(t, 2, c.Stats().StoreErrors)
	})
}

// A fencedOff is a Store in which a fenced transaction of an earlier term is open.
type fencedOff struct{ lease.Store }

func (fencedOff) Acquire(_ context.Context, req lease.Request) (lease.Record, error) {
	return lease.Record{Name: req.Name}, nil
}

func TestCandidateBehindFenceDoesNotSpin(t *testing.T) {
	exactly(t, func(t *testing.T) {
		c := lease.New(fencedOff{lease.NewMemory()}, billing)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := c.Campaign(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.InDelta(t, time.Minute/(time.Second/8), c.Stats().Asked, 5, "an eighth of Poll")
	})
}
