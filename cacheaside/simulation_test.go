package cacheaside_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/internal/sim"
)

// TestCacheSimulation runs one to three processes with a Store that loses, delays and reorders calls and responses.
// Writes and invalidations occur during loads, and subscriptions are lost and restored. No Get returns a value older
// than promised to it. After the faults, each call returns long before LoadTimeout, with a bounded number of calls to
// the Store, and each process reads the committed values.
func TestCacheSimulation(t *testing.T) {
	sim.Simulation{Name: "cacheaside", Seeds: 300, Run: simulateCache}.Test(t)
}

// A fair has the processes of a simulation, the values of their source, and the values that were promised.
type fair struct {
	*sim.World
	store     *fakeStore // nil: no Store
	memory    bool       // otherwise each Get skips it, and sees the writes of all processes
	processes []*stall
	keys      int

	mu      sync.Mutex
	source  [fairKeys]int64
	all     [fairKeys]floor // promised to every process
	ops     int
	pending map[int]string
}

const (
	fairKeys = 3
	fairStep = 250 * time.Millisecond // longer than the random pauses between two queries of the Store
	pairs    = 100                    // a load of a key of pairs or more makes two Gets
)

// A floor is the oldest value that may be read. The code uses the clock, which does not order the events of one
// instant. So a promise counts from the next instant on.
type floor struct {
	now, was int64
	at       time.Duration // of now
}

func (f *floor) raise(v int64, at time.Duration) {
	if at > f.at {
		f.was, f.at = f.now, at
	}
	f.now = max(f.now, v)
}

func (f *floor) before(at time.Duration) int64 {
	if at > f.at {
		return f.now
	}
	return f.was
}

type stall struct {
	*fair
	name     string
	cache    *cacheaside.Cache[int, int64]
	conn     *simConn
	promised [fairKeys]floor
}

func simulateCache(w *sim.World) {
	f := &fair{World: w, memory: true, pending: make(map[int]string)}
	w.Step, w.Trouble, w.Hold, w.Meddle, w.Most = fairStep, 5*w.Choose(10), 1+w.Choose(30), 10, 500
	steps := func(n ...int) time.Duration { return time.Duration(sim.Pick(w, n...)) * fairStep }
	cfg := cacheaside.Config[int, int64]{
		TTL: steps(8, 2, 1, 40), Jitter: cacheaside.None, StaleWhileRevalidate: steps(0, 0, 4),
		StaleIfError: steps(0, 100, 100), ErrorPause: sim.Pick(w, cacheaside.None, fairStep, 4*fairStep),
		LoadTimeout: 100*fairStep + 3*time.Millisecond, FinishLoads: w.Chance(50),
	}
	if cfg.StaleIfError > 0 {
		cfg.SoftTimeout = steps(0, 1, 1, 3)
	}
	n := 1 + w.Choose(3)
	switch w.Choose(6) {
	case 0, 1, 2:
		f.store = newFakeStore()
		w.Chance(30) // the draw of a former setting; without it, the corpus would run other cases
	case 3, 4:
		f.store, f.memory = newFakeStore(), false
	default:
		n = 1
	}
	f.keys = fairKeys
	if f.store != nil && f.memory && w.Chance(80) {
		// Loads of one key that has a stale value start and end in any order relative to its writes. The fences of process b
		// stay in place for long, and the messages about them are late.
		f.keys, n = 1, 2+w.Choose(2)
		cfg.TTL, cfg.StaleWhileRevalidate, cfg.StaleIfError, cfg.SoftTimeout = fairStep, 0, 100*fairStep, fairStep
		w.Hold, w.Meddle, w.Idle = 4+w.Choose(40), 3, 60
		w.Prone = func(label string) int {
			switch {
			case strings.Contains(label, "hears"):
				return 70
			case strings.HasPrefix(label, "b writes"), strings.Contains(label, " has "),
				strings.Contains(label, "asks") && strings.HasSuffix(label, "answer"):
				return 50
			}
			return 3
		}
	}
	if f.store != nil {
		f.store.lease, f.store.write = 12*fairStep, 40*fairStep
	}
	for i := range n {
		p := &stall{fair: f, name: string(rune('a' + i))}
		cfg.Load = p.load
		if f.store != nil {
			p.conn = &simConn{fakeConn: f.store.connect(), w: w, name: p.name}
			cfg.Store = p.conn
		}
		p.cache = cacheaside.New(cfg)
		asked := 0
		p.cache.SetChance(func(below time.Duration) time.Duration { // no two alike
			f.mu.Lock()
			defer f.mu.Unlock()
			asked++
			return below * time.Duration(asked*389%997) / 997
		})
		f.processes = append(f.processes, p)
	}
	defer func() {
		w.End()
		for _, p := range f.processes {
			_ = p.cache.Close()
		}
	}()
	get, write := sim.Act{Name: "get", Do: func() { f.some().get(f.key(), w.Choose(8)) }},
		sim.Act{Name: "write", Do: func() { f.some().write(f.key()) }}
	w.Acts = []sim.Act{
		get, get, get, get, get, write, write,
		{Name: "get of two keys", Do: func() { f.some().get(pairs+w.Choose(2), 0) }},
		{Name: "invalidate", Do: func() { f.some().invalidate(f.key(), false) }},
		{Name: "commit and invalidate", Do: func() { f.some().invalidate(f.key(), true) }},
		{Name: "invalidate all", Do: func() { f.some().invalidate(-1, false) }},
		{Name: "expire", Do: func() {
			p, key := f.some(), f.key()
			defer p.begin("expire")()
			_ = p.cache.Expire(context.Background(), key)
		}},
		{Name: "subscription lost", Do: func() {
			if p := f.some(); p.conn != nil {
				p.conn.lose()
			}
		}},
	}
	if w.Prone != nil {
		w.Acts = append(w.Acts, slices.Repeat([]sim.Act{get, get, get, get, get, write, write}, 2)...)
	}
	w.Drive(60*fairStep, nil)

	w.Heal()
	before := w.Counts().Calls
	idle := func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.pending) == 0
	}
	most := 30 * fairStep
	if !w.Drive(most, idle) && !w.Failed() {
		w.Fail("liveness", "after %v without trouble there are %v", most, f.pending)
	}
	// By then all invalidations have reached the Store, including those of a Write that are retried after ErrorPause. No
	// value from before is served as stale.
	settled := cfg.TTL + cfg.StaleWhileRevalidate + max(cfg.ErrorPause, 0) + fairStep
	w.Drive(settled, nil)
	for round := range 2 {
		for _, p := range f.processes {
			for _, key := range []int{0, 1, 2, pairs, pairs + 1} {
				go p.get(key, 8)
				if !w.Drive(20*fairStep, idle) && !w.Failed() {
					w.Fail("liveness", "%s: a Get of %d takes longer than %v", p.name, key, 20*fairStep)
				}
			}
		}
		if round == 0 { // earlier failures are no longer stored
			w.Drive(cfg.TTL+cfg.StaleWhileRevalidate+5*fairStep, nil)
		}
	}
	// Each load that was invalidated polls the Store until a lease that was not released has expired.
	if calls := w.Counts().Calls - before; calls > 1000 {
		w.Fail("work", "%d calls after the troubles", calls)
	}
}

func (f *fair) some() *stall { return f.processes[f.Choose(len(f.processes))] }

func (f *fair) key() int { return f.Choose(f.keys) }

// begin records that an operation is in flight until done is called.
func (f *fair) begin(what string) (done func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ops++
	id := f.ops
	f.pending[id] = what
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.pending, id)
	}
}

// get calls Get, depending on how: 7 has a short timeout, 6 skips memory, 5 calls GetMany, and 8 must return the
// committed value.
func (p *stall) get(key, how int) {
	what := fmt.Sprintf("%s gets %d", p.name, key)
	defer p.begin(what)()
	keys := []int{key}
	if key >= pairs {
		keys = []int{0, 1 + key - pairs}
	}
	p.mu.Lock()
	var least int64
	for _, k := range keys {
		switch {
		case how == 8:
			least += p.source[k]
		default:
			least += max(p.promised[k].before(p.Now()), p.all[k].before(p.Now()))
		}
	}
	p.mu.Unlock()
	ctx, cancel := context.Background(), func() {}
	if how == 7 {
		ctx, cancel = context.WithTimeout(ctx, 2*fairStep+7*time.Millisecond)
	}
	defer cancel()
	var v int64
	var err error
	switch {
	case how == 6, !p.memory:
		v, _, err = p.cache.GetWith(ctx, key, cacheaside.GetOptions{SkipMemory: true})
	case how == 5:
		var got map[int]int64
		if got, err = p.cache.GetMany(ctx, []int{key}); err == nil {
			v = got[key]
		}
	default:
		v, err = p.cache.Get(ctx, key)
	}
	switch {
	case err != nil && how == 8:
		p.Fail("error", "%s: %v", what, err)
	case err == nil && v < least && key < pairs:
		p.Fail("old", "%s: %d, but %d was promised", what, v, least)
	case err == nil && v > 1_000_000:
		p.Fail("unknown", "%s: %d", what, v)
	}
	p.Note("%s: %d %v", what, v, err)
}

// load reads the source. Its answer may be late.
func (p *stall) load(ctx context.Context, key int) (int64, error) {
	if key >= pairs {
		var both sync.WaitGroup
		var v [2]int64
		var errs [2]error
		for i, k := range []int{0, 1 + key - pairs} {
			both.Go(func() {
				_, _ = p.Call(ctx, fmt.Sprintf("%s loads %d by %d", p.name, key, k))
				v[i], errs[i] = p.cache.Get(ctx, k)
			})
		}
		both.Wait()
		return v[0] + v[1], errors.Join(errs[0], errs[1])
	}
	label := fmt.Sprintf("%s loads %d", p.name, key)
	if fault, err := p.Call(ctx, label, "fails"); fault != "" || err != nil {
		return 0, errors.Join(errStore, err)
	}
	p.mu.Lock()
	v := p.source[key]
	p.mu.Unlock()
	if fault, err := p.Call(ctx, fmt.Sprintf("%s has %d of %d", p.name, v, key), "fails"); fault != "" || err != nil {
		return 0, errors.Join(errStore, err)
	}
	return v, nil
}

func (p *stall) commit(key int) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.source[key]++
	return p.source[key]
}

// promise records that this process no longer reads a value of key older than v. If the invalidation has reached the
// Store, the same holds for the other processes that skip memory.
func (p *stall) promise(key int, v int64, told bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.promised[key].raise(v, p.Now())
	if told && !p.memory {
		p.all[key].raise(v, p.Now())
	}
}

func (p *stall) write(key int) {
	what := fmt.Sprintf("%s writes %d", p.name, key)
	defer p.begin(what)()
	p.mu.Lock()
	v := p.source[key]
	p.mu.Unlock()
	err := p.cache.Write(context.Background(), key, func(ctx context.Context) error {
		if fault, err := p.Call(ctx, what, "fails"); fault != "" || err != nil {
			return errors.Join(errStore, err)
		}
		v = p.commit(key)
		p.Note("%s has %d", what, v)
		if fault, _ := p.Call(context.Background(), what+": answer", "lost"); fault != "" {
			return errStore
		}
		return nil
	})
	p.promise(key, v, !errors.Is(err, cacheaside.ErrNotPropagated))
	p.Note("%s: %d %v", what, v, err)
}

// invalidate invalidates key, or all with -1.
func (p *stall) invalidate(key int, commit bool) {
	what := fmt.Sprintf("%s invalidates %d", p.name, key)
	defer p.begin(what)()
	if commit {
		p.commit(key)
	}
	p.mu.Lock()
	source := p.source
	p.mu.Unlock()
	var err error
	if key < 0 {
		err = p.cache.InvalidateAll(context.Background())
	} else {
		err = p.cache.Invalidate(context.Background(), key)
	}
	for k, v := range source {
		if key < 0 || key == k {
			p.promise(k, v, err == nil)
		}
	}
	p.Note("%s: %v", what, err)
}

// simConn is a fakeConn on which everything takes as long as the scheduler wants.
type simConn struct {
	*fakeConn
	w    *sim.World
	name string

	lmu  sync.Mutex
	lost chan struct{} // nil without a subscription
}

// call parks before and after do.
func (c *simConn) call(ctx context.Context, what string, do func()) error {
	fault, err := c.w.Call(ctx, c.name+" "+what, "fails", "lost")
	switch {
	case err != nil:
		return err
	case fault == "fails" || fault == "over":
		return errStore
	}
	do()
	if fault == "lost" {
		return errStore
	}
	if fault, err = c.w.Call(ctx, c.name+" "+what+": answer"); fault == "over" {
		return errStore
	}
	return err
}

func (c *simConn) Acquire(ctx context.Context, asks ...cacheaside.Request) (looks []cacheaside.Response, err error) {
	what := "asks"
	for _, ask := range asks {
		what += " " + ask.Key
	}
	var inner error
	if err = c.call(ctx, what, func() { looks, inner = c.fakeConn.Acquire(context.Background(), asks...) }); err != nil {
		return nil, err
	}
	return looks, inner
}

func (c *simConn) Fill(ctx context.Context, values ...cacheaside.Entry) (current []bool, err error) {
	what := "fills"
	for _, v := range values {
		what += " " + v.Key
	}
	if err = c.call(ctx, what, func() { current, _ = c.fakeConn.Fill(context.Background(), values...) }); err != nil {
		return nil, err
	}
	return current, nil
}

func (c *simConn) Release(ctx context.Context, ask cacheaside.Request, failed bool) error {
	return c.call(ctx, "releases "+ask.Key, func() { _ = c.fakeConn.Release(context.Background(), ask, failed) })
}

func (c *simConn) Invalidate(ctx context.Context, keys ...string) error {
	return c.call(ctx, fmt.Sprint("invalidates ", keys),
		func() { _ = c.fakeConn.Invalidate(context.Background(), keys...) })
}

func (c *simConn) Expire(ctx context.Context, keys ...string) error {
	return c.call(ctx, fmt.Sprint("expires ", keys), func() { _ = c.fakeConn.Expire(context.Background(), keys...) })
}

func (c *simConn) InvalidateAll(ctx context.Context) error {
	return c.call(ctx, "invalidates all", func() { _ = c.fakeConn.InvalidateAll(context.Background()) })
}

func (c *simConn) Fence(ctx context.Context, key, token string) (d time.Duration, err error) {
	if err = c.call(ctx, "fences "+key, func() { d, _ = c.fakeConn.Fence(context.Background(), key, token) }); err != nil {
		return 0, err
	}
	return d, nil
}

func (c *simConn) Unfence(ctx context.Context, key, token string) error {
	return c.call(ctx, "unfences "+key, func() { _ = c.fakeConn.Unfence(context.Background(), key, token) })
}

func (c *simConn) lose() {
	c.lmu.Lock()
	defer c.lmu.Unlock()
	if c.lost != nil {
		close(c.lost)
		c.lost = nil
	}
}

// Watch delivers each message when the scheduler wants, in order.
func (c *simConn) Watch(ctx context.Context, up func(), heard func(string)) error {
	if fault, err := c.w.Call(ctx, c.name+" watches", "fails"); fault != "" || err != nil {
		return errors.Join(errStore, err)
	}
	lost, messages := make(chan struct{}), make(chan string, 10_000)
	c.lmu.Lock()
	c.lost = lost
	c.lmu.Unlock()
	c.fakeStore.mu.Lock()
	c.conns[c.fakeConn] = func(key string) { messages <- key }
	c.fakeStore.mu.Unlock()
	defer func() {
		c.fakeStore.mu.Lock()
		delete(c.conns, c.fakeConn)
		c.fakeStore.mu.Unlock()
	}()
	up()
	ended := func() bool {
		select {
		case <-lost:
			return true
		default:
			return ctx.Err() != nil
		}
	}
	for {
		select {
		case key := <-messages:
			_, _ = c.w.Call(ctx, c.name+" hears of "+key)
			if ended() {
				return errStore
			}
			heard(key)
		case <-lost:
			return errStore
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
