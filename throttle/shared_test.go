package throttle_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

type call struct {
	script string
	keys   []string
	args   []any
}

// A fakeRedis gives the answers of a function. internal/integration/throttle tests the
// script with a real Redis.
type fakeRedis struct {
	mu     sync.Mutex
	calls  []call
	answer func(ctx context.Context, args []any) (any, error)
}

func (f *fakeRedis) eval(ctx context.Context, script string, keys []string, args ...any) (any, error) {
	f.mu.Lock()
	f.calls = append(f.calls, call{script, keys, args})
	answer := f.answer
	f.mu.Unlock()
	return answer(ctx, args)
}

func (f *fakeRedis) made() []call {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.calls)
}

func answers(v ...any) func(context.Context, []any) (any, error) {
	return func(context.Context, []any) (any, error) { return v, nil }
}

var errDown = errors.New("connection refused")

func down(context.Context, []any) (any, error) { return nil, errDown }

func hanging(ctx context.Context, _ []any) (any, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestSharedAsksOnceForEachDecision(t *testing.T) {
	f := &fakeRedis{answer: answers(int64(1), int64(0), int64(300_000))}
	s := throttle.NewShared(throttle.SharedConfig{Timeout: time.Minute, Name: "api", Eval: f.eval, Rate: 10, Burst: 5, Instances: 1})
	require.Equal(t, throttle.Decision{OK: true, Limit: 5, Window: 500 * time.Millisecond, Remaining: 2, ResetAfter: 300 * time.Millisecond}, s.Take(t.Context(), "", 1))
	require.NoError(t, s.Do(t.Context(), "", ok))
	f.answer = answers("0", []byte("100000"), 500_000)
	err := s.Do(t.Context(), "", ok)
	require.EqualError(t, err, "throttle: api: limited (over the limit), retry after 100ms")
	require.Equal(t, throttle.SharedStats{Admitted: 2, Refused: 1, Refusals: map[throttle.Reason]int64{throttle.OverLimit: 1}, Spent: 2, Asked: 3}, withoutTime(s.Stats()))
	for _, c := range f.calls {
		require.Equal(t, []string{"throttle:api"}, c.keys)
		require.Equal(t, f.calls[0].script, c.script, "the same each time, so that it can be sent by its hash")
		require.Equal(t, []any{uint64(500_000), uint64(0), uint64(500_000), uint64(0), "take", 0, 1, uint64(100_000), uint64(0), 0, int64(0), int64(0), "100000"}, c.args)
	}

	require.NoError(t, setSharedLimit(s, throttle.Limit{Rate: 3, Burst: 2}))
	require.Equal(t, 666_666_667*time.Nanosecond, s.Take(t.Context(), "", 1).Window)
	require.Equal(t, []any{uint64(666_666), uint64(2863311532), uint64(666_666), uint64(2863311532), "take", 0, 1, uint64(333_333), uint64(1431655766), 0, int64(0), int64(0), "333333.3333333335"}, f.calls[3].args,
		"a third of a second, rounded up to 2^-32 us")
	require.Error(t, setSharedLimit(s, throttle.Limit{Rate: 0, Burst: 2}))
	require.Error(t, setSharedLimit(s, throttle.Limit{Rate: 1e10, Burst: 2}))
}

func TestSharedKeysLevelsAndCosts(t *testing.T) {
	type cost struct{}
	var refused []*throttle.LimitedError
	f := &fakeRedis{answer: answers(int64(0), int64(1000), int64(1000))}
	s := throttle.NewShared(throttle.SharedConfig{
		Timeout: time.Minute,
		Name:    "api", Prefix: "p:", Eval: f.eval, Rate: 1e6, Burst: 10, Instances: 1,
		Levels:   2,
		Reserve:  []float64{0.5},
		Priority: func(context.Context) int { return 5 },
		Cost:     func(ctx context.Context) int { n, _ := ctx.Value(cost{}).(int); return n },
	})
	onRefuse(s, func(_ context.Context, e *throttle.LimitedError) { refused = append(refused, e) })
	of := func(n int) context.Context { return context.WithValue(t.Context(), cost{}, n) }
	require.NoError(t, s.Do(of(0), "tenant", ok), "takes nothing, asks nobody")
	require.NoError(t, s.Do(of(-1), "tenant", ok))
	require.Empty(t, f.calls)
	require.Error(t, s.Do(of(1), "tenant", ok), "less than nothing gives nothing")
	f.calls, refused = nil, nil
	require.EqualError(t, s.Do(of(3), "tenant", ok), "throttle: api[tenant]: limited (over the limit), retry after 1ms")
	require.Equal(t, []string{"p:api/tenant"}, f.calls[0].keys)
	require.Equal(t, []any{uint64(10), uint64(0), uint64(5), uint64(0), "take", 0, 3, uint64(3), uint64(0), 0, int64(0), int64(0), "1"}, f.calls[0].args)
	err := s.Do(of(6), "tenant", ok)
	require.EqualError(t, err, "throttle: api[tenant]: limited (too costly): 6 tokens at level 1 are more than a burst of 10 can give")
	require.Len(t, f.calls, 1)
	require.Len(t, refused, 2)
	f.answer = answers(int64(0), int64(0), int64(0))
	require.NoError(t, s.Refund(t.Context(), "tenant", 100))
	require.Equal(t, []any{uint64(10), uint64(0), uint64(10), uint64(0), "take", 0, 0, uint64(0), uint64(0), -10, int64(-10), int64(0), "1"}, f.calls[1].args)
	require.EqualValues(t, 10, s.Stats().Refunded, "a burst at most")
	require.NoError(t, s.Update(func(c *throttle.SharedConfig) { c.Reserve = nil }))
	require.Equal(t, []float64{0.25}, s.Config().Reserve)
	require.Equal(t, throttle.TooCostly, reasonOfTake(s.Take(t.Context(), "tenant", 9)))
}

func withoutTime(s throttle.SharedStats) throttle.SharedStats {
	s.AskTime = 0
	return s
}

func TestSharedEndedContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: hanging}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Eval: f.eval, Rate: 1, Instances: 1})
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		start := time.Now()
		err := s.Do(ctx, "", ok)
		require.Equal(t, time.Millisecond, time.Since(start))
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		require.Equal(t, throttle.ContextEnded, limited.Reason)
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, s.Do(ctx, "", ok), throttle.ErrLimited)
		require.Equal(t, throttle.Decision{Limit: 1, Window: time.Second}, s.Take(ctx, "", 1))
		time.Sleep(50 * time.Millisecond)
		require.False(t, s.Stats().Down, "one answer that is late")
		time.Sleep(time.Second)
		synctest.Wait()
		require.True(t, s.Stats().Down, "found out without the caller")
		require.Len(t, f.made(), 1)
	})
}

// A result that the script cannot have returned is an outage. The error says what was
// wrong with it.
func TestSharedBadAnswers(t *testing.T) {
	for want, answer := range map[string]any{
		"throttle: api: the script's answer is string OK: must be 3 integers":               "OK",
		"throttle: api: the script's answer is <nil> <nil>: must be 3 integers":             nil,
		"throttle: api: the script's answer is []interface {} [1 2]: must be 3 integers":    []any{int64(1), int64(2)},
		"throttle: api: the script's answer has string x: must be an integer of 0 or more":  []any{int64(1), "x", int64(2)},
		"throttle: api: the script's answer has float64 1: must be an integer of 0 or more": []any{1.0, int64(1), int64(2)},
		"throttle: api: the script's answer has int64 -5: must be an integer of 0 or more":  []any{int64(1), int64(-5), int64(2)},
		"throttle: api: the script's answer is 7 tokens: must be 0 or 1":                    []any{int64(7), int64(0), int64(2)},
	} {
		s := throttle.NewShared(throttle.SharedConfig{
			Timeout: time.Minute,
			Name:    "api", Rate: 1, OnOutage: throttle.RefuseAll,
			Eval: func(context.Context, string, []string, ...any) (any, error) { return answer, nil },
		})
		var seen events
		s.Observe(seen.add)
		err := s.Do(t.Context(), "", ok)
		cause := seen.take()[0].Err
		require.EqualError(t, cause, want)
		require.ErrorIs(t, err, throttle.ErrOutage)
		require.ErrorIs(t, err, throttle.ErrLimited)
		require.ErrorIs(t, err, cause)
	}
}

// FuzzSharedAnswer has Redis answer a call of 1 to 8 tokens with three values, each
// as a client of one kind or another has it.
func FuzzSharedAnswer(f *testing.F) {
	const asInt64, asString, asBytes, asInt, asFloat, asNil = 0, 1, 2, 3, 4, 5
	f.Add(uint8(4), uint8(asInt64), int64(5), int64(0), int64(500_000))              // what the call takes
	f.Add(uint8(2), uint8(asString), int64(3), int64(0), int64(1_000_000))           // what the call takes, and nothing left
	f.Add(uint8(1), uint8(asBytes), int64(0), int64(200_000), int64(1_000_000))      // refused
	f.Add(uint8(0), uint8(asInt), int64(4), int64(0), int64(0))                      // neither of what was asked for
	f.Add(uint8(0), uint8(asFloat), int64(1), int64(0), int64(0))                    // not an integer
	f.Add(uint8(0), uint8(asNil), int64(1), int64(0), int64(0))                      // nothing
	f.Add(uint8(0), uint8(asInt64), int64(-1), int64(0), int64(0))                   // fewer than none
	f.Add(uint8(0), uint8(asInt64), int64(0), int64(-1), int64(math.MinInt64))       // in the past
	f.Add(uint8(0), uint8(asInt64), int64(1), int64(0), int64(math.MaxInt64/1000))   // as long as a Duration can be
	f.Add(uint8(0), uint8(asInt64), int64(0), int64(math.MaxInt64/1000+1), int64(0)) // longer
	f.Add(uint8(7), uint8(asString), int64(math.MaxInt64), int64(0), int64(100_000)) // tokens without end
	f.Fuzz(func(t *testing.T, cost, kind uint8, taken, wait, debt int64) {
		n := 1 + int(cost%8)
		as := func(v int64) any {
			return []any{v, strconv.FormatInt(v, 10), strconv.AppendInt(nil, v, 10), int(v), float64(v), nil}[kind%6]
		}
		s := throttle.NewShared(throttle.SharedConfig{
			Timeout: time.Minute,
			Name:    "api", Rate: 10, Burst: 10, OnOutage: throttle.RefuseAll, RetryEvery: time.Hour,
			Eval: func(context.Context, string, []string, ...any) (any, error) {
				return []any{as(taken), as(wait), as(debt)}, nil
			},
		})
		d := s.Take(t.Context(), "", n)
		sane := kind%6 < asFloat && min(taken, wait, debt) >= 0 && max(taken, wait, debt) <= math.MaxInt64/1000 &&
			(taken == 0 || taken == int64(n))
		require.Equal(t, sane, s.Stats().Failed == 0)
		require.Equal(t, sane && taken > 0, d.OK)
		require.GreaterOrEqual(t, min(d.RetryAfter, d.ResetAfter), time.Duration(0))
		require.True(t, 0 <= d.Remaining && d.Remaining <= 10)
	})
}

func TestSharedOutage(t *testing.T) {
	for name, c := range map[string]struct {
		policy   throttle.OutagePolicy
		admitted int // of 100 at once
	}{
		"LimitLocally": {throttle.LimitLocally, 5},
		"RefuseAll":    {throttle.RefuseAll, 0},
		"AdmitAll":     {throttle.AdmitAll, 100},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeRedis{answer: hanging}
				s := throttle.NewShared(throttle.SharedConfig{
					Name: "api", Eval: f.eval, Rate: 10, Burst: 20, OnOutage: c.policy, Instances: 4,
				})
				start := time.Now()
				admitted := 0
				var err error
				for range 100 {
					if e := s.Do(t.Context(), "", ok); e == nil {
						admitted++
					} else {
						err = e
					}
				}
				require.Equal(t, c.admitted, admitted)
				require.Equal(t, 100*time.Millisecond, time.Since(start), "two wait for Redis, the others do not")
				require.Len(t, f.made(), 2)
				var reasons map[throttle.Reason]int64
				if admitted < 100 {
					reasons = map[throttle.Reason]int64{throttle.OverLimit: int64(100 - admitted)}
				}
				if c.policy == throttle.RefuseAll {
					reasons = map[throttle.Reason]int64{throttle.Outage: 100}
				}
				require.Equal(t, throttle.SharedStats{
					Admitted: int64(admitted), Refused: int64(100 - admitted), Refusals: reasons, Spent: int64(admitted),
					Asked: 2, AskTime: 100 * time.Millisecond, Failed: 2, Alone: 100, Outages: 1, Down: true,
				}, s.Stats())
				switch c.policy {
				case throttle.RefuseAll:
					require.EqualError(t, err, "throttle: api: limited (outage), retry after 1s: throttle: shared limit cannot be reached: context deadline exceeded")
				case throttle.LimitLocally:
					require.EqualError(t, err, "throttle: api: limited (over the limit), retry after 350ms")
				}

				time.Sleep(time.Second) // one tries again
				f.answer = down
				_ = s.Do(t.Context(), "", ok)
				_ = s.Do(t.Context(), "", ok)
				require.Len(t, f.made(), 3)
				time.Sleep(time.Second)
				f.answer = answers(int64(1), int64(0), int64(100))
				for range 100 {
					require.NoError(t, s.Do(t.Context(), "", ok))
				}
				require.Len(t, f.made(), 103, "Redis is back")
				require.False(t, s.Stats().Down)
			})
		})
	}
}

func TestSharedOutageRefusesCallsTooCostlyForOneInstance(t *testing.T) {
	f := &fakeRedis{answer: down}
	s := throttle.NewShared(throttle.SharedConfig{
		Timeout: time.Minute,
		Name:    "api", Eval: f.eval, Rate: 10, Burst: 8, Instances: 4, Cost: func(context.Context) int { return 5 },
	})
	err := s.Do(t.Context(), "", ok)
	require.ErrorIs(t, err, throttle.ErrOutage)
	require.ErrorIs(t, err, errDown)
	limited, _ := errors.AsType[*throttle.LimitedError](err)
	require.True(t, limited.Retryable(), "once Redis is back")
	require.Positive(t, limited.RetryAfter())
}

// An Update changes the part of an instance in an outage, too.
func TestSharedSetLimitInAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := throttle.NewShared(throttle.SharedConfig{
			Name: "api", Eval: (&fakeRedis{answer: down}).eval, Rate: 10, Burst: 8, Instances: 4, RetryEvery: time.Hour,
		})
		admitted := func() (n int) {
			for s.Allow(t.Context(), "") {
				n++
			}
			return n
		}
		require.Equal(t, 2, admitted())
		require.NoError(t, setSharedLimit(s, throttle.Limit{Rate: 40, Burst: 40}))
		time.Sleep(time.Minute)
		require.Equal(t, 10, admitted())
		time.Sleep(100 * time.Millisecond)
		require.Equal(t, 1, admitted(), "at a quarter of 40 a second")
	})
}

// A call of no tokens is decided without Redis, and told of the limit.
func TestSharedTakesNothing(t *testing.T) {
	f := &fakeRedis{answer: down}
	s := throttle.NewShared(throttle.SharedConfig{Name: "api", Eval: f.eval, Rate: 2, Burst: 5, Instances: 1})
	want := s.Take(t.Context(), "", 6)
	require.Equal(t, throttle.Decision{Limit: 5, Window: want.Window, RetryAfter: throttle.Never}, want)
	want.OK, want.RetryAfter = true, 0
	require.Equal(t, want, s.Take(t.Context(), "", 0))
	require.Empty(t, f.made())
}

func TestSharedValidate(t *testing.T) {
	eval := (&fakeRedis{}).eval
	for want, cfg := range map[string]throttle.SharedConfig{
		"throttle.SharedConfig.Name is \"\": must be set: it names the limit that is shared":                                    {Eval: eval, Rate: 1, Instances: 1},
		"throttle.SharedConfig.Eval is nil: must be set":                                                                        {Name: "n", Instances: 1, Rate: 1},
		"throttle.SharedConfig.Rate is 0: must be above 0 and at most 1e9 tokens a second":                                      {Name: "n", Instances: 1, Eval: eval},
		"throttle.SharedConfig.Rate is NaN: must be above 0 and at most 1e9 tokens a second":                                    {Name: "n", Instances: 1, Eval: eval, Rate: math.NaN()},
		"throttle.SharedConfig.Rate is 1e+10: must be above 0 and at most 1e9 tokens a second":                                  {Name: "n", Instances: 1, Eval: eval, Rate: 1e10},
		"throttle.SharedConfig.Burst is -1: must be 0 (for a second's worth) or more":                                           {Name: "n", Instances: 1, Eval: eval, Rate: 2, Burst: -1},
		"throttle.SharedConfig.Timeout is -1ns: must be 0 (for 50 ms) or more":                                                  {Name: "n", Instances: 1, Eval: eval, Rate: 2, Timeout: -1},
		"throttle.SharedConfig.OnOutage is \"no\": must be \"limit locally\", \"refuse all\" or \"admit all\"":                  {Name: "n", Instances: 1, Eval: eval, Rate: 2, OnOutage: "no"},
		"throttle.SharedConfig.Instances is -1: must be 0 or more":                                                              {Name: "n", Eval: eval, Rate: 2, Instances: -1},
		"throttle.SharedConfig.Instances is 0: must be 1 or more where OnOutage is LimitLocally: each instance admits its part": {Name: "n", Eval: eval, Rate: 2},
		"throttle.SharedConfig.Levels is 2: must be 0 or 1 where Priority is nil":                                               {Name: "n", Instances: 1, Eval: eval, Rate: 2, Levels: 2},
		"throttle.SharedConfig.Reserve is [0.1]: must be at most 0 long, one less than Levels":                                  {Name: "n", Instances: 1, Eval: eval, Rate: 2, Reserve: []float64{0.1}},
		"throttle.SharedConfig.RetryEvery is -1ns: must be 0 (for a second) or more":                                            {Name: "n", Instances: 1, Eval: eval, Rate: 2, RetryEvery: -1},
	} {
		require.PanicsWithError(t, want, func() { throttle.NewShared(cfg) })
	}
	for _, policy := range []throttle.OutagePolicy{throttle.RefuseAll, throttle.AdmitAll} {
		require.NoError(t, throttle.SharedConfig{Name: "n", Eval: eval, Rate: 1e9, OnOutage: policy}.Validate())
	}
}
