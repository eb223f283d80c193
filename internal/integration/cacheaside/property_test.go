package cacheaside_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/internal/integration/services"
)

// A record is one key of the source, with the promises that the test has recorded.
type record struct {
	promised atomic.Int64 // no Get that starts now may return an older version
}

func (r *record) promise(version int64) {
	for {
		old := r.promised.Load()
		if old >= version || r.promised.CompareAndSwap(old, version) {
			return
		}
	}
}

// A trial searches for values that are older than promised.
type trial struct {
	writers, keys, reads int
	skip                 bool                                    // the readers skip memory
	processes            int                                     // each has a Cache and a share of the readers and writers
	invalidate           bool                                    // commit, then Invalidate, rather than Write
	crash                bool                                    // one writer in five dies after its commit
	breakIt              func(cacheaside.Store) cacheaside.Store // nil: nothing is broken
	store                func(*redisstore.Config)
	during               func() // runs along with the writers
}

// A listening Store can report when it has received all messages published so far.
type listening struct {
	cacheaside.Store
	mu    sync.Mutex
	heard map[string]chan struct{}
}

func (l *listening) Watch(ctx context.Context, up func(), heard func(string)) error {
	return l.Store.Watch(ctx, func() {
		up() // memory is cleared, so missed messages do not matter
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, ch := range l.heard {
			close(ch)
		}
		clear(l.heard)
	}, func(key string) {
		heard(key)
		l.mu.Lock()
		defer l.mu.Unlock()
		if ch := l.heard[key]; ch != nil {
			close(ch)
			delete(l.heard, key)
		}
	})
}

// catchUp returns when l has received all messages that were published before.
func (l *listening) catchUp(ctx context.Context, from cacheaside.Store) error {
	key, ch := fmt.Sprintf("mark-%x", rand.Uint64()), make(chan struct{})
	l.mu.Lock()
	l.heard[key] = ch
	l.mu.Unlock()
	if err := from.Invalidate(ctx, key); err != nil {
		return err
	}
	<-ch
	return nil
}

// untoldKey is the key of a value in the ctx of a Write, which records that the invalidation did not reach the Store.
type untoldKey struct{}

// dying is the Store of a process that dies before its Unfence.
type dying struct{ cacheaside.Store }

var errDied = errors.New("died")

func (dying) Unfence(context.Context, string, string) error { return errDied }

// run counts the Gets that returned a value older than promised. In memory, the updates of the same process promise;
// without memory, the updates of all processes do. A writer that died after its commit promises as well, because its
// fence was in place.
func (tr trial) run(t *testing.T, addr string) (violations, writes int64) {
	prefix := newPrefix(t)
	type proc struct {
		cache   *cacheaside.Cache[int, int64]
		ears    *listening
		dying   *cacheaside.Cache[int, int64]
		records []record
	}
	committed := make([]atomic.Int64, tr.keys)
	load := func(ctx context.Context, key int) (int64, error) {
		v := committed[key].Load()
		for range rand.N(3) { // between reading the row and returning it
			runtime.Gosched()
		}
		return v, nil
	}
	procs := make([]proc, tr.processes)
	for i := range procs {
		p := newProcess(t, addr)
		change := func(cfg *redisstore.Config) {
			if tr.store != nil {
				tr.store(cfg)
			}
		}
		var s cacheaside.Store = p.store(prefix, change)
		if tr.breakIt != nil {
			s = tr.breakIt(s)
		}
		procs[i].ears = &listening{Store: s, heard: map[string]chan struct{}{}}
		procs[i].records = make([]record, tr.keys)
		procs[i].cache = cacheaside.New(cacheaside.Config[int, int64]{
			Load: load, Store: procs[i].ears, ErrorPause: 20 * time.Millisecond,
		})
		procs[i].cache.Observe(func(ctx context.Context, e cacheaside.Event) {
			if untold, ok := ctx.Value(untoldKey{}).(*bool); ok && e.Kind == cacheaside.EventNotPropagated {
				*untold = true
			}
		})
		awaitWatch(t, procs[i].cache)
		defer procs[i].cache.Close()
		if tr.crash {
			var s cacheaside.Store = p.store(prefix, change)
			if tr.breakIt != nil {
				s = tr.breakIt(s)
			}
			// Its retries never succeed.
			procs[i].dying = cacheaside.New(cacheaside.Config[int, int64]{
				Load: load, Store: dying{s}, ErrorPause: cacheaside.None,
			})
		}
	}
	promise := func(by, key int, version int64) {
		for i := range procs {
			if i == by || tr.skip {
				procs[i].records[key].promise(version)
			}
		}
	}
	var bad, written atomic.Int64
	var reading, writing sync.WaitGroup
	var done, settled atomic.Bool
	const readers = 8
	for w := range tr.writers {
		by := w % tr.processes
		writing.Go(func() {
			p := procs[by]
			own := newProcess(t, addr)
			client, other := own.client, own.store(prefix)
			for i := 0; !done.Load(); i++ {
				key := (w*7 + i) % tr.keys
				var version int64
				untold := false
				commit := func(ctx context.Context) error {
					runtime.Gosched()
					if tr.crash { // others come and go between the fence and the commit
						for range rand.N(4) {
							_ = client.Ping(ctx).Err()
						}
					}
					version = committed[key].Add(1)
					runtime.Gosched()
					return nil
				}
				var err error
				switch {
				case tr.crash && rand.N(5) == 0:
					err = p.dying.Write(t.Context(), key, commit)
					if err == nil && !tr.skip { // for memory, after the message about the fence
						err = p.ears.catchUp(t.Context(), other)
					}
				case tr.invalidate:
					_ = commit(t.Context())
					err = p.cache.Invalidate(t.Context(), key)
				default:
					err = p.cache.Write(context.WithValue(t.Context(), untoldKey{}, &untold), key, commit)
				}
				var late *cacheaside.TimeoutError
				switch {
				case err == nil && (!untold || tr.during == nil):
					promise(by, key, version)
				case errors.As(err, &late) && version == 0:
					continue // the machine stopped for longer than the fence lasts: nothing was written
				case errors.Is(err, errDied):
					continue // the same after the commit: the error means that nothing is promised
				case tr.during == nil:
					t.Errorf("write: %v", err)
					return
				default: // the invalidation did not reach Redis, which may have lost the fence; only this process knows
					p.records[key].promise(version)
				}
				written.Add(1)
				if tr.crash { // so that the value of a dead writer can be read
					for range rand.N(8) {
						_ = client.Ping(t.Context()).Err()
					}
				}
			}
		})
	}
	for r := range readers {
		p := procs[r%tr.processes]
		reading.Go(func() {
			for i := 0; i < tr.reads/readers || !settled.Load(); i++ {
				key := i % tr.keys
				floor := p.records[key].promised.Load()
				v, _, err := p.cache.GetWith(t.Context(), key, cacheaside.GetOptions{SkipMemory: tr.skip})
				if err != nil {
					t.Errorf("get: %v", err)
					return
				}
				if v < floor {
					bad.Add(1)
				}
			}
		})
	}
	if tr.during != nil {
		tr.during()
	}
	settled.Store(true)
	reading.Wait()
	done.Store(true)
	writing.Wait()
	return bad.Load(), written.Load()
}

// quickly makes the fence of a writer that died fall soon.
func quickly(cfg *redisstore.Config) { cfg.WriteTimeout = 100 * time.Millisecond }

// shortLease makes nearly every load outlast its lease.
func shortLease(cfg *redisstore.Config) { cfg.LeaseTTL = 50 * time.Microsecond }

func TestGetSeesReturnedWrite(t *testing.T) {
	addr := services.Redis(t)
	for name, tr := range map[string]trial{
		"redis":                         {writers: 4, keys: 8, reads: 5_000, skip: true, processes: 2},
		"redis, three writers, one key": {writers: 3, keys: 1, reads: 5_000, skip: true, processes: 3},
		"redis, invalidated": {writers: 3, keys: 2, reads: 5_000, skip: true, processes: 3,
			invalidate: true},
		"redis, crashes": {writers: 3, keys: 4, reads: 5_000, skip: true, processes: 3, crash: true,
			store: quickly},
		"redis, loads that outlast their lease": {writers: 3, keys: 2, reads: 5_000, skip: true, processes: 3,
			invalidate: true, store: shortLease},
		"both, loads that outlast their lease": {writers: 3, keys: 2, reads: 5_000, processes: 3, invalidate: true,
			store: shortLease},
		"both":                         {writers: 4, keys: 8, reads: 5_000, processes: 2},
		"both, three writers, one key": {writers: 3, keys: 1, reads: 5_000, processes: 3},
		"both, invalidated":            {writers: 3, keys: 2, reads: 5_000, processes: 3, invalidate: true},
		"both, crashes": {writers: 3, keys: 4, reads: 5_000, processes: 3, crash: true,
			store: quickly},
	} {
		t.Run(name, func(t *testing.T) {
			violations, writes := tr.run(t, addr)
			t.Logf("%d reads, %d writes, %d violations", tr.reads, writes, violations)
			require.Zero(t, violations)
		})
	}
}

func TestNoGetIsOlderWhileRedisIsKilledAndRestarted(t *testing.T) {
	for name, tr := range map[string]trial{
		"redis": {writers: 3, keys: 4, reads: 5_000, skip: true, processes: 3},
		"both":  {writers: 3, keys: 4, reads: 5_000, processes: 3},
	} {
		t.Run(name, func(t *testing.T) {
			server := services.NewRedis(t)
			tr.during = func() {
				for range 4 {
					time.Sleep(150 * time.Millisecond) // traffic, with Redis
					server.Kill()
					time.Sleep(150 * time.Millisecond) // without memory
					server.Start()
				}
				time.Sleep(150 * time.Millisecond)
			}
			violations, writes := tr.run(t, server.Addr)
			t.Logf("4 restarts, %d writes, %d violations", writes, violations)
			require.Zero(t, violations)
		})
	}
}

// An unleased Store fills with the current grant, whichever process has it.
type unleased struct{ cacheaside.Store }

func (s unleased) Fill(ctx context.Context, values ...cacheaside.Entry) ([]bool, error) {
	for i, v := range values {
		token := fmt.Sprint(rand.Uint64())
		for {
			looks, err := s.Acquire(ctx, cacheaside.Request{Key: v.Key, Token: token, Refresh: true})
			if err != nil || looks[0].State == cacheaside.Fenced {
				return make([]bool, len(values)), err
			}
			if looks[0].State == cacheaside.Leased {
				values[i].Grant = looks[0].Grant
				break
			}
			time.Sleep(time.Millisecond)
		}
	}
	return s.Store.Fill(ctx, values...)
}

// A renewed Store extends the lease of a long load by acquiring it again with the same token. After an invalidation,
// this grants a right that was revoked.
type renewed struct {
	cacheaside.Store
	tokens *sync.Map // of each grant
}

func (s renewed) Acquire(ctx context.Context, asks ...cacheaside.Request) ([]cacheaside.Response, error) {
	looks, err := s.Store.Acquire(ctx, asks...)
	for i, look := range looks {
		if look.State == cacheaside.Leased {
			s.tokens.Store(look.Grant, asks[i].Token)
		}
	}
	return looks, err
}

func (s renewed) Fill(ctx context.Context, values ...cacheaside.Entry) ([]bool, error) {
	for i, v := range values {
		token, _ := s.tokens.Load(v.Grant)
		looks, err := s.Store.Acquire(ctx, cacheaside.Request{Key: v.Key, Token: token.(string), Refresh: true})
		if err != nil {
			return nil, err
		}
		if looks[0].State == cacheaside.Leased {
			values[i].Grant = looks[0].Grant
		}
	}
	return s.Store.Fill(ctx, values...)
}

// unfenced writes without a fence.
type unfenced struct{ cacheaside.Store }

func (unfenced) Fence(context.Context, string, string) (time.Duration, error) {
	return time.Minute, nil
}

// uncounted has one fence for all writers of a key: the first to be done takes it
// down.
type uncounted struct{ cacheaside.Store }

func (s uncounted) Fence(ctx context.Context, key, _ string) (time.Duration, error) {
	return s.Store.Fence(ctx, key, "the fence")
}

func (s uncounted) Unfence(ctx context.Context, key, _ string) error {
	return s.Store.Unfence(ctx, key, "the fence")
}

// The tests above are worth something only if they fail where a rule is broken.
func TestNoGetIsOlderFailsWithoutEachRule(t *testing.T) {
	addr := services.Redis(t)
	for name, tr := range map[string]trial{
		"no lease": {writers: 3, keys: 1, reads: 1_000, skip: true, processes: 3, invalidate: true,
			breakIt: func(s cacheaside.Store) cacheaside.Store { return unleased{s} }},
		"lease acquired again": {writers: 3, keys: 1, reads: 1_000, skip: true, processes: 3, invalidate: true,
			breakIt: func(s cacheaside.Store) cacheaside.Store { return renewed{s, new(sync.Map)} }},
		"no fence": {writers: 3, keys: 4, reads: 1_000, skip: true, processes: 3, crash: true,
			breakIt: func(s cacheaside.Store) cacheaside.Store { return unfenced{s} }},
		"no fence, memory": {writers: 3, keys: 4, reads: 5_000, processes: 3, crash: true,
			breakIt: func(s cacheaside.Store) cacheaside.Store { return unfenced{s} }},
		"fence without count": {writers: 3, keys: 1, reads: 1_000, skip: true, processes: 3, crash: true,
			breakIt: func(s cacheaside.Store) cacheaside.Store { return uncounted{s} }},
	} {
		t.Run(name, func(t *testing.T) {
			for range 20 {
				violations, writes := tr.run(t, addr)
				t.Logf("%d reads, %d writes, %d violations", tr.reads, writes, violations)
				if violations > 0 {
					return
				}
			}
			t.Error("a broken rule was not detected")
		})
	}
}
