package fleet_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/fleet"
)

// A rateStore does the arithmetic of the script for rates. Several Limits may share it.
type rateStore struct {
	mu      sync.Mutex
	latency func() time.Duration      // of each way; nil means none
	before  func(keys []string) error // is called before a take
	debts   map[string]float64        // in tokens
	written map[string]time.Time      // when a debt was written
	cooling map[string]time.Time      // the ends of cooldowns
	down    bool                      // every operation fails
	takes   int                       // round trips
	taken   map[string]float64        // tokens by key
}

func (s *rateStore) eval(ctx context.Context, _ string, keys []string, args ...any) (any, error) {
	s.mu.Lock()
	latency := s.latency
	s.mu.Unlock()
	if latency != nil {
		time.Sleep(latency())
		defer func() { time.Sleep(latency()) }()
	}
	s.mu.Lock()
	if s.debts == nil {
		s.debts, s.written = map[string]float64{}, map[string]time.Time{}
		s.cooling, s.taken = map[string]time.Time{}, map[string]float64{}
	}
	before := s.before
	if args[0] == "take" {
		s.takes++
	}
	down := s.down
	s.mu.Unlock()
	if down {
		return nil, errDown
	}
	if before != nil && args[0] == "take" {
		if err := before(keys); err != nil {
			return nil, err
		}
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	switch args[0] {
	case "cool":
		s.cooling[keys[0]] = now.Add(time.Duration(args[1].(int64)) * time.Microsecond)
		return []any{int64(1), now.UnixMicro()}, nil
	case "settle":
		for i, key := range keys[1:] {
			s.debts[key] = max(0, s.debts[key]+float64(args[5*i+7].(int64))/1e6)
			s.taken[key] += float64(args[5*i+7].(int64)) / 1e6
		}
		return []any{int64(1), now.UnixMicro(), int64(0)}, nil
	case "ping":
		return []any{int64(1), now.UnixMicro()}, nil
	}
	n := len(keys) / 2
	fits, answer := true, []any{int64(0), now.UnixMicro(), int64(0), int64(0)}
	for i, key := range keys[:n] {
		limit, perSecond := float64(args[4*i+4].(int64))/1e6, args[4*i+5].(float64)
		cost := float64(args[4*i+6].(int64)) / 1e6
		s.debts[key] = max(0, s.debts[key]-now.Sub(s.written[key]).Seconds()*perSecond)
		s.written[key] = now
		wait, cool := int64(-1), int64(0)
		if missing := s.debts[key] + cost - limit; missing > 1e-6 {
			wait = int64(math.Ceil(missing / perSecond * 1e6))
		}
		if end := s.cooling[keys[n+i]]; end.After(now) {
			wait, cool = end.Sub(now).Microseconds(), 1
		}
		fits = fits && wait < 0
		answer = append(answer, int64(max(0, limit-s.debts[key])), wait, cool)
	}
	if !fits {
		return answer, nil
	}
	answer = []any{int64(1), now.UnixMicro()}
	for i, key := range keys[:n] {
		s.debts[key] += float64(args[4*i+6].(int64)) / 1e6
		s.taken[key] += float64(args[4*i+6].(int64)) / 1e6
		answer = append(answer, int64(0))
	}
	return answer, nil
}

func (s *rateStore) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.takes
}

func (s *rateStore) set(f func(*rateStore)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s)
}

type metersKey struct{}

// limits returns Limits on s. Their meters are those of ctx.
func (s *rateStore) limits(change ...func(*fleet.Config)) *fleet.Limits {
	cfg := fleet.Config{Name: "n", Eval: s.eval, MaxWait: fleet.Unlimited,
		Meters: func(ctx context.Context) []fleet.Meter { return ctx.Value(metersKey{}).([]fleet.Meter) }}
	for _, f := range change {
		f(&cfg)
	}
	return fleet.New(cfg)
}

// A crowd records the ends of calls.
type crowd struct {
	t     *testing.T
	l     *fleet.Limits
	start time.Time
	calls sync.WaitGroup
	mu    sync.Mutex
	ends  []callEnd // in the order of their ends
}

type callEnd struct {
	name     string
	after    time.Duration
	reason   throttle.Reason // empty if the call was admitted
	err      error
	reserved *fleet.Reservation
}

func newCrowd(t *testing.T, l *fleet.Limits) *crowd {
	return &crowd{t: t, l: l, start: time.Now()}
}

// call starts a call, and returns when the call waits or has ended.
func (c *crowd) call(ctx context.Context, name string, meters ...fleet.Meter) {
	c.calls.Go(func() {
		r, err := c.l.Reserve(context.WithValue(ctx, metersKey{}, meters))
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		end := callEnd{name: name, after: time.Since(c.start), err: err, reserved: r}
		if limited != nil {
			end.reason = limited.Reason
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.ends = append(c.ends, end)
	})
	synctest.Wait()
}

// report waits for all calls and returns their ends, in the order of time and name: name, time and reason.
func (c *crowd) report() (report []string) {
	c.calls.Wait()
	slices.SortFunc(c.ends, func(a, b callEnd) int {
		return cmp.Or(cmp.Compare(a.after, b.after), cmp.Compare(a.name, b.name))
	})
	for _, end := range c.ends {
		text := fmt.Sprintf("%s %v", end.name, end.after.Round(time.Millisecond))
		if end.err != nil {
			text += " " + cmp.Or(string(end.reason), end.err.Error())
		}
		report = append(report, text)
	}
	calls, lines := fleet.Waiting(c.l)
	require.Equal(c.t, []int{0, 0}, []int{calls, lines}, "no memory is kept")
	return report
}

func TestWaitersShareAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits())
		var want []string
		for i := range 100 {
			c.call(t.Context(), fmt.Sprint(i), fleet.Rate("a", 10, 1).Burst(2))
			want = append(want, fmt.Sprintf("%d %v", i, time.Duration(max(0, i-1))*100*time.Millisecond))
		}
		require.Equal(t, want, c.report(), "in the order of arrival, at the rate")
		require.Less(t, s.count(), 300)
		t.Logf("%d round trips", s.count())
	})
}

func TestCanceledWaitersHandOver(t *testing.T) {
	for canceled, want := range [][]string{
		{"1 1s", "2 2s", "3 3s"},
		{"0 1s", "2 2s", "3 3s"},
		{"0 1s", "1 2s", "3 3s"},
		{"0 1s", "1 2s", "2 3s"},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := &rateStore{}
			c := newCrowd(t, s.limits())
			c.call(t.Context(), "x", fleet.Rate("a", 1, 1))
			ctx, cancel := context.WithCancel(t.Context())
			for i := range 4 {
				if i == canceled {
					c.call(ctx, fmt.Sprint(i), fleet.Rate("a", 1, 1))
				} else {
					c.call(t.Context(), fmt.Sprint(i), fleet.Rate("a", 1, 1))
				}
			}
			time.Sleep(500 * time.Millisecond)
			cancel()
			want := append([]string{"x 0s", fmt.Sprintf("%d 500ms context_ended", canceled)}, want...)
			require.Equal(t, want, c.report())
			require.Equal(t, 5+5, s.count(), "five arrivals; then the last call needs one, and the others two")
			require.ErrorIs(t, c.ends[1].err, context.Canceled)
		})
	}
}

// TestCanceledTurn cancels the first call while it asks Redis.
func TestCanceledTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s := &rateStore{}
		c := newCrowd(t, s.limits())
		c.call(t.Context(), "x", fleet.Rate("a", 1, 1))
		c.call(ctx, "0", fleet.Rate("a", 1, 1))
		c.call(t.Context(), "1", fleet.Rate("a", 1, 1))
		c.call(t.Context(), "2", fleet.Rate("a", 1, 1))
		s.set(func(s *rateStore) {
			s.before = func([]string) error {
				if time.Since(c.start) == time.Second {
					cancel()
				}
				return nil
			}
		})
		require.Equal(t, []string{"x 0s", "0 1s context_ended", "1 1s", "2 2s"}, c.report())
		require.NoError(t, c.l.Close(t.Context()))
	})
}

// TestPanicHandsOver has Eval and an observer of the first call panic.
func TestPanicHandsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits())
		c.call(t.Context(), "x", fleet.Rate("a", 1, 1))
		c.calls.Go(func() {
			defer func() { require.Equal(t, "boom", recover()) }()
			_, _ = c.l.Reserve(context.WithValue(t.Context(), metersKey{}, []fleet.Meter{fleet.Rate("a", 1, 1)}))
		})
		synctest.Wait()
		for i := range 3 {
			c.call(t.Context(), fmt.Sprint(i), fleet.Rate("a", 1, 1))
		}
		s.set(func(s *rateStore) {
			s.before = func([]string) error {
				s.set(func(s *rateStore) { s.before = nil })
				panic("boom")
			}
		})
		require.Equal(t, []string{"x 0s", "0 1s", "1 2s", "2 3s"}, c.report())
	})
}

// TestObserverDoesNotHoldTheLine has the observer of a refused call wait in the line of this call.
func TestObserverDoesNotHoldTheLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits())
		x := fleet.Rate("a/x", 1, 1)
		c.l.Observe(func(ctx context.Context, _ throttle.Event) {
			time.Sleep(time.Millisecond)
			_, err := c.l.Reserve(context.WithValue(ctx, metersKey{}, []fleet.Meter{x}))
			require.NoError(t, err)
		})
		c.call(t.Context(), "x", x)
		c.call(t.Context(), "0", x, fleet.Rate("a/y", 1, 0))
		c.call(t.Context(), "1", x)
		c.call(t.Context(), "2", x)
		require.NoError(t, c.l.Cooldown(t.Context(), "a/y", time.Minute))
		require.Equal(t, []string{"x 0s", "1 1s", "2 2s", "0 3s cooling_down"}, c.report())
	})
}

// TestSlowObserverDelaysOneCall has the observer of each refused call take an hour.
func TestSlowObserverDelaysOneCall(t *testing.T) {
	const hour = time.Hour + time.Second
	for name, want := range map[string]map[string]time.Duration{
		"outage":   {"x": 0, "0": hour, "1": hour + time.Second, "2": hour + time.Second},
		"canceled": {"x": 0, "0": hour, "1": time.Second, "2": 2 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			s := &rateStore{}
			c := newCrowd(t, s.limits())
			c.l.Observe(func(_ context.Context, e throttle.Event) {
				if e.Kind == throttle.EventRefused {
					time.Sleep(time.Hour)
				}
			})
			c.call(t.Context(), "x", fleet.Rate("a", 1, 1))
			c.call(ctx, "0", fleet.Rate("a", 1, 1))
			c.call(t.Context(), "1", fleet.Rate("a", 1, 1))
			c.call(t.Context(), "2", fleet.Rate("a", 1, 1))
			s.set(func(s *rateStore) {
				s.down = name == "outage"
				s.before = func([]string) error { cancel(); return nil }
			})
			c.calls.Wait()
			ends := map[string]time.Duration{}
			for _, end := range c.ends {
				ends[end.name] = end.after
			}
			require.Equal(t, want, ends, name)
			cancel()
		})
	}
}

func TestOutageEndsTheLine(t *testing.T) {
	for policy, want := range map[fleet.OutagePolicy][]string{
		fleet.Refuse: {" 0s", " 1s outage", " 2s outage", " 2s outage", " 2s outage"},
		fleet.Admit:  {" 0s", " 1s", " 2s", " 2s", " 2s"},
		fleet.Local:  {" 0s", " 1s", " 2s over_limit", " 2s over_limit", " 2s over_limit"},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := &rateStore{}
			c := newCrowd(t, s.limits(func(c *fleet.Config) { c.OnOutage, c.Instances = policy, 2 }))
			c.call(t.Context(), "", fleet.Rate("a", 1, 1))
			for range 4 {
				c.call(t.Context(), "", fleet.Rate("a", 1, 1))
			}
			asked := s.count()
			s.set(func(s *rateStore) { s.down = true })
			report := c.report()
			slices.Sort(report)
			require.Equal(t, want, report, policy)
			require.Equal(t, asked+1, s.count(), "only the first call asks")
		})
	}
}

// TestLostAnswerDoesNotEndTheLine has the answer to the first call be lost. The outage ends with the first ping.
func TestLostAnswerDoesNotEndTheLine(t *testing.T) {
	for policy, end := range map[fleet.OutagePolicy]string{
		fleet.Refuse: "0 1s outage", fleet.Admit: "0 1s", fleet.Local: "0 1s",
	} {
		synctest.Test(t, func(t *testing.T) {
			s := &rateStore{}
			c := newCrowd(t, s.limits(func(c *fleet.Config) { c.OnOutage, c.Instances = policy, 2 }))
			c.call(t.Context(), "x", fleet.Rate("a", 1, 1))
			for i := range 4 {
				c.call(t.Context(), fmt.Sprint(i), fleet.Rate("a", 1, 1))
			}
			s.set(func(s *rateStore) {
				s.latency = func() time.Duration { return time.Microsecond }
				s.before = func([]string) error {
					s.set(func(s *rateStore) { s.before = nil })
					return errDown
				}
			})
			report := c.report()
			require.Equal(t, []string{"x 0s", end, "1 2s", "2 3s", "3 4s"}, report, policy)
		})
	}
}

// TestLostAnswerAtAHighRate has calls be due before the first ping has ended the outage.
func TestLostAnswerAtAHighRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits())
		for range 20 {
			c.call(t.Context(), "", fleet.Rate("a", 1000, 1).Burst(1))
		}
		s.set(func(s *rateStore) {
			s.latency = func() time.Duration { return time.Millisecond }
			s.before = func([]string) error {
				s.set(func(s *rateStore) { s.before = nil })
				return errDown
			}
		})
		lost := slices.DeleteFunc(c.report(), func(end string) bool { return !strings.HasSuffix(end, "outage") })
		require.Less(t, len(lost), 10, lost) // only calls that were due before the ping
	})
}

// TestErrorOfOneCallHandsOver has an error that concerns only the first call.
func TestErrorOfOneCallHandsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits())
		c.call(t.Context(), "x", fleet.Rate("a", 1, 1))
		for i := range 3 {
			c.call(t.Context(), fmt.Sprint(i), fleet.Rate("a", 1, 1))
		}
		s.set(func(s *rateStore) {
			s.before = func([]string) error {
				s.set(func(s *rateStore) { s.before = nil })
				return replyError("TRYAGAIN Multiple keys request during rehashing of slot")
			}
		})
		require.Equal(t, []string{"x 0s", "0 1s outage", "1 1s", "2 2s"}, c.report())
	})
}

// TestHangingAnswerDelaysOneCall has the answer to the first call hang for less than Timeout.
func TestHangingAnswerDelaysOneCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits(func(c *fleet.Config) { c.Timeout = time.Minute }))
		for i := range 4 {
			c.call(t.Context(), fmt.Sprint(i), fleet.Rate("a", 1, 1))
		}
		s.set(func(s *rateStore) {
			s.before = func([]string) error {
				s.set(func(s *rateStore) { s.before = nil })
				time.Sleep(10500 * time.Millisecond)
				return nil
			}
		})
		require.Equal(t, []string{"0 0s", "2 2s", "3 3s", "1 11.5s"}, c.report())
	})
}

func TestLinesAreIndependent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits())
		slow, fast := fleet.Rate("a", 1.0/3600, 1), fleet.Rate("b", 10, 1).Burst(1)
		for i := range 3 {
			c.call(t.Context(), fmt.Sprint("slow ", i), slow)
			c.call(t.Context(), fmt.Sprint("fast ", i), fast)
		}
		c.call(t.Context(), "larger", fleet.Rate("a", 10, 1).Burst(2)) // the limit of the slow rate has changed
		c.call(t.Context(), "largest", fleet.Rate("a", 10, 1).Burst(2))
		calls, lines := fleet.Waiting(c.l)
		require.Equal(t, []int{5, 3}, []int{calls, lines})
		report := c.report()
		require.Equal(t, []string{"fast 0 0s", "larger 0s", "slow 0 0s", "fast 1 100ms", "largest 100ms", "fast 2 200ms"},
			report[:6])
		require.Len(t, report, 8)
	})
}

// TestWaiterChangesItsLine has a call that one rate and then another refuses. Meanwhile calls of the first rate run.
func TestWaiterChangesItsLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits())
		all, user := fleet.Rate("a/all", 1, 1), fleet.Rate("a/user", 0.1, 1)
		c.call(t.Context(), "x", all)
		c.call(t.Context(), "both", all, user)
		c.call(t.Context(), "all", all)
		time.Sleep(500 * time.Millisecond)
		s.set(func(s *rateStore) { s.debts["n:{a}:r:user"], s.written["n:{a}:r:user"] = 1, time.Now() })
		require.Equal(t, []string{"x 0s", "all 1s", "both 10.5s"}, c.report())
	})
}

// TestLateWaitersAreRefusedAtOnce has calls that the answer to another call shows to be due too late.
func TestLateWaitersAreRefusedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits(func(c *fleet.Config) { c.MaxWait = 90 * time.Second }))
		minutely := fleet.Rate("a", throttle.PerMinute(1), 1)
		soon, cancel := context.WithTimeout(t.Context(), 100*time.Second)
		defer cancel()
		c.call(t.Context(), "0", minutely)
		c.call(t.Context(), "1", minutely)
		time.Sleep(40 * time.Second)
		c.call(t.Context(), "2", minutely)
		c.call(t.Context(), "3", minutely)
		c.call(soon, "deadline", minutely)
		asked := s.count()
		require.Equal(t, []string{"0 0s", "1 1m0s", "deadline 1m0s deadline_too_close", "2 2m0s",
			"3 2m0s wait_too_long"}, c.report())
		require.LessOrEqual(t, s.count(), asked+4)
	})
}

func TestNewcomerThatWouldWaitTooLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits(func(c *fleet.Config) { c.MaxWait = 5 * time.Second }))
		rate := func(cost int) fleet.Meter { return fleet.Rate("a", 1, cost).Burst(10) }
		c.call(t.Context(), "all", rate(10))
		c.call(t.Context(), "5", rate(5))
		c.call(t.Context(), "6", rate(6))
		soon, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		c.call(soon, "3", rate(3))
		require.NoError(t, c.l.Cooldown(t.Context(), "b", time.Hour))
		c.call(t.Context(), "cool", fleet.Rate("b", 1, 0))
		require.Equal(t, []string{"3 0s deadline_too_close", "6 0s wait_too_long", "all 0s", "cool 0s cooling_down",
			"5 5s"}, c.report())
		limited, _ := errorsAs(c.ends[1].err)
		require.Equal(t, 6*time.Second, limited.After)
	})
}

// TestMaxWaitEndsInTheLine has calls wait behind others until MaxWait ends.
func TestMaxWaitEndsInTheLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits(func(c *fleet.Config) { c.MaxWait = time.Second }))
		for i := range 50 {
			c.call(t.Context(), fmt.Sprint(i), fleet.Rate("a", 10, 1).Burst(1))
		}
		report := c.report()
		require.Len(t, report, 50)
		for i := range 10 {
			require.Contains(t, report, fmt.Sprintf("%d %v", i, time.Duration(i)*100*time.Millisecond))
		}
		for _, end := range c.ends {
			if end.err != nil {
				require.Equal(t, throttle.WaitTooLong, end.reason)
				require.GreaterOrEqual(t, end.after, 900*time.Millisecond)
				limited, _ := errorsAs(end.err)
				require.Equal(t, end.after, limited.Waited)
				require.LessOrEqual(t, limited.Waited, time.Second)
				require.LessOrEqual(t, limited.After, 100*time.Millisecond)
			}
		}
		require.Less(t, s.count(), 75)
	})
}

// TestCheapCallsComeFirst has an expensive call that cheap calls of another process always overtake.
func TestCheapCallsComeFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits())
		rate := func(cost int) fleet.Meter { return fleet.Rate("a", 1, cost).Burst(10) }
		c.call(t.Context(), "all", rate(10))
		c.call(t.Context(), "10", rate(10))
		c.call(t.Context(), "2", rate(2))
		c.call(t.Context(), "1", rate(1))
		c.call(t.Context(), "2 again", rate(2))
		require.Equal(t, []string{"all 0s", "1 1s", "2 3s", "2 again 5s", "10 15s"}, c.report())
		require.LessOrEqual(t, s.count(), 5+2*4)
	})
}

// TestLineTakesRefundedTokensBeforeMaxWait has a call settle that has used nothing. The calls behind the first do not
// know about the tokens until Redis has answered it. They must not be refused before that.
func TestLineTakesRefundedTokensBeforeMaxWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits(func(c *fleet.Config) { c.MaxWait = 15 * time.Second }))
		rate := func(cost int) fleet.Meter { return fleet.Rate("a", 1, cost).Burst(100).Estimated() }
		c.call(t.Context(), "all", rate(100))
		for i := range 5 {
			c.call(t.Context(), fmt.Sprint(i), rate(10))
		}
		c.ends[0].reserved.Settle(0)
		s.set(func(s *rateStore) { s.latency = func() time.Duration { return time.Millisecond } })
		require.Equal(t, []string{"all 0s", "0 10.002s", "1 10.004s", "2 10.006s", "3 10.008s", "4 10.01s"}, c.report())
	})
}

// TestNewcomersAnswerHurriesTheLine has the answer to another call show that the first call is due earlier.
func TestNewcomersAnswerHurriesTheLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits())
		rate := func(cost int) fleet.Meter { return fleet.Rate("a", 1, cost).Burst(100).Estimated() }
		c.call(t.Context(), "all", rate(100))
		c.call(t.Context(), "0", rate(50))
		c.ends[0].reserved.Settle(45)
		time.Sleep(time.Second)
		c.call(t.Context(), "1", rate(60)) // 56 tokens are left
		require.Equal(t, []string{"all 0s", "0 1s", "1 55s"}, c.report())
	})
}

// TestFastRateIsUsed has a rate that makes several tokens in the time of a round trip.
func TestFastRateIsUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{latency: func() time.Duration { return 5 * time.Millisecond }}
		c := newCrowd(t, s.limits())
		for i := range 1000 {
			c.calls.Go(func() {
				ctx := context.WithValue(t.Context(), metersKey{}, []fleet.Meter{fleet.Rate("a", 1000, 1).Burst(1)})
				_, err := c.l.Reserve(ctx)
				require.NoError(t, err, i)
			})
		}
		c.calls.Wait()
		require.Less(t, time.Since(c.start), 1300*time.Millisecond)
		require.Less(t, s.count(), 3500)
		t.Logf("%v, %d round trips", time.Since(c.start), s.count())
	})
}

func TestTwoProcessesShareARate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{latency: func() time.Duration { return 100*time.Microsecond + rand.N(100*time.Microsecond) }}
		crowds := []*crowd{newCrowd(t, s.limits()), newCrowd(t, s.limits())}
		for i := range 100 {
			for _, c := range crowds {
				c.call(t.Context(), fmt.Sprint(i), fleet.Rate("a", 20, 1))
			}
		}
		time.Sleep(4 * time.Second) // 100 of 200 calls
		for _, c := range crowds {
			c.mu.Lock()
			require.InDelta(t, 50, len(c.ends), 22)
			c.mu.Unlock()
		}
		for _, c := range crowds {
			require.Len(t, c.report(), 100)
			require.Less(t, c.ends[99].after, 10*time.Second)
		}
		require.Less(t, s.count(), 800)
		t.Logf("%d round trips", s.count())
	})
}

func TestCloseEndsTheLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits())
		for i := range 10 {
			c.call(t.Context(), fmt.Sprint(i), fleet.Rate("a", 1, 1))
		}
		require.NoError(t, c.l.Close(t.Context()))
		require.Len(t, c.report(), 10)
		for _, end := range c.ends[1:] {
			require.ErrorIs(t, end.err, fleet.ErrClosed)
		}
		require.Equal(t, 10, s.count())
	})
}

// TestUpdateKeepsTheLine changes MaxWait while calls wait. The change applies to later calls.
func TestUpdateKeepsTheLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &rateStore{}
		c := newCrowd(t, s.limits())
		for i := range 3 {
			c.call(t.Context(), fmt.Sprint(i), fleet.Rate("a", 1, 1))
		}
		require.NoError(t, c.l.Update(func(c *fleet.Config) { c.MaxWait = 0 }))
		c.call(t.Context(), "new", fleet.Rate("a", 1, 1))
		require.Equal(t, []string{"0 0s", "new 0s over_limit", "1 1s", "2 2s"}, c.report())
	})
}

// TestUpdateOfEval has a call wait for one server, and later calls for another.
func TestUpdateOfEval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, other := &rateStore{}, &rateStore{}
		c := newCrowd(t, s.limits())
		hourly := fleet.Rate("a", 1.0/3600, 1).Burst(2)
		c.call(t.Context(), "0", fleet.Rate("a", 1.0/3600, 2).Burst(2))
		c.call(t.Context(), "1", hourly)
		time.Sleep(50 * time.Minute)
		_, err := other.eval(t.Context(), "", []string{"n:{a}:r:", ""}, "take", "", 0, "r", int64(2e6), 1.0/3600, int64(2e6))
		require.NoError(t, err)
		time.Sleep(9 * time.Minute)
		require.NoError(t, c.l.Update(func(c *fleet.Config) { c.Eval = other.eval }))
		c.call(t.Context(), "2", hourly)
		require.Equal(t, []string{"0 0s", "1 1h0m0s", "2 1h50m0s"}, c.report())
	})
}

// TestLinesUnderStress has calls of several processes, keys and costs, which are canceled at any time. Some requests
// fail. Redis has given as many tokens as calls report.
func TestLinesUnderStress(t *testing.T) {
	s := &rateStore{latency: func() time.Duration { return rand.N(300 * time.Microsecond) }}
	s.before = func([]string) error {
		if rand.N(200) == 0 {
			return replyError("TRYAGAIN Multiple keys request during rehashing of slot")
		}
		return nil
	}
	start := time.Now()
	var mu sync.Mutex
	admitted, gotten, asked := map[string]float64{}, 0, 0
	var limits []*fleet.Limits
	var calls sync.WaitGroup
	for range 2 {
		l := s.limits(func(c *fleet.Config) { c.MaxWait, c.Timeout = 200*time.Millisecond, 10*time.Second })
		limits = append(limits, l)
		for range 50 {
			calls.Go(func() {
				for time.Since(start) < time.Second {
					key, cost := fmt.Sprint("a/", rand.N(3)), 1+rand.N(3)
					ctx := context.WithValue(t.Context(), metersKey{}, []fleet.Meter{
						fleet.Rate(key, 500, cost).Burst(10).Estimated(), fleet.Rate("a/all", 1000, cost).Burst(20),
					})
					ctx, cancel := context.WithTimeout(ctx, rand.N(300*time.Millisecond))
					r, err := l.Reserve(ctx)
					cancel()
					mu.Lock()
					asked++
					if err == nil {
						gotten++
						admitted["n:{a}:r:"+key[2:]] += float64(cost)
						admitted["n:{a}:r:all"] += float64(cost)
						if rand.N(2) == 0 {
							admitted["n:{a}:r:"+key[2:]] -= float64(cost)
							r.Settle(0)
						}
					} else if !errors.Is(err, context.DeadlineExceeded) { // the error of a call whose ctx was done before it
						assert.ErrorIs(t, err, throttle.ErrLimited) // require would end the goroutine with mu locked
					}
					mu.Unlock()
				}
			})
		}
	}
	calls.Wait()
	elapsed := time.Since(start).Seconds()
	for _, l := range limits {
		require.NoError(t, l.Close(t.Context()))
		calls, lines := fleet.Waiting(l)
		require.Equal(t, []int{0, 0}, []int{calls, lines})
	}
	require.LessOrEqual(t, admitted["n:{a}:r:all"], 20+1000*elapsed)
	for key, n := range admitted {
		require.InDelta(t, n, s.taken[key], 0.5, key)
	}
	t.Logf("%d of %d calls, %d round trips", gotten, asked, s.count())
}
