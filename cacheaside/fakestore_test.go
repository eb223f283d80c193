package cacheaside_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"time"

	"github.com/go-resilience/resilience/cacheaside"
)

var errStore = errors.New("the store is down")

// fakeStore is the obvious Store: what several fakeConns share. Its time is that
// of the test's bubble.
type fakeStore struct {
	mu    sync.Mutex
	items map[string]*fakeItem
	epoch int
	conns map[*fakeConn]func(string)
	calls map[string]int
	lease time.Duration
	write time.Duration
}

type fakeItem struct {
	value       []byte
	fresh, keep time.Time
	epoch       int
	token       string
	leased      time.Time
	fences      map[string]time.Time
}

func newFakeStore() *fakeStore {
	return &fakeStore{
		items: map[string]*fakeItem{}, conns: map[*fakeConn]func(string){}, calls: map[string]int{},
		lease: 3 * time.Second, write: 10 * time.Second,
	}
}

// fakeConn is one process's way to a fakeStore.
type fakeConn struct {
	*fakeStore
	yield bool // lets other goroutines run around each call

	mu      sync.Mutex
	failing bool
	lost    chan struct{} // closed when the subscription is to be lost
}

func (s *fakeStore) connect() *fakeConn { return &fakeConn{fakeStore: s, lost: make(chan struct{})} }

// fail makes every call fail, and ends the subscription, until recover.
func (c *fakeConn) fail() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.failing {
		c.failing = true
		close(c.lost)
	}
}

func (c *fakeConn) recover() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failing, c.lost = false, make(chan struct{})
}

func (c *fakeConn) begin(ctx context.Context, name string) error {
	if c.yield {
		for range rand.N(20) {
			runtime.Gosched()
		}
	}
	c.mu.Lock()
	failing := c.failing
	c.mu.Unlock()
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	c.calls[name]++
	if failing {
		return errStore
	}
	return ctx.Err()
}

func (s *fakeStore) called(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[name]
}

func (s *fakeStore) item(key string) *fakeItem {
	it := s.items[key]
	if it == nil {
		it = &fakeItem{fences: map[string]time.Time{}}
		s.items[key] = it
	}
	return it
}

func (it *fakeItem) fenced() bool {
	for _, until := range it.fences {
		if time.Now().Before(until) {
			return true
		}
	}
	return false
}

func (it *fakeItem) drop() { it.value, it.token = nil, "" }

func (c *fakeConn) publish(key string) {
	for conn, heard := range c.conns {
		if conn != c && heard != nil {
			heard(key)
		}
	}
}

func (c *fakeConn) Acquire(ctx context.Context, key, token string, renew bool) (cacheaside.Lookup, error) {
	if err := c.begin(ctx, "Acquire"); err != nil {
		return cacheaside.Lookup{}, err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	it, now := c.item(key), time.Now()
	if it.fenced() {
		return cacheaside.Lookup{State: cacheaside.Fenced}, nil
	}
	var look cacheaside.Lookup
	if it.value != nil && it.epoch == c.epoch && now.Before(it.keep) {
		look.Value, look.Fresh = it.value, it.fresh.Sub(now)
		if look.Fresh > 0 && !renew {
			look.State = cacheaside.Hit
			return look, nil
		}
	}
	if it.token != "" && it.token != token && now.Before(it.leased) && it.epoch == c.epoch {
		look.State, look.Wait = cacheaside.Busy, it.leased.Sub(now)
		return look, nil
	}
	if it.epoch != c.epoch {
		it.value = nil
	}
	it.token, it.leased, it.epoch = token, now.Add(c.lease), c.epoch
	look.State = cacheaside.Leased
	return look, nil
}

func (c *fakeConn) Fill(ctx context.Context, key, token string, value []byte, fresh, keep time.Duration) (bool, error) {
	if err := c.begin(ctx, "Fill"); err != nil {
		return false, err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	it, now := c.item(key), time.Now()
	if it.token != token || it.epoch != c.epoch || it.fenced() {
		return false, nil
	}
	it.value, it.token, it.fresh, it.keep = value, "", now.Add(fresh), now.Add(keep)
	return true, nil
}

func (c *fakeConn) Release(ctx context.Context, key, token string) error {
	if err := c.begin(ctx, "Release"); err != nil {
		return err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	if it := c.item(key); it.token == token {
		it.token = ""
	}
	return nil
}

func (c *fakeConn) Invalidate(ctx context.Context, key string) error {
	if err := c.begin(ctx, "Invalidate"); err != nil {
		return err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	c.item(key).drop()
	c.publish(key)
	return nil
}

func (c *fakeConn) Expire(ctx context.Context, key string) error {
	if err := c.begin(ctx, "Expire"); err != nil {
		return err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	it := c.item(key)
	it.token = ""
	if it.fresh.After(time.Now()) {
		it.fresh = time.Now()
	}
	c.publish(key)
	return nil
}

func (c *fakeConn) InvalidateAll(ctx context.Context) error {
	if err := c.begin(ctx, "InvalidateAll"); err != nil {
		return err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	c.epoch++
	c.publish("")
	return nil
}

func (c *fakeConn) Fence(ctx context.Context, key, token string) (time.Duration, error) {
	if err := c.begin(ctx, "Fence"); err != nil {
		return 0, err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	it := c.item(key)
	it.drop()
	it.fences[token] = time.Now().Add(2 * c.write)
	c.publish(key)
	return c.write, nil
}

func (c *fakeConn) Unfence(ctx context.Context, key, token string) error {
	if err := c.begin(ctx, "Unfence"); err != nil {
		return err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	it := c.item(key)
	it.drop()
	delete(it.fences, token)
	c.publish(key)
	return nil
}

func (c *fakeConn) Watch(ctx context.Context, up func(), heard func(string)) error {
	c.mu.Lock()
	lost, failing := c.lost, c.failing
	c.mu.Unlock()
	if failing {
		return errStore
	}
	c.fakeStore.mu.Lock()
	c.conns[c] = heard
	c.fakeStore.mu.Unlock()
	defer func() {
		c.fakeStore.mu.Lock()
		delete(c.conns, c)
		c.fakeStore.mu.Unlock()
	}()
	up()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-lost:
		return errStore
	}
}
