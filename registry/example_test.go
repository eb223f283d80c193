package registry_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
)

// exampleLogger returns a logger that writes to standard output without times.
func exampleLogger() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{ReplaceAttr: withoutTime}))
}

func Example() {
	users := breaker.New(breaker.Config{Name: "users"})
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 16})
	reg := registry.New()
	reg.MustAdd(users, slots)

	users.ForceOpen(errors.New("maintenance"))
	for name, health := range reg.Health(context.Background()) {
		fmt.Println(name, health.Status)
	}

	report, err := reg.Apply([]byte(`{"bulkhead/users": {"Limit": 32}}`))
	fmt.Println(report, err)
	// Output:
	// breaker/users fail
	// bulkhead/users pass
	// bulkhead/users.Limit: 16 -> 32 <nil>
}

func ExampleNew() {
	reg := registry.New()
	reg.MustAdd(bulkhead.New(bulkhead.Config{Name: "users", Limit: 16}))
	for e := range reg.All() {
		fmt.Println(e)
	}
	// Output: bulkhead/users
}

func ExampleRegistry_Add() {
	reg := registry.New()
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 16})
	fmt.Println(reg.Add(slots))
	fmt.Println(reg.Add(slots))
	// Output:
	// <nil>
	// registry: bulkhead/users is already registered
}

func ExampleRegistry_Get() {
	reg := registry.New()
	reg.MustAdd(bulkhead.New(bulkhead.Config{Name: "users", Limit: 16}))
	e, ok := reg.Get("bulkhead", "users")
	fmt.Println(e, ok)
	for _, m := range e.Metrics() {
		if m.Name == "bulkhead.limit" {
			fmt.Println(m.Name, m.Value)
		}
	}
	// Output:
	// bulkhead/users true
	// bulkhead.limit 16
}

func ExampleRegistry_Observe() {
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 1})
	reg := registry.New()
	reg.MustAdd(slots)
	stop := reg.Observe(func(_ context.Context, e policy.Event) {
		fmt.Println(e.Kind, e.Name, e.What)
	})
	defer stop()

	ctx := context.Background()
	_ = slots.Do(ctx, func(ctx context.Context) error {
		return slots.Do(ctx, func(context.Context) error { return nil }) // the only slot is taken
	})
	// Output: bulkhead users refused
}

func ExampleLog() {
	log := registry.Log(exampleLogger()) // usually the argument of reg.Observe
	for range 3 {                        // one line for three refusals
		log(context.Background(), policy.Event{
			Kind: "bulkhead", Name: "users", What: "refused", Level: slog.LevelWarn,
			Attrs: []slog.Attr{slog.String("reason", "full")},
		})
	}
	// Output: level=WARN msg="bulkhead refused" name=users reason=full
}

func ExampleRegistry_Apply() {
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 16})
	reg := registry.New()
	reg.MustAdd(slots)

	report, err := reg.Apply([]byte(`{
		"bulkhead/users": {"Limit": 32, "Queue": 100, "MaxWait": "unlimited"},
		"?bulkhead/search": {"Limit": 8}
	}`))
	fmt.Println(report, err)
	fmt.Println(slots.Config().MaxWait == bulkheadUnlimited)

	_, err = reg.Apply([]byte(`{"bulkhead/users": {"Limit": -5, "MaxWait": 7}}`))
	fmt.Println(err)
	// Output:
	// bulkhead/users.Limit: 16 -> 32
	// bulkhead/users.MaxWait: "0s" -> "unlimited"
	// bulkhead/users.Queue: 0 -> 100 <nil>
	// true
	// bulkhead/users: MaxWait: is 7: must be a duration in quotes, such as "1.5s"
}

// bulkheadUnlimited is a MaxWait without a limit.
const bulkheadUnlimited = time.Duration(-1)

func ExampleRegistry_Preview() {
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 16})
	reg := registry.New()
	reg.MustAdd(slots)
	report, err := reg.Preview([]byte(`{"bulkhead/users": {"Limit": 32}}`))
	fmt.Println(report, err)
	fmt.Println(slots.Config().Limit)
	// Output:
	// bulkhead/users.Limit: 16 -> 32 <nil>
	// 16
}

func ExampleRegistry_Reload() {
	file, err := os.CreateTemp("", "settings-*.json")
	if err != nil {
		panic(err)
	}
	defer os.Remove(file.Name())
	if err := os.WriteFile(file.Name(), []byte(`{"bulkhead/users": {"Limit": 32}}`), 0o600); err != nil {
		panic(err)
	}

	reg := registry.New()
	reg.MustAdd(bulkhead.New(bulkhead.Config{Name: "users", Limit: 16}))
	report, err := reg.Reload(file.Name())
	exampleLogger().Info("settings", "changed", report, "err", err)
	// Output: level=INFO msg=settings changed.bulkhead/users.Limit="16 -> 32" err=<nil>
}

func ExampleEntry_Settings() {
	reg := registry.New()
	reg.MustAdd(&Gate{name: "visitors", cfg: GateConfig{Limit: 3}})
	e, _ := reg.Get("gate", "visitors")
	fmt.Printf("%s\n", e.Settings())
	// Output: {"Limit": 3}
}

func ExampleEntry_Worst() {
	shards := resilience.NewGroup(func(string) *breaker.Breaker {
		return breaker.New(breaker.Config{Name: "shards", OpenFor: time.Minute})
	}, resilience.GroupConfig{})
	reg := registry.New()
	reg.MustAdd(shards)

	for _, shard := range []string{"eu-1", "eu-2", "us-1"} {
		_ = shards.Do(context.Background(), shard, func(context.Context) error { return nil })
	}
	for shard, b := range shards.All() {
		if shard == "eu-2" {
			b.Trip(errors.New("disk full"), 0)
		}
	}

	e, _ := reg.Get("breaker", "shards")
	for _, m := range e.Worst(1) {
		health := m.Health(context.Background())
		fmt.Println(m.Key, health.Status, health.State)
	}
	// Output: eu-2 fail open
}

// A Gate is a policy that admits a number of calls.
type Gate struct {
	name string
	cfg  GateConfig
}

// GateConfig configures a [Gate].
type GateConfig struct{ Limit int }

var _ policy.Describer = (*Gate)(nil)

func (g *Gate) Describe() policy.Description {
	return policy.Description{Kind: "gate", Name: g.name, Config: func() any { return g.cfg }}
}
