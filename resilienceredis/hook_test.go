package resilienceredis_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle/fleet"
)

// A server answers each command with what reply returns for its words: one reply, "" to close
// the connection, and "hang" for none.
type server func(words []string) string

func (s server) dial(context.Context, string, string) (net.Conn, error) {
	client, conn := net.Pipe()
	replies := make(chan string, 100)
	go func() {
		for reply := range replies {
			_, _ = io.WriteString(conn, reply+"\r\n")
		}
	}()
	go func() {
		defer conn.Close()
		defer close(replies)
		r := bufio.NewReader(conn)
		line := func() string { text, _ := r.ReadString('\n'); return strings.TrimSpace(text) }
		for {
			n, err := strconv.Atoi(strings.TrimPrefix(line(), "*"))
			if err != nil {
				return
			}
			words := make([]string, n)
			for i := range words {
				line()
				words[i] = line()
			}
			reply := "+OK"
			switch strings.ToUpper(words[0]) {
			case "HELLO":
				reply = "-ERR unknown command"
			case "CLIENT", "MULTI":
			default:
				reply = s(words)
			}
			if reply == "" {
				return
			}
			if reply != "hang" {
				replies <- reply
			}
		}
	}()
	return client, nil
}

func (s server) client(t *testing.T, policies ...resilience.Middleware) *redis.Client {
	rdb := redis.NewClient(&redis.Options{Addr: "node", Dialer: s.dial, DialerRetries: 1, MaxRetries: -1,
		ContextTimeoutEnabled: true})
	t.Cleanup(func() { _ = rdb.Close() })
	resilienceredis.Hook(rdb, resilienceredis.Config{Node: func(addr string) resilience.Middleware {
		require.Equal(t, "node", addr)
		return resilience.Chain(policies...)
	}})
	return rdb
}

func always(reply string) server { return func([]string) string { return reply } }

func TestReplies(t *testing.T) {
	for reply, state := range map[string]breaker.State{
		"+OK":                                breaker.Closed,
		"$-1":                                breaker.Closed,
		"-ERR value is not an integer":       breaker.Closed,
		"-WRONGTYPE Operation":               breaker.Closed,
		"-NOSCRIPT No matching script":       breaker.Closed,
		"-ERR user_script:1: oops":           breaker.Closed,
		"-MOVED 3999 127.0.0.1:6381":         breaker.Closed,
		"-ASK 3999 127.0.0.1:6381":           breaker.Closed,
		"-NOAUTH Authentication required":    breaker.Closed,
		"-NOPERM this user has no":           breaker.Closed,
		"-WRONGPASS invalid":                 breaker.Closed,
		"-CROSSSLOT Keys in request":         breaker.Closed,
		"-BUSYGROUP Consumer Group name":     breaker.Closed,
		"-BUSYKEY Target key name":           breaker.Closed,
		"-NOTBUSY No scripts in execution":   breaker.Closed,
		"-UNBLOCKED by CLIENT UNBLOCK":       breaker.Closed,
		"-ERR it says: -OOM":                 breaker.Closed,
		"-EXECABORT because of previous":     breaker.Closed,
		"-OOM command not allowed":           breaker.Open,
		"-MISCONF Errors writing to the AOF": breaker.Open,
		"-NOREPLICAS Not enough good":        breaker.Open,
		"-NOMASTERLINK Can't SYNC":           breaker.Open,
		"-BUSY Redis is busy running a":      breaker.Open,
		"-ERR LOADING as Kvrocks has it":     breaker.Open,
		"-UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)": breaker.Open,
		"-EXECABORT Transaction discarded because of: OOM command not allowed":                          breaker.Open,
		"-EXECABORT Transaction discarded because of: WRONGTYPE Operation":                              breaker.Closed,
		"-ERR Error running script (call to f_1): @user_script: 1: -READONLY You can't":                 breaker.Open,
		"-ERR Error running script (call to f_1): @user_script: 1: -WRONGTYPE Operation":                breaker.Closed,
		"-ERR max number of clients + cluster connections reached":                                      breaker.Open,
		"-LOADING Redis is loading":          breaker.Open,
		"-READONLY You can't write":          breaker.Open,
		"-CLUSTERDOWN The cluster":           breaker.Open,
		"-TRYAGAIN Multiple keys":            breaker.Open,
		"-MASTERDOWN Link with MASTER":       breaker.Open,
		"-ERR max number of clients reached": breaker.Open,
		"":                                   breaker.Open, // the connection is lost
	} {
		circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
		rdb := always(reply).client(t, circuit.Wrap)
		err := rdb.Get(t.Context(), "key").Err()
		require.Equal(t, state, circuit.State(), reply)
		switch {
		case reply == "$-1":
			require.Equal(t, redis.Nil, err, "callers compare")
		case strings.HasPrefix(reply, "-"):
			require.EqualError(t, err, reply[1:])
			var own redis.Error
			require.ErrorAs(t, err, &own)
		}
	}
}

func TestFailedDialCountsOnce(t *testing.T) {
	circuit := breaker.New(breaker.Config{ConsecutiveFailures: 9})
	away := errors.New("away")
	dial := func(context.Context, string, string) (net.Conn, error) { return nil, away }
	rdb := redis.NewClient(&redis.Options{Dialer: dial, DialerRetries: 1, MaxRetries: -1})
	defer rdb.Close()
	resilienceredis.Hook(rdb, resilienceredis.Config{Node: func(string) resilience.Middleware { return circuit.Wrap }})
	require.ErrorIs(t, rdb.Get(t.Context(), "key").Err(), away)
	require.EqualValues(t, 1, circuit.Stats().Failed)
}

// TestConnectionSetupBelongsToItsCommand: one slot is enough, and all is one call.
func TestConnectionSetupBelongsToItsCommand(t *testing.T) {
	slots, circuit := bulkhead.New(bulkhead.Config{Limit: 1}), breaker.New(breaker.Config{})
	rdb := always("+v").client(t, circuit.Wrap, slots.Wrap)
	v, err := rdb.Get(t.Context(), "key").Result()
	require.NoError(t, err)
	require.Equal(t, "v", v)
	require.EqualValues(t, 1, circuit.Stats().Succeeded)
	require.Zero(t, circuit.Stats().Refused)
}

func TestCancelOpensNoBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
		rdb := always("hang").client(t, circuit.Wrap)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		require.Error(t, rdb.Get(ctx, "key").Err())
		require.Equal(t, breaker.Closed, circuit.State())
		require.NoError(t, rdb.Close())
	})
}

func TestExhaustedPoolRefuses(t *testing.T) {
	for want, opt := range map[error]*redis.Options{
		redis.ErrPoolTimeout:   {PoolSize: 1, PoolTimeout: time.Nanosecond},
		redis.ErrPoolExhausted: {PoolSize: 2, MaxActiveConns: 1},
	} {
		circuit, taken := breaker.New(breaker.Config{ConsecutiveFailures: 1}), make(chan bool, 1)
		opt.Dialer = server(func([]string) string { taken <- true; return "hang" }).dial
		opt.ContextTimeoutEnabled, opt.MaxRetries = true, -1
		rdb := redis.NewClient(opt)
		resilienceredis.Hook(rdb, resilienceredis.Config{Node: func(string) resilience.Middleware { return circuit.Wrap }})
		ctx, cancel := context.WithCancel(t.Context())
		go rdb.Get(ctx, "key")
		<-taken
		require.ErrorIs(t, rdb.Get(t.Context(), "key").Err(), want)
		require.Equal(t, breaker.Closed, circuit.State())
		require.EqualValues(t, 1, circuit.Stats().Ignored)
		cancel()
		require.NoError(t, rdb.Close())
	}
}

func TestPipelineIsOneCall(t *testing.T) {
	circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	rdb := server(func(words []string) string { return words[1] }).client(t, circuit.Wrap)
	pipeline := func(replies ...string) ([]redis.Cmder, error) {
		return rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
			for _, reply := range replies {
				p.Get(t.Context(), reply)
			}
			return nil
		})
	}
	cmds, err := pipeline("$-1", "+a", "-WRONGTYPE x")
	require.Equal(t, redis.Nil, err, "the error of the first command")
	require.Equal(t, []any{redis.Nil, nil, "WRONGTYPE x"}, []any{cmds[0].Err(), cmds[1].Err(), cmds[2].Err().Error()})
	require.EqualValues(t, 1, circuit.Stats().Succeeded)

	cmds, err = pipeline("$-1", "+a", "-LOADING x")
	require.Equal(t, redis.Nil, err)
	require.NoError(t, cmds[1].Err())
	require.EqualValues(t, 1, circuit.Stats().Failed)

	cmds, err = pipeline("+a", "+b") // open
	require.ErrorIs(t, err, breaker.ErrOpen)
	for _, cmd := range cmds {
		require.ErrorIs(t, cmd.Err(), breaker.ErrOpen)
	}
}

// TestClusterPipelineFailsByAnyReply: go-redis returns the first error at most.
func TestClusterPipelineFailsByAnyReply(t *testing.T) {
	circuit := breaker.New(breaker.Config{ConsecutiveFailures: 2})
	rdb := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: []string{"node"}, MaxRedirects: -1,
		Dialer: server(func(words []string) string {
			if words[0] == "get" {
				return words[1]
			}
			return "-ERR unknown command"
		}).dial,
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{{End: 16383, Nodes: []redis.ClusterNode{{Addr: "node"}}}}, nil
		},
	})
	defer rdb.Close()
	resilienceredis.Hook(rdb, resilienceredis.Config{Node: func(string) resilience.Middleware { return circuit.Wrap }})
	_, err := rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
		p.Get(t.Context(), "+a")
		p.Get(t.Context(), "-LOADING x")
		return nil
	})
	require.EqualError(t, err, "LOADING x")
	require.EqualValues(t, 1, circuit.Stats().Failed)
}

func TestRetrierRepeatsWithin(t *testing.T) {
	replies := []string{"-LOADING x", "", "+v", "$-1"}
	rdb := server(func([]string) string {
		reply := replies[0]
		replies = replies[1:]
		return reply
	}).client(t, retry.New(retry.Config{Attempts: 4, Backoff: retry.Constant(time.Microsecond)}).Wrap)
	require.Equal(t, "v", rdb.Get(t.Context(), "key").Val())
	require.Equal(t, redis.Nil, rdb.Get(t.Context(), "key").Err(), "an answer is not repeated")
	require.Empty(t, replies)
}

func TestPoliciesMustKeepTheContext(t *testing.T) {
	lost := func(next resilience.Func) resilience.Func {
		return func(context.Context) error { return next(context.Background()) }
	}
	rdb := always("+v").client(t, lost)
	want := "resilienceredis: policies lost the ctx of the command"
	require.EqualError(t, rdb.Get(t.Context(), "key").Err(), want)
	cmds, err := rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
		p.Get(t.Context(), "a")
		p.Get(t.Context(), "b")
		return nil
	})
	require.EqualError(t, err, want)
	for _, cmd := range cmds {
		require.EqualError(t, cmd.Err(), want)
	}
}

// The shards that NewRing has created, and the shards that are added later.
func TestHookGuardsTheShardsOfARing(t *testing.T) {
	for _, added := range []string{"", "node3"} {
		at := map[string]string{"a": "node1", "b": "node2"}
		ring := redis.NewRing(&redis.RingOptions{Addrs: at, Dialer: always("+v").dial, HeartbeatFrequency: time.Hour})
		nodes, calls := []string{}, 0
		resilienceredis.Hook(ring, resilienceredis.Config{Node: func(addr string) resilience.Middleware {
			nodes = append(nodes, addr)
			return func(next resilience.Func) resilience.Func {
				return func(ctx context.Context) error { calls++; return next(ctx) }
			}
		}})
		want := []string{"node1", "node2"}
		if added != "" {
			ring.SetAddrs(map[string]string{"a": "node1", "b": "node2", "c": added})
			want = append(want, added)
		}
		require.ElementsMatch(t, want, nodes)
		for i := range 20 {
			require.Equal(t, "v", ring.Get(t.Context(), strconv.Itoa(i)).Val())
		}
		require.Equal(t, 20, calls)
		_, err := ring.Pipelined(t.Context(), func(p redis.Pipeliner) error {
			p.Get(t.Context(), "key")
			p.Get(t.Context(), "key")
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, 21, calls, "a pipeline is one call")
		require.NoError(t, ring.Close())
	}
}

func TestHookKnowsItsClients(t *testing.T) {
	require.PanicsWithValue(t, "resilienceredis: Hook: client is a <nil>: must be a Client, a ClusterClient or a Ring",
		func() { resilienceredis.Hook(nil, node(resilience.Chain())) })
}

func TestHookNeedsNode(t *testing.T) {
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"node"}})
	defer cluster.Close()
	for _, rdb := range []redis.UniversalClient{cluster, nil} {
		require.PanicsWithValue(t, "resilienceredis.Config.Node is nil: must be a function that returns policies", func() {
			resilienceredis.Hook(rdb, resilienceredis.Config{})
		})
	}
}

// Without a client, the functions would panic on a goroutine of their caller and end the program.
func TestFunctionsNeedClient(t *testing.T) {
	for name, f := range map[string]func(){
		"Eval":      func() { resilienceredis.Eval(nil) },
		"EvalEach":  func() { resilienceredis.EvalEach(nil) },
		"Node":      func() { resilienceredis.Node(nil) },
		"Subscribe": func() { resilienceredis.Subscribe(nil) },
	} {
		require.PanicsWithValue(t, "resilienceredis: "+name+": client is nil: must be set", f)
	}
}

func node(m resilience.Middleware) resilienceredis.Config {
	return resilienceredis.Config{Node: func(string) resilience.Middleware { return m }}
}

func TestEachHookAppliesItsPolicies(t *testing.T) {
	calls := map[string]int{}
	count := func(name string, before func(context.Context) error) resilience.Middleware {
		return func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error {
				calls[name]++
				if err := before(ctx); err != nil {
					return err
				}
				return next(ctx)
			}
		}
	}
	nothing := func(context.Context) error { return nil }
	inner := always("+v").client(t, count("inner", nothing))
	resilienceredis.Hook(inner, node(count("second", nothing)))
	var outer *redis.Client
	outer = always("+v").client(t, count("outer", func(ctx context.Context) error {
		if err := outer.Ping(ctx).Err(); err != nil { // without policies, because it is part of the call
			return err
		}
		_, err := inner.Pipelined(ctx, func(p redis.Pipeliner) error { return p.Get(ctx, "key").Err() })
		return err
	}))
	require.NoError(t, outer.Get(t.Context(), "key").Err())
	require.Equal(t, map[string]int{"outer": 1, "inner": 1, "second": 1}, calls)
	require.NoError(t, inner.Get(t.Context(), "key").Err())
	require.Equal(t, map[string]int{"outer": 1, "inner": 2, "second": 2}, calls)
}

func TestEvalSendsTheHashOfAKnownScript(t *testing.T) {
	var got []string
	known := false
	rdb := server(func(words []string) string {
		got = append(got, words[0])
		if words[0] == "evalsha" && !known {
			return "-NOSCRIPT No matching script"
		}
		known = true
		return ":7"
	}).client(t)
	eval := resilienceredis.Eval(rdb)
	for range 2 {
		v, err := eval(t.Context(), "return 7", []string{"key"}, 1)
		require.NoError(t, err)
		require.Equal(t, int64(7), v)
	}
	require.Equal(t, []string{"evalsha", "eval", "evalsha"}, got)
}

// TestEvalReturnsWhenContextIsDone has servers that hang from the first command on.
func TestEvalReturnsWhenContextIsDone(t *testing.T) {
	hang := server(func([]string) string { return "hang" }).dial
	for name, open := range map[string]func(respects bool) redis.UniversalClient{
		"Client": func(respects bool) redis.UniversalClient {
			return redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", Dialer: hang, MaxRetries: -1,
				ContextTimeoutEnabled: respects})
		},
		"ClusterClient": func(respects bool) redis.UniversalClient {
			return redis.NewClusterClient(&redis.ClusterOptions{
				ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) { // it hangs at the next command, COMMAND
					return []redis.ClusterSlot{{End: 16383, Nodes: []redis.ClusterNode{{Addr: "127.0.0.1:1"}}}}, nil
				},
				Dialer: hang, MaxRetries: -1, ContextTimeoutEnabled: respects,
			})
		},
		"Ring": func(respects bool) redis.UniversalClient {
			return redis.NewRing(&redis.RingOptions{
				Addrs: map[string]string{"a": "127.0.0.1:1"}, Dialer: hang, MaxRetries: -1, ContextTimeoutEnabled: respects,
			})
		},
	} {
		for _, respects := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/ContextTimeoutEnabled=%v", name, respects), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					client := open(respects)
					ctx, cancel := context.WithTimeout(t.Context(), 250*time.Millisecond)
					defer cancel()
					start := time.Now()
					_, err := resilienceredis.Eval(client)(ctx, "return 7", []string{"key"})
					require.Error(t, err)
					require.Equal(t, 250*time.Millisecond, time.Since(start))
					if respects { // otherwise EvalEach returns after ReadTimeout
						ctx, cancel := context.WithTimeout(t.Context(), 250*time.Millisecond)
						defer cancel()
						calls := []fleet.Call{{Script: "return 7", Keys: []string{"key"}}}
						require.Error(t, resilienceredis.EvalEach(client)(ctx, calls)[0].Err)
						require.Equal(t, 500*time.Millisecond, time.Since(start))
					}
					time.Sleep(time.Minute)
					require.NoError(t, client.Close())
				})
			})
		}
	}
}

// TestEvalGoroutines: a script has its own goroutine only if the client ignores ctx.
func TestEvalGoroutines(t *testing.T) {
	goroutine := func() string {
		stack := make([]byte, 64)
		return strings.Fields(string(stack[:runtime.Stack(stack, false)]))[1]
	}
	for _, respects := range []bool{false, true} {
		rdb := redis.NewClient(&redis.Options{
			Addr: "node", Dialer: server(func([]string) string { return ":7" }).dial, MaxRetries: -1,
			ContextTimeoutEnabled: respects,
		})
		defer rdb.Close()
		var on string
		resilienceredis.Hook(rdb, resilienceredis.Config{Node: func(string) resilience.Middleware {
			return func(next func(context.Context) error) func(context.Context) error {
				return func(ctx context.Context) error {
					on = goroutine()
					return next(ctx)
				}
			}
		}})
		v, err := resilienceredis.Eval(rdb)(t.Context(), "return 7", []string{"key"})
		require.NoError(t, err)
		require.Equal(t, int64(7), v)
		require.Equal(t, respects, on == goroutine())
	}
}

// TestEvalFallsBackToTheText has servers that do not permit EVALSHA, in the words of Redis, Kvrocks and proxies.
func TestEvalFallsBackToTheText(t *testing.T) {
	for _, refusal := range []string{
		"-NOPERM User app has no permissions to run the 'evalsha' command",
		"-NOPERM this user has no permissions to run the 'evalsha' command or its subcommand",
		"-ERR unknown command 'evalsha', with args beginning with: 'f3'",
		"-ERR unknown command `evalsha`, with args beginning with: ",
		"-ERR unknown command 'EVALSHA'",
	} {
		var got []string
		rdb := server(func(words []string) string {
			got = append(got, words[0])
			if words[0] == "evalsha" {
				return refusal
			}
			return ":7"
		}).client(t)
		eval := resilienceredis.Eval(rdb)
		for range 3 {
			v, err := eval(t.Context(), "return 7", []string{"key"}, 1)
			require.NoError(t, err, refusal)
			require.Equal(t, int64(7), v)
		}
		require.Equal(t, []string{"evalsha", "eval", "eval", "eval"}, got, "it is tried once")
		replies := resilienceredis.EvalEach(rdb)(t.Context(), []fleet.Call{{Script: "return 7", Keys: []string{"key"}}})
		require.Equal(t, []fleet.Reply{{Value: int64(7)}}, replies)
	}
}

// TestEvalReportsWhatIsForbidden has servers that permit neither, and other errors that name the command.
func TestEvalReportsWhatIsForbidden(t *testing.T) {
	for _, c := range []struct {
		replies map[string]string
		calls   int // of three
	}{
		{map[string]string{"evalsha": "-NOPERM no permissions to run the 'evalsha' command",
			"eval": "-NOPERM no permissions to run the 'eval' command"}, 6},
		{map[string]string{"evalsha": "-NOPERM No permissions to access a key"}, 3},
		{map[string]string{"evalsha": "-ERR user_script:1: 'evalsha'"}, 3},
	} {
		calls := 0
		rdb := server(func(words []string) string {
			calls++
			return c.replies[words[0]]
		}).client(t)
		eval := resilienceredis.Eval(rdb)
		for range 3 {
			_, err := eval(t.Context(), "return 7", []string{"key"}, 1)
			require.Error(t, err)
		}
		require.Equal(t, c.calls, calls)
	}
}

// TestEvalDropsAClosedConnection has a server that closes the connection after its reply, as Redis does.
func TestEvalDropsAClosedConnection(t *testing.T) {
	var got []string
	rdb := server(func(words []string) string {
		got = append(got, words[0])
		switch len(got) {
		case 1:
			return "-ERR Protocol error: invalid bulk length"
		case 2: // the connection ends when the client uses it again
			return ""
		}
		return ":7"
	}).client(t)
	eval := resilienceredis.Eval(rdb)
	_, err := eval(t.Context(), "return 7", []string{"key"}, "large")
	require.EqualError(t, err, "ERR Protocol error: invalid bulk length")
	v, err := eval(t.Context(), "return 7", []string{"key"}, "small")
	require.NoError(t, err)
	require.Equal(t, int64(7), v)
	require.Equal(t, []string{"evalsha", "exists", "evalsha"}, got)
}

// TestEvalReloadsTheCluster has the master of a cluster die after another one has taken over its slots.
func TestEvalReloadsTheCluster(t *testing.T) {
	type run func(context.Context, *redis.ClusterClient) error
	for name, run := range map[string]run{
		"Eval": func(ctx context.Context, c *redis.ClusterClient) error {
			_, err := resilienceredis.Eval(c)(ctx, "return 7", []string{"key"})
			return err
		},
		"EvalEach": func(ctx context.Context, c *redis.ClusterClient) error {
			return resilienceredis.EvalEach(c)(ctx, []fleet.Call{{Script: "return 7", Keys: []string{"key"}}})[0].Err
		},
		"Subscribe": func(ctx context.Context, c *redis.ClusterClient) error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			err := resilienceredis.Subscribe(c)(ctx, "c", cancel, nil)
			if ctx.Err() != nil { // Redis has confirmed the subscription
				return nil
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var dead atomic.Bool
				var mu sync.Mutex
				var conns []net.Conn
				c := redis.NewClusterClient(&redis.ClusterOptions{
					MaxRedirects: -1, MaxRetries: -1, DialerRetries: 1,
					ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
						master := "old:1"
						if dead.Load() {
							master = "new:1"
						}
						return []redis.ClusterSlot{{End: 16383, Nodes: []redis.ClusterNode{{Addr: master}}}}, nil
					},
					Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
						if addr == "old:1" && dead.Load() {
							return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
						}
						conn, err := server(func(words []string) string {
							switch {
							case addr == "old:1" && dead.Load():
								return "" // the connection ends
							case words[0] == "subscribe":
								return confirmed
							case words[0] == "evalsha":
								return ":7"
							}
							return "-ERR unknown command"
						}).dial(ctx, network, addr)
						mu.Lock()
						defer mu.Unlock()
						conns = append(conns, conn)
						return conn, err
					},
				})
				require.NoError(t, run(t.Context(), c))
				time.Sleep(20 * time.Second) // without Eval, the client reloads after a minute
				dead.Store(true)
				start := time.Now()
				require.Error(t, run(t.Context(), c))
				require.Eventually(t, func() bool { return run(t.Context(), c) == nil }, time.Minute, 100*time.Millisecond)
				require.Less(t, time.Since(start), 2*time.Second)
				require.NoError(t, c.Close())
				time.Sleep(time.Second)      // a reload ends with a pause
				for _, conn := range conns { // even connections to nodes that have left the cluster
					_ = conn.Close()
				}
			})
		})
	}
}

// Node does not wait for a cluster that hangs, and knows a master when a call has found it.
func TestNodeSendsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hangs atomic.Bool
		hangs.Store(true)
		rdb := redis.NewClusterClient(&redis.ClusterOptions{
			Addrs: []string{"node:1"}, MaxRedirects: -1,
			Dialer: server(func(words []string) string {
				switch {
				case hangs.Load():
					return "hang"
				case words[0] != "cluster":
					return "-ERR unknown command"
				}
				return "*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$4\r\nnode\r\n:1"
			}).dial,
		})
		node := resilienceredis.Node(rdb)
		start := time.Now()
		require.Empty(t, node("key"))
		require.Zero(t, time.Since(start))
		hangs.Store(false)
		_, _ = resilienceredis.Eval(rdb)(t.Context(), "return 1", []string{"key"})
		require.Equal(t, "node:1", node("key"))
		require.NoError(t, rdb.Close())
	})
}

const confirmed = "*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1"

func TestSubscribe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		circuit := breaker.New(breaker.Config{})
		circuit.ForceOpen(nil)
		rdb := server(func(words []string) string {
			return confirmed + "\r\n*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$5\r\nhello"
		}).client(t, circuit.Wrap)
		ctx, cancel := context.WithCancelCause(t.Context())
		why, told := errors.New("enough"), false
		err := resilienceredis.Subscribe(rdb)(ctx, "c", func() { told = true }, func(payload string) {
			require.True(t, told)
			require.Equal(t, "hello", payload)
			cancel(why)
		})
		require.Equal(t, why, err)
		require.NoError(t, rdb.Close())
	})
}

// Subscribe pings after ten seconds, and returns after ten more.
func TestSubscribeDetectsAnIdleServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pings := 0
		rdb := server(func(words []string) string {
			if words[0] == "ping" {
				if pings++; pings > 3 {
					return "hang"
				}
				return "*2\r\n$4\r\npong\r\n$0\r\n"
			}
			return confirmed
		}).client(t)
		start := time.Now()
		err := resilienceredis.Subscribe(rdb)(t.Context(), "c", func() {}, func(string) { t.Error("a message") })
		require.Error(t, err)
		require.Equal(t, 50*time.Second, time.Since(start))
		require.NoError(t, rdb.Close())
	})
}

func TestSubscribeReportsALostConnection(t *testing.T) {
	told := false
	err := resilienceredis.Subscribe(always("").client(t))(t.Context(), "c", func() { told = true }, nil)
	require.Error(t, err)
	require.False(t, told)
}
