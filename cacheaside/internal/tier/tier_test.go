package tier_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside/internal/tier"
)

const s = time.Second

var errDown = errors.New("down")

// A server is a Store that answers as it is told. The first byte of a key is its shard.
type server struct {
	mu    sync.Mutex
	calls []string
	fails func(call string) error // nil: nothing fails
}

func (r *server) call(ctx context.Context, what string, keys ...string) error {
	call := strings.Join(append([]string{what}, keys...), " ")
	r.mu.Lock()
	r.calls = append(r.calls, call)
	fails := r.fails
	r.mu.Unlock()
	if fails == nil {
		return ctx.Err()
	}
	return fails(call)
}

// set says what fails from now on, and forgets the calls so far.
func (r *server) set(fails func(call string) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls, r.fails = nil, fails
}

// made returns the calls since set, in the order of their names.
func (r *server) made() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(slices.Values(r.calls))
}

func (r *server) Shard(key string) uint8 { return key[0] }

func (r *server) Acquire(ctx context.Context, asks ...tier.Ask) (looks []tier.Lookup, err error) {
	var keys []string
	for _, ask := range asks {
		state := tier.Missed
		if ask.Token != "" {
			state = tier.Leased
		}
		keys, looks = append(keys, ask.Key), append(looks, tier.Lookup{State: state})
	}
	return looks, r.call(ctx, "ask", keys...)
}

func (r *server) Fill(ctx context.Context, values ...tier.Filling) ([]bool, error) {
	return make([]bool, len(values)), r.call(ctx, "fill", values[0].Key)
}

func (r *server) Release(ctx context.Context, key, _ string) error {
	return r.call(ctx, "release", key)
}

func (r *server) Invalidate(ctx context.Context, keys ...string) error {
	return r.call(ctx, "invalidate", keys...)
}

func (r *server) Expire(ctx context.Context, keys ...string) error {
	return r.call(ctx, "expire", keys...)
}

func (r *server) InvalidateAll(ctx context.Context) error { return r.call(ctx, "invalidate all") }

func (r *server) Fence(ctx context.Context, key, _ string) (time.Duration, error) {
	return s, r.call(ctx, "fence", key)
}

func (r *server) Unfence(ctx context.Context, key, _ string) error {
	return r.call(ctx, "unfence", key)
}

func (r *server) Watch(ctx context.Context, up func(), _ func(string)) error {
	if err := r.call(ctx, "watch"); err != nil {
		return err
	}
	up()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(2 * s):
		return errDown
	}
}

func always(string) error { return errDown }

// on fails calls whose text begins so.
func on(prefixes ...string) func(string) error {
	return func(call string) error {
		if slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(call, p) }) {
			return errDown
		}
		return nil
	}
}

// slowly fails every call after it has made its caller wait.
func slowly(string) error {
	time.Sleep(10 * time.Millisecond)
	return errDown
}

// A cache is what is in front of a Tier.
type cache struct {
	*testing.T
	*tier.Tier
	*server
	lost, restored, retold atomic.Int64
	started, running       atomic.Int64 // goroutines
	claim                  tier.Claim   // of key a1
}

// with runs a test with a Tier whose Store answers. A shard that fails is skipped for 1 s.
func with(t *testing.T, test func(c *cache)) {
	synctest.Test(t, func(t *testing.T) {
		c, begun := &cache{T: t, server: new(server)}, time.Now()
		var all sync.WaitGroup
		c.Tier = tier.New(c.server, tier.Host{
			Now:   func() time.Duration { return time.Since(begun) },
			Pause: func() time.Duration { return s },
			Go: func(f func()) {
				c.started.Add(1)
				c.running.Add(1)
				all.Go(func() {
					defer c.running.Add(-1)
					f()
				})
			},
			Lost:     func(context.Context, error) { c.lost.Add(1) },
			Restored: func(context.Context) { c.restored.Add(1) },
			Retold:   func(context.Context) { c.retold.Add(1) },
		})
		q := &tier.Question{Key: "a1", Lease: true}
		c.Ask(c.Context(), q)
		c.claim = q.Claim
		c.set(nil)
		test(c)
		c.set(nil)
		_, err := c.Tier.Close()
		require.NoError(c, err)
		all.Wait()
	})
}

// look reports whether the Store answers a question about key.
func (c *cache) look(key string) bool {
	q := &tier.Question{Key: key}
	c.Ask(c.Context(), q)
	return q.OK
}

// change invalidates keys, and reports whether the Store was told of all.
func (c *cache) change(keys ...string) bool {
	for _, err := range c.Tier.Invalidate(c.Context(), keys, func(int) {}) {
		if err != nil {
			return false
		}
	}
	return true
}

// asks reports whether the Store is asked about key, though not whether it would be trusted.
func (c *cache) asks(key string) bool {
	before := len(c.made())
	_, _ = c.Tier.Fence(c.Context(), key)
	return len(c.made()) > before
}

func (c *cache) changeAll() bool { return c.Tier.InvalidateAll(c.Context(), func() {}) == nil }

var operations = map[string]func(c *cache){
	"ask":            func(c *cache) { c.look("a1") },
	"release":        func(c *cache) { c.Tier.Release(c.Context(), "a1", c.claim) },
	"fill":           func(c *cache) { c.Tier.Fill(c.Context(), c.claim, tier.Filling{Key: "a1"}) },
	"invalidate":     func(c *cache) { c.change("a1") },
	"invalidate all": func(c *cache) { c.changeAll() },
	"fence":          func(c *cache) { _, _ = c.Tier.Fence(c.Context(), "a1") },
}

func TestAShardThatFailsIsSkippedForAPause(t *testing.T) {
	for name, operation := range operations {
		t.Run(name, func(t *testing.T) {
			with(t, func(c *cache) {
				c.set(always)
				operation(c)
				require.Len(c, c.made(), 1)
				require.False(c, c.asks("a1"))
				require.EqualValues(c, 1, c.lost.Load())
			})
		})
	}
}

func TestAnyAnswerEndsAnOutage(t *testing.T) {
	for name, operation := range operations {
		t.Run(name, func(t *testing.T) {
			with(t, func(c *cache) {
				c.set(always)
				require.False(c, c.look("a1"))
				c.set(nil)
				time.Sleep(s)
				operation(c)
				require.EqualValues(c, 1, c.restored.Load())
			})
		})
	}
}

func TestWhatACallerBeginsIsSaidEvenIfItLeaves(t *testing.T) {
	for name, operation := range map[string]func(ctx context.Context, c *cache){
		"ask":            func(ctx context.Context, c *cache) { c.Ask(ctx, &tier.Question{Key: "a1"}) },
		"release":        func(ctx context.Context, c *cache) { c.Tier.Release(ctx, "a1", c.claim) },
		"fill":           func(ctx context.Context, c *cache) { c.Tier.Fill(ctx, c.claim, tier.Filling{Key: "a1"}) },
		"invalidate":     func(ctx context.Context, c *cache) { c.Tier.Invalidate(ctx, []string{"a1"}, func(int) {}) },
		"invalidate all": func(ctx context.Context, c *cache) { _ = c.Tier.InvalidateAll(ctx, func() {}) },
		"fence":          func(ctx context.Context, c *cache) { _, _ = c.Tier.Fence(ctx, "a1") },
	} {
		t.Run(name, func(t *testing.T) {
			with(t, func(c *cache) {
				ctx, cancel := context.WithCancel(c.Context())
				cancel()
				operation(ctx, c)
				require.Len(c, c.made(), 1)
				require.Zero(c, c.lost.Load())
			})
		})
	}
}

func TestOneCallTriesAShardAfterItsPause(t *testing.T) {
	with(t, func(c *cache) {
		c.set(always)
		c.look("a1")
		time.Sleep(s)
		c.set(slowly)
		go c.look("a1")
		synctest.Wait()
		require.False(c, c.asks("a2"))
		time.Sleep(s)
	})
}

// wholeDown has two shards make their callers wait in vain.
func (c *cache) wholeDown() {
	c.set(slowly)
	c.look("a1")
	c.look("b1")
}

func TestOneCallTriesAStoreThatIsDownAfterItsPause(t *testing.T) {
	with(t, func(c *cache) {
		c.wholeDown()
		require.False(c, c.asks("c1"))
		time.Sleep(s)
		c.set(slowly)
		go c.look("c1")
		synctest.Wait()
		require.False(c, c.asks("d1"))
		time.Sleep(s)
	})
}

func TestShardsThatAnswerAreProbedOneAtATime(t *testing.T) {
	with(t, func(c *cache) {
		c.wholeDown()
		c.set(slowly)
		c.look("a1") // it is down itself
		require.Zero(c, c.running.Load())
		c.look("c1")
		c.look("c2")
		c.look("d1")
		synctest.Wait()
		require.Equal(c, []string{"ask c1"}, c.made())
		time.Sleep(10 * time.Millisecond)
		synctest.Wait()
		c.look("c1") // it is down now
		synctest.Wait()
		require.Equal(c, []string{"ask c1"}, c.made())
		c.set(nil)
		c.look("d1")
		synctest.Wait()
		require.Equal(c, []string{"ask d1"}, c.made())
		require.True(c, c.look("e1"), "a shard that answers ends the pause of the whole Store")
	})
}

func TestAShardThatWasAskedBeforeAnotherAnsweredDoesNotCountAsAWait(t *testing.T) {
	with(t, func(c *cache) {
		c.set(func(call string) error {
			if call == "ask c1" {
				return nil
			}
			return slowly(call)
		})
		go c.look("a1")
		go c.look("b1")
		time.Sleep(5 * time.Millisecond)
		require.True(c, c.look("c1"))
		time.Sleep(5 * time.Millisecond)
		synctest.Wait()
		require.False(c, c.asks("a1"))
		require.False(c, c.asks("b1"))
		require.True(c, c.look("c1"))
	})
}

// A call that is under way when two shards fail may be answered after that.
func TestAnAnswerEndsTheOutageOfOthersIfItsOwnShardFailedWithThem(t *testing.T) {
	for name, tc := range map[string]struct {
		key  string
		slow bool // those that fail make their callers wait: the whole Store is down
		ends bool
	}{
		"of a shard that is down": {key: "a1", slow: true, ends: true},
		"of another":              {key: "c1", slow: true},
		"of a shard that is down, though the Store is not": {key: "a1"},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, func(c *cache) {
				c.set(func(call string) error {
					switch {
					case call == "ask "+tc.key:
						time.Sleep(s / 2)
						return nil
					case tc.slow:
						return slowly(call)
					}
					return errDown
				})
				go c.look(tc.key)
				synctest.Wait()
				c.look("a2")
				c.look("b2")
				time.Sleep(s / 2)
				synctest.Wait()
				c.set(nil)
				require.Equal(c, tc.ends, c.asks("b1"))
			})
		})
	}
}

// One shard that makes its callers wait is not the whole Store, whatever else fails at once.
func TestAFailureThatMakesNobodyWaitDoesNotCount(t *testing.T) {
	for _, fails := range [][]func(string) error{{always, slowly}, {slowly, always}} {
		with(t, func(c *cache) {
			for i, key := range []string{"a1", "b1"} {
				c.set(fails[i])
				require.False(c, c.look(key))
			}
			require.True(c, c.asks("c1"))
		})
	}
}

func TestAFenceThatTheStoreDoesNotConfirmHasNoWindow(t *testing.T) {
	with(t, func(c *cache) {
		c.set(always)
		f, err := c.Tier.Fence(c.Context(), "a1")
		require.Error(c, err)
		require.Zero(c, f.Window, "whatever the Store returned beside its error")
	})
}

func TestAnAnswerAboutAllKeysIsOneOfEachShard(t *testing.T) {
	with(t, func(c *cache) {
		c.set(always)
		c.look("a1")
		c.set(nil)
		require.True(c, c.changeAll())
		require.EqualValues(c, 1, c.restored.Load())
		require.True(c, c.asks("a1"))
	})
}

func TestAnOutageIsOverOnceWhatIsStillDownIsDueToBeAsked(t *testing.T) {
	with(t, func(c *cache) {
		c.set(always)
		c.look("a1")
		c.look("b1")
		c.set(nil)
		time.Sleep(s)
		require.True(c, c.look("a1"))
		require.EqualValues(c, 1, c.restored.Load())
	})
}

// The answer of a shard that was never down says nothing about one that is.
func TestAShardIsDownUntilItAnswersOrNobodyAsksIt(t *testing.T) {
	with(t, func(c *cache) {
		c.set(on("ask a1"))
		c.look("a1")
		for range 200 {
			time.Sleep(s)
			c.look("a1")
			require.True(c, c.look("b1"))
		}
		require.EqualValues(c, 1, c.lost.Load())
		time.Sleep(s + time.Minute - 1)
		require.True(c, c.change("b1"))
		require.Zero(c, c.restored.Load())
		time.Sleep(time.Nanosecond)
		require.True(c, c.look("b1"))
		require.EqualValues(c, 1, c.restored.Load())
		require.False(c, c.look("b1"), "the change is told again")
	})
}

// What the Store was told last, it may have lost in a failover. tellAgain holds that key a1
// is not asked for until the Store has been told of it again.
func (c *cache) tellAgain(call string) {
	synctest.Wait()
	c.set(nil)
	require.False(c, c.look("a1"))
	time.Sleep(s)
	synctest.Wait()
	require.Contains(c, c.made(), call)
	require.True(c, c.look("a1"))
	time.Sleep(s)
	require.Zero(c, c.running.Load(), "there is nothing more to tell")
}

func TestWhatWasToldLastIsToldAgainAfterAnOutageBegan(t *testing.T) {
	t.Run("a key, of ten seconds before", func(t *testing.T) {
		with(t, func(c *cache) {
			require.True(c, c.change("a1"))
			time.Sleep(10 * s)
			c.set(always)
			c.look("b1")
			c.tellAgain("invalidate a1")
		})
	})
	t.Run("or ended", func(t *testing.T) {
		with(t, func(c *cache) {
			c.set(on("ask b1"))
			c.look("b1")
			require.True(c, c.change("a1"))
			c.set(nil)
			time.Sleep(s)
			require.True(c, c.look("b1"))
			require.EqualValues(c, 1, c.restored.Load())
			c.tellAgain("invalidate a1")
		})
	})
	t.Run("or ended for its shard", func(t *testing.T) {
		with(t, func(c *cache) {
			c.set(on("ask x1"))
			c.look("x1")
			c.set(func(call string) error {
				switch call {
				case "invalidate a1":
					time.Sleep(s / 2)
					return nil
				case "invalidate a2":
					return errDown
				}
				return nil
			})
			go c.change("a1")
			synctest.Wait()
			require.False(c, c.change("a2"), "it fails over")
			time.Sleep(s / 2)
			c.tellAgain("invalidate a1")
		})
	})
	t.Run("not a key of earlier", func(t *testing.T) {
		with(t, func(c *cache) {
			require.True(c, c.change("a1"))
			time.Sleep(10*s + 1)
			c.set(on("ask b1"))
			c.look("b1")
			require.True(c, c.look("a1"))
		})
	})
	for name, change := range map[string]func(c *cache){
		"invalidate a1":  func(c *cache) { c.change("a1") },
		"invalidate all": func(c *cache) { c.changeAll() },
	} {
		t.Run("that was late itself: "+name, func(t *testing.T) {
			with(t, func(c *cache) {
				c.set(always)
				change(c)
				c.set(nil)
				time.Sleep(s)
				synctest.Wait()
				require.EqualValues(c, 1, c.retold.Load())
				require.True(c, c.look("a1"))
				time.Sleep(10 * s) // and the change is older than that
				c.set(always)
				c.look("b1")
				c.tellAgain(name)
			})
		})
	}
	for name, heard := range map[string]func(call string) error{"before a subscription": on("watch"), "in a subscription": nil} {
		t.Run(name, func(t *testing.T) {
			with(t, func(c *cache) {
				c.set(heard)
				var ups, downs atomic.Int64
				go c.Tier.Watch(func() { ups.Add(1) }, func(string) {}, func(error) { downs.Add(1) })
				time.Sleep(s / 2)
				require.True(c, c.change("a1"))
				if heard == nil { // it ends after two seconds
					c.set(on("watch"))
					time.Sleep(3 * s / 2)
				} else { // it is tried again after one
					c.set(nil)
					time.Sleep(s / 2)
				}
				synctest.Wait()
				require.EqualValues(c, 1, ups.Load())
				require.EqualValues(c, 1, downs.Load())
				require.False(c, c.look("a1"))
				time.Sleep(s)
				synctest.Wait()
				require.Contains(c, c.made(), "invalidate a1")
				require.True(c, c.look("a1"))
			})
		})
	}
}

// What the Store could not be told is told after each pause, by one goroutine.
func TestWhatIsUntoldIsToldLater(t *testing.T) {
	for name, tc := range map[string]struct {
		do   func(c *cache)
		told string
		once bool // it ends by itself
	}{
		"a key":                            {do: operations["invalidate"], told: "invalidate a1"},
		"all keys":                         {do: operations["invalidate all"], told: "invalidate all"},
		"a lease that was granted":         {do: operations["release"], told: "release a1", once: true},
		"a lease that was to be filled":    {do: operations["fill"], told: "release a1", once: true},
		"a lease that may have been given": {do: func(c *cache) { c.Ask(c.Context(), &tier.Question{Key: "a1", Lease: true}) }, told: "release a1", once: true},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, func(c *cache) {
				c.set(always)
				tc.do(c)
				c.set(always)
				time.Sleep(s) // it fails again, and the shard is skipped again
				synctest.Wait()
				require.Equal(c, []string{tc.told}, c.made())
				time.Sleep(s / 2)
				require.False(c, c.asks("a1"))
				c.set(nil)
				time.Sleep(s / 2)
				synctest.Wait()
				if tc.once {
					require.Empty(c, c.made())
				} else {
					require.Equal(c, []string{tc.told}, c.made())
					require.EqualValues(c, 1, c.restored.Load())
				}
				require.EqualValues(c, 1, c.started.Load())
				require.Zero(c, c.running.Load())
				require.Zero(c, c.Untold())
				require.True(c, c.look("a1"))
			})
		})
	}
}

func TestLeasesAreReleasedOneByOneUntilTheStoreAnswers(t *testing.T) {
	with(t, func(c *cache) {
		c.set(always)
		operations["release"](c)
		operations["release"](c)
		for _, fails := range []func(string) error{always, nil} {
			require.Zero(c, c.restored.Load())
			c.set(fails)
			time.Sleep(s)
			synctest.Wait()
			require.Equal(c, []string{"release a1"}, c.made())
		}
		require.EqualValues(c, 1, c.restored.Load())
		require.Zero(c, c.running.Load())
	})
}

func TestWhatIsUntoldOfOneKeyIsNotAskedOfIt(t *testing.T) {
	with(t, func(c *cache) {
		c.set(on("invalidate"))
		require.False(c, c.change("a1"))
		require.False(c, c.change("b1"))
		require.EqualValues(c, 1, c.started.Load())
		require.True(c, c.look("c1"))
		require.EqualValues(c, 2, c.Untold())
	})
}

func TestAStoreThatPanicsIsToldLater(t *testing.T) {
	with(t, func(c *cache) {
		c.set(func(string) error { panic("oops") })
		told := 0
		errs := c.Tier.Invalidate(c.Context(), []string{"a1"}, func(int) { told++ })
		require.ErrorContains(c, errs[0], "the Store panicked: oops")
		require.Equal(c, 1, told)
		c.set(nil)
		time.Sleep(s)
		synctest.Wait()
		require.Equal(c, []string{"invalidate a1"}, c.made())
	})
}

func TestShardsThatAreDownDoNotDelayWhatOthersAreTold(t *testing.T) {
	var keys, calls []string
	for i := range 20 {
		key := string(rune('a' + i))
		keys, calls = append(keys, key), append(calls, "invalidate "+key)
	}
	with(t, func(c *cache) {
		c.set(always)
		require.False(c, c.change(keys...))
		c.set(on("invalidate a"))
		time.Sleep(s)
		synctest.Wait()
		require.Equal(c, calls, c.made())
		require.EqualValues(c, 1, c.Untold())
	})
	with(t, func(c *cache) {
		c.set(always)
		require.False(c, c.change(keys...))
		c.set(always)
		time.Sleep(s)
		synctest.Wait()
		require.Len(c, c.made(), 2, "the whole Store is down")
	})
}

// A shard that stays down keeps neither the doubts about others nor their changes from being
// told.
func TestAShardThatStaysDownDelaysNothingOfTheOthers(t *testing.T) {
	for name, down := range map[string][]string{"one": {"x1"}, "several": {"u1", "v1", "w1", "x1"}} {
		t.Run(name, func(t *testing.T) {
			with(t, func(c *cache) {
				isDown := func(call string) error {
					if slices.ContainsFunc(down, func(key string) bool { return strings.HasSuffix(call, key) }) {
						return errDown
					}
					return nil
				}
				require.True(c, c.change("a1"))
				c.set(isDown)
				require.False(c, c.change(down...))
				c.set(always)
				require.False(c, c.change("b1"))
				c.set(isDown)
				require.False(c, c.look("a1"))
				require.False(c, c.look("b1"))
				time.Sleep(20 * s)
				require.EqualValues(c, len(down), c.Untold())
				require.True(c, c.look("a1"))
				require.True(c, c.look("b1"))
				c.set(on("invalidate u1", "invalidate v1"))
				time.Sleep(20 * s)
				require.EqualValues(c, len(down)/2, c.Untold(), "those that are up again were told")
			})
		})
	}
}

// Shards that stay down, and miss more and more, keep no other from being told: neither one
// that is back, nor those that never failed.
func TestShardsThatStayDownComeLast(t *testing.T) {
	const dead = "tuvwxyz"
	isDown := func(call string) error {
		if _, key, _ := strings.Cut(call, " "); strings.ContainsAny(key[:1], dead) {
			return errDown
		}
		return nil
	}
	with(t, func(c *cache) {
		time.Sleep(s)
		c.set(always)
		require.False(c, c.change("b1"))
		time.Sleep(s + s/2) // it is told in vain
		c.set(isDown)
		for i := range 100 {
			for _, shard := range dead {
				require.False(c, c.change(fmt.Sprint(string(shard), i)))
			}
			time.Sleep(s / 10)
		}
		require.True(c, c.look("b1"))
		require.EqualValues(c, 100*len(dead), c.Untold())
	})
	with(t, func(c *cache) {
		for _, shard := range dead + "ab" {
			require.True(c, c.change(string(shard)))
		}
		time.Sleep(s)
		c.set(isDown)
		for _, shard := range dead {
			require.False(c, c.look(string(shard)+"2"))
			time.Sleep(s / 100)
		}
		require.False(c, c.look("a"))
		require.False(c, c.look("b"))
		time.Sleep(s)
		require.True(c, c.look("a"))
		require.True(c, c.look("b"))
	})
}

// While it is down, no change of all keys succeeds: that says nothing about the others.
func TestAShardThatStaysDownDelaysNoChangeAfterOneOfAllKeys(t *testing.T) {
	for _, missed := range []bool{false, true} {
		with(t, func(c *cache) {
			require.True(c, c.changeAll())
			c.set(on("ask x1", "invalidate x1", "invalidate all"))
			require.False(c, c.look("x1"))
			require.False(c, missed && c.change("x1"))
			for range 40 {
				require.True(c, c.change("b1"))
				time.Sleep(s / 2)
			}
			require.False(c, c.look("b1"), "all may be lost")
		})
	}
}

// Nor does such a change, before or after one of a key, keep that from being told.
func TestAChangeOfAllKeysThatFailsDelaysNoChangeOfAKey(t *testing.T) {
	for _, before := range []bool{false, true} {
		with(t, func(c *cache) {
			c.set(always)
			require.False(c, before && c.change("b1"))
			require.False(c, c.changeAll())
			require.False(c, !before && c.change("b1"))
			c.set(on("invalidate all"))
			time.Sleep(3 * s)
			require.Contains(c, c.made(), "invalidate b1")
			require.EqualValues(c, 1, c.Untold(), "all")
			require.False(c, c.look("b1"))
		})
	}
}

// A call that fails undoes none before it: of a thousand, there may always be one.
func TestAShardIsToldOnFromWhereItFailed(t *testing.T) {
	for _, fenced := range []bool{true, false} {
		with(t, func(c *cache) {
			const keys = 1000
			calls := int64(keys / 100)
			fences := make([]tier.Fence, keys)
			for i := range fences {
				if fenced {
					calls = keys
					fences[i], _ = c.Tier.Fence(c.Context(), fmt.Sprint("a", i))
				}
			}
			c.set(always)
			for i, f := range fences {
				c.Tier.Unfence(c.Context(), []string{fmt.Sprint("a", i)}, f, func(int) {})
			}
			require.EqualValues(c, keys, c.Untold())
			var n atomic.Int64
			c.set(func(string) error {
				if n.Add(1)%(calls-1) == 0 {
					return errDown
				}
				return nil
			})
			time.Sleep(3 * s)
			require.Zero(c, c.Untold())
			require.EqualValues(c, keys, c.retold.Load())
		})
	}
}

func TestWhatIsUntoldHasBounds(t *testing.T) {
	for call, most := range map[string]int{"release a1": 1000, "unfence a1": 100} {
		t.Run(call, func(t *testing.T) {
			with(t, func(c *cache) {
				var fences []tier.Fence
				for range most + 1 {
					f, err := c.Tier.Fence(c.Context(), "a1")
					require.NoError(c, err)
					fences = append(fences, f)
				}
				c.set(always)
				for _, f := range fences {
					if call == "release a1" {
						operations["release"](c)
					} else {
						c.Tier.Unfence(c.Context(), []string{"a1"}, f, func(int) {})
					}
				}
				c.set(nil)
				time.Sleep(s)
				synctest.Wait()
				require.Equal(c, slices.Repeat([]string{call}, most), c.made())
			})
		})
	}
}

func TestCloseReturnsWhatTheStoreWasNotTold(t *testing.T) {
	with(t, func(c *cache) {
		c.set(always)
		untold := []string{"a1", "b1", "c1", "d1", "e1", "f1", "g1", "h1"}
		require.False(c, c.change(untold...))
		keys, err := c.Tier.Close()
		require.ErrorIs(c, err, errDown)
		require.Equal(c, untold, keys, "in their order")
		synctest.Wait()
		require.Zero(c, c.running.Load())
		started := c.started.Load()
		require.False(c, c.change("z1"))
		require.Equal(c, started, c.started.Load(), "no goroutine begins")
	})
}

// What the Store is told meanwhile is not left.
func TestCloseReturnsNothingIfTheStoreIsToldMeanwhile(t *testing.T) {
	with(t, func(c *cache) {
		c.set(always)
		require.False(c, c.change("a1"))
		c.set(func(string) error { time.Sleep(s); return nil })
		time.Sleep(s + s/2)
		c.set(func(string) error { time.Sleep(s); return errDown })
		keys, err := c.Tier.Close()
		require.NoError(c, err)
		require.Empty(c, keys)
	})
}

func TestNothingBeginsAfterClose(t *testing.T) {
	with(t, func(c *cache) {
		_, err := c.Tier.Close()
		require.NoError(c, err)
		c.set(always)
		require.False(c, c.change("a1"))
		require.Zero(c, c.started.Load())
	})
}

func TestATierMayBeUsedConcurrently(t *testing.T) {
	with(t, func(c *cache) {
		var n atomic.Int64
		c.set(func(call string) error {
			if n.Add(1)%3 == 0 {
				return nil
			}
			return slowly(call)
		})
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				for j := range 50 {
					key := fmt.Sprintf("%c%d", 'a'+rune(j%5), i)
					c.look(key)
					if c.change(key); j%5 == 0 {
						c.changeAll()
					}
					time.Sleep(s / 5)
				}
				_, _ = c.Tier.Close()
			})
		}
		all.Wait()
	})
}
