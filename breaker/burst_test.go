package breaker_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/linger"
)

const ms = time.Millisecond

// limits are the rules by which a breaker tells a burst from a trend.
var limits = map[string]breaker.Config{
	"consecutive":   {ConsecutiveFailures: 10, Window: 10 * time.Second, OpenFor: 900 * ms},
	"rate":          {FailureRate: 0.5, Window: 10 * time.Second, OpenFor: 900 * ms},
	"rate of calls": {FailureRate: 0.5, WindowCalls: 100, OpenFor: 900 * ms},
	"in window":     {FailuresInWindow: 10, Window: 10 * time.Second, OpenFor: 900 * ms},
	"both": {
		ConsecutiveFailures: 10, FailureRate: 0.5, Window: 10 * time.Second, OpenFor: 900 * ms,
		ProbeTimeout: 10 * time.Second,
	},
}

// forEachLimit runs a test in virtual time with a breaker by each of the named limits.
func forEachLimit(t *testing.T, names []string, test func(t *testing.T, b *breaker.Breaker)) {
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				test(t, breaker.New(limits[name]))
				time.Sleep(time.Minute) // calls end
			})
		})
	}
}

// streamFor makes a call that succeeds at once and whose stream ends after d with err. It reports whether the
// call was admitted.
func streamFor(b *breaker.Breaker, d time.Duration, err error) bool {
	ctx, work := linger.Begin(context.Background())
	if b.Do(ctx, func(context.Context) error { work.Continue(); return nil }) != nil {
		return false
	}
	time.AfterFunc(d, func() { work.End(err) })
	return true
}

// pace calls f every so often, for d.
func pace(every, d time.Duration, f func(i int)) {
	for i, end := 0, time.Now().Add(d); time.Now().Before(end); i++ {
		f(i)
		time.Sleep(every)
	}
}

// What shares a lost connection fails at once. The server is up: every retry and reconnect is sent.
func TestLostConnectionKeepsBreakerClosed(t *testing.T) {
	all := []string{"consecutive", "rate", "rate of calls", "in window", "both"}
	for _, kind := range []string{"calls", "streams", "calls and streams"} {
		for _, history := range []time.Duration{0, 25 * time.Second} {
			for _, within := range []time.Duration{0, 100 * ms} {
				for _, retried := range []bool{true, false} {
					name := fmt.Sprintf("%s/history %v/within %v/retried %v", kind, history, within, retried)
					t.Run(name, func(t *testing.T) {
						forEachLimit(t, all, func(t *testing.T, b *breaker.Breaker) {
							pace(50*ms, history, func(int) { go do(b, taking(20*ms, nil)) })
							begin := func(i int, d time.Duration, err error) {
								if kind == "calls" || kind == "calls and streams" && i%2 == 0 {
									go do(b, taking(d, err))
								} else {
									streamFor(b, d, err)
								}
							}
							for i := range 30 {
								cut := 500*ms + within*time.Duration(i)/30
								begin(i, cut, errDown)
								if retried {
									time.AfterFunc(cut+time.Duration(i)*3*ms, func() { begin(i, 500*ms, nil) })
								}
							}
							time.Sleep(5 * time.Second)
							require.Equal(t, errDown, do(b, down), "a straggler")
							s := b.Stats()
							require.Zero(t, s.Refused)
							require.Zero(t, s.Transitions[breaker.Open])
						})
					})
				}
			}
		}
	}
}

// All connections are reset, and new ones refused for 200ms. Callers retry three times, and new ones arrive.
func TestRestartedServerIsClosedSoon(t *testing.T) {
	forEachLimit(t, []string{"consecutive", "rate", "both"}, func(t *testing.T, b *breaker.Breaker) {
		var down struct {
			sync.Mutex
			from, until time.Time
		}
		var refused atomic.Int64
		serve := func(context.Context) error {
			down.Lock()
			from, until := down.from, down.until
			down.Unlock()
			if now := time.Now(); !now.Before(from) && now.Before(until) {
				return errDown
			}
			began := time.Now()
			time.Sleep(100 * ms)
			down.Lock()
			defer down.Unlock()
			if began.Before(down.until) && !time.Now().Before(down.from) {
				return errDown // its connection was reset
			}
			return nil
		}
		request := func(number int) {
			for attempt := range 4 {
				err := do(b, serve)
				if errors.Is(err, breaker.ErrOpen) {
					refused.Add(1)
				}
				if err == nil {
					return
				}
				time.Sleep(time.Duration(50+(number*7+attempt*13)%50) * ms << attempt)
			}
		}
		pace(5*ms, 5*time.Second, func(i int) { go request(i) })
		down.Lock()
		down.from, down.until = time.Now(), time.Now().Add(200*ms)
		down.Unlock()
		pace(5*ms, 1200*ms, func(i int) { go request(i) })
		require.Equal(t, breaker.Closed, b.State(), "within a second")
		refused.Store(0)
		pace(5*ms, 5*time.Second, func(i int) { go request(i) })
		require.Zero(t, refused.Load())
	})
}

// The server refuses connections. Calls that do not overlap open the breaker after exactly ConsecutiveFailures;
// others within three times as many calls or 250ms, whichever is later.
func TestRefusedConnectionsOpenBreaker(t *testing.T) {
	for _, callers := range []int{1, 2, 10, 100} {
		for _, takes := range []time.Duration{0, ms, 10 * ms} {
			for _, rest := range []time.Duration{0, 20 * ms} {
				if takes+rest == 0 && callers > 1 {
					continue
				}
				t.Run(fmt.Sprintf("%d callers/take %v/rest %v", callers, takes, rest), func(t *testing.T) {
					forEachLimit(t, []string{"consecutive", "both"}, func(t *testing.T, b *breaker.Breaker) {
						var mu sync.Mutex
						var first, opened time.Time
						var calls atomic.Int64
						note := func(at *time.Time) {
							mu.Lock()
							defer mu.Unlock()
							if at.IsZero() {
								*at = time.Now()
							}
						}
						onChange(b, func(context.Context, breaker.Event) { note(&opened) })
						for range callers {
							go func() {
								for b.State() == breaker.Closed && calls.Load() < 100_000 {
									_ = do(b, func(context.Context) error {
										calls.Add(1)
										time.Sleep(takes)
										note(&first)
										return errDown
									})
									time.Sleep(rest)
								}
							}()
						}
						time.Sleep(5 * time.Second)
						mu.Lock()
						defer mu.Unlock()
						took := opened.Sub(first)
						t.Logf("open after %v and %d calls", took, calls.Load())
						require.False(t, opened.IsZero())
						if callers == 1 {
							require.EqualValues(t, 10, calls.Load())
						} else if calls.Load() > 30 {
							require.LessOrEqual(t, took, 250*ms+takes+rest, "at the next failure")
						}
					})
				})
			}
		}
	}
}

// A server that hangs is noticed when a second round of calls has timed out.
func TestHangingServerOpensBreaker(t *testing.T) {
	for _, timeout := range []time.Duration{50 * ms, 100 * ms, 300 * ms, time.Second, 10 * time.Second} {
		for _, spread := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/spread %v", timeout, spread), func(t *testing.T) {
				forEachLimit(t, []string{"consecutive", "rate", "both"}, func(t *testing.T, b *breaker.Breaker) {
					began := time.Now()
					for i := range 100 {
						go func() {
							if spread {
								time.Sleep(timeout * time.Duration(i) / 100)
							}
							for b.Stats().Transitions[breaker.Open] == 0 && time.Since(began) < time.Minute {
								_ = do(b, taking(timeout, errHang))
								time.Sleep(ms)
							}
						}()
					}
					for b.State() == breaker.Closed && time.Since(began) < time.Minute {
						time.Sleep(ms)
					}
					t.Logf("open after %v", time.Since(began))
					require.LessOrEqual(t, time.Since(began), 2*timeout+100*ms)
				})
			})
		}
	}
}

// A call that takes until its caller's deadline is a timeout, whatever error it returns. So is a success that takes
// SlowAfter.
func TestSlowCallsOpenBreaker(t *testing.T) {
	for name, test := range map[string]struct {
		cfg      breaker.Config
		deadline time.Duration
		err      error
	}{
		"deadline":  {breaker.Config{ConsecutiveFailures: 10, Patience: 50 * ms}, 50 * ms, errDown},
		"SlowAfter": {breaker.Config{ConsecutiveFailures: 10, SlowAfter: 50 * ms}, time.Hour, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(test.cfg)
				for range 2 {
					for range 20 {
						go func() {
							ctx, cancel := context.WithTimeout(context.Background(), test.deadline)
							defer cancel()
							_ = b.Do(ctx, taking(50*ms, test.err))
						}()
					}
					time.Sleep(51 * ms)
				}
				require.Equal(t, breaker.Open, b.State())
			})
		})
	}
}

// Half of the calls fail, in steady traffic.
func TestHalfFailingOpensBreaker(t *testing.T) {
	for _, rate := range []int{20, 200, 2000} {
		for _, takes := range []time.Duration{0, 20 * ms, 500 * ms} {
			for _, order := range []string{"alternately", "at random"} {
				t.Run(fmt.Sprintf("%d a second/of %v/%s", rate, takes, order), func(t *testing.T) {
					forEachLimit(t, []string{"rate", "both"}, func(t *testing.T, b *breaker.Breaker) {
						random := rand.New(rand.NewPCG(3, uint64(rate)))
						began := time.Now()
						for i := 0; b.State() == breaker.Closed && time.Since(began) < time.Minute; i++ {
							err, d := errDown, takes
							if order == "at random" {
								d = time.Duration(float64(d) * (0.5 + random.Float64()))
								if random.IntN(2) == 0 {
									err = nil
								}
							} else if i%2 == 0 {
								err = nil
							}
							go do(b, taking(d, err))
							time.Sleep(time.Second / time.Duration(rate))
						}
						t.Logf("open after %v", time.Since(began))
						require.LessOrEqual(t, time.Since(began), 5*time.Second)
					})
				})
			}
		}
	}
}

// A fifth of the answers is an error, and the others are streams that last: the host mostly works.
func TestFailuresBesideStreamsKeepBreakerClosed(t *testing.T) {
	for _, percent := range []int{10, 20, 30} {
		for seed := range uint64(3) {
			t.Run(fmt.Sprintf("%d%%/seed %d", percent, seed), func(t *testing.T) {
				forEachLimit(t, []string{"consecutive", "rate", "rate of calls", "both"},
					func(t *testing.T, b *breaker.Breaker) {
						random := rand.New(rand.NewPCG(4, seed))
						pace(50*ms, 5*time.Minute, func(int) {
							if random.IntN(100) < percent {
								go do(b, taking(20*ms, errDown))
							} else {
								streamFor(b, 5*time.Second, nil)
							}
						})
						s := b.Stats()
						require.Zero(t, s.Refused)
						require.EqualValues(t, 6000, s.Succeeded+s.Failed)
					})
			})
		}
	}
}
