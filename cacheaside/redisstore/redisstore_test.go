package redisstore_test

import (
	"context"
	"errors"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
)

// These tests check the calls to the client and its replies. The scripts are tested on a real Redis, in
// internal/integration/cacheaside.

// call is one call to Eval.
type call struct {
	script string
	keys   []string
	args   []any
}

// client answers each call with reply and err, and records it.
type client struct {
	mu    sync.Mutex
	calls []call
	reply any
	err   error
}

func (c *client) eval(ctx context.Context, script string, keys []string, args ...any) (any, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, call{script, keys, args})
	if d, ok := ctx.Deadline(); !ok || time.Until(d) > 250*time.Millisecond {
		return nil, errors.New("no deadline")
	}
	return c.reply, c.err
}

func (c *client) last() call {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.calls[len(c.calls)-1]
}

func (c *client) called() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.calls)
}

func TestValidateNamesTheFieldAndItsRange(t *testing.T) {
	for field, change := range map[string]func(*redisstore.Config){
		`Prefix is ""`:        func(c *redisstore.Config) { c.Prefix = "" },
		`Prefix is "a{b"`:     func(c *redisstore.Config) { c.Prefix = "a{b" },
		"Eval is nil":         func(c *redisstore.Config) { c.Eval = nil },
		"Timeout is -1s":      func(c *redisstore.Config) { c.Timeout = -time.Second },
		"LeaseTTL is -1s":     func(c *redisstore.Config) { c.LeaseTTL = -time.Second },
		"WriteTimeout is -1s": func(c *redisstore.Config) { c.WriteTimeout = -time.Second },
		"Heartbeat is -1s":    func(c *redisstore.Config) { c.Heartbeat = -time.Second },
	} {
		cfg := redisstore.Config{Prefix: "users", Eval: new(client).eval}
		require.NoError(t, cfg.Validate())
		change(&cfg)
		err := cfg.Validate()
		require.ErrorContains(t, err, "redisstore.Config."+field+": must be ")
		require.PanicsWithError(t, err.Error(), func() { redisstore.New(cfg) })
	}
}

// Redis whose memory is full, and that evicts nothing, runs a script whose first write needs none. Like
// Invalidate and Fence, InvalidateAll and Expire must not fail then.
func TestInvalidationsDeleteFirst(t *testing.T) {
	c := &client{}
	s := redisstore.New(redisstore.Config{Prefix: "p", Eval: c.eval})
	require.NoError(t, s.InvalidateAll(t.Context()))
	require.Regexp(t, `call\('DEL', KEYS\[1\]\).*\nredis\.call\('SET', KEYS\[1\]`, c.last().script)
	require.NoError(t, s.Expire(t.Context(), "key"))
	require.Regexp(t, `(?s)\n\tredis\.call\('HDEL', KEYS\[i\], ''\).*'HSET'`, c.last().script)
}

// A time that is meant as "forever" does not overflow into the past.
func TestLongTimesDoNotOverflow(t *testing.T) {
	var c client
	s := redisstore.New(redisstore.Config{Prefix: "users", Eval: c.eval, LeaseTTL: math.MaxInt64,
		WriteTimeout: math.MaxInt64})
	year := (365 * 24 * time.Hour).Microseconds()
	requireYear := func(arg any) {
		t.Helper()
		n, err := strconv.ParseInt(arg.(string), 10, 64)
		require.NoError(t, err)
		require.Greater(t, n, year/1000)
	}
	_, _ = s.Acquire(t.Context(), ask("42"))
	requireYear(c.last().args[0])
	requireYear(c.last().args[1])
	window, err := s.Fence(t.Context(), "42", "token")
	require.NoError(t, err)
	require.Positive(t, window)
	requireYear(c.last().args[3])
	_, _ = s.Fill(t.Context(),
		cacheaside.Entry{Key: "42", Grant: "g", Value: []byte("v"), Fresh: math.MaxInt64, Keep: math.MaxInt64})
	requireYear(c.last().args[3])
	requireYear(c.last().args[4])
	fresh, err := strconv.ParseInt(c.last().args[3].(string), 10, 64)
	require.NoError(t, err)
	c.reply = []any{[]any{"hit", "v", fresh, int64(0), ""}} // a moment later
	looks, err := s.Acquire(t.Context(), ask("42"))
	require.NoError(t, err)
	require.Equal(t, cacheaside.Hit, looks[0].State)
}

func ask(key string) cacheaside.Request { return cacheaside.Request{Key: key, Token: "token"} }

func TestRepliesAreRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c client
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: c.eval})
		for _, test := range []struct {
			reply any
			want  cacheaside.Response
		}{
			{[]any{"hit", "v", int64(2000), int64(0), ""},
				cacheaside.Response{State: cacheaside.Hit, Value: []byte("v"), Fresh: 2 * time.Millisecond}},
			{[]any{"busy", []byte("v"), int64(-5000), int64(7), "99"},
				cacheaside.Response{State: cacheaside.Busy, Value: []byte("v"), Fresh: -5 * time.Millisecond,
					Wait: 7 * time.Microsecond, WaitToken: "99"}},
			{[]any{"failed", "v", int64(-5000), int64(0), ""},
				cacheaside.Response{State: cacheaside.Failed, Value: []byte("v"), Fresh: -5 * time.Millisecond}},
			{[]any{"leased", "", int64(0), int64(0), "7:8:t"}, cacheaside.Response{State: cacheaside.Leased, Grant: "7:8:t"}},
			{[]any{"leased", "", int64(0), int64(0), []byte("7:8:t")},
				cacheaside.Response{State: cacheaside.Leased, Grant: "7:8:t"}},
			{[]any{"fenced", "", int64(0), int64(0), ""}, cacheaside.Response{State: cacheaside.Fenced}},
		} {
			c.reply = []any{test.reply, test.reply}
			got, err := s.Acquire(t.Context(), ask("42"), ask("42"))
			require.NoError(t, err)
			require.Equal(t, []cacheaside.Response{test.want, test.want}, got)
		}
		for _, reply := range []any{nil, "OK", []any{}, []any{nil}, []any{[]any{"hit", 2.5, int64(0), int64(0), ""}},
			[]any{[]any{"hit", "v", "0", int64(0), ""}}, []any{[]any{nil, "v", int64(0), int64(0), ""}},
			[]any{[]any{"hit", "v", int64(0), int64(0)}}, []any{[]any{"hit", "v", int64(0), int64(0), 5}}} {
			c.reply = reply
			_, err := s.Acquire(t.Context(), ask("42"))
			require.ErrorContains(t, err, "redisstore: acquire: unexpected reply")
		}
		value := cacheaside.Entry{Key: "42", Grant: "g", Value: []byte("v"), Fresh: time.Second, Keep: time.Minute}
		c.reply = []any{int64(0), int64(1)}
		current, err := s.Fill(t.Context(), value, value)
		require.NoError(t, err)
		require.Equal(t, []bool{false, true}, current)
		for _, reply := range []any{"OK", []any{}, []any{"1"}} {
			c.reply = reply
			_, err = s.Fill(t.Context(), value)
			require.ErrorContains(t, err, "redisstore: fill: unexpected reply")
		}
	})
}

// A client that writes its arguments with fmt would write the bytes of a []byte as
// numbers.
func TestArgumentsOfAScriptAreStrings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c client
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: c.eval})
		ctx := t.Context()
		_, _ = s.Acquire(ctx, ask("1"))
		_, _ = s.Fill(ctx, cacheaside.Entry{Key: "1", Value: []byte("\x00\xff"), Fresh: time.Second, Keep: time.Minute})
		require.Equal(t, []any{"0", "", "\x00\xff", "1000000", "60000000"}, c.last().args)
		_, _ = s.Fence(ctx, "1", "t")
		_ = s.Unfence(ctx, "1", "t")
		_ = s.Release(ctx, ask("1"), true)
		_ = s.Invalidate(ctx, "1", "65")
		_ = s.Expire(ctx, "1")
		_ = s.InvalidateAll(ctx)
		for _, call := range c.calls {
			for _, arg := range call.args {
				require.IsType(t, "", arg)
			}
		}
	})
}

func TestTimeoutBoundsEval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eval := func(ctx context.Context, _ string, _ []string, _ ...any) (any, error) {
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: eval})
		start := time.Now()
		require.ErrorIs(t, s.Invalidate(t.Context(), "1"), context.DeadlineExceeded)
		require.Equal(t, 250*time.Millisecond, time.Since(start))
		gone := errors.New("gone")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(gone)
		require.ErrorIs(t, s.Invalidate(ctx, "1"), gone)
		require.Equal(t, 250*time.Millisecond, time.Since(start))
	})
}

func TestErrorsOfTheClientAreWrapped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		down := errors.New("connection refused")
		c := client{err: down}
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: c.eval})
		ctx := t.Context()
		_, err := s.Acquire(ctx, ask("42"))
		require.EqualError(t, err, "redisstore: acquire: connection refused")
		_, err = s.Fill(ctx, cacheaside.Entry{Key: "42"})
		require.ErrorIs(t, err, down)
		_, err = s.Fence(ctx, "42", "token")
		require.ErrorIs(t, err, down)
		for _, err := range []error{s.Release(ctx, ask("42"), false), s.Invalidate(ctx, "42"), s.Expire(ctx, "42"),
			s.Unfence(ctx, "42", "token"), s.InvalidateAll(ctx)} {
			require.ErrorIs(t, err, down)
		}
	})
}

// In a cluster a script may touch the keys of one slot only. The part in braces
// determines the slot.
func TestKeysOfAScriptShareASlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c client
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: c.eval})
		slots := map[string]bool{}
		for _, key := range []string{"", "42", "a{b}c", "user:7", "ü"} {
			c.reply = []any{[]any{"fenced", "", int64(0), int64(0), ""}}
			_, err := s.Acquire(t.Context(), ask(key))
			require.NoError(t, err)
			keys := c.last().keys
			require.Len(t, keys, 2)
			require.Equal(t, "{users:"+strconv.Itoa(int(s.Shard(key)))+"}", keys[1])
			slot, rest, ok := strings.Cut(keys[0], "}")
			require.True(t, ok)
			require.Equal(t, ":"+key, rest)
			require.Equal(t, slot+"}", keys[1])
			slots[slot] = true
		}
		require.Greater(t, len(slots), 2, "keys are distributed")
		before := len(c.calls)
		require.NoError(t, s.InvalidateAll(t.Context()))
		require.Len(t, c.calls[before:], 64)
	})
}

// bus carries messages between stores.
type bus struct {
	subscribed chan func(string) // each subscription's message function
	end        chan error        // ends a subscription
	confirm    bool
}

func newBus() *bus {
	return &bus{subscribed: make(chan func(string), 10), end: make(chan error), confirm: true}
}

func (b *bus) subscribe(ctx context.Context, channel string, subscribed func(), message func(string)) error {
	if b.confirm {
		subscribed()
		subscribed() // harmless
	}
	b.subscribed <- message
	select {
	case <-ctx.Done():
		return ctx.Err()
	case err := <-b.end:
		return err
	}
}

func TestWatchReportsOtherProcesses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mine, theirs client
		b := newBus()
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: mine.eval, Subscribe: b.subscribe})
		other := redisstore.New(redisstore.Config{Prefix: "users", Eval: theirs.eval})
		ctx, cancel := context.WithCancel(t.Context())
		ups := 0
		var heard []string
		done := make(chan error)
		go func() { done <- s.Watch(ctx, func() { ups++ }, func(key string) { heard = append(heard, key) }) }()
		message := <-b.subscribed
		published := func(c *client, do func() error) {
			require.NoError(t, do())
			require.Equal(t, "users", c.last().args[0])
			message(c.last().args[1].(string))
		}
		published(&mine, func() error { return s.Invalidate(ctx, "1") })
		published(&theirs, func() error { return other.Invalidate(ctx, "2") })
		published(&theirs, func() error { return other.Expire(ctx, "three\nlines\nlong") })
		published(&theirs, func() error { _, err := other.Fence(ctx, "4", "t"); return err })
		published(&theirs, func() error { return other.Unfence(ctx, "5", "t") })
		published(&theirs, func() error { return other.InvalidateAll(ctx) })
		synctest.Wait()
		require.Equal(t, []string{"2", "three\nlines\nlong", "4", "5", ""}, heard)
		require.GreaterOrEqual(t, ups, 1)
		cancel()
		require.ErrorIs(t, <-done, context.Canceled)
	})
}

// Other processes are notified when InvalidateAll starts, for their ReplicaLag, and when no bucket has an old value any
// longer.
func TestInvalidateAllNotifiesFirstAndLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c client
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: c.eval})
		require.NoError(t, s.InvalidateAll(t.Context()))
		for i, call := range c.calls {
			require.Equal(t, i == 0 || i == len(c.calls)-1, call.args[1] != "", i)
		}
	})
}

func TestWatchEndsWithItsSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c client
		b := newBus()
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: c.eval, Subscribe: b.subscribe})
		lost := errors.New("connection reset")
		for _, end := range []error{lost, nil} {
			done := make(chan error)
			go func() { done <- s.Watch(t.Context(), func() {}, func(string) {}) }()
			<-b.subscribed
			b.end <- end
			err := <-done
			require.ErrorContains(t, err, "redisstore: subscription")
			if end != nil {
				require.ErrorIs(t, err, lost)
			}
		}
	})
}

func TestHeartbeatThenSubscriptionLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c client
		b := newBus()
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: c.eval, Subscribe: b.subscribe,
			Heartbeat: 10 * time.Second})
		watch := func() (done chan error) {
			done = make(chan error, 1)
			go func() { done <- s.Watch(t.Context(), func() {}, func(string) { t.Error("heard") }) }()
			return done
		}
		done := watch()
		message := <-b.subscribed
		begun := time.Now()
		for n := range 5 { // it is alive as long as the tests arrive
			for c.called() == n {
				time.Sleep(100 * time.Millisecond)
			}
			message(c.last().args[1].(string))
		}
		require.GreaterOrEqual(t, time.Since(begun), 50*time.Second)
		require.Less(t, time.Since(begun), 65*time.Second)
		start := time.Now()
		require.ErrorContains(t, <-done, "heartbeat did not arrive")
		require.Less(t, time.Since(start), 15*time.Second)

		// A test that arrives late, after tests that failed, counts.
		done = watch()
		message = <-b.subscribed
		c.mu.Lock()
		c.err = errors.New("i/o timeout")
		before := len(c.calls)
		c.mu.Unlock()
		for c.called() < before+3 {
			time.Sleep(100 * time.Millisecond)
		}
		c.mu.Lock()
		c.err = nil
		c.mu.Unlock()
		message(c.last().args[1].(string))
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatal(err)
		default:
		}
		require.ErrorContains(t, <-done, "heartbeat did not arrive")

		// A subscription is also lost if no heartbeat can be published, or if it is never confirmed.
		done = watch()
		<-b.subscribed
		c.mu.Lock()
		c.err = errors.New("connection refused")
		c.mu.Unlock()
		require.ErrorContains(t, <-done, "redisstore: heartbeat: connection refused")
		c.mu.Lock()
		c.err = nil
		c.mu.Unlock()
		b.confirm = false
		require.ErrorContains(t, <-watch(), "heartbeat did not arrive")
	})
}

// Calls to Subscribe that do not return delay neither the next Watch nor the end of a Watch. If there are too many of
// them, Watch fails until a call returns.
func TestHangingSubscribeDoesNotBlockWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most, grace, lostWithin = 4, 1250 * time.Millisecond, 10 * time.Second
		var calls atomic.Int32
		release := make(chan struct{})
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: new(client).eval,
			Subscribe: func(_ context.Context, _ string, subscribed func(), _ func(string)) error {
				calls.Add(1)
				subscribed()
				<-release
				return nil
			}})
		watch := func(ctx context.Context) (ups int, took time.Duration, err error) {
			begun := time.Now()
			err = s.Watch(ctx, func() { ups++ }, func(string) {})
			return ups, time.Since(begun), err
		}
		for range most - 1 {
			ups, took, err := watch(t.Context())
			require.ErrorContains(t, err, "heartbeat did not arrive")
			require.Equal(t, 1, ups)
			require.Less(t, took, lostWithin)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		ups, took, err := watch(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 1, ups)
		require.Equal(t, time.Second+grace, took)

		ups, took, err = watch(t.Context())
		require.ErrorContains(t, err, "4 calls to Subscribe did not return")
		require.Zero(t, ups)
		require.Equal(t, grace, took)
		_, took, err = watch(ctx) // has ended
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Zero(t, took)
		require.Equal(t, int32(most), calls.Load())

		close(release)
		synctest.Wait()
		ups, _, err = watch(t.Context())
		require.ErrorContains(t, err, "subscription ended")
		require.LessOrEqual(t, ups, 1)
		require.Equal(t, int32(most+1), calls.Load())
	})
}

func TestWatchWithoutSubscribe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: new(client).eval})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		up := false
		require.ErrorIs(t, s.Watch(ctx, func() { up = true }, nil), context.DeadlineExceeded)
		require.True(t, up)
	})
}

// If a master of a cluster is down, a subscription at another master does not end: the next heartbeat is published
// through another master.
func TestSubscriptionSurvivesAnotherMaster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBus()
		var dead string          // the bucket of the first heartbeat
		var message atomic.Value // func(string)
		s := redisstore.New(redisstore.Config{
			Prefix: "users", Subscribe: b.subscribe,
			Eval: func(_ context.Context, _ string, keys []string, args ...any) (any, error) {
				if dead == "" {
					dead = keys[0]
				}
				if keys[0] == dead {
					return nil, errors.New("connection refused")
				}
				go message.Load().(func(string))(args[1].(string))
				return int64(0), nil
			},
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- s.Watch(ctx, func() {}, func(string) { t.Error("heard") }) }()
		message.Store(<-b.subscribed)
		require.ErrorIs(t, <-done, context.DeadlineExceeded, "after an hour")
	})
}
