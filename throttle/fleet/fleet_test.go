package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/reply"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/fleet"
)

var errDown = errors.New("connection refused")

func ok(context.Context) error { return nil }

// A redis answers as the script does, without its arithmetic: it admits each call.
type redis struct {
	mu     sync.Mutex
	err    error
	takes  time.Duration
	calls  map[any]int // by what they ask for
	last   map[any][]any
	keys   []string               // of the last settlement or free
	answer func(args []any) []any // of a take; nil admits it
}

func (r *redis) eval(ctx context.Context, _ string, keys []string, args ...any) (any, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.calls == nil {
		r.calls, r.last = map[any]int{}, map[any][]any{}
	}
	r.calls[args[0]]++
	r.last[args[0]] = args
	if args[0] == "settle" || args[0] == "free" {
		r.keys = keys
	}
	if r.takes > 0 {
		timer := time.NewTimer(r.takes)
		defer timer.Stop()
		r.mu.Unlock()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		r.mu.Lock()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	if r.err != nil {
		return nil, r.err
	}
	now := time.Now().UnixMicro()
	switch {
	case args[0] == "renew":
		answer := []any{now}
		for range keys {
			answer = append(answer, int64(1))
		}
		return answer, nil
	case args[0] != "take":
		return []any{int64(1), now}, nil
	case r.answer != nil:
		return r.answer(args), nil
	}
	answer := []any{int64(1), now}
	for range (len(args) - 3) / 4 {
		answer = append(answer, int64(0))
	}
	return answer, nil
}

func (r *redis) count(op string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.calls[op]
}

func (r *redis) set(f func(*redis)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(r)
}

func of(meters ...fleet.Meter) func(context.Context) []fleet.Meter {
	return func(context.Context) []fleet.Meter { return meters }
}

func TestMetersAreChecked(t *testing.T) {
	day := throttle.Window{Per: throttle.Day}
	for want, meters := range map[string][]fleet.Meter{
		"Meters[0] is Meter{}: must be one that Rate, Quota or Slots returned": {
			{},
		},
		"Meters is 0: must be 1 to 16": {},
		`Meters[1].key is "b/x": must be one that begins with "a", as the first: a call's meters are on one node`: {
			fleet.Slots("a/x", 1), fleet.Slots("b/x", 1),
		},
		`Meters[1].key is "a/x": must be different from the keys of earlier meters`: {
			fleet.Slots("a/x", 1), fleet.Rate("a/x", 1, 1),
		},
		`Meters[1].key is "a/": must be different from the keys of earlier meters`: {
			fleet.Slots("a", 1), fleet.Slots("a/", 1),
		},
		`Meters[0].cost is -500: must be 0 or more`: {
			fleet.Rate("a", 1, -500),
		},
		`Meters[0].cost is -1: must be 0 or more`: {
			fleet.Quota("a", 1, day, -1).Estimated(),
		},
		`Meters[0].perSecond is 0: must be above 0 and at most 1e9, throttle.None or throttle.Unlimited`: {
			fleet.Rate("a", 0, 1).Burst(1),
		},
		`Meters[0].Burst is 5000000000: must be 1 to 4e9, throttle.None or throttle.Unlimited`: {
			fleet.Rate("a", 1, 1).Burst(5e9),
		},
		`Meters[0].Burst is 5: must be set only for a Rate`: {
			fleet.Slots("a", 1).Burst(5),
		},
		`Meters[0].Burst is 6: must be set only for a Rate`: {
			fleet.Quota("a", 1, day, 1).Burst(6),
		},
		`Meters[0].n is 0: must be 1 to 1e15, throttle.None or throttle.Unlimited`: {
			fleet.Quota("a", 0, day, 1),
		},
		`Meters[0].Per is "": must be set where Every is not, and the other way round`: {
			fleet.Quota("a", 1, throttle.Window{}, 1),
		},
		`Meters[0].n is 0: must be 1 to 1e6, throttle.None or throttle.Unlimited`: {
			fleet.Slots("a", 0),
		},
	} {
		l := fleet.New(fleet.Config{Name: "n", Eval: new(redis).eval, Meters: of(meters...)})
		require.EqualError(t, l.Do(t.Context(), ok), "fleet.Config."+want)
	}
	for want, cfg := range map[string]fleet.Config{
		`fleet.Config.Name is "": must be set: it names the limits that are shared`: {Eval: new(redis).eval, Meters: of()},
		"fleet.Config.Eval is nil: must be set":                                     {Name: "n", Meters: of()},
		"fleet.Config.Meters is nil: must be set":                                   {Name: "n", Eval: new(redis).eval},
		"fleet.Config.Instances is 0: must be 1 or more where OnOutage is Local": {
			Name: "n", Eval: new(redis).eval, Meters: of(), OnOutage: fleet.Local,
		},
		`fleet.Config.OnOutage is "open": must be "refuse", "local" or "admit"`: {Name: "n", Eval: new(redis).eval,
			Meters: of(), OnOutage: "open"},
		"fleet.Config.MaxWait is -2ns: must be 0 or more, or fleet.Unlimited": {
			Name: "n", Eval: new(redis).eval, Meters: of(), MaxWait: -2,
		},
		"fleet.Config.Lease is 1ms: must be 0 (for 10 s), or at least 100 ms": {
			Name: "n", Eval: new(redis).eval, Meters: of(), Lease: time.Millisecond,
		},
	} {
		require.PanicsWithError(t, want, func() { fleet.New(cfg) })
	}
}

// A call that can never pass asks nobody.
func TestTooCostlyCallDoesNotAskRedis(t *testing.T) {
	r := &redis{}
	for _, m := range []fleet.Meter{fleet.Rate("a", 1, 2),
		fleet.Quota("a", 1, throttle.Window{Per: throttle.Day}, 2).Estimated()} {
		err := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Meters: of(m)}).Do(t.Context(), ok)
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		require.Equal(t, throttle.TooCostly, limited.Reason)
		require.Equal(t, 2, limited.Cost)
		require.False(t, limited.Retryable())
	}
	require.Zero(t, r.count("take"))
}

// Of several meters that refuse, the error is that of the latest. Nobody waits for a quota.
func TestRefusalNamesTheLatest(t *testing.T) {
	second := int64(1_000_000)
	for _, c := range []struct {
		answer []any // of three meters: what is left, the time until, whether it is cooling down
		key    string
		reason throttle.Reason
		after  time.Duration
	}{
		{[]any{int64(0), 2 * second, int64(0), int64(3), int64(-1), int64(0), int64(0), int64(-1), int64(0)}, "a/rate",
			throttle.WaitTooLong, 2 * time.Second},
		{[]any{int64(0), 2 * second, int64(0), int64(3), 9 * second, int64(0), int64(0), int64(-1), int64(0)}, "a/day",
			throttle.OverQuota, 9 * time.Second},
		{[]any{int64(0), 20 * second, int64(0), int64(3), 9 * second, int64(0), int64(0), int64(0), int64(0)}, "a/rate",
			throttle.OverLimit, 20 * time.Second},
		{[]any{int64(0), int64(-1), int64(0), int64(3), int64(-1), int64(0), int64(0), int64(0), int64(0)}, "a/slots",
			throttle.WaitTooLong, 0},
		{[]any{int64(0), 5 * second, int64(1), int64(3), int64(-1), int64(0), int64(0), int64(0), int64(0)}, "a/rate",
			throttle.CoolingDown, 5 * time.Second},
	} {
		r := &redis{answer: func([]any) []any {
			return append([]any{int64(0), time.Now().UnixMicro(), int64(2), int64(10_000)}, c.answer...)
		}}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, MaxWait: time.Nanosecond, Meters: of(
			fleet.Rate("a/rate", 1, 1), fleet.Quota("a/day", 5, throttle.Window{Per: throttle.Day},
				1), fleet.Slots("a/slots", 2))})
		limited, _ := errors.AsType[*throttle.LimitedError](l.Do(t.Context(), ok))
		require.Equal(t, []any{c.key, c.reason, c.after}, []any{limited.Key, limited.Reason, limited.After}, "%v", c.answer)
		require.EqualValues(t, 1, l.Stats().Refusals[c.reason])
	}
}

// While Redis is away, the first call waits for its Timeout, and no other.
func TestNoCallWaitsDuringAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{takes: time.Hour}
		var events []throttle.EventKind
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Timeout: 50 * time.Millisecond,
			Meters: func(ctx context.Context) []fleet.Meter {
				return []fleet.Meter{fleet.Rate(fmt.Sprint(ctx.Value(account{})), 10, 1)}
			}})
		var mu sync.Mutex
		defer l.Observe(func(_ context.Context, e throttle.Event) {
			mu.Lock()
			defer mu.Unlock()
			if e.Kind != throttle.EventRefused {
				events = append(events, e.Kind)
			}
		})()
		start := time.Now()
		for i := range 160 {
			err := l.Do(context.WithValue(t.Context(), account{}, i), ok)
			limited, _ := errors.AsType[*throttle.LimitedError](err)
			require.Equal(t, throttle.Outage, limited.Reason)
			require.ErrorIs(t, err, throttle.ErrOutage)
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		require.Equal(t, 50*time.Millisecond, time.Since(start))
		health := l.Describe().Health(t.Context())
		require.ErrorIs(t, health.Err, throttle.ErrOutage)
		health.Err = nil
		require.Equal(t, policy.Health{Status: policy.Fail, State: "store_down"}, health)
		require.True(t, l.Stats().Down)
		require.EqualValues(t, 1, l.Stats().Failed, "the other calls did not ask")
		time.Sleep(10 * time.Second)
		require.Error(t, l.Do(t.Context(), ok), "which has it tried")
		time.Sleep(time.Second)
		require.Equal(t, 2, r.count("ping"), "one at the beginning, and one each RetryEvery that somebody calls")
		r.set(func(r *redis) { r.takes = 0 })
		require.Error(t, l.Do(t.Context(), ok))
		synctest.Wait()
		require.NoError(t, l.Do(t.Context(), ok))
		require.Zero(t, l.Describe().Health(t.Context()))
		mu.Lock()
		defer mu.Unlock()
		require.Equal(t, []throttle.EventKind{throttle.EventOutageBegan, throttle.EventOutageEnded}, events)
	})
}

type account struct{}

// A connection that has the deadline of the call often returns a moment before its ctx ends.
func TestDeadlineOfACallIsNoOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fleet.New(fleet.Config{Name: "n", Meters: of(fleet.Rate("a", 10, 1)),
			Eval: func(context.Context, string, []string, ...any) (any, error) {
				time.Sleep(time.Millisecond)
				return nil, os.ErrDeadlineExceeded
			}})
		ctx := endsSoon{t.Context(), time.Now().Add(time.Millisecond)}
		require.ErrorIs(t, l.Do(ctx, ok), context.DeadlineExceeded)
		ctx.at = time.Now().Add(time.Millisecond)
		require.Equal(t, context.DeadlineExceeded, l.Cooldown(ctx, "a", time.Hour))
		require.False(t, l.Stats().Down)
	})
}

// TestCanceledCallGetsItsTokensBack has the ctx of a call end while Redis admits the call.
func TestCanceledCallGetsItsTokensBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		ctx, cancel := context.WithCancel(t.Context())
		l := fleet.New(fleet.Config{Name: "n",
			Meters: of(fleet.Quota("a/month", 10, throttle.Window{Per: throttle.Month}, 3), fleet.Slots("a/slots", 2)),
			Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
				v, err := r.eval(context.WithoutCancel(ctx), script, keys, args...)
				cancel()
				return v, err
			}})
		err := l.Do(ctx, func(context.Context) error { t.Error("the call ran"); return nil })
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, throttle.ErrLimited)
		require.NoError(t, l.Close(t.Context()))
		require.Equal(t, []int{1, 0}, []int{r.count("settle"), r.count("free")})
		require.Equal(t, int64(-3), r.last["settle"][7])
		s := l.Stats()
		require.Equal(t, []int64{0, 1}, []int64{s.Admitted, s.Refusals[throttle.ContextEnded]})
	})
}

// An endsSoon is a ctx whose deadline has passed before it knows.
type endsSoon struct {
	context.Context
	at time.Time
}

func (c endsSoon) Deadline() (time.Time, bool) { return c.at, true }

// The outage of one node leaves the calls of others alone.
func TestOutageOfANode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		good, bad := &redis{}, &redis{err: errDown}
		l := fleet.New(fleet.Config{
			Name: "n", Node: func(key string) string { return key[3:4] },
			Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
				if keys[0][3:4] == "b" {
					return bad.eval(ctx, script, keys, args...)
				}
				return good.eval(ctx, script, keys, args...)
			},
			Meters: func(ctx context.Context) []fleet.Meter {
				return []fleet.Meter{fleet.Rate(ctx.Value(account{}).(string), 10, 1)}
			},
		})
		for range 5 {
			require.Error(t, l.Do(context.WithValue(t.Context(), account{}, "b"), ok))
			require.NoError(t, l.Do(context.WithValue(t.Context(), account{}, "a"), ok))
		}
		require.Equal(t, 1, bad.count("take"))
		require.Equal(t, 5, good.count("take"))
	})
}

// An outage ends also if a failover has given the keys of its node to another.
func TestOutageEndsWithAFailover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{err: errDown}
		node := "old"
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Meters: of(fleet.Rate("a", 10, 1)),
			Node: func(string) string { return node }})
		var recovered []string
		l.Observe(func(_ context.Context, e throttle.Event) {
			if e.Kind == throttle.EventOutageEnded {
				recovered = append(recovered, e.Key)
			}
		})
		require.ErrorIs(t, l.Do(t.Context(), ok), errDown)
		time.Sleep(2 * time.Second)
		r.set(func(r *redis) { r.err = nil })
		node = "new"
		require.NoError(t, l.Do(t.Context(), ok))
		synctest.Wait()
		require.Zero(t, l.Describe().Health(t.Context()))
		require.Equal(t, []string{"old"}, recovered)
	})
}

// An outage ends also if nobody calls because of it, such as a balancer that asks for the health.
func TestOutageEndsWithoutCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{err: errDown}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Meters: of(fleet.Rate("a", 10, 1))})
		for _, fails := range []func() bool{
			func() bool { return l.Describe().Health(t.Context()).Status != policy.Pass },
			func() bool { return l.Stats().Down },
		} {
			r.set(func(r *redis) { r.err = errDown })
			require.ErrorIs(t, l.Do(t.Context(), ok), errDown)
			time.Sleep(10 * time.Second)
			require.True(t, fails())
			r.set(func(r *redis) { r.err = nil })
			time.Sleep(10 * time.Second)
			_ = fails()
			synctest.Wait()
			require.False(t, fails())
		}
	})
}

// An answer that comes after Timeout admits nobody.
func TestLateAnswerAdmitsNoCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		l := fleet.New(fleet.Config{Name: "n", Timeout: 50 * time.Millisecond, Meters: of(fleet.Rate("a", 10, 1)),
			Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
				time.Sleep(51 * time.Millisecond) // which heeds no ctx
				return r.eval(ctx, script, keys, args...)
			}})
		require.ErrorIs(t, l.Do(t.Context(), ok), throttle.ErrOutage)
		require.Equal(t, 1, r.count("take"))
		time.Sleep(time.Second)
		synctest.Wait()
	})
}

// With Local each process has its part of each limit.
func TestLocalParts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{err: errDown}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, OnOutage: fleet.Local, Instances: 4, Meters: of(
			fleet.Rate("a/rate", 1e-3, 2).Burst(80).Estimated(), fleet.Quota("a/day", 40,
				throttle.Window{Per: throttle.Day}, 1), fleet.Slots("a/slots", 9))})
		one, err := l.Reserve(t.Context())
		require.NoError(t, err)
		require.Nil(t, one.Lost())
		synctest.Wait()
		require.Equal(t, 1, r.count("free"), "it may have got a slot without knowing it")
		require.NoError(t, l.Do(t.Context(), func(ctx context.Context) error {
			limited, _ := errors.AsType[*throttle.LimitedError](l.Do(ctx, ok))
			require.Equal(t, "a/slots", limited.Key, "two of nine")
			return nil
		}))
		one.Settle(12) // 14 of 20 of the rate, 2 of 10 of the quota
		one.Settle(99)
		for i := range 3 {
			require.NoError(t, l.Do(t.Context(), ok), i)
		}
		limited, _ := errors.AsType[*throttle.LimitedError](l.Do(t.Context(), ok))
		require.Equal(t, "a/rate", limited.Key)
		require.EqualValues(t, 5, l.Stats().AdmittedLocal)
		synctest.Wait()
		require.Zero(t, r.count("settle"), "nothing of what was done alone is told")
		require.ErrorIs(t, l.Do(t.Context(), func(context.Context) error { return errDown }), throttle.ErrLimited)

		costly := fleet.New(fleet.Config{Name: "n", Eval: r.eval, OnOutage: fleet.Local, Instances: 4,
			Meters: of(fleet.Rate("a", 1, 5).Burst(10))})
		limited, _ = errors.AsType[*throttle.LimitedError](costly.Do(t.Context(), ok))
		require.Equal(t, throttle.Outage, limited.Reason, "more than this process's part, and not more than the limit")

		rare := fleet.New(fleet.Config{Name: "n", Eval: r.eval, OnOutage: fleet.Local, Instances: 1000,
			Meters: of(fleet.Rate("a", 1e-7, 1))})
		require.NoError(t, rare.Do(t.Context(), ok), "its part would be one in centuries")
		require.ErrorIs(t, rare.Do(t.Context(), ok), throttle.ErrLimited)
	})
}

// A change in an outage holds at once, and what was spent stays spent. As in Redis, "a" and "a/" are one
// meter, and a Rate and a Quota of a key are two.
func TestLocalPartsFollowChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fleet.New(fleet.Config{Name: "n", Eval: (&redis{err: errDown}).eval, OnOutage: fleet.Local, Instances: 10,
			Meters: func(ctx context.Context) []fleet.Meter { return []fleet.Meter{ctx.Value(account{}).(fleet.Meter)} }})
		admits := func(m fleet.Meter) (n int) {
			ctx := context.WithValue(t.Context(), account{}, m)
			for {
				if _, err := l.Reserve(ctx); err != nil {
					return n
				}
				n++
			}
		}
		day := throttle.Window{Per: throttle.Day}
		require.Equal(t, 2, admits(fleet.Rate("a", 1e-3, 1).Burst(20)))
		require.Zero(t, admits(fleet.Rate("a/", 1e-3, 1).Burst(20)))
		require.Equal(t, 4, admits(fleet.Quota("a", 40, day, 1)))
		require.Equal(t, 1, admits(fleet.Slots("a", 10)))
		require.NoError(t, l.Update(func(c *fleet.Config) { c.Instances = 5 }))
		require.Equal(t, 2, admits(fleet.Rate("a", 1e-3, 1).Burst(20)))
		require.Equal(t, 2, admits(fleet.Rate("a", 1e-3, 1).Burst(30)))
		require.Equal(t, 4, admits(fleet.Quota("a", 40, day, 1)))
		require.Equal(t, 1, admits(fleet.Slots("a", 10)))
		require.NoError(t, l.Update(func(c *fleet.Config) { c.Instances = 40 }))
		require.Zero(t, admits(fleet.Rate("a", 1e-3, 1).Burst(20)))
		require.Zero(t, admits(fleet.Quota("a", 40, day, 1)))
	})
}

// A settlement is sent again until it is told, and no longer than its horizon.
func TestSettlementsReachRedis(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		each := 0
		cfg := fleet.Config{Name: "n", Eval: r.eval,
			Meters: of(fleet.Rate("a/tokens", 10, 5).Estimated(), fleet.Rate("a/calls", 10, 1))}
		for _, batch := range []bool{false, true} {
			if batch {
				cfg.EvalEach = func(ctx context.Context, calls []fleet.Call) (replies []fleet.Reply) {
					each++
					for _, c := range calls {
						v, err := r.eval(ctx, c.Script, c.Keys, c.Args...)
						replies = append(replies, fleet.Reply{Value: v, Err: err})
					}
					return replies
				}
			}
			l := fleet.New(cfg)
			reserve := func() *fleet.Reservation {
				one, err := l.Reserve(t.Context())
				require.NoError(t, err)
				return one
			}
			before := r.count("settle")
			reserve().Settle(5)
			synctest.Wait()
			require.Equal(t, before, r.count("settle"), "nothing to correct")
			one := reserve()
			one.Settle(7)
			one.Settle(8)
			synctest.Wait()
			require.Equal(t, before+1, r.count("settle"))
			r.mu.Lock()
			require.Equal(t, []any{int64(2_000_000), int64(0)}, []any{r.last["settle"][7], r.last["settle"][12]},
				"two tokens more of the estimate")
			r.mu.Unlock()
			reserve().SettleEach(map[string]int{"calls": 3})
			synctest.Wait()
			r.mu.Lock()
			require.Equal(t, []any{int64(0), int64(2_000_000)}, []any{r.last["settle"][7], r.last["settle"][12]})
			r.mu.Unlock()
			require.Error(t, l.Do(t.Context(), func(context.Context) error { return &throttle.LimitedError{} }))
			synctest.Wait()
			r.mu.Lock()
			require.Equal(t, []any{int64(-5_000_000), int64(-1_000_000)}, []any{r.last["settle"][7], r.last["settle"][12]},
				"it was not sent")
			r.mu.Unlock()

			late := reserve()
			r.set(func(r *redis) { r.err = errDown })
			before = r.count("settle")
			late.Settle(0)
			time.Sleep(5*time.Second + 1)
			require.Equal(t, before+6, r.count("settle"))
			require.Equal(t, 1, l.Stats().Unsettled)
			time.Sleep(time.Hour)
			require.Equal(t, before+11, r.count("settle"))
			require.Zero(t, l.Stats().Unsettled)
			require.EqualValues(t, 1, l.Stats().NeverSettled)
			r.set(func(r *redis) { r.err = nil })
		}
		require.Positive(t, each)
	})
}

// A slot is renewed each third of its lease. If that fails it is lost before its lease ends,
// and the ctx of Do ends.
func TestSlotsAreRenewedOrLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Lease: 9 * time.Second, Meters: of(fleet.Slots("a/slots", 2))})
		start := time.Now()
		err := l.Do(t.Context(), func(ctx context.Context) error {
			one, err := l.Reserve(t.Context())
			require.NoError(t, err)
			time.Sleep(30*time.Second + 1)
			require.Equal(t, 10, r.count("renew"), "both in one call")
			one.Settle(0)
			r.set(func(r *redis) { r.err = errDown })
			<-ctx.Done()
			return context.Cause(ctx)
		})
		require.ErrorIs(t, err, fleet.ErrLost)
		require.Less(t, time.Since(start), 39*time.Second)
		require.Greater(t, time.Since(start), 37*time.Second)
		require.EqualValues(t, 1, l.Stats().LostSlots)
		r.set(func(r *redis) { r.err = nil })
		time.Sleep(time.Minute)

		one, err := l.Reserve(t.Context())
		require.NoError(t, err)
		renewed := r.count("renew")
		one.Settle(0)
		time.Sleep(time.Minute)
		require.LessOrEqual(t, r.count("renew"), renewed, "nothing is held")
		<-one.Lost() // or what waits for it waits forever
	})
}

// The slot of a response is held until it has been read.
func TestSlotIsHeldUntilTheWorkEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Meters: of(fleet.Slots("a/slots", 2))})
		ctx, work := linger.Begin(t.Context())
		var inner context.Context
		require.NoError(t, l.Do(ctx, func(ctx context.Context) error {
			inner = ctx
			work.Continue()
			return nil
		}))
		time.Sleep(time.Hour)
		require.Zero(t, r.count("settle"))
		require.Positive(t, r.count("renew"))
		require.NoError(t, inner.Err())
		work.End(nil)
		synctest.Wait()
		require.Equal(t, 1, r.count("settle"))
		require.Equal(t, context.Canceled, context.Cause(inner))

		ctx, work = linger.Begin(t.Context())
		require.NoError(t, l.Do(ctx, func(ctx context.Context) error {
			inner = ctx
			work.Continue()
			return nil
		}))
		r.set(func(r *redis) { r.err = errDown })
		<-inner.Done()
		require.Equal(t, fleet.ErrLost, context.Cause(inner))
		work.End(nil)
		time.Sleep(time.Hour)
	})
}

// A process loses none of its slots because it has many, of one tag or of many.
func TestManySlotsAreRenewed(t *testing.T) {
	for _, tags := range []int{1, 10_000} {
		synctest.Test(t, func(t *testing.T) {
			r := &redis{}
			one := make(chan bool, 1) // the script's thread
			l := fleet.New(fleet.Config{Name: "n", Meters: func(ctx context.Context) []fleet.Meter {
				return []fleet.Meter{fleet.Slots(fmt.Sprint(ctx.Value(account{}).(int)%tags), 10_000)}
			}, Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
				if args[0] == "renew" {
					time.Sleep(1500 * time.Microsecond) // on the network
					one <- true
					time.Sleep(time.Duration(len(keys)) * 15 * time.Microsecond)
					<-one
					if ctx.Err() != nil {
						return nil, ctx.Err()
					}
				}
				return r.eval(ctx, script, keys, args...)
			}})
			var held []*fleet.Reservation
			for i := range 10_000 {
				slot, err := l.Reserve(context.WithValue(t.Context(), account{}, i))
				require.NoError(t, err)
				held = append(held, slot)
			}
			time.Sleep(time.Minute)
			require.Zero(t, l.Stats().LostSlots)
			for _, slot := range held {
				slot.Settle(0)
			}
			time.Sleep(time.Minute)
		})
	}
}

// What is renewed is the slots, wherever they stand among the meters.
func TestSlotsWithoutOtherMetersAreRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		var renewed [][]string
		l := fleet.New(fleet.Config{Name: "n",
			Meters: of(fleet.Rate("a/calls", 10, 1), fleet.Slots("a/slots", 2), fleet.Slots("a/all", 2)),
			Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
				if args[0] == "renew" {
					renewed = append(renewed, keys)
				}
				return r.eval(ctx, script, keys, args...)
			}})
		one, err := l.Reserve(t.Context())
		require.NoError(t, err)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		one.Settle(0)
		require.Equal(t, [][]string{{"n:{a}:s:slots", "n:{a}:s:all"}}, renewed)
		time.Sleep(time.Minute)
	})
}

// The clock of Redis may be in another day than that of the process: the script says so, and is asked
// again with the times of its own.
func TestRedisIsOnAnotherDay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		const ahead = 36 * time.Hour
		var days []any
		r.answer = func(args []any) []any {
			days = append(days, args[5])
			now := time.Now().Add(ahead).UnixMicro()
			if len(days) == 1 {
				return []any{int64(-1), now}
			}
			return []any{int64(1), now, int64(7)}
		}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval,
			Meters: of(fleet.Quota("a/day", 5, throttle.Window{Per: throttle.Day}, 1))})
		require.NoError(t, l.Do(t.Context(), ok))
		midnight := func(n int) int64 { return time.Date(2000, 1, n, 0, 0, 0, 0, time.UTC).UnixMicro() }
		require.Equal(t, []any{
			fmt.Sprint(midnight(0), midnight(1), midnight(2), midnight(3)), fmt.Sprint(midnight(1), midnight(2),
				midnight(3), midnight(4)),
		}, days)
	})
}

// An Update of the Lease loses no slot: each is renewed by the Lease with which it was taken.
func TestSlotsOutliveAnUpdateOfTheLease(t *testing.T) {
	for _, leases := range [][2]time.Duration{{10 * time.Second, time.Hour}, {time.Hour, time.Second}} {
		synctest.Test(t, func(t *testing.T) {
			r := &redis{}
			l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Lease: leases[0], Meters: of(fleet.Slots("a/slots", 2))})
			before, err := l.Reserve(t.Context())
			require.NoError(t, err)
			time.Sleep(time.Second)
			require.NoError(t, l.Update(func(c *fleet.Config) { c.Lease = leases[1] }))
			after, err := l.Reserve(t.Context())
			require.NoError(t, err)
			time.Sleep(2 * time.Hour)
			require.Zero(t, l.Stats().LostSlots)
			before.Settle(0)
			after.Settle(0)
			time.Sleep(2 * time.Hour)
			renewed := r.count("renew")
			time.Sleep(24 * time.Hour)
			require.Equal(t, renewed, r.count("renew"), "nothing is held")
		})
	}
}

// A settlement that is told by its tenth try again comes in time also if each try waits for Timeout.
func TestSettlementIsInTimeAfterTenTimeouts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Timeout: time.Second,
			Meters: of(fleet.Rate("a", 10, 5).Estimated())})
		one, err := l.Reserve(t.Context())
		require.NoError(t, err)
		r.set(func(r *redis) { r.takes = time.Hour })
		start := time.Now()
		one.Settle(0)
		for r.count("settle") < 11 {
			time.Sleep(10 * time.Millisecond)
		}
		r.mu.Lock()
		horizon := r.last["settle"][3]
		r.mu.Unlock()
		require.LessOrEqual(t, time.Since(start).Microseconds(), horizon)
		time.Sleep(time.Minute)
	})
}

// A Redis that hangs for longer than a lease takes a slot in time, or two could have it.
func TestSlotIsLostWhileRedisHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Lease: 12 * time.Second, Timeout: time.Minute,
			Meters: of(fleet.Slots("a/slots", 2))})
		one, err := l.Reserve(t.Context())
		require.NoError(t, err)
		start := time.Now()
		time.Sleep(5 * time.Second) // it is renewed after 4
		r.set(func(r *redis) { r.takes = time.Hour })
		<-one.Lost()
		require.Equal(t, 15*time.Second, time.Since(start))
		require.EqualValues(t, 1, l.Stats().LostSlots)
		r.set(func(r *redis) { r.takes = 0 })
		one.Settle(0)
		time.Sleep(time.Hour)
	})
}

// Who waits for a slot asks for the last time when it has waited for MaxWait, and then leaves the
// line, so as not to hold up those behind. So does whoever may have got a slot without knowing it.
func TestCanceledWaiterLeavesTheLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{answer: func([]any) []any {
			return []any{int64(0), time.Now().UnixMicro(), int64(2), int64(10_000), int64(0), int64(0), int64(0)}
		}}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, MaxWait: 25 * time.Millisecond,
			Meters: of(fleet.Slots("a/slots", 2))})
		start := time.Now()
		limited, _ := errors.AsType[*throttle.LimitedError](l.Do(t.Context(), ok))
		require.Equal(t, throttle.WaitTooLong, limited.Reason)
		require.Equal(t, []time.Duration{25 * time.Millisecond, limited.Waited},
			[]time.Duration{time.Since(start), 25 * time.Millisecond})
		require.Equal(t, 4, r.count("take"), "after 0, 10, 20 and 25 ms")
		synctest.Wait()
		require.Equal(t, 1, r.count("free"))
		r.mu.Lock()
		require.Equal(t, []string{"n:{a}:s:slots", "n:{a}:w:slots", "n:{a}:p:slots"}, r.keys)
		require.Equal(t, r.last["take"][1], r.last["free"][1])
		r.mu.Unlock()

		ctx, cancel := context.WithTimeout(t.Context(), 15*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, l.Do(ctx, ok), context.DeadlineExceeded)
		synctest.Wait()
		require.Equal(t, 2, r.count("free"))

		require.NoError(t, l.Update(func(c *fleet.Config) { c.MaxWait = 0 }))
		r.set(func(r *redis) {
			r.answer = func([]any) []any {
				return []any{int64(0), time.Now().UnixMicro(), int64(0), int64(0), int64(0), int64(0), int64(0)}
			}
		})
		require.ErrorIs(t, l.Do(t.Context(), ok), throttle.ErrLimited)
		synctest.Wait()
		require.Equal(t, 2, r.count("free"), "it stood in no line")
		r.set(func(r *redis) { r.err = errDown })
		for range 3 {
			require.ErrorIs(t, l.Do(t.Context(), ok), throttle.ErrOutage)
		}
		r.set(func(r *redis) { r.err = nil })
		time.Sleep(2 * time.Second)
		require.LessOrEqual(t, r.count("free"), 4, "of the one that asked")
		require.GreaterOrEqual(t, r.count("free"), 3)
	})
}

// A settlement that is to be sent again holds up no other.
func TestSettlementsDoNotWaitForEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Meters: of(fleet.Rate("a", 10, 5).Estimated())})
		one, err := l.Reserve(t.Context())
		require.NoError(t, err)
		other, err := l.Reserve(t.Context())
		require.NoError(t, err)
		r.set(func(r *redis) { r.err = errDown })
		one.Settle(0)
		synctest.Wait()
		r.set(func(r *redis) { r.err = nil })
		other.Settle(0)
		synctest.Wait()
		require.Equal(t, 2, r.count("settle"))
		require.Equal(t, 1, l.Stats().Unsettled)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Zero(t, l.Stats().Unsettled)
	})
}

// Cool waits no more for a Redis that is away than a call does.
func TestCooldownInAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{takes: time.Hour}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Meters: of(fleet.Rate("a", 10, 1))})
		start := time.Now()
		for range 3 {
			err := l.Cooldown(t.Context(), "a", time.Minute)
			require.ErrorIs(t, err, throttle.ErrOutage)
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		require.Equal(t, 100*time.Millisecond, time.Since(start))
		synctest.Wait()
		r.set(func(r *redis) { r.takes = 0 })
		time.Sleep(2 * time.Second)
		require.Error(t, l.Cooldown(t.Context(), "a", time.Minute), "which has it tried")
		synctest.Wait()
		require.NoError(t, l.Cooldown(t.Context(), "a", time.Minute))
	})
}

func TestLongDurationsDoNotOverflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Timeout: math.MaxInt64, RetryEvery: math.MaxInt64,
			Lease: math.MaxInt64, Meters: of(fleet.Rate("a/rate", 10, 5).Estimated(), fleet.Slots("a/slots", 1))})
		require.NoError(t, l.Cooldown(t.Context(), "a", math.MaxInt64))
		one, err := l.Reserve(t.Context())
		require.NoError(t, err)
		one.Settle(0)
		require.NoError(t, l.Close(t.Context()))
		const century = int64(100 * 365 * 24 * time.Hour / time.Microsecond)
		for _, us := range []any{r.last["cool"][1], r.last["settle"][3]} {
			require.GreaterOrEqual(t, us, century)
			require.LessOrEqual(t, us, 2*century)
		}
	})
}

// A node that hangs holds up no renewal on another, also if Timeout is as long as the Lease.
func TestHangingNodeDelaysNoRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		good, bad := &redis{}, &redis{}
		l := fleet.New(fleet.Config{
			Name: "n", Node: func(key string) string { return key[3:4] }, Lease: 12 * time.Second, Timeout: 12 * time.Second,
			Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
				if keys[0][3:4] == "b" {
					return bad.eval(ctx, script, keys, args...)
				}
				return good.eval(ctx, script, keys, args...)
			},
			Meters: func(ctx context.Context) []fleet.Meter {
				return []fleet.Meter{fleet.Slots(ctx.Value(account{}).(string), 2)}
			},
		})
		a, err := l.Reserve(context.WithValue(t.Context(), account{}, "a"))
		require.NoError(t, err)
		b, err := l.Reserve(context.WithValue(t.Context(), account{}, "b"))
		require.NoError(t, err)
		bad.set(func(r *redis) { r.takes = time.Hour })
		<-b.Lost()
		time.Sleep(time.Hour)
		require.EqualValues(t, 1, l.Stats().LostSlots)
		a.Settle(0)
		b.Settle(0)
		time.Sleep(time.Hour)
	})
}

// The time of a settlement is that of the clock of Redis, which goes on by the steady clock of the
// process: by the other one it would seem too late, and be dropped, where that is off or was set.
func TestTimeOfASettlement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const off = -48 * time.Hour
		r := &redis{answer: func([]any) []any { return []any{int64(1), time.Now().Add(off).UnixMicro(), int64(0)} }}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Meters: of(fleet.Rate("a", 10, 5).Estimated())})
		one, err := l.Reserve(t.Context())
		require.NoError(t, err)
		time.Sleep(90 * time.Second)
		one.Settle(0)
		synctest.Wait()
		require.Equal(t, time.Now().Add(off).UnixMicro(), r.last["settle"][2])
	})
	l := fleet.New(fleet.Config{Name: "n", Eval: new(redis).eval, Meters: of(fleet.Rate("a", 10, 1))})
	require.NoError(t, l.Do(t.Context(), ok))
	require.Contains(t, fleet.ReadAt(l).String(), " m=", "what time.Since needs for the steady clock; no bubble has it")
}

// A panic of Eval in a settlement ends neither the program nor the settlement.
func TestPanicOfEval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		once := true
		l := fleet.New(fleet.Config{Name: "n", Meters: of(fleet.Rate("a", 10, 5).Estimated()),
			Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
				if args[0] == "settle" && once {
					once = false
					panic("boom")
				}
				return r.eval(ctx, script, keys, args...)
			}})
		one, err := l.Reserve(t.Context())
		require.NoError(t, err)
		one.Settle(0)
		time.Sleep(2 * time.Second)
		require.Equal(t, 1, r.count("settle"))
		require.Zero(t, l.Stats().Unsettled)
	})
}

// The recovery of Redis is told on a goroutine of ours.
func TestPanicOfObserverOfOutageEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{err: errDown}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Meters: of(fleet.Rate("a", 10, 1))})
		l.Observe(func(_ context.Context, e throttle.Event) {
			if e.Kind == throttle.EventOutageEnded {
				panic("boom")
			}
		})
		require.ErrorIs(t, l.Do(t.Context(), ok), errDown)
		synctest.Wait()
		r.set(func(r *redis) { r.err = nil })
		time.Sleep(time.Second)
		require.ErrorIs(t, l.Do(t.Context(), ok), throttle.ErrOutage)
		synctest.Wait()
		require.NoError(t, l.Do(t.Context(), ok))
	})
}

func TestImpossibleAnswers(t *testing.T) {
	for _, answer := range []any{nil, "no", []any{}, []any{int64(1)}, []any{int64(1), "x"},
		[]any{int64(1), int64(1)}, []any{int64(1), int64(1), int64(1), int64(1)}, []any{int64(-1), int64(5)},
		[]any{int64(0), int64(1), int64(0), int64(0), int64(9), int64(-1), int64(0)}, []any{int64(1), int64(1),
			int64(0), int64(0), int64(9), int64(1), int64(0)}} {
		l := fleet.New(fleet.Config{Name: "n", Meters: of(fleet.Rate("a", 10, 1)),
			Eval: func(context.Context, string, []string, ...any) (any, error) { return answer, nil }})
		require.ErrorIs(t, l.Do(t.Context(), ok), throttle.ErrOutage, "%v", answer)
	}
}

func TestLimitsDescribeThemselves(t *testing.T) {
	l := fleet.New(fleet.Config{Name: "n", Eval: new(redis).eval, Meters: of(fleet.Rate("a", 10, 1))})
	d := l.Describe()
	require.Equal(t, []string{"throttle", "n"}, []string{d.Kind, d.Name})
	shown := d.Config().(fleet.Config)
	shown.Eval, shown.Node, shown.Meters = nil, nil, nil
	require.Equal(t, fleet.Config{
		Name: "n", Lease: 10 * time.Second, Timeout: 100 * time.Millisecond, RetryEvery: time.Second, OnOutage: fleet.Refuse,
	}, shown)
	require.NoError(t, d.Update(true, func(cfg any) error { cfg.(*fleet.Config).Lease = time.Minute; return nil }))
	require.Equal(t, 10*time.Second, l.Config().Lease)
	require.NoError(t, l.Update(func(c *fleet.Config) { c.Lease *= 6 }))
	require.Equal(t, time.Minute, l.Config().Lease)
	require.EqualError(t, l.Update(func(c *fleet.Config) { c.Name = "m" }),
		`fleet.Config.Name is "m": must be "n" as before: it cannot change`)

	require.NoError(t, l.Wrap(ok)(t.Context()))
	var events []policy.Event
	defer d.Observe(func(_ context.Context, e policy.Event) { events = append(events, e) })()
	require.NoError(t, l.Update(func(c *fleet.Config) { c.Meters = of(fleet.Rate("a", 1, 2)) }))
	err := l.Do(t.Context(), ok)
	require.Equal(t, []policy.Event{{
		Kind: "throttle", Name: "n", Key: "a", What: "refused", Level: slog.LevelWarn, Err: err,
		Attrs: []slog.Attr{slog.String("reason", "too_costly")},
	}}, events)
	metrics := map[string]float64{}
	for _, m := range d.Metrics() {
		metrics[m.Name] = m.Value
	}
	require.Equal(t, map[string]float64{
		"throttle.calls{outcome=admitted,reason=}":                  1,
		"throttle.calls{outcome=refused,reason=over_limit}":         0,
		"throttle.calls{outcome=refused,reason=over_quota}":         0,
		"throttle.calls{outcome=refused,reason=cooling_down}":       0,
		"throttle.calls{outcome=refused,reason=wait_too_long}":      0,
		"throttle.calls{outcome=refused,reason=deadline_too_close}": 0,
		"throttle.calls{outcome=refused,reason=context_ended}":      0,
		"throttle.calls{outcome=refused,reason=too_costly}":         1,
		"throttle.calls{outcome=refused,reason=outage}":             0,
		"throttle.calls.local":                                      0,
		"throttle.redis.calls":                                      1,
		"throttle.redis.failures":                                   0,
		"throttle.tokens{outcome=forgiven}":                         0,
		"throttle.settlements.pending":                              0,
		"throttle.settlements{outcome=late}":                        0,
		"throttle.settlements{outcome=lost}":                        0,
		"throttle.slots.lost":                                       0,
		"throttle.down":                                             0,
	}, metrics)
}

func TestEndedContextIsNoOutage(t *testing.T) {
	l := fleet.New(fleet.Config{Name: "n", Eval: new(redis).eval, Meters: of(fleet.Rate("a", 10, 1))})
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, l.Do(ended, ok), context.Canceled)
	require.ErrorIs(t, l.Cooldown(ended, "a", time.Hour), context.Canceled)
	require.NoError(t, l.Cooldown(t.Context(), "a", -time.Hour))
}

// During an outage, the ctx of a call ends after Do has checked it.
func TestCallThatEndsInAnOutageIsNotMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		end := func() {}
		l := fleet.New(fleet.Config{
			Name: "n", Eval: (&redis{err: errDown}).eval, OnOutage: fleet.Admit,
			Meters: func(context.Context) []fleet.Meter {
				end()
				return []fleet.Meter{fleet.Rate("a", 10, 1)}
			},
		})
		require.NoError(t, l.Do(t.Context(), ok))
		require.True(t, l.Stats().Down)
		ctx, cancel := context.WithCancel(t.Context())
		end = cancel
		err := l.Do(ctx, func(context.Context) error { t.Error("called"); return nil })
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		require.Equal(t, throttle.ContextEnded, limited.Reason)
		require.ErrorIs(t, err, context.Canceled)
	})
}

// A replyError is an error reply as a client of Redis returns it.
type replyError string

func (e replyError) Error() string { return string(e) }
func (replyError) RedisError()     {}

func TestTroubleOfErrors(t *testing.T) {
	for text, want := range map[string]string{
		"dial tcp 127.0.0.1:6379: connection refused":                             "store_down",
		"context deadline exceeded":                                               "store_down",
		"LOADING Redis is loading the dataset in memory":                          "store_down",
		"ERR LOADING by Kvrocks":                                                  "store_down",
		"READONLY You can't write against a read only replica. script: 5, on @x":  "store_down",
		"ERR Error running script (call to f_5): @user_script:3: -READONLY You":   "store_down",
		"BUSY Redis is busy running a script":                                     "store_down",
		"MISCONF Redis is configured to save RDB snapshots":                       "store_down",
		"CLUSTERDOWN The cluster is down":                                         "store_down",
		"ERR max number of clients reached":                                       "store_down",
		"ERR Write commands are not allowed from read-only scripts. script: 5":    "store_down",
		"OOM command not allowed when used memory > 'maxmemory'. script: 5":       "store_full",
		"ERR Error running script (call to f_5): @user_script:3: @: -OOM command": "store_full",
		"NOPERM User app has no permissions to run the 'eval' command":            "store_rejects",
		"NOAUTH Authentication required.":                                         "store_rejects",
		"WRONGPASS invalid username-password pair":                                "store_rejects",
		"ERR unknown command 'eval', with args beginning with: ":                  "store_rejects",
		"ERR Error compiling script (new function): user_script:1: x":             "store_rejects",
		"CLUSTERDOWN Hash slot not served":                                        "call_undecided",
		"TRYAGAIN Multiple keys request during rehashing of slot":                 "call_undecided",
		"MOVED 3999 127.0.0.1:6381":                                               "call_undecided",
		"WRONGTYPE Operation against a key holding the wrong kind of value":       "call_undecided",
		"ERR user_script:12: attempt to compare nil with number script: 5":        "call_undecided",
	} {
		require.Equal(t, want, fleet.TroubleOf(errors.New(text)), text)
		if want != "store_down" || reply.Code(text) == strings.ToUpper(reply.Code(text)) {
			require.Equal(t, want, fleet.TroubleOf(fmt.Errorf("redis: %w", replyError(text))),
				"of a client that wraps it: %s", text)
		}
	}
	require.Equal(t, "call_undecided", fleet.TroubleOf(replyError("XYZ a code that is not known")))
}

// TestErrorAboutOneKeyIsNoOutage has one tenant's calls fail. They are refused one by one.
func TestErrorAboutOneKeyIsNoOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		tenant := "bad"
		l := fleet.New(fleet.Config{
			Name: "n",
			Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
				if strings.Contains(keys[0], "{bad}") {
					return nil, replyError("TRYAGAIN Multiple keys request during rehashing of slot")
				}
				return r.eval(ctx, script, keys, args...)
			},
			Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Rate(tenant, 10, 1)} },
		})
		l.Observe(func(_ context.Context, e throttle.Event) { require.Equal(t, throttle.EventRefused, e.Kind) })
		for range 100 {
			tenant = "bad"
			err := l.Do(t.Context(), ok)
			limited, _ := errors.AsType[*throttle.LimitedError](err)
			require.Equal(t, throttle.Outage, limited.Reason)
			require.ErrorContains(t, err, "TRYAGAIN")
			require.Zero(t, l.Describe().Health(t.Context()))
			tenant = "good"
			require.NoError(t, l.Do(t.Context(), ok))
		}
		require.Zero(t, r.count("ping"))
	})
}

func TestFullRedisIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full := replyError("OOM command not allowed when used memory > 'maxmemory'.")
		r := &redis{err: full}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Meters: of(fleet.Rate("a", 10, 1))})
		err := l.Do(t.Context(), ok)
		require.ErrorIs(t, err, throttle.ErrOutage)
		require.ErrorIs(t, err, full)
		health := l.Describe().Health(t.Context())
		require.Equal(t, []any{policy.Fail, "store_full"}, []any{health.Status, health.State})
		require.ErrorIs(t, health.Err, full)
		r.set(func(r *redis) { r.err = nil })
		time.Sleep(time.Second)
		_ = l.Describe().Health(t.Context())
		synctest.Wait()
		require.Zero(t, l.Describe().Health(t.Context()))
		require.NoError(t, l.Do(t.Context(), ok))
	})
}
