package cacheaside_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/go-resilience/resilience/cacheaside"
)

var errStore = errors.New("the store is down")

// A fakeStore is the simplest Store. Several fakeConns share it. It uses the bubble's clock.
type fakeStore struct {
	mu          sync.Mutex
	items       map[string]*fakeItem
	epoch       int
	generations int
	conns       map[*fakeConn]func(string)
	calls       map[string]int
	lease       time.Duration
	write       time.Duration
}

type fakeItem struct {
	versions map[uint32]*fakeValue
	epoch    int
	fences   map[string]time.Time // the zero time for a fence that arrived too late
}

type fakeValue struct {
	value              []byte
	fresh, keep        time.Time
	generation, filled string
	token              string
	leased             time.Time
	failed             time.Time // time of the last failed load
	failures           int
}

func newFakeStore() *fakeStore {
	return &fakeStore{
		items: map[string]*fakeItem{}, conns: map[*fakeConn]func(string){}, calls: map[string]int{},
		lease: 3 * time.Second, write: 10 * time.Second,
	}
}

// fakeConn connects one process to a fakeStore.
type fakeConn struct {
	*fakeStore
	yield bool // lets other goroutines run around each call

	mu      sync.Mutex
	failing bool
	broken  map[uint8]bool // shards that fail
	hangs   time.Duration  // duration of a call that fails
	lost    chan struct{}  // closed to end the subscription
}

// Shard is the last character of key, which tests can predict.
func (c *fakeConn) Shard(key string) uint8 {
	if key == "" {
		return 0
	}
	return key[len(key)-1] % 64
}

// breakShard starts or stops failing the calls for the shard of key.
func (c *fakeConn) breakShard(key string, fails bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.broken == nil {
		c.broken = map[uint8]bool{}
	}
	c.broken[c.Shard(key)] = fails
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

func (c *fakeConn) begin(ctx context.Context, name string, keys ...string) error {
	if c.yield {
		for range rand.N(20) {
			runtime.Gosched()
		}
	}
	c.mu.Lock()
	failing, hangs := c.failing, c.hangs
	for _, key := range keys {
		if c.Shard(key) != c.Shard(keys[0]) {
			panic("the keys of one call are of several shards")
		}
		failing = failing || c.broken[c.Shard(key)]
	}
	c.mu.Unlock()
	c.fakeStore.mu.Lock()
	c.calls[name]++
	c.fakeStore.mu.Unlock()
	if failing {
		if hangs > 0 {
			time.Sleep(hangs)
		}
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
		it = &fakeItem{fences: map[string]time.Time{}, versions: map[uint32]*fakeValue{}}
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

func (it *fakeItem) drop() { clear(it.versions) }

func (it *fakeItem) of(version uint32) *fakeValue {
	v := it.versions[version]
	if v == nil {
		v = &fakeValue{}
		it.versions[version] = v
	}
	return v
}

func (c *fakeConn) publish(key string) {
	for conn, heard := range c.conns {
		if conn != c && heard != nil {
			heard(key)
		}
	}
}

func (c *fakeConn) Acquire(ctx context.Context, asks ...cacheaside.Request) ([]cacheaside.Response, error) {
	var keys []string
	for _, ask := range asks {
		keys = append(keys, ask.Key)
	}
	if err := c.begin(ctx, "Acquire", keys...); err != nil {
		return nil, err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	var looks []cacheaside.Response
	for _, ask := range asks {
		looks = append(looks, c.look(ask))
	}
	return looks, nil
}

func (c *fakeConn) look(ask cacheaside.Request) (look cacheaside.Response) {
	it, now := c.item(ask.Key), time.Now()
	if it.fenced() {
		return cacheaside.Response{State: cacheaside.Fenced}
	}
	if it.epoch != c.epoch {
		it.drop()
		it.epoch = c.epoch
	}
	v := it.of(ask.Version)
	paused := now.Before(v.failed.Add(ask.Pause))
	if v.value != nil && now.Before(v.keep) {
		look.Value, look.Fresh = v.value, v.fresh.Sub(now)
		switch {
		case look.Fresh > 0 && (!ask.Refresh || paused):
			look.State = cacheaside.Hit
			return look
		case paused:
			look.State = cacheaside.Failed
			return look
		}
	}
	waited, err := strconv.Atoi(ask.WaitToken)
	switch {
	case err == nil && v.failures > waited:
		look.State = cacheaside.Failed
		return look
	case v.token != "" && v.token != ask.Token && now.Before(v.leased):
		look.State, look.Wait, look.WaitToken = cacheaside.Busy, v.leased.Sub(now), strconv.Itoa(v.failures)
		return look
	}
	if v.generation == "" {
		c.generations++
		v.generation = strconv.Itoa(c.generations)
	}
	v.token, v.leased = ask.Token, now.Add(c.lease)
	look.State, look.Grant = cacheaside.Leased, v.generation
	return look
}

func (c *fakeConn) Fill(ctx context.Context, values ...cacheaside.Entry) ([]bool, error) {
	var keys []string
	for _, v := range values {
		keys = append(keys, v.Key)
	}
	if err := c.begin(ctx, "Fill", keys...); err != nil {
		return nil, err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	var current []bool
	for _, v := range values {
		it, now := c.item(v.Key), time.Now()
		is := it.of(v.Version)
		ok := it.epoch == c.epoch && !it.fenced() && v.Grant != "" && (v.Grant == is.generation || v.Grant == is.filled)
		if ok && v.Grant == is.generation {
			*is = fakeValue{value: v.Value, fresh: now.Add(v.Fresh), keep: now.Add(v.Keep), filled: v.Grant,
				failures: is.failures}
		}
		current = append(current, ok)
	}
	return current, nil
}

func (c *fakeConn) Release(ctx context.Context, ask cacheaside.Request, failed bool) error {
	if err := c.begin(ctx, "Release", ask.Key); err != nil {
		return err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	if v := c.item(ask.Key).of(ask.Version); v.token == ask.Token {
		v.token = ""
		if failed {
			v.failed = time.Now()
			v.failures++
		}
	}
	return nil
}

func (c *fakeConn) Invalidate(ctx context.Context, keys ...string) error {
	if err := c.begin(ctx, "Invalidate", keys...); err != nil {
		return err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	for _, key := range keys {
		c.item(key).drop()
		c.publish(key)
	}
	return nil
}

func (c *fakeConn) Expire(ctx context.Context, keys ...string) error {
	if err := c.begin(ctx, "Expire", keys...); err != nil {
		return err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	for _, key := range keys {
		for _, v := range c.item(key).versions {
			v.token, v.generation, v.filled, v.failed = "", "", "", time.Time{}
			if v.fresh.After(time.Now()) {
				v.fresh = time.Now()
			}
		}
		c.publish(key)
	}
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
	if err := c.begin(ctx, "Fence", key); err != nil {
		return 0, err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	it := c.item(key)
	it.drop()
	if _, late := it.fences[token]; !late {
		it.fences[token] = time.Now().Add(2 * c.write)
	}
	c.publish(key)
	return c.write, nil
}

func (c *fakeConn) Unfence(ctx context.Context, key, token string) error {
	if err := c.begin(ctx, "Unfence", key); err != nil {
		return err
	}
	c.fakeStore.mu.Lock()
	defer c.fakeStore.mu.Unlock()
	it := c.item(key)
	it.drop()
	if _, stood := it.fences[token]; stood {
		delete(it.fences, token)
	} else {
		it.fences[token] = time.Time{}
	}
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

// An unwatched Store has no subscription, so memory is not used.
type unwatched struct{ cacheaside.Store }

func (unwatched) Watch(ctx context.Context, _ func(), _ func(string)) error {
	<-ctx.Done()
	return ctx.Err()
}

// tier returns a Store for a Cache that has its values in "memory", in the "store", or in "both".
func (s *fakeStore) tier(name string) cacheaside.Store {
	if name == "memory" {
		return nil
	}
	return watchedIf(name == "both", s.connect())
}

// watchedIf returns s, or an unwatched s.
func watchedIf(watched bool, s cacheaside.Store) cacheaside.Store {
	if watched {
		return s
	}
	return unwatched{s}
}
