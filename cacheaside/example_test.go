package cacheaside_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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

// Callers do not notice that the database fails for a while if they ask for values that
// have been read before.
func ExampleConfig_staleOnError() {
	down := false
	prices := cacheaside.New(cacheaside.Config[string, int]{
		Load: func(ctx context.Context, item string) (int, error) {
			if down {
				return 0, errors.New("connection refused")
			}
			cacheaside.SetTTL(ctx, time.Nanosecond) // this one is out of date at once
			return 100, nil
		},
		StaleIfError: time.Hour,
		OnEvent: func(_ context.Context, e cacheaside.Event) {
			if e.Kind == cacheaside.EventServedStale && e.Err != nil {
				fmt.Println("stale:", e.Key, "because:", e.Err)
			}
		},
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

// Events go to a log in one line.
func ExampleConfig_onEvent() {
	users := cacheaside.New(cacheaside.Config[int, string]{
		Load: func(context.Context, int) (string, error) { return "Ada", nil },
		OnEvent: func(ctx context.Context, e cacheaside.Event) {
			slog.InfoContext(ctx, "cache", "name", e.Name, "what", e.Kind, "key", e.Key, "took", e.Took, "err", e.Err)
		},
	})
	fmt.Println(users.Close())
	// Output: <nil>
}

// A whole list is read with one query.
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
