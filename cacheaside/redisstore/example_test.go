package redisstore_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
)

// While Redis is down, as here, a Cache loads values from the source.
func ExampleNew() {
	// With go-redis: eval, subscribe := resilienceredis.Eval(client), resilienceredis.Subscribe(client)
	eval := func(context.Context, string, []string, ...any) (any, error) {
		return nil, errors.New("connection refused")
	}
	subscribe := func(context.Context, string, func(), func(string)) error { return errors.New("connection refused") }

	users := cacheaside.New(cacheaside.Config[int, string]{
		Name:  "users",
		Load:  func(_ context.Context, id int) (string, error) { return fmt.Sprint("user ", id), nil },
		Store: redisstore.New(redisstore.Config{Prefix: "users", Eval: eval, Subscribe: subscribe}),
	})
	defer users.Close()
	fmt.Println(users.Get(context.Background(), 42))
	fmt.Println(users.Invalidate(context.Background(), 42))
	// Output:
	// user 42 <nil>
	// cacheaside: users: ["42"] not invalidated in the store: redisstore: invalidate: connection refused
}
