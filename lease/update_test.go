package lease_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/lease"
)

func TestConfigHasItsDefaults(t *testing.T) {
	c := lease.New(lease.NewMemory(), lease.Config{Name: "billing"})
	cfg := c.Config()
	require.Equal(t, "billing", c.Name())
	require.NotEmpty(t, cfg.Holder)
	require.Equal(t, []time.Duration{15 * time.Second, 1500 * time.Millisecond, 5 * time.Second},
		[]time.Duration{cfg.TTL, cfg.Margin, cfg.Poll})
	require.NoError(t, c.Update(func(cfg *lease.Config) { cfg.TTL = time.Minute }))
	require.Equal(t, 6*time.Second, c.Config().Margin, "a default that depends on another field")
}

func TestUpdateRefusesAnotherName(t *testing.T) {
	c := lease.New(lease.NewMemory(), billing)
	before := c.Config()
	require.ErrorContains(t, c.Update(func(cfg *lease.Config) { cfg.Name = "other"; cfg.TTL = time.Minute }), "lease.Config.Name")
	require.ErrorContains(t, c.Update(func(cfg *lease.Config) { cfg.TTL = -1 }), "lease.Config.TTL")
	require.Equal(t, before, c.Config())
}

func TestUpdateKeepsATermUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory()}
		c := lease.New(store, quiet(billing))
		term, err := c.Campaign(t.Context())
		require.NoError(t, err)
		require.NoError(t, c.Update(func(cfg *lease.Config) { cfg.TTL = time.Hour }))
		time.Sleep(time.Minute)
		synctest.Wait()
		store.set(&store.renew, down)
		rec, err := store.Load(t.Context(), "billing")
		require.NoError(t, err)
		require.LessOrEqual(t, rec.Until.Sub(rec.Now), ttl)
		<-term.Context().Done()
		require.Equal(t, rec.Until.Add(-ttl/10), time.Now())
		_ = term.Resign(t.Context())
		term, err = c.Campaign(t.Context())
		require.NoError(t, err)
		rec, err = store.Load(t.Context(), "billing")
		require.NoError(t, err)
		require.Equal(t, time.Hour, rec.Until.Sub(rec.Now))
		require.NoError(t, term.Resign(t.Context()))
	})
}

// tokens fails a test if a token asks for two TTLs: a late request could then end a term
// before its ctx.
type tokens struct {
	lease.Store
	t   *testing.T
	ttl sync.Map
}

func (s *tokens) Acquire(ctx context.Context, req lease.Request) (lease.Record, error) {
	if before, ok := s.ttl.LoadOrStore(req.Token, req.TTL); ok && before != req.TTL {
		s.t.Errorf("a token asks for %v after %v", req.TTL, before)
	}
	return s.Store.Acquire(ctx, req)
}

// TestUpdateReachesAWait changes what a campaign under way asks with.
func TestUpdateReachesAWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &tokens{Store: lease.NewMemory(), t: t}
		first := campaign(t, store, billing)
		c := lease.New(store, billing)
		var wg sync.WaitGroup
		wg.Go(func() {
			term, err := c.Campaign(t.Context())
			require.NoError(t, err)
			rec, err := store.Load(t.Context(), "billing")
			require.NoError(t, err)
			require.Equal(t, time.Hour, rec.Until.Sub(rec.Now))
			require.NoError(t, term.Resign(t.Context()))
		})
		time.Sleep(time.Minute)
		require.NoError(t, c.Update(func(cfg *lease.Config) { cfg.Poll = time.Second }))
		asked := c.Stats().Asked
		time.Sleep(time.Minute)
		require.Greater(t, c.Stats().Asked-asked, int64(40), "the Poll")
		require.NoError(t, c.Update(func(cfg *lease.Config) { cfg.TTL = time.Hour }))
		time.Sleep(time.Minute)
		resigned := time.Now()
		require.NoError(t, first.Resign(t.Context()))
		wg.Wait()
		require.LessOrEqual(t, time.Since(resigned), 9*time.Second/8, "its first token has left the line")
		require.Equal(t, lease.Stats{Elected: 1, Resigned: 1, Asked: c.Stats().Asked, WaitTime: c.Stats().WaitTime}, c.Stats())
	})
}

func TestUpdatesTakeTurns(t *testing.T) {
	c := lease.New(lease.NewMemory(), lease.Config{Name: "billing", Poll: 1})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				require.NoError(t, c.Update(func(cfg *lease.Config) { cfg.Poll++ }))
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 801, c.Config().Poll)
}

// TestUpdateUnderLoad changes the Config all the while: never two lead.
func TestUpdateUnderLoad(t *testing.T) {
	store := lease.NewMemory()
	c := lease.New(store, lease.Config{Name: "billing"})
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var leading, terms atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for ctx.Err() == nil {
				_ = c.Run(ctx, func(context.Context, lease.Term) error {
					if leading.Add(1) != 1 {
						t.Error("two lead")
					}
					terms.Add(1)
					leading.Add(-1)
					return nil
				})
			}
		})
	}
	wg.Go(func() {
		for i := 1; ctx.Err() == nil; i++ {
			require.NoError(t, c.Update(func(cfg *lease.Config) { cfg.TTL = time.Duration(i%7+10) * time.Second }))
			c.Config()
			time.Sleep(time.Millisecond)
		}
	})
	wg.Wait()
	s := c.Stats()
	require.Equal(t, terms.Load(), s.Elected)
	require.Equal(t, s.Elected, s.Resigned+s.Lost)
	require.Zero(t, s.Leading+s.Queued)
	require.NotZero(t, s.Elected)
}
