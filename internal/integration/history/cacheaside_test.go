package history_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/anishathalye/porcupine"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
)

// A key of a cache is a register. A Get may return a committed value, but no value from before the last promise. A
// Write or an Invalidate that has returned promises the value committed by then. With memory, a promise holds in its
// process. For a Get that skips memory, it holds in all processes.
func TestCacheaside(t *testing.T) { search(t, &cacheTarget) }

var cacheTarget = target{name: "cacheaside", length: 4 * time.Second, worker: cacheWorker, begin: cacheBegin,
	check: cacheCheck}

type cachePlan struct {
	Memory, Store                         bool
	TTL, Stale, StaleIfError, SoftTimeout time.Duration
	ErrorPause, LoadTimeout               time.Duration
	Timeout, LeaseTTL, WriteTimeout       time.Duration
	Load, Write                           time.Duration // usually the maximum
	Keys                                  int           // in use at the same time
	Slow, Failing, Lost, Late             int           // percentage of loads, loads, scripts, and replies
	Finish                                bool
	Restarts                              bool // Redis restarts without its data
	Network                               bool // a faulty network between the processes and Redis
	Readers, Writers                      int
	Pause, WritePause                     time.Duration // maximum pause of a reader, and of a writer
}

func cacheBegin(r *run) {
	rng := r.rng
	ms := func(of ...int) time.Duration { return time.Duration(of[rng.IntN(len(of))]) * time.Millisecond }
	p := cachePlan{
		TTL: ms(5, 50, 2000), Stale: ms(0, 1, 30), StaleIfError: ms(0, 50, 10_000), ErrorPause: ms(0, 2, 20, 100),
		LoadTimeout: ms(10, 100, 1000),
		Timeout:     ms(100, 250), Network: rng.IntN(2) == 0, LeaseTTL: ms(1, 10, 100), WriteTimeout: ms(20, 100),
		Load: ms(1, 5, 20, 100), Write: ms(1, 5, 20), Keys: []int{1, 2, 5, 10}[rng.IntN(4)],
		Failing: []int{0, 10, 40}[rng.IntN(3)], Lost: []int{0, 1, 5}[rng.IntN(3)], Late: []int{0, 5, 30}[rng.IntN(3)],
		Finish: rng.IntN(2) == 0, Restarts: rng.IntN(5) == 0, Readers: 8, Writers: 1 + rng.IntN(3),
		Slow: []int{20, 66}[rng.IntN(2)], Pause: 500 * time.Microsecond, WritePause: 10 * time.Millisecond,
	}
	if p.ErrorPause == 0 {
		p.ErrorPause = cacheaside.None
	}
	switch rng.IntN(8) {
	case 0:
		p.Memory = true
	case 1, 2, 3:
		p.Store = true
		if rng.IntN(3) > 0 { // loads start and end within the fences of writers that die after their change
			p.TTL, p.LoadTimeout, p.Failing, p.Late = ms(50, 2000), time.Second, min(p.Failing, 10), min(p.Late, 5)
			p.Load, p.Write, p.WriteTimeout = 5*time.Millisecond, 100*time.Millisecond, 100*time.Millisecond
			p.Keys, p.Pause, p.WritePause, r.calm = 2, 5*time.Millisecond, 60*time.Millisecond, 2*time.Second
		}
	default:
		p.Memory, p.Store = true, true
	}
	if p.StaleIfError > 0 {
		p.SoftTimeout = ms(0, 1, 1, 3)
	}
	processes := []int{1, 2, 2, 3, 4}[rng.IntN(5)]
	r.calm = ms(200, 800, 2000)
	if p.Memory && p.Store && rng.IntN(5) > 0 {
		// loads of a key that has a stale value start and end in any order relative to its writes
		p.TTL = ms(1, 2)
		p.Stale, p.StaleIfError, p.SoftTimeout = 0, 10*time.Second, time.Millisecond
		p.Load, p.Slow, p.Failing, p.LoadTimeout = 400*time.Millisecond, 20, min(p.Failing, 10), time.Second
		p.Timeout, p.Late, p.Lost = 250*time.Millisecond, 40, 0
		p.Write, p.WritePause, p.WriteTimeout = ms(5, 20), 60*time.Millisecond, 100*time.Millisecond
		p.Keys, p.Readers, p.Pause, p.Writers = 8, 32, 5*time.Millisecond, 4
		processes, r.calm = 2+rng.IntN(2), 2*time.Second
	}
	r.plan = p
	r.newSource()
	if !p.Store {
		r.start("")
		r.troubles = [][]trouble{r.disturb(50 * time.Millisecond)}
		return
	}
	server := services.NewRedis(r)
	var proxies []*faultproxy.Proxy
	for range processes {
		addr := server.Addr
		if p.Network {
			proxies = append(proxies, faultproxy.New(r, addr))
			addr = proxies[len(proxies)-1].Addr()
		}
		r.start(addr)
	}
	servers := []trouble{{"Redis stopped", func(rng *rand.Rand) {
		server.Pause()
		time.Sleep(between(rng, time.Millisecond, 2*p.Timeout))
		server.Resume()
	}}}
	if p.Restarts {
		servers = append(servers, trouble{"Redis restarted", func(*rand.Rand) {
			server.Kill()
			server.Start()
		}})
	}
	if p.Network {
		servers = append(servers, network(proxies, p.Timeout, 2*p.Timeout)...)
	}
	r.troubles = [][]trouble{r.disturb(4 * p.WriteTimeout), servers}
}

// The source of record is memory that the processes share, and that survives them: a
// value for each key.
const sourceSize = 1 << 20

func (r *run) newSource() {
	source, err := os.Create(filepath.Join(r.dir, "source"))
	require.NoError(r, err)
	require.NoError(r, source.Truncate(sourceSize))
	require.NoError(r, source.Close())
}

func openSource(dir string) *[sourceSize / 8]atomic.Int64 {
	f, err := os.OpenFile(filepath.Join(dir, "source"), os.O_RDWR, 0)
	if err != nil {
		panic(err)
	}
	defer f.Close()
	mem, err := syscall.Mmap(int(f.Fd()), 0, sourceSize, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	return (*[sourceSize / 8]atomic.Int64)(unsafe.Pointer(&mem[0]))
}

// A cacheOp is one operation on one key. Each key of a GetMany is a separate operation.
type cacheOp struct {
	Kind     string // get, write, commit (without the cache), invalidate, invalidate all, expire
	Key      int
	Value    int64 `json:",omitempty"` // the value read or written
	From, To int64 `json:",omitempty"` // when the source was changed; if To is 0, perhaps later or never
	Fenced   bool  `json:",omitempty"` // the fence was in place during the change
	Untold   bool  `json:",omitempty"` // the invalidation did not reach the Store
	Unfenced bool  `json:",omitempty"` // there was no fence either
	Died     bool  `json:",omitempty"` // the writer died before its Write returned
	Refused  bool  `json:",omitempty"` // the operation was not started
	Failed   bool  `json:",omitempty"` // no value
}

// Each key is used for a limited time, so its history is short.
const lifeOfKeys = 500 * time.Millisecond

type cacheProcess struct {
	cachePlan
	*worker
	*journal[cacheOp]
	source *[sourceSize / 8]atomic.Int64
	cache  *cacheaside.Cache[int, int64]
	dying  *cacheaside.Cache[int, int64] // never ends a Write in the Store; nil without a Store
	values atomic.Int64
	client *redis.Client
}

type opKey struct{}

var (
	errSource = errors.New("the source failed")
	errLost   = errors.New("the answer is lost")
)

func cacheWorker(ctx context.Context, w *worker) {
	p := &cacheProcess{worker: w, journal: newJournal[cacheOp](w), source: openSource(w.Dir)}
	if err := json.Unmarshal(w.Plan, &p.cachePlan); err != nil {
		panic(err)
	}
	cfg := cacheaside.Config[int, int64]{
		Load: p.load, TTL: p.TTL, StaleWhileRevalidate: p.Stale, StaleIfError: p.StaleIfError, SoftTimeout: p.SoftTimeout,
		ErrorPause:  p.ErrorPause,
		LoadTimeout: p.LoadTimeout, FinishLoads: p.Finish,
	}
	observe := func(ctx context.Context, e cacheaside.Event) {
		if op, ok := ctx.Value(opKey{}).(*cacheOp); ok {
			switch e.Kind {
			case cacheaside.EventNotPropagated:
				op.Untold = true
			case cacheaside.EventFenceFailed:
				op.Unfenced = true
			}
		}
	}
	if p.Store {
		p.client = redis.NewClient(&redis.Options{Addr: w.Addr, ContextTimeoutEnabled: true, MaxRetries: -1,
			DialTimeout: p.Timeout, PoolSize: 64})
		cfg.Store = redisstore.New(redisstore.Config{
			Prefix: "history", Eval: p.eval, Subscribe: p.subscribe,
			Timeout: p.Timeout, LeaseTTL: p.LeaseTTL, WriteTimeout: p.WriteTimeout, Heartbeat: 4 * p.Timeout,
		})
	}
	p.cache = cacheaside.New(cfg)
	p.cache.Observe(observe)
	if p.Store {
		cfg.Store, cfg.ErrorPause = dying{cfg.Store}, cacheaside.None
		p.dying = cacheaside.New(cfg)
		p.dying.Observe(observe)
	}
	var all sync.WaitGroup
	for i := range p.Readers {
		all.Go(func() { p.readAll(ctx, i, w.rand(i)) })
	}
	for i := range p.Writers {
		all.Go(func() { p.writeAll(ctx, p.Readers+i, w.rand(p.Readers+i)) })
	}
	all.Go(func() {
		rng := w.rand(-1)
		for pause(ctx, between(rng, 10*time.Millisecond, 200*time.Millisecond)) { // settings change during the history
			err := p.cache.Update(func(c *cacheaside.Config[int, int64]) {
				c.TTL = max(1, p.TTL*time.Duration(1+rng.IntN(3))/2)
				c.StaleWhileRevalidate = p.Stale * time.Duration(1+rng.IntN(3)) / 2
			})
			if err != nil {
				panic(err)
			}
		}
	})
	all.Wait()
	_ = p.cache.Close()
}

// A dying Store belongs to a writer that dies after its commit. Later calls do nothing. If they returned an error,
// later writers would get no fences.
type dying struct{ cacheaside.Store }

func (dying) Unfence(context.Context, string, string) error { return nil }
func (dying) Invalidate(context.Context, ...string) error   { return nil }

// eval loses some requests, some answers, and delivers some requests late.
func (p *cacheProcess) eval(ctx context.Context, script string, keys []string, args ...any) (any, error) {
	run := func(ctx context.Context) (any, error) {
		return resilienceredis.Eval(p.client)(ctx, script, keys, args...)
	}
	of := 100
	if ctx.Value(opKey{}) == nil {
		of = 50_000 // not for writes of a key: after a failure, a shard or the whole Store is not used for a pause
	}
	if rand.IntN(of) >= p.Lost {
		if ctx.Value(opKey{}) == nil && rand.IntN(100) < p.Late {
			pause(ctx, rand.N(p.Timeout/8))
			defer func() { pause(ctx, rand.N(p.Timeout/8)) }()
		}
		return run(ctx)
	}
	switch rand.IntN(3) {
	case 0:
	case 1:
		_, _ = run(ctx)
	default:
		time.AfterFunc(rand.N(4*p.Timeout), func() { _, _ = run(context.WithoutCancel(ctx)) })
	}
	return nil, errLost
}

func (p *cacheProcess) subscribe(ctx context.Context, channel string, subscribed func(), message func(string)) error {
	return resilienceredis.Subscribe(p.client)(ctx, channel, subscribed, message)
}

func (p *cacheProcess) load(ctx context.Context, key int) (int64, error) {
	d := time.Duration(rand.ExpFloat64() * float64(p.Load) / 4)
	if rand.IntN(100) >= p.Slow {
		d = 0
	}
	pause(ctx, d/2) // the query is in flight
	v := p.source[key].Load()
	pause(ctx, d/2) // the response is in flight
	if rand.IntN(100) < p.Failing {
		return 0, errSource
	}
	return v, ctx.Err()
}

func (p *cacheProcess) key(rng *rand.Rand) int {
	return (int(now()/int64(lifeOfKeys))*p.Keys + rng.IntN(p.Keys)) % (sourceSize / 8)
}

func (p *cacheProcess) readAll(ctx context.Context, client int, rng *rand.Rand) {
	for pause(ctx, between(rng, 0, p.Pause)) {
		getCtx, cancel := ctx, context.CancelFunc(func() {})
		if rng.IntN(4) == 0 {
			getCtx, cancel = context.WithTimeout(ctx, between(rng, 0, 2*p.Load))
		}
		if rng.IntN(10) > 0 || !p.Memory {
			p.look(client, cacheOp{Kind: "get", Key: p.key(rng)}, func(op *cacheOp) {
				v, _, err := p.cache.GetWith(getCtx, op.Key, cacheaside.GetOptions{SkipMemory: !p.Memory})
				op.Value, op.Failed = v, err != nil
			})
			cancel()
			continue
		}
		keys := []int{p.key(rng), p.key(rng), p.key(rng)}
		begun := now()
		got, _ := p.cache.GetMany(getCtx, keys)
		for key, v := range got {
			p.write(&entry[cacheOp]{Process: p.Number, Client: client, ID: int(p.last.Add(1)), Call: begun, Return: now(),
				Op: cacheOp{Kind: "get", Key: key, Value: v}})
		}
		cancel()
	}
}

func (p *cacheProcess) writeAll(ctx context.Context, client int, rng *rand.Rand) {
	for pause(ctx, between(rng, 0, p.WritePause)) {
		op := cacheOp{Key: p.key(rng)}
		switch n := rng.IntN(20); {
		case n < 13:
			op.Kind = "write"
			p.do(client, p.fresh(op), func(op *cacheOp, write func()) { p.change(ctx, client, op, write, rng) })
		case n < 17: // the change and the invalidation, which Write would combine
			op.Kind = "commit"
			p.do(client, p.fresh(op), p.commit)
			fallthrough
		case n < 18:
			op.Kind = "invalidate"
			p.do(client, op, func(op *cacheOp, _ func()) {
				op.Untold = p.cache.Invalidate(ctx, op.Key) != nil
			})
		case n < 19 || rng.IntN(5) > 0:
			op.Kind = "expire"
			p.do(client, op, func(op *cacheOp, _ func()) { _ = p.cache.Expire(ctx, op.Key) })
		default:
			op.Kind = "invalidate all"
			p.do(client, op, func(op *cacheOp, _ func()) {
				op.Untold = p.cache.InvalidateAll(ctx) != nil
			})
		}
	}
}

// fresh gives op a value that no other operation writes.
func (p *cacheProcess) fresh(op cacheOp) cacheOp {
	op.Value = int64(p.Number+1)*1_000_000 + p.values.Add(1)
	return op
}

// commit changes the source.
func (p *cacheProcess) commit(op *cacheOp, write func()) {
	op.From = now()
	write()
	op.From = now()
	p.source[op.Key].Store(op.Value)
	op.To = now()
	write()
}

// change is a Write whose change succeeds, fails, panics, or takes effect late.
func (p *cacheProcess) change(ctx context.Context, client int, op *cacheOp, write func(), rng *rand.Rand) {
	op.Refused = true
	how := rng.IntN(20)
	before, after := time.Duration(rng.ExpFloat64()*float64(p.Write)/4), time.Duration(rng.ExpFloat64()*float64(p.Write)/4)
	begun := now()
	cache := p.cache
	if op.Died = p.dying != nil && rng.IntN(6) == 0; op.Died {
		cache = p.dying
	}
	defer func() { _ = recover() }()
	err := cache.Write(context.WithValue(ctx, opKey{}, op), op.Key, func(ctx context.Context) error {
		op.Refused = false
		if !pause(ctx, before) {
			return ctx.Err()
		}
		switch {
		case how == 0:
			return errSource
		case how == 1:
			panic("before the change")
		case how == 2: // the answer is lost, and the change is late
			late := cacheOp{Kind: "commit", Key: op.Key, Value: op.Value}
			time.AfterFunc(30*after, func() { p.do(client, late, p.commit) })
			return errSource
		}
		p.commit(op, func() {
			op.Fenced = !op.Unfenced && now()-begun < int64(p.WriteTimeout)
			write()
		})
		pause(ctx, after)
		switch {
		case how == 3: // the answer is lost
			return errSource
		case how == 4:
			panic("after the change")
		case how == 5 && rng.IntN(10*p.Writers) == 0:
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		return nil
	})
	if errors.Is(err, cacheaside.ErrNotPropagated) {
		op.Untold, op.Unfenced = true, true
	}
}

// A cacheStep is what an operation does to the register, at one moment.
type cacheStep struct {
	kind  string // commit, promise, notice, settle, get, lag, failover
	value int64
	id    string // identifies the operation, for notice and settle
}

// A register has the values that may be read: from the promised value to the last committed value.
type register struct {
	values []int64
	held   []noticed // values noticed by an invalidation that has started: it promises the value committed then

	lags bool    // Redis replicates nothing, and
	lost []int64 // may forget that these are too old
}

// promise makes value the oldest that may be read.
func (s register) promise(value int64) register {
	at := max(0, slices.Index(s.values, value))
	if s.lags {
		s.lost = slices.Concat(s.lost, s.values[:at])
	}
	s.values = s.values[at:]
	return s
}

type noticed struct {
	id    string
	value int64
}

var registerModel = porcupine.Model{
	Init: func() any { return register{values: []int64{0}} },
	Step: func(state, input, _ any) (bool, any) {
		s, in := state.(register), input.(cacheStep)
		switch in.kind {
		case "get":
			return slices.Contains(s.values, in.value), s
		case "commit":
			s.values = append(slices.Clip(s.values), in.value)
		case "promise":
			s = s.promise(in.value)
		case "notice":
			s.held = append(slices.Clip(s.held), noticed{in.id, s.values[len(s.values)-1]})
		case "settle":
			at := slices.IndexFunc(s.held, func(n noticed) bool { return n.id == in.id })
			if at >= 0 { // otherwise the history was shortened
				s = s.promise(s.held[at].value)
				s.held = slices.Delete(slices.Clone(s.held), at, at+1)
			}
		case "lag":
			s.lags = true
		case "failover":
			s.values, s.lost, s.lags = slices.Concat(s.lost, s.values), nil, false
		}
		return true, s
	},
	Equal: func(a, b any) bool {
		x, y := a.(register), b.(register)
		return slices.Equal(x.values, y.values) && slices.Equal(x.held, y.held) && slices.Equal(x.lost, y.lost) &&
			x.lags == y.lags
	},
	Hash: func(state any) uint64 { return maphash.Comparable(hashSeed, fmt.Sprint(state)) },
	DescribeOperation: func(input, _ any) string {
		in := input.(cacheStep)
		switch in.kind {
		case "get":
			return fmt.Sprintf("Get returns %d", in.value)
		case "commit":
			return fmt.Sprintf("%d is committed", in.value)
		case "promise":
			return fmt.Sprintf("%d is promised: its Write has returned, or its writer has died", in.value)
		case "notice":
			return "an invalidation starts " + in.id
		case "lag":
			return "Redis replicates nothing more"
		case "failover":
			return "the replica takes over: later promises no longer hold"
		}
		return "an invalidation has ended: the value committed when it started is promised " + in.id
	},
	DescribeState: func(state any) string { return fmt.Sprint(state.(register).values) },
}

var hashSeed = maphash.MakeSeed()

// registerPossible reports whether each value that is read is committed too, and no failover is left out.
func (r *run) registerPossible(ops []porcupine.Operation) bool {
	committed, failovers := map[int64]bool{0: true}, 0 // two steps each
	for _, op := range ops {
		switch in := op.Input.(cacheStep); in.kind {
		case "commit":
			committed[in.value] = true
		case "lag", "failover":
			failovers++
		}
	}
	return failovers == 2*len(r.gaps) && !slices.ContainsFunc(ops, func(op porcupine.Operation) bool {
		in := op.Input.(cacheStep)
		return in.kind == "get" && !committed[in.value]
	})
}

func cacheCheck(r *run) *finding {
	plan := r.plan.(cachePlan)
	type part struct{ process, key int }
	byKey, alls, readers := make(map[int][]entry[cacheOp]), []entry[cacheOp](nil), make(map[part]bool)
	seen := make(map[int64]int64) // when a value was first known to exist
	for _, e := range read[cacheOp](r) {
		r.count(e.Op.Kind, 1)
		if e.Op.Kind == "get" && e.Op.Failed {
			continue
		}
		if e.Op.Kind == "invalidate all" {
			alls = append(alls, e)
			continue
		}
		byKey[e.Op.Key] = append(byKey[e.Op.Key], e)
		if e.Op.Kind == "get" {
			readers[part{e.Process, e.Op.Key}] = true
			if first := seen[e.Op.Value]; first == 0 || e.Return < first {
				seen[e.Op.Value] = e.Return
			}
		}
	}
	for at := range readers {
		var ops []porcupine.Operation
		add := func(e entry[cacheOp], call, ret int64, step cacheStep) {
			ops = append(ops, porcupine.Operation{ClientId: e.Process*10 + e.Client, Input: step, Call: call, Return: ret})
		}
		entries := byKey[at.key]
		first, last := entries[0].Call, entries[len(entries)-1].Call
		for _, e := range alls {
			if e.Call >= first && e.Call <= last {
				entries = append(entries, e)
			}
		}
		for _, g := range r.gaps {
			add(entry[cacheOp]{Process: -1}, g.begun, g.begun, cacheStep{kind: "lag"})
			add(entry[cacheOp]{Process: -1}, g.killed, g.dead, cacheStep{kind: "failover"})
		}
		for _, e := range entries {
			op, id := e.Op, fmt.Sprintf("(%d.%d)", e.Process, e.ID)
			if op.Kind == "get" {
				if e.Process == at.process {
					add(e, e.Call, e.Return, cacheStep{kind: "get", value: op.Value})
				}
				continue
			}
			switch {
			case op.To > 0:
				add(e, op.From, op.To, cacheStep{kind: "commit", value: op.Value})
			case op.From > 0 && seen[op.Value] > 0: // before it was read; if it never was, perhaps never
				add(e, op.From, max(op.From, seen[op.Value]), cacheStep{kind: "commit", value: op.Value})
			}
			own := e.Process == at.process && plan.Memory
			shared := !plan.Memory && (!op.Untold || !plan.Restarts && !op.Unfenced && op.Kind == "write")
			if !own && !shared && !op.Died && !(e.Process == at.process && e.Return > 0) {
				continue
			}
			ends := max(e.Return, op.To)
			if slices.ContainsFunc(r.gaps, func(g gap) bool { return e.Call <= g.dead && ends >= g.killed }) {
				continue // either of the two servers may have the change
			}
			switch op.Kind {
			case "invalidate", "invalidate all", "write":
				if e.Return > 0 && !op.Refused && !op.Died {
					add(e, e.Call, e.Call, cacheStep{kind: "notice", id: id})
					add(e, e.Return, e.Return, cacheStep{kind: "settle", id: id})
					r.count("promises", 1)
				}
			}
			switch {
			case op.Kind != "write" || op.To == 0:
			case e.Return > 0 && !op.Died:
				add(e, e.Return, e.Return, cacheStep{kind: "promise", value: op.Value})
				r.count("promises", 1)
			case !plan.Memory && !plan.Restarts && op.Fenced: // the writer has died, and the fence keeps the promise
				add(e, op.To, op.To, cacheStep{kind: "promise", value: op.Value})
				r.count("promises", 1)
			}
		}
		what := fmt.Sprintf("process %d reads a value of key %d that is older than was promised", at.process, at.key)
		if found := r.judge(what, registerModel, ops, r.registerPossible); found != nil {
			return found
		}
	}
	return nil
}
