package cacheaside_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/cacheaside"
)

func Example() {
	rows := map[int]string{42: "Ada"} // the store of record
	users := cacheaside.New(cacheaside.Config[int, string]{
		Name: "users",
		Load: func(_ context.Context, id int) (string, error) {
			fmt.Println("reading", id)
			if name, ok := rows[id]; ok {
				return name, nil
			}
			return "", cacheaside.ErrNotFound
		},
		TTL: time.Minute,
	})
	defer users.Close()
	ctx := context.Background()

	for range 2 {
		name, err := users.Get(ctx, 42)
		fmt.Println(name, err)
	}
	err := users.Write(ctx, 42, func(context.Context) error {
		rows[42] = "Ada Lovelace"
		return nil
	})
	fmt.Println("updated:", err)
	fmt.Println(users.Get(ctx, 42))
	_, err = users.Get(ctx, 7)
	fmt.Println(errors.Is(err, cacheaside.ErrNotFound))
	// Output:
	// reading 42
	// Ada <nil>
	// Ada <nil>
	// updated: <nil>
	// reading 42
	// Ada Lovelace <nil>
	// reading 7
	// true
}

// With StaleIfError, callers still get values that were loaded before the database failed.
func ExampleConfig_staleIfError() {
	down := false
	prices := cacheaside.New(cacheaside.Config[string, int]{
		Load: func(ctx context.Context, item string) (int, error) {
			if down {
				return 0, errors.New("connection refused")
			}
			cacheaside.SetTTL(ctx, time.Nanosecond) // stale immediately
			return 100, nil
		},
		StaleIfError: time.Hour,
	})
	prices.Observe(func(_ context.Context, e cacheaside.Event) {
		if e.Kind == cacheaside.EventServedStale && e.Err != nil {
			fmt.Println("stale:", e.Key, "because:", e.Err)
		}
	})
	defer prices.Close()
	fmt.Println(prices.Get(context.Background(), "tea"))
	down = true
	fmt.Println(prices.Get(context.Background(), "tea"))
	fmt.Println(prices.Get(context.Background(), "coffee"))
	// Output:
	// 100 <nil>
	// stale: tea because: connection refused
	// 100 <nil>
	// 0 connection refused
}

func ExampleNew() {
	users := cacheaside.New(cacheaside.Config[int, string]{
		Name:         "users",
		Load:         func(_ context.Context, id int) (string, error) { return fmt.Sprint("user ", id), nil },
		TTL:          time.Minute,
		StaleIfError: time.Hour, // used if the database fails
	})
	defer users.Close()
	cfg := users.Config() // the Config with its defaults
	fmt.Println(cfg.TTL, cfg.StaleIfError, cfg.Jitter, cfg.LoadTimeout, cfg.Capacity)
	// Output: 1m0s 1h0m0s 0.1 30s 10000
}

func ExampleCache_Get() {
	users := cacheaside.New(cacheaside.Config[int, string]{
		Name: "users",
		Load: func(_ context.Context, id int) (string, error) {
			fmt.Println("reading", id)
			if id == 42 {
				return "Ada", nil
			}
			return "", cacheaside.ErrNotFound
		},
	})
	defer users.Close()
	ctx := context.Background()
	for _, id := range []int{42, 42, 7} {
		switch name, err := users.Get(ctx, id); {
		case errors.Is(err, cacheaside.ErrNotFound):
			fmt.Println("no such user")
		case err != nil:
			fmt.Println("failed:", err)
		default:
			fmt.Println("got", name)
		}
	}
	// Output:
	// reading 42
	// got Ada
	// got Ada
	// reading 7
	// no such user
}

func ExampleCache_Observe() {
	users := cacheaside.New(cacheaside.Config[int, string]{
		Name: "users",
		Load: func(context.Context, int) (string, error) { return "Ada", nil },
	})
	defer users.Close()
	stop := users.Observe(func(_ context.Context, e cacheaside.Event) {
		fmt.Println(e.Name, e.Kind, e.Key, e.Err)
	})
	defer stop()
	_, _ = users.Get(context.Background(), 42)
	// Output: users loaded 42 <nil>
}

// LoadMany reads a whole list with one query.
func ExampleCache_GetMany() {
	users := cacheaside.New(cacheaside.Config[int, string]{
		Load: func(context.Context, int) (string, error) { return "", errors.New("not one by one") },
		LoadMany: func(_ context.Context, ids []int) (map[int]string, error) {
			fmt.Println("reading", len(ids))
			return map[int]string{1: "Ada", 2: "Grace"}, nil
		},
	})
	defer users.Close()
	fmt.Println(users.GetMany(context.Background(), []int{1, 2, 3}))
	fmt.Println(users.Get(context.Background(), 2))
	// Output:
	// reading 3
	// map[1:Ada 2:Grace] <nil>
	// Grace <nil>
}
