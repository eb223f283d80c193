package lease_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/lease"
)

func TestWatchYieldsEachChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := lease.NewMemory()
		cfg := billing
		cfg.Holder = "one"
		var mu sync.Mutex
		var term lease.Term
		var resigned time.Time
		began := time.Now()
		step := 0
		for s, err := range lease.Watch(t.Context(), store, "billing") {
			require.NoError(t, err)
			require.Equal(t, "billing", s.Name)
			mu.Lock()
			switch step++; step {
			case 1:
				require.Equal(t, lease.State{Name: "billing", Now: began}, s)
				time.AfterFunc(10*time.Second, func() { mu.Lock(); defer mu.Unlock(); term = campaign(t, store, cfg) })
			case 2:
				require.Equal(t, lease.State{Name: "billing", Holder: "one", Epoch: term.Epoch(), Since: began.Add(10 * time.Second), Until: began.Add(10*time.Second + ttl), Now: time.Now()}, s)
				time.AfterFunc(time.Hour+time.Second/2, func() { // between two looks
					mu.Lock()
					defer mu.Unlock()
					_ = term.Resign(t.Context())
					term = campaign(t, store, cfg)
				})
			case 3:
				require.Equal(t, "one", s.Holder)
				require.Equal(t, term.Epoch(), s.Epoch, "the next term of the same holder")
				time.AfterFunc(time.Hour, func() { mu.Lock(); defer mu.Unlock(); resigned = time.Now(); _ = term.Resign(t.Context()) })
			case 4:
				require.Empty(t, s.Holder)
				require.Equal(t, resigned, s.Since)
				_, err := store.Acquire(t.Context(), lease.Request{Name: "billing", Token: "x", Holder: "dead", TTL: ttl})
				require.NoError(t, err)
			case 5:
				require.Equal(t, "dead", s.Holder)
			default:
				require.Empty(t, s.Holder)
				require.Equal(t, ttl, s.Now.Sub(s.Since.Add(-ttl)).Truncate(time.Second), "since it was over")
			}
			mu.Unlock()
			if step == 6 {
				break
			}
		}
	})
}

func TestWatchGoesOnWhenTheStoreFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &unreadable{lease.NewMemory(), 3}
		var errs int
		for s, err := range lease.Watch(t.Context(), store, "billing") {
			switch {
			case err != nil:
				require.ErrorIs(t, err, errDown)
				errs++
			case errs == 3:
				require.Equal(t, "billing", s.Name)
				store.failures = 2 // again, while nobody leads
			}
			if errs == 5 {
				break
			}
		}
	})
}

func TestWatchEndsWithItsCtx(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		n := 0
		for range lease.Watch(ctx, lease.NewMemory(), "billing") {
			n++
		}
		require.Equal(t, 1, n)
		for range lease.Watch(ctx, lease.NewMemory(), "billing") {
			t.Error("yields after the end of ctx")
		}
	})
}

// An unreadable fails a few times.
type unreadable struct {
	lease.Store
	failures int
}

func (s *unreadable) Load(ctx context.Context, name string) (lease.Record, error) {
	if s.failures--; s.failures >= 0 {
		return lease.Record{}, errDown
	}
	return s.Store.Load(ctx, name)
}
