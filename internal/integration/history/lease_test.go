package history_test

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/internal/integration/services/etcd"
	"github.com/go-resilience/resilience/internal/integration/services/kube"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/redislease"
	"github.com/go-resilience/resilience/lease/sqllease"
	"github.com/go-resilience/resilience/resilienceetcd"
	"github.com/go-resilience/resilience/resiliencek8s"
	"github.com/go-resilience/resilience/resilienceredis"
)

// A lease is the current epoch, which grows. A term holds, and a transaction that it has fenced is committed, only
// while its epoch is the current one and was not resigned. In Redis and Kubernetes, which have no fence, terms do not
// overlap.
func TestLease(t *testing.T) { search(t, &leaseTarget) }

var leaseTarget = target{
	name: "lease", length: 4 * time.Second, worker: leaseWorker, begin: leaseBegin, check: leaseCheck,
}

type leasePlan struct {
	Driver string // of database/sql, redis, etcd or kubernetes
	Addr   string // the server; "" for a database
	TTL    time.Duration
	Work   time.Duration // between two acts of a leader, at most
}

func leaseBegin(r *run) {
	rng := r.rng
	p := leasePlan{
		Driver: []string{"pgx", "mysql", "sqlite", "redis", "etcd", "kubernetes"}[r.seed%6], // each of six in a row
		TTL:    time.Duration([]int{200, 400}[rng.IntN(2)]) * time.Millisecond,
		Work:   time.Duration([]int{2, 20, 60}[rng.IntN(3)]) * time.Millisecond,
	}
	if p.Driver == "kubernetes" {
		p.TTL = time.Second // the least one: others wait for whole seconds
	}
	r.calm = []time.Duration{p.TTL, 3 * p.TTL}[rng.IntN(2)]
	var proxies []*faultproxy.Proxy
	var servers []trouble
	var name string
	var stop, resume func()
	switch p.Driver {
	case "etcd":
		cluster := etcd.New(r, 1)
		name, p.Addr = "etcd", cluster.Addrs[0]
		stop, resume = func() { cluster.Pause() }, func() { cluster.Resume() }
	case "kubernetes":
		server := kube.New(r)
		name, p.Addr, stop, resume = "API server", server.Addr, server.Pause, server.Resume
	case "redis":
		server := services.NewRedis(r)
		name, p.Addr, stop, resume = "Redis", server.Addr, server.Pause, server.Resume
	}
	r.plan = p
	if p.Addr != "" {
		for range 3 {
			proxies = append(proxies, faultproxy.New(r, p.Addr))
			r.start(proxies[len(proxies)-1].Addr())
		}
		servers = append(servers, trouble{name + " stopped", func(rng *rand.Rand) {
			stop()
			time.Sleep(between(rng, time.Millisecond, 2*p.TTL))
			resume()
		}})
	} else {
		r.db = newDatabase(r, p.Driver, 3*p.TTL)
		require.NoError(r, leaseStore(r.db.DB, p.Driver).Migrate(r.Context()))
		for _, statement := range []string{
			"CREATE TABLE written_last (n bigint NOT NULL)", "INSERT INTO written_last VALUES (0)",
			"CREATE TABLE written (id bigint PRIMARY KEY, n bigint NOT NULL)",
		} {
			_, err := r.db.Exec(statement)
			require.NoError(r, err)
		}
		proxies = r.db.start(r, 3)
	}
	r.troubles = [][]trouble{r.disturb(3 * p.TTL)}
	if len(proxies) > 0 {
		r.troubles = append(r.troubles, append(servers, network(proxies, p.TTL/2, 3*p.TTL)...))
	}
}

func leaseStore(db *sql.DB, driver string) *sqllease.Store {
	dialect := map[string]sqllease.Dialect{
		"pgx": sqllease.PostgreSQL, "mysql": sqllease.MySQL, "sqlite": sqllease.SQLite,
	}[driver]
	return sqllease.New(db, dialect, sqllease.Config{})
}

// A leaseOp is one operation on the lease.
type leaseOp struct {
	Kind  string // campaign, hold (the term says that it does), write (fenced), resign, look
	Epoch int64  `json:",omitempty"`
	Held  bool   `json:",omitempty"` // of look
	ID, N int64  `json:",omitempty"` // of a write, and its number in the order of commits
	OK    bool   `json:",omitempty"`
}

const leaseName = "history"

type leaseProcess struct {
	leasePlan
	*worker
	*journal[leaseOp]
	store lease.Store
	db    *sql.DB          // nil: Redis, etcd or Kubernetes
	etcd  *clientv3.Client // nil: another driver
}

func leaseWorker(ctx context.Context, w *worker) {
	p := &leaseProcess{worker: w, journal: newJournal[leaseOp](w)}
	if err := json.Unmarshal(w.Plan, &p.leasePlan); err != nil {
		panic(err)
	}
	switch p.Driver {
	case "etcd":
		client, err := etcd.Connect(w.Addr)
		if err != nil {
			panic(err)
		}
		p.etcd, p.store = client, resilienceetcd.New(client, resilienceetcd.Config{})
	case "kubernetes":
		p.store = resiliencek8s.New(kube.Leases(w.Addr))
	case "redis":
		client := redis.NewClient(&redis.Options{
			Addr: w.Addr, ContextTimeoutEnabled: true, MaxRetries: -1, DialTimeout: p.TTL / 3,
		})
		p.store = redislease.New(redislease.Config{Eval: resilienceredis.Eval(client)})
	default:
		db, err := connect(p.Driver, w.Addr)
		if err != nil {
			panic(err)
		}
		p.db, p.store = db, leaseStore(db, p.Driver)
	}
	var all sync.WaitGroup
	for i := range 2 {
		all.Go(func() { p.candidate(ctx, i, w.rand(i)) })
	}
	all.Go(func() {
		rng := w.rand(2)
		for pause(ctx, between(rng, 0, p.TTL/10)) {
			p.look(2, leaseOp{Kind: "look"}, func(op *leaseOp) {
				rec, err := p.store.Load(ctx, leaseName)
				op.Epoch, op.Held, op.OK = rec.Epoch, rec.Held(), err == nil
			})
		}
	})
	all.Wait()
}

// candidate campaigns, leads for a while, works on when its term is over, and resigns.
func (p *leaseProcess) candidate(ctx context.Context, client int, rng *rand.Rand) {
	c := lease.New(p.store, lease.Config{Name: leaseName, TTL: p.TTL})
	c.Observe(func(context.Context, lease.Event) {}) // no warnings
	for pause(ctx, between(rng, 0, p.TTL/4)) {
		var term lease.Term
		got := false
		p.do(client, leaseOp{Kind: "campaign"}, func(op *leaseOp, _ func()) {
			wait, cancel := context.WithTimeout(ctx, between(rng, p.TTL/10, 8*p.TTL))
			defer cancel()
			var err error
			if rng.IntN(8) == 0 {
				term, err = c.TryCampaign(wait)
			} else {
				term, err = c.Campaign(wait)
			}
			if got = err == nil; got {
				op.Epoch, op.OK = term.Epoch(), true
			}
		})
		if !got {
			continue
		}
		until, after := time.Now().Add(between(rng, 0, 4*p.TTL)), rng.IntN(4)
		for ctx.Err() == nil && time.Now().Before(until) && after > 0 {
			if term.Err() != nil {
				after--
			}
			p.look(client, leaseOp{Kind: "hold", Epoch: term.Epoch()}, func(op *leaseOp) { op.OK = term.Err() == nil })
			if p.db != nil || p.etcd != nil {
				p.do(client, leaseOp{Kind: "write", Epoch: term.Epoch(), ID: rng.Int64()}, func(op *leaseOp, write func()) {
					op.OK = p.change(term, op, write, rng) == nil
				})
			}
			pause(ctx, between(rng, 0, p.Work))
		}
		p.do(client, leaseOp{Kind: "resign", Epoch: term.Epoch()}, func(op *leaseOp, _ func()) {
			give, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.TTL)
			defer cancel()
			op.OK = term.Resign(give) == nil
		})
	}
}

// change is a fenced transaction, which also a process makes that has not noticed that
// its term is over. Its writes are numbered in the order of commits.
func (p *leaseProcess) change(term lease.Term, op *leaseOp, write func(), rng *rand.Rand) error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*p.TTL)
	defer cancel()
	if p.etcd != nil {
		fence := p.store.(*resilienceetcd.Store).Fence(leaseName, op.Epoch)
		write()
		resp, err := p.etcd.Txn(ctx).If(fence).Then(clientv3.OpPut(fmt.Sprint("written/", op.ID), "")).Commit()
		if err == nil && !resp.Succeeded {
			err = lease.ErrLost
		}
		return err
	}
	tx, err := p.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if rng.IntN(2) == 0 {
		err = term.Fence(ctx, tx)
	} else { // whatever the local clock says
		err = p.store.(lease.Fencer).Fence(ctx, tx, leaseName, op.Epoch)
	}
	if err != nil {
		return err
	}
	if rng.IntN(20) == 0 {
		pause(ctx, between(rng, 0, 2*p.TTL))
	}
	if _, err := tx.ExecContext(ctx, "UPDATE written_last SET n = n + 1"); err != nil {
		return err
	}
	if err := tx.QueryRowContext(ctx, "SELECT n FROM written_last").Scan(&op.N); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, fmt.Sprintf("INSERT INTO written (id, n) VALUES (%d, %d)", op.ID, op.N)); err != nil {
		return err
	}
	write()
	return tx.Commit()
}

// A leadership is what is known about the lease.
type leadership struct {
	epoch int64
	given bool  // a Campaign has returned the epoch
	over  bool  // it was given up
	n     int64 // of the last write
}

var leaseModel = porcupine.Model{
	Init: func() any { return leadership{} },
	Step: func(state, input, _ any) (bool, any) {
		s, op := state.(leadership), input.(leaseOp)
		if op.Kind == "resign" { // of a term that is over, it does nothing
			s.over = s.over || op.Epoch == s.epoch
			return true, s
		}
		if op.Epoch > s.epoch {
			s.epoch, s.given, s.over = op.Epoch, false, false
		}
		ok := op.Epoch == s.epoch
		switch op.Kind {
		case "campaign":
			ok, s.given = ok && !s.given && !s.over, true
		case "hold":
			ok = ok && !s.over
		case "write":
			ok, s.n = ok && !s.over && op.N > s.n, op.N
		case "look":
			ok = ok && !(op.Held && s.over)
		}
		return ok, s
	},
	DescribeOperation: func(input, _ any) string {
		switch op := input.(leaseOp); op.Kind {
		case "write":
			return fmt.Sprintf("%d commits the fenced write %d", op.Epoch, op.N)
		case "hold":
			return fmt.Sprintf("%d holds", op.Epoch)
		case "look":
			return fmt.Sprintf("the store has %d, held %v", op.Epoch, op.Held)
		default:
			return fmt.Sprintf("%s %d", op.Kind, op.Epoch)
		}
	},
	DescribeState: func(state any) string { return fmt.Sprintf("%+v", state) },
}

func leaseCheck(r *run) *finding {
	plan := r.plan.(leasePlan)
	committed := make(map[int64]int64) // numbers in the order of commits
	if plan.Driver == "etcd" {
		resp, err := etcd.Client(r, plan.Addr).Get(r.Context(), "written/", clientv3.WithPrefix())
		require.NoError(r, err)
		for _, kv := range resp.Kvs {
			id, err := strconv.ParseInt(strings.TrimPrefix(string(kv.Key), "written/"), 10, 64)
			require.NoError(r, err)
			committed[id] = kv.ModRevision
		}
	}
	if r.db != nil {
		rows, err := r.db.Query("SELECT id, n FROM written")
		require.NoError(r, err)
		defer rows.Close()
		for rows.Next() {
			var id, n int64
			require.NoError(r, rows.Scan(&id, &n))
			committed[id] = n
		}
		require.NoError(r, rows.Err())
	}
	var ops []porcupine.Operation
	for _, e := range read[leaseOp](r) {
		op, ret := e.Op, e.Return
		switch op.Kind {
		case "write":
			if op.N = committed[op.ID]; op.N == 0 {
				r.count("writes refused or failed", 1)
				continue
			}
			if !op.OK {
				ret = unknown
			}
		case "resign":
			if !op.OK {
				ret = unknown
			}
		default:
			if !op.OK {
				continue
			}
		}
		r.count(op.Kind, 1)
		ops = append(ops, porcupine.Operation{
			ClientId: e.Process*10 + e.Client, Input: op, Call: e.Call, Return: cmp.Or(ret, unknown),
		})
	}
	return r.judge(plan.Driver+": a term is not the only one", leaseModel, ops, nil)
}
