package redisstore_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
)

// These tests are about what goes to the client and what comes back; what the
// scripts do is tested on a real Redis, in internal/integration/cacheaside.

// call is one call of Eval.
type call struct {
	script string
	keys   []string
	args   []any
}

// client answers as it is told, and hears what was asked.
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
		`Prefix is ""`:     func(c *redisstore.Config) { c.Prefix = "" },
		`Prefix is "a{b"`:  func(c *redisstore.Config) { c.Prefix = "a{b" },
		"Eval is nil":      func(c *redisstore.Config) { c.Eval = nil },
		"Timeout is -1s":   func(c *redisstore.Config) { c.Timeout = -time.Second },
		"Lease is -1s":     func(c *redisstore.Config) { c.Lease = -time.Second },
		"Write is -1s":     func(c *redisstore.Config) { c.Write = -time.Second },
		"Heartbeat is -1s": func(c *redisstore.Config) { c.Heartbeat = -time.Second },
	} {
		cfg := redisstore.Config{Prefix: "users", Eval: new(client).eval}
		require.NoError(t, cfg.Validate())
		change(&cfg)
		err := cfg.Validate()
		require.ErrorContains(t, err, "redisstore.Config."+field+": must be ")
		require.PanicsWithError(t, err.Error(), func() { redisstore.New(cfg) })
	}
}

func TestRepliesAreRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c client
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: c.eval})
		for _, test := range []struct {
			reply any
			want  cacheaside.Lookup
		}{
			{[]any{int64(1), "v", int64(2000), int64(0)},
				cacheaside.Lookup{State: cacheaside.Hit, Value: []byte("v"), Fresh: 2 * time.Millisecond}},
			{[]any{int64(3), []byte("v"), int64(-5000), int64(7)},
				cacheaside.Lookup{State: cacheaside.Busy, Value: []byte("v"), Fresh: -5 * time.Millisecond, Wait: 7 * time.Microsecond}},
			{[]any{int64(2), "", int64(0), int64(0)}, cacheaside.Lookup{State: cacheaside.Leased}},
			{[]any{int64(4), "", int64(0), int64(0)}, cacheaside.Lookup{State: cacheaside.Fenced}},
		} {
			c.reply = test.reply
			got, err := s.Acquire(t.Context(), "42", "token", true)
			require.NoError(t, err)
			require.Equal(t, test.want, got)
		}
		for _, reply := range []any{nil, "OK", []any{}, []any{int64(1), 2.5, int64(0), int64(0)},
			[]any{int64(1), "v", "0", int64(0)}, []any{nil, "v", int64(0), int64(0)}} {
			c.reply = reply
			_, err := s.Acquire(t.Context(), "42", "token", false)
			require.ErrorContains(t, err, "redisstore: acquire: unexpected reply")
		}
		for _, reply := range []any{int64(0), int64(1)} {
			c.reply = reply
			ok, err := s.Fill(t.Context(), "42", "token", []byte("v"), time.Second, time.Minute)
			require.NoError(t, err)
			require.Equal(t, reply == int64(1), ok)
		}
		c.reply = "OK"
		_, err := s.Fill(t.Context(), "42", "token", []byte("v"), time.Second, time.Minute)
		require.ErrorContains(t, err, "redisstore: fill: unexpected reply")
	})
}

func TestErrorsOfTheClientAreWrapped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		down := errors.New("connection refused")
		c := client{err: down}
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: c.eval})
		ctx := t.Context()
		_, err := s.Acquire(ctx, "42", "token", false)
		require.EqualError(t, err, "redisstore: acquire: connection refused")
		_, err = s.Fill(ctx, "42", "token", nil, 0, 0)
		require.ErrorIs(t, err, down)
		_, err = s.Fence(ctx, "42", "token")
		require.ErrorIs(t, err, down)
		for _, err := range []error{s.Release(ctx, "42", "token"), s.Invalidate(ctx, "42"), s.Expire(ctx, "42"),
			s.Unfence(ctx, "42", "token"), s.InvalidateAll(ctx)} {
			require.ErrorIs(t, err, down)
		}
	})
}

// In a cluster a script may touch the keys of one slot only: the part in braces
// decides it.
func TestKeysOfAScriptShareASlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c client
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: c.eval})
		slots := map[string]bool{}
		for _, key := range []string{"", "42", "a{b}c", "user:7", "ü"} {
			require.NoError(t, s.Invalidate(t.Context(), key))
			keys := c.last().keys
			require.Len(t, keys, 2)
			slot, rest, ok := strings.Cut(keys[0], "}")
			require.True(t, ok)
			require.Equal(t, ":"+key, rest)
			require.Equal(t, slot+"}", keys[1])
			slots[slot] = true
		}
		require.Greater(t, len(slots), 2, "and keys are spread")
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

func TestWatchHearsOfOthersOnly(t *testing.T) {
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

func TestSilentSubscriptionIsTestedAndThenLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c client
		b := newBus()
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: c.eval, Subscribe: b.subscribe, Heartbeat: 10 * time.Second})
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

		// What cannot be tested is lost as well; so is what is never confirmed.
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

func TestWithoutSubscribeThereIsNothingToLose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := redisstore.New(redisstore.Config{Prefix: "users", Eval: new(client).eval})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		up := false
		require.ErrorIs(t, s.Watch(ctx, func() { up = true }, nil), context.DeadlineExceeded)
		require.True(t, up)
	})
}
