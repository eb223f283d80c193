package harm_test

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/redislease"
	"github.com/go-resilience/resilience/lease/sqllease"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

const (
	// ttl is lease.Config.TTL and saga.RunnerConfig.LeaseTTL.
	ttl = 3 * time.Second
	// poll is lease.Config.Poll and saga.RunnerConfig.Poll.
	poll = 500 * time.Millisecond
	// documented is the longest time of a takeover. The tests allow twice as long, for busy machines.
	documented = ttl + poll
)

// A workerConfig configures a worker: a process that leads, or runs the step of a saga, until it is killed.
type workerConfig struct {
	Saga   bool // otherwise it leads
	Driver string
	DSN    string // of Redis: the address
}

// A worker is such a process.
type worker struct{ cmd *exec.Cmd }

// begun is the line that a worker prints when it leads or has started the step.
const begun = "BEGUN"

// startWorker starts a worker and waits until it has begun. It ends with the test.
func startWorker(t *testing.T, c workerConfig) worker {
	config, err := json.Marshal(c)
	require.NoError(t, err)
	w := worker{exec.Command(os.Args[0])}
	w.cmd.Env = append(os.Environ(), "HARM_WORKER="+string(config))
	stdin, err := w.cmd.StdinPipe() // the worker ends with this process, even if that is killed
	require.NoError(t, err)
	stdout, err := w.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, w.cmd.Start())
	t.Cleanup(func() {
		w.kill()
		_ = stdin.Close()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err, line)
	require.Equal(t, begun, strings.TrimSpace(line))
	return w
}

// kill kills the process and waits for its end.
func (w worker) kill() {
	_ = w.cmd.Process.Kill()
	_ = w.cmd.Wait()
}

func (w worker) pause() { _ = w.cmd.Process.Signal(syscall.SIGSTOP) }

// work runs a worker.
func work(config string) {
	var c workerConfig
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); cancel() }() // until the test ends
	if c.Saga {
		runner := saga.NewRunner(sqlstore.New(open(c), dialects[c.Driver], sqlstore.Config{}), runnerConfig)
		saga.Register(runner, trip(func(ctx context.Context) {
			fmt.Println(begun)
			<-ctx.Done()
		}))
		_ = runner.Run(ctx)
		return
	}
	_ = lease.New(leaseStore(c), leaseConfig).Run(ctx, func(ctx context.Context, _ lease.Term) error {
		fmt.Println(begun)
		<-ctx.Done()
		return nil
	})
}

var dialects = map[string]sqlstore.Dialect{"pgx": sqlstore.PostgreSQL, "sqlite": sqlstore.SQLite}

func open(c workerConfig) *sql.DB {
	db, err := sql.Open(c.Driver, c.DSN)
	if err != nil {
		panic(err)
	}
	db.SetMaxOpenConns(4)
	return db
}

var leaseConfig = lease.Config{Name: "harm", TTL: ttl, Poll: poll}

func leaseStore(c workerConfig) lease.Store {
	if c.Driver == "redis" {
		client := redis.NewClient(&redis.Options{Addr: c.DSN, ContextTimeoutEnabled: true, MaxRetries: -1})
		return redislease.New(redislease.Config{Eval: resilienceredis.Eval(client)})
	}
	return sqllease.New(open(c), sqllease.Dialect(dialects[c.Driver]), sqllease.Config{})
}

var runnerConfig = saga.RunnerConfig{LeaseTTL: ttl, Poll: poll}

// trip is a saga of one step.
func trip(do func(context.Context)) *saga.Saga[struct{}] {
	return &saga.Saga[struct{}]{Name: "trip", Steps: []saga.Step[struct{}]{{
		Name: "fly",
		Do: func(ctx context.Context, _ *struct{}) error {
			do(ctx)
			return ctx.Err()
		},
		Undo: func(context.Context, *struct{}) error { return nil },
	}}}
}

// A trouble does something to a worker or to its connections to the store.
type trouble func(w worker, proxy *faultproxy.Proxy)

func killed(w worker, _ *faultproxy.Proxy)  { w.kill() }
func paused(w worker, _ *faultproxy.Proxy)  { w.pause() }
func cutOff(_ worker, p *faultproxy.Proxy)  { p.Hang() }
func refused(_ worker, p *faultproxy.Proxy) { p.Refuse(); p.Reset() }
