// Reload is a program that changes the settings of its policies under load, without a failed call. It reads the
// settings from a file when it starts and on SIGHUP, and polls Redis for settings every 100ms. This is the pattern
// External Configuration Store; see package registry.
//
//	go run ./examples/reload                          # a temporary file that the program edits
//	go run ./examples/reload -redis 127.0.0.1:6379    # also a key in Redis
//	go run ./examples/reload -file my.json -for 1h    # edit the file, and kill -HUP the program
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

var file = flag.String("file", "", "the settings to read at the start and on SIGHUP; empty means a temporary file")
var addr = flag.String("redis", "", "the address of a Redis whose key resilience:settings is polled; empty means none")
var lasts = flag.Duration("for", 3*time.Second, "the duration of the load")

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	run(ctx, os.Stdout)
	stop()
}

// run calls through the policies while their settings change. It returns the number of calls and the number of failed
// calls.
func run(ctx context.Context, out io.Writer) (calls, failed int64) {
	ctx, cancel := context.WithTimeout(ctx, *lasts)
	defer cancel()
	retries := retry.New(retry.Config{Name: "users", Attempts: 3})
	circuit := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 5})
	rate := throttle.New(throttle.Config{Name: "users", Rate: 500, Burst: 10, MaxWait: -1})
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 4, MaxWait: -1})
	reg := registry.New()
	reg.MustAdd(retries, circuit, rate, slots)

	changed := func(from string, report registry.Report, err error) {
		if len(report) > 0 {
			_, _ = fmt.Fprintf(out, "%s:\n%s\n", from, report)
		}
		if err != nil { // the report lists the changes that took effect despite the error
			_, _ = fmt.Fprintf(out, "%s: %d changes made:\n%v\n", from, len(report), err)
		}
	}
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	var background sync.WaitGroup
	defer background.Wait()
	path := *file
	if path == "" {
		path = filepath.Join(os.TempDir(), fmt.Sprintf("reload-%d.json", os.Getpid()))
		defer func() { _ = os.Remove(path) }()
		background.Go(func() { edit(ctx, path) })
	} else {
		report, err := reg.Reload(path)
		changed("file", report, err)
	}
	background.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-hangup:
				report, err := reg.Reload(path)
				changed("file", report, err)
			}
		}
	})
	background.Go(func() {
		poll(ctx, *addr, func(settings string) {
			report, err := reg.Apply([]byte(settings))
			changed("redis", report, err)
		})
	})
	calls, failed = load(ctx, resilience.Chain(retries.Wrap, circuit.Wrap, rate.Wrap, slots.Wrap))
	_, _ = fmt.Fprintf(out, "%d calls, %d failed; final settings:\n%s", calls, failed, reg.Settings())
	return calls, failed
}

// poll reads a key in Redis every 100ms, and calls apply with its value whenever the value has changed. While Redis is
// down, the settings do not change.
func poll(ctx context.Context, addr string, apply func(settings string)) {
	db := redis.NewClient(&redis.Options{Addr: addr, DialerRetries: 1})
	defer func() { _ = db.Close() }()
	for last := ""; addr != "" && ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
		data, err := db.Get(ctx, "resilience:settings").Result()
		if err == nil && data != last {
			apply(data)
			last = data
		} else if err != nil && !errors.Is(err, redis.Nil) && ctx.Err() == nil {
			slog.Error("settings", "err", err)
		}
	}
}

// edit writes settings to the file and sends SIGHUP to this process, as an operator would do. The first settings have a
// higher rate and more slots. The second settings have mistakes, so none of them is applied. The third settings have
// fewer slots.
func edit(ctx context.Context, file string) {
	for _, settings := range []string{
		`{"throttle/users": {"Rate": 2000, "Burst": 40}, "bulkhead/users": {"Limit": 16}}`,
		`{"throttle/users": {"Rate": -1}, "breaker/users": {"OpenFor": 45, "Failure": 10},` +
			` "bulkhead/user": {"Limit": 2}}`,
		`{"throttle/users": {"Rate": 1000}, "bulkhead/users": {"Limit": 2},` +
			` "breaker/users": {"OpenFor": "45s", "ConsecutiveFailures": 10}}`,
	} {
		select {
		case <-ctx.Done():
			return
		case <-time.After(*lasts / 5):
		}
		err := errors.Join(os.WriteFile(file, []byte(settings), 0o600), syscall.Kill(os.Getpid(), syscall.SIGHUP))
		if err != nil {
			log.Fatal(err)
		}
	}
}

// load makes calls under the policies until ctx is done, and then waits for the calls in flight.
func load(ctx context.Context, guarded resilience.Middleware) (int64, int64) {
	call := guarded(func(context.Context) error { time.Sleep(time.Millisecond); return nil })
	var calls, failed atomic.Int64
	var callers sync.WaitGroup
	for range 32 {
		callers.Go(func() {
			for ctx.Err() == nil {
				calls.Add(1)
				if err := call(context.WithoutCancel(ctx)); err != nil {
					failed.Add(1)
				}
			}
		})
	}
	callers.Wait()
	return calls.Load(), failed.Load()
}
