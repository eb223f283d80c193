package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/fleet"
)

// A standIn takes the place of Redis in these examples. A program uses resilienceredis.Eval(client) instead. The
// standIn counts the tokens that are taken from each key, and lets no time pass.
type standIn struct {
	mu    sync.Mutex
	taken map[string]int64
}

// eval takes what the meters of a call say, if there is enough of each.
func (s *standIn) eval(_ context.Context, _ string, keys []string, args ...any) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	answer := []any{int64(1), time.Now().UnixMicro()}
	if args[0] != "take" {
		return answer, nil
	}
	if s.taken == nil {
		s.taken = map[string]int64{}
	}
	refusal, refused := []any{int64(0), answer[1], int64(0), int64(0)}, false
	for i := 0; 4*i+6 < len(args); i++ {
		limit, cost := args[4*i+4].(int64), args[4*i+6].(int64)
		left, after := limit-s.taken[keys[i]], int64(-1)
		if cost > left {
			refused, after = true, time.Minute.Microseconds()
		}
		answer, refusal = append(answer, int64(0)), append(refusal, left, after, int64(0))
	}
	if refused {
		return refusal, nil
	}
	for i := range answer[2:] {
		s.taken[keys[i]] += args[4*i+6].(int64)
	}
	return answer, nil
}

func estimate(context.Context) int { return 60_000 }

// Requests and tokens of a language model, shared by all processes.
func Example() {
	redis := &standIn{}
	limits := fleet.New(fleet.Config{
		Name: "llm",
		Eval: redis.eval, // resilienceredis.Eval(client)
		Meters: func(ctx context.Context) []fleet.Meter {
			return []fleet.Meter{
				fleet.Rate("acme/requests", throttle.PerMinute(500), 1).Burst(500),
				fleet.Rate("acme/tokens", throttle.PerMinute(90_000), estimate(ctx)).Burst(90_000).Estimated(),
				fleet.Quota("acme/day", 1_000_000, throttle.Window{Per: throttle.Day}, 1),
			}
		},
	})
	defer func() { // flushes settlements
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		fmt.Println("closed:", limits.Close(ctx))
	}()

	r, err := limits.Reserve(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	used := 0
	defer func() { r.Settle(used) }()
	used = 40_000

	_, err = limits.Reserve(context.Background())
	limited, _ := errors.AsType[*throttle.LimitedError](err)
	fmt.Println(limited.Key, limited.Reason, limited.RetryAfter())
	// Output:
	// acme/tokens over_limit 1m0s
	// closed: <nil>
}

func ExampleNew() {
	redis := &standIn{}
	limits := fleet.New(fleet.Config{
		Name:     "api",
		Eval:     redis.eval,
		Meters:   func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Rate("acme/calls", 2, 1)} },
		OnOutage: fleet.Admit, // rather than refuse calls while Redis is away
	})
	defer limits.Close(context.Background())
	for range 3 {
		_, err := limits.Reserve(context.Background())
		fmt.Println(err == nil)
	}
	// Output:
	// true
	// true
	// false
}

func ExampleLimits_Do() {
	redis := &standIn{}
	limits := fleet.New(fleet.Config{
		Name:   "api",
		Eval:   redis.eval,
		Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Rate("acme/calls", 1, 1)} },
	})
	defer limits.Close(context.Background())
	for range 2 {
		fmt.Println(limits.Do(context.Background(), func(context.Context) error { return nil }))
	}
	// Output:
	// <nil>
	// throttle: api[acme/calls]: limited (over_limit), retry after 1m0s
}

func ExampleLimits_Wrap() {
	redis := &standIn{}
	limits := fleet.New(fleet.Config{
		Name:   "emails",
		Eval:   redis.eval,
		Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Slots("free/running", throttle.None)} },
	})
	defer limits.Close(context.Background())
	send := limits.Wrap(func(context.Context) error { return nil })
	fmt.Println(send(context.Background()))
	// Output: throttle: emails[free/running]: limited (over_limit)
}

func ExampleLimits_Close() {
	redis := &standIn{}
	limits := fleet.New(fleet.Config{
		Name:   "jobs",
		Eval:   redis.eval,
		Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Slots("jobs/running", 4)} },
	})
	err := limits.Do(context.Background(), func(context.Context) error { return nil })
	fmt.Println("job:", err)

	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	fmt.Println("close:", limits.Close(ctx)) // otherwise the slot would stay taken for the whole Lease
	fmt.Println(limits.Do(context.Background(), func(context.Context) error { return nil }))
	// Output:
	// job: <nil>
	// close: <nil>
	// fleet: closed
}
