package resilienceetcd_test

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/storetest"
	"github.com/go-resilience/resilience/resilienceetcd"
)

// connect returns a client of the server that all tests share.
var connect = sync.OnceValues(func() (*clientv3.Client, error) {
	dir, err := os.MkdirTemp("", "etcd")
	if err != nil {
		return nil, err
	}
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel, cfg.UnsafeNoFsync = dir, "fatal", true
	cfg.TickMs, cfg.ElectionMs = 10, 100 // the least TTL is then a second
	here := []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls, cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = here, here, here, here
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	server, err := embed.StartEtcd(cfg)
	if err != nil {
		return nil, err
	}
	<-server.Server.ReadyNotify()
	_ = os.RemoveAll(dir) // the server has its files open
	return clientv3.New(clientv3.Config{Endpoints: []string{server.Clients[0].Addr().String()}})
})

func newStore(t *testing.T) (*resilienceetcd.Store, *clientv3.Client) {
	client, err := connect()
	require.NoError(t, err)
	return resilienceetcd.New(client, resilienceetcd.Config{Prefix: t.Name() + "/"}), client
}

func TestStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) lease.Store { s, _ := newStore(t); return s })
}

func TestFence(t *testing.T) {
	store, client := newStore(t)
	write := func(epoch int64) bool {
		put := clientv3.OpPut(t.Name(), fmt.Sprint(epoch))
		resp, err := client.Txn(t.Context()).If(store.Fence("a", epoch)).Then(put).Commit()
		require.NoError(t, err)
		return resp.Succeeded
	}
	require.False(t, write(1))
	one, err := lease.New(store, lease.Config{Name: "a"}).Campaign(t.Context())
	require.NoError(t, err)
	require.True(t, write(one.Epoch()))
	require.False(t, write(one.Epoch()-1))
	req := lease.Request{Name: "a", Token: "other", TTL: time.Hour, Run: 7}
	require.ErrorIs(t, store.Renew(t.Context(), req), lease.ErrLost)
	require.True(t, write(one.Epoch()))
	require.NoError(t, one.Resign(t.Context()))
	require.False(t, write(one.Epoch()), "resigned")
	two, err := lease.New(store, lease.Config{Name: "a"}).Campaign(t.Context())
	require.NoError(t, err)
	require.Greater(t, two.Epoch(), one.Epoch())
	require.False(t, write(one.Epoch()))
	require.True(t, write(two.Epoch()))
	require.ErrorIs(t, two.Fence(t.Context(), nil), lease.ErrNoFence)
	require.NoError(t, two.Resign(t.Context()))
}

// A run changes the record, but not the epoch, whose fences hold.
func TestRunKeepsEpoch(t *testing.T) {
	store, _ := newStore(t)
	rec, err := store.Acquire(t.Context(), lease.Request{Name: "a", Token: "x", TTL: time.Hour})
	require.NoError(t, err)
	require.NoError(t, store.Renew(t.Context(), lease.Request{Name: "a", Token: "x", TTL: time.Hour, Run: 7}))
	now, err := store.Load(t.Context(), "a")
	require.NoError(t, err)
	require.Equal(t, rec.Epoch, now.Epoch)
	require.EqualValues(t, 7, now.LastRun)
}

// A renewal with the same TTL writes nothing, so that the history of etcd does not grow.
func TestRenewalWritesNothing(t *testing.T) {
	store, client := newStore(t)
	req := lease.Request{Name: "a", Token: "x", TTL: time.Hour}
	_, err := store.Acquire(t.Context(), req)
	require.NoError(t, err)
	revision := func() int64 {
		resp, err := client.Get(t.Context(), "none")
		require.NoError(t, err)
		return resp.Header.Revision
	}
	before := revision()
	for range 3 {
		require.NoError(t, store.Renew(t.Context(), req))
	}
	require.Equal(t, before, revision())
}

// An etcd lease that is not needed any more is revoked.
func TestLeasesAreRevoked(t *testing.T) {
	store, client := newStore(t)
	count := func() int {
		resp, err := client.Leases(t.Context())
		require.NoError(t, err)
		return len(resp.Leases)
	}
	before := count()
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			_, _ = store.Acquire(t.Context(), lease.Request{Name: "a", Token: fmt.Sprint(i), TTL: time.Hour})
		})
	}
	all.Wait()
	rec, err := store.Load(t.Context(), "a")
	require.NoError(t, err)
	for _, ttl := range []time.Duration{time.Minute, time.Hour} {
		require.NoError(t, store.Renew(t.Context(), lease.Request{Name: "a", Token: rec.Token, TTL: ttl}))
	}
	require.Equal(t, before+1, count())
	require.NoError(t, store.Release(t.Context(), "a", rec.Token))
	require.Equal(t, before, count())
}

func TestErrorsNameMethod(t *testing.T) {
	store, client := newStore(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	req := lease.Request{Name: "a", Token: "x", TTL: time.Second}
	_, err := store.Acquire(ctx, req)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "resilienceetcd: acquire: ")
	require.ErrorContains(t, store.Renew(ctx, req), "resilienceetcd: renew: ")
	require.ErrorContains(t, store.Release(ctx, "a", "x"), "resilienceetcd: release: ")
	_, err = client.Put(t.Context(), t.Name()+"/term/a", "no JSON")
	require.NoError(t, err)
	_, err = store.Load(t.Context(), "a")
	require.ErrorContains(t, err, "resilienceetcd: load: value of TestErrorsNameMethod/term/a: ")
}

func TestValidateReportsRoundedTTL(t *testing.T) {
	require.NoError(t, resilienceetcd.Validate(lease.Config{Name: "a"}))
	require.NoError(t, resilienceetcd.Validate(lease.Config{Name: "a", TTL: 3 * time.Second}))
	err := resilienceetcd.Validate(lease.Config{TTL: 1500 * time.Millisecond})
	require.ErrorContains(t, err, "resilienceetcd: lease.Config.TTL is 1.5s: must be whole seconds")
	require.ErrorContains(t, err, "lease.Config.Name")
	require.Panics(t, func() { resilienceetcd.New(nil, resilienceetcd.Config{}) })
}
