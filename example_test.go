package resilience_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/retry"
)

type User struct{ Name string }

func fetchUser(ctx context.Context, id int) (*User, error) { return &User{"Ada"}, nil }

// The first example: a call that returns a value, under a chain of policies.
func Example() {
	retries := retry.New(retry.Config{Name: "users", Attempts: 4})
	circuit := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 5, OpenFor: 30 * time.Second})
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 16, Queue: 32, MaxWait: 100 * time.Millisecond})
	guarded := resilience.Chain(retries.Wrap, circuit.Wrap, slots.Wrap, resilience.Timeout(2*time.Second))

	user, err := resilience.Do(context.Background(), guarded, func(ctx context.Context) (*User, error) {
		return fetchUser(ctx, 42)
	})
	if resilience.Refused(err) {
		fmt.Println("fetchUser was not called:", err)
		return
	}
	fmt.Println(user.Name, err)
	// Output: Ada <nil>
}

func ExampleDo() {
	limit := resilience.Timeout(time.Second)
	name, err := resilience.Do(context.Background(), limit, func(ctx context.Context) (string, error) {
		return "Ada", nil
	})
	fmt.Println(name, err)
	// Output: Ada <nil>
}

// logged writes a line after each call. Any function of this form is a Middleware.
func logged(name string) resilience.Middleware {
	return func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			err := next(ctx)
			fmt.Printf("%s: %v\n", name, err)
			return err
		}
	}
}

func ExampleChain() {
	guarded := resilience.Chain(
		logged("outer"),
		resilience.Fallback(func(ctx context.Context, err error) error { return nil }),
		logged("inner"),
	)
	err := guarded(func(ctx context.Context) error { return errors.New("no route") })(context.Background())
	fmt.Println("result:", err)
	// Output:
	// inner: no route
	// outer: <nil>
	// result: <nil>
}

func ExampleTimeout() {
	impatient := resilience.Timeout(time.Millisecond)
	err := impatient(func(ctx context.Context) error {
		<-ctx.Done()
		return errors.New("no answer yet")
	})(context.Background())
	fmt.Println(err)
	fmt.Println(errors.Is(err, context.DeadlineExceeded))
	// Output:
	// resilience: timed out after 1ms: no answer yet
	// true
}

func ExampleNamedTimeout() {
	impatient := resilience.NamedTimeout("users", time.Millisecond)
	err := impatient(func(ctx context.Context) error {
		<-ctx.Done()
		return context.Cause(ctx)
	})(context.Background())
	fmt.Println(err)
	var timeout *resilience.TimeoutError
	if errors.As(err, &timeout) {
		fmt.Println(timeout.Name, timeout.After)
	}
	// Output:
	// resilience: users: timed out after 1ms
	// users 1ms
}

func ExampleFallback() {
	cached := map[int]string{42: "Ada"}

	var name string
	err := resilience.Fallback(func(ctx context.Context, err error) error {
		var ok bool
		if name, ok = cached[42]; !ok {
			return err
		}
		return nil
	})(func(ctx context.Context) error {
		return errors.New("the database is down")
	})(context.Background())
	fmt.Println(name, err)
	// Output: Ada <nil>
}

func ExampleAnswer() {
	circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	err := circuit.Do(context.Background(), func(ctx context.Context) error {
		return resilience.Answer(errors.New("card declined"))
	})
	fmt.Println(err, resilience.Answered(err), circuit.State())
	// Output: card declined true closed
}

func ExampleRefused() {
	circuit := breaker.New(breaker.Config{Name: "users"})
	circuit.ForceOpen(nil)
	err := circuit.Do(context.Background(), func(ctx context.Context) error { return nil })
	fmt.Println(resilience.Refused(err), resilience.Refused(errors.New("no route")))
	// Output: true false
}

func ExampleContextErr() {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errors.New("shutting down"))
	err := resilience.ContextErr(ctx)
	fmt.Println(err)
	fmt.Println(errors.Is(err, context.Canceled))
	// Output:
	// context canceled: shutting down
	// true
}

func ExampleNewGroup() {
	hosts := resilience.NewGroup(func(host string) *breaker.Breaker {
		return breaker.New(breaker.Config{Name: "hosts"})
	}, resilience.GroupConfig{MaxKeys: 300})
	_ = hosts.Do(context.Background(), "eu-1", func(ctx context.Context) error { return nil })
	fmt.Println(hosts.Stats().Members)
	// Output: 1
}

func ExampleGroup_Do() {
	hosts := resilience.NewGroup(func(host string) *breaker.Breaker {
		return breaker.New(breaker.Config{Name: "hosts", ConsecutiveFailures: 1})
	}, resilience.GroupConfig{})
	ctx := context.Background()
	down := func(ctx context.Context) error { return errors.New("no route") }
	well := func(ctx context.Context) error { return nil }

	fmt.Println(hosts.Do(ctx, "eu-1", down))
	fmt.Println(resilience.Refused(hosts.Do(ctx, "eu-1", well)))
	fmt.Println(hosts.Do(ctx, "us-1", well))
	// Output:
	// no route
	// true
	// <nil>
}

func ExampleGroup_By() {
	type tenant struct{}
	tenants := resilience.NewGroup(func(tenant string) *bulkhead.Bulkhead {
		return bulkhead.New(bulkhead.Config{Name: "tenants", Limit: 10})
	}, resilience.GroupConfig{})
	guarded := resilience.Chain(
		tenants.By(func(ctx context.Context) string { return ctx.Value(tenant{}).(string) }),
		resilience.Timeout(time.Second),
	)
	ctx := context.WithValue(context.Background(), tenant{}, "acme")
	err := guarded(func(ctx context.Context) error { return nil })(ctx)
	_, ok := tenants.Get("acme")
	fmt.Println(err, ok)
	// Output: <nil> true
}

func ExampleGroup_Get() {
	hosts := resilience.NewGroup(func(host string) *breaker.Breaker {
		return breaker.New(breaker.Config{Name: "hosts"})
	}, resilience.GroupConfig{})
	_ = hosts.Do(context.Background(), "eu-1", func(ctx context.Context) error { return nil })
	if circuit, ok := hosts.Get("eu-1"); ok {
		fmt.Println(circuit.State())
	}
	_, ok := hosts.Get("us-1")
	fmt.Println(ok)
	// Output:
	// closed
	// false
}

func ExampleGroup_Describe() {
	hosts := resilience.NewGroup(func(host string) *breaker.Breaker {
		return breaker.New(breaker.Config{Name: "hosts"})
	}, resilience.GroupConfig{})
	var described policy.Describer = hosts
	err := described.Describe().Update(false, func(cfg any) error {
		cfg.(*breaker.Config).OpenFor = 10 * time.Second
		return nil
	})
	_ = hosts.Do(context.Background(), "eu-1", func(ctx context.Context) error { return nil })
	circuit, _ := hosts.Get("eu-1")
	fmt.Println(circuit.Config().OpenFor, err)
	// Output: 10s <nil>
}

// A body is work that ends when it is closed.
type body struct {
	io.Reader
	work *resilience.Work
}

func (b body) Close() error {
	b.work.End(nil)
	return nil
}

// An adapter for a client whose calls return a body: the bulkhead keeps its slot until the body is closed.
func ExampleBeginWork() {
	slots := bulkhead.New(bulkhead.Config{Limit: 10})
	ctx, work := resilience.BeginWork(context.Background())
	var opened body
	err := slots.Do(ctx, func(ctx context.Context) error {
		opened = body{strings.NewReader("content"), work}
		work.Continue()
		return nil
	})
	if err != nil {
		work.End(nil)
		return
	}
	fmt.Println("in flight:", slots.Stats().InFlight)
	_ = opened.Close()
	fmt.Println("in flight:", slots.Stats().InFlight)
	// Output:
	// in flight: 1
	// in flight: 0
}

// Middleware with slots of its own holds each of them until the work has really ended.
func ExampleAtEnd() {
	slots := make(chan struct{}, 10)
	pooled := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				return resilience.ContextErr(ctx)
			}
			return resilience.AtEnd(ctx, next, func(err error) {
				<-slots
				fmt.Println("ended:", err)
			})
		}
	}
	err := pooled(func(context.Context) error { return errors.New("no route") })(context.Background())
	fmt.Println("returned:", err, "in use:", len(slots))
	// Output:
	// ended: no route
	// returned: no route in use: 0
}

func ExampleResultOf() {
	ctx, cancel := context.WithCancel(context.Background())
	failed := errors.New("no route")
	fmt.Println(resilience.ResultOf(ctx, nil), resilience.ResultOf(ctx, failed))
	cancel()
	fmt.Println(resilience.ResultOf(ctx, failed))
	// Output:
	// success failure
	// ignored
}
