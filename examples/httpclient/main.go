// Httpclient calls a service that fails, through an http.Client whose transport
// retries, opens a circuit, bounds what is in flight and gives up in time. The
// service is in the same process, so that the program needs nothing else.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/faults"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
)

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(out io.Writer) error {
	script := faults.New(faults.Config{Enabled: true})
	fail := func(requests int) { // the next requests that the service gets
		down := []faults.Plan{{Kind: faults.Status, Status: http.StatusServiceUnavailable, Count: requests}}
		if err := script.Update(func(c *faults.Config) { c.Plans = down }); err != nil {
			panic(err)
		}
	}
	server := httptest.NewServer(faults.Handler(script, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s done", r.Method)
	})))
	defer server.Close()

	// Built once and shared by all calls of the service.
	retries := retry.New(retry.Config{
		Attempts: 3,
		Backoff:  retry.Exponential(10*time.Millisecond, time.Second),
		OnRetry: func(_ context.Context, a retry.Attempt) {
			fmt.Fprintf(out, "  attempt %d: %v\n", a.Number, a.Err)
		},
	})
	circuit := breaker.New(breaker.Config{Name: "users", Failures: 5, OpenFor: 100 * time.Millisecond,
		OnChange: func(_ context.Context, c breaker.Event) { fmt.Fprintf(out, "  circuit: %v -> %v\n", c.From, c.To) }})
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 8, MaxWait: -1, Queue: 16})
	client := &http.Client{Transport: &resiliencehttp.Transport{
		Middleware: resilience.Chain(retries.Wrap, circuit.Wrap, slots.Wrap, resilience.Timeout(time.Second)),
	}}
	defer client.CloseIdleConnections()

	fmt.Fprintln(out, "A GET that fails twice is repeated:")
	fail(2)
	if err := show(out)(client.Get(server.URL)); err != nil {
		return err
	}

	fmt.Fprintln(out, "A POST is not, and its answer is for the caller to judge:")
	fail(1)
	if err := show(out)(client.Post(server.URL, "text/plain", strings.NewReader("order"))); err != nil {
		return err
	}

	fmt.Fprintln(out, "Unless the server knows a repetition by its key:")
	fail(1)
	req, err := http.NewRequest(http.MethodPost, server.URL, strings.NewReader("order"))
	if err != nil {
		return err
	}
	req.Header.Set("Idempotency-Key", "8e03978e-40d5-43dd-bc93-6894a57f9324")
	if err := show(out)(client.Do(req)); err != nil {
		return err
	}

	fmt.Fprintln(out, "A service that stays down is left alone:")
	fail(1000)
	before := script.Stats().Calls
	refused := 0
	for range 20 {
		resp, err := client.Get(server.URL)
		switch {
		case errors.Is(err, breaker.ErrOpen):
			refused++
		case err != nil:
			return err
		default: // the last failure, as it came
			_ = resp.Body.Close()
		}
	}
	fmt.Fprintf(out, "  20 calls, %d requests, %d calls refused\n", script.Stats().Calls-before, refused)

	fmt.Fprintln(out, "And called again when it is back:")
	script.Disable()
	for circuit.State() == breaker.Open {
		time.Sleep(circuit.Stats().OpenLeft)
	}
	return show(out)(client.Get(server.URL))
}

// show returns a function that prints a response, or returns the error.
func show(out io.Writer) func(*http.Response, error) error {
	return func(resp *http.Response, err error) error {
		if err != nil {
			return err
		}
		defer resp.Body.Close() // the slot in the bulkhead is held until then
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "  %s: %s\n", resp.Status, bytes.TrimSpace(body))
		return nil
	}
}
