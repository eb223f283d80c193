package harm

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
)

// plantedHarms are known mistakes, each with the row that must notice it. They are configurations and middleware that
// exist only in this test. A row that RedRows lists cannot show its harm: deleting its line plants the harm.
var plantedHarms = []struct {
	name, row string
	client    func(base *http.Transport, cfg Config) *http.Client
}{
	{"no retry budget", "8/30", with(func() (c resiliencehttp.ClientConfig) {
		c.Retry = retry.New(retry.Config{}).Wrap
		return c
	})},
	{"one failure opens the breaker", "8/20", with(func() (c resiliencehttp.ClientConfig) {
		c.Breaker = breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: s}).Wrap
		return c
	})},
	{"FIFO queue of 10s", "11/deadline-2-1s", with(func() (c resiliencehttp.ClientConfig) {
		c.Bulkhead = fifo(10 * s)
		return c
	})},
	{"body held until its first byte", "15/h2-first", func(base *http.Transport, cfg Config) *http.Client {
		return &http.Client{Transport: holdBody{newClient(base, cfg, resiliencehttp.ClientConfig{}).Transport}}
	}},
	{"connection never abandoned", "5/h2-blue-green", func(base *http.Transport, cfg Config) *http.Client {
		return newClient(keepConn{base}, cfg, resiliencehttp.ClientConfig{})
	}},
	{"breaker counts cancellations", "16/h1", with(func() (c resiliencehttp.ClientConfig) {
		c.Breaker = countCancellations(usualBreaker())
		return c
	})},
	{"probe never ends", "4/refused", with(func() (c resiliencehttp.ClientConfig) {
		c.Breaker = endlessProbes(usualBreaker())
		return c
	})},
	{"canceled stream keeps its slot", "16/streams", with(func() (c resiliencehttp.ClientConfig) {
		c.Bulkhead = leakSlots
		return c
	})},
	{"Retry-After applied to the host", "9/60s", with(func() (c resiliencehttp.ClientConfig) {
		c.Breaker = hostWaits
		return c
	})},
	{"budget shared by all hosts", "20/503", with(func() (c resiliencehttp.ClientConfig) {
		c.Retry = retry.New(retry.Config{Budget: retry.NewBudget(retry.BudgetConfig{})}).Wrap
		return c
	})},
}

// with returns the constructor of a NewClient with a mistake.
func with(config func() resiliencehttp.ClientConfig) func(*http.Transport, Config) *http.Client {
	return func(base *http.Transport, cfg Config) *http.Client { return newClient(base, cfg, config()) }
}

var plant = flag.Bool("planted", false, "plant the known mistakes, each of which must turn its row red")

// TestPlantedHarms plants each mistake and sees its row turn red.
func TestPlantedHarms(t *testing.T) {
	if !*plant {
		t.Skip("runs only with -planted; run make harm")
	}
	rows := map[string]*Row{}
	for _, r := range Rows() {
		rows[r.ID] = r
	}
	for _, p := range plantedHarms {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			r, ok := rows[p.row]
			if !ok {
				t.Fatalf("there is no row %s", p.row)
			}
			cell := r.Quick()
			if redRow(RedRows, r, cell, false) != nil {
				t.Logf("row %s is red without the mistake", r.ID)
				return
			}
			others := map[string]*Measurement{
				Plain.Name: Run(t, r, cell, Plain, Seeds...), Retries.Name: Run(t, r, cell, Retries, Seeds...),
			}
			planted := Client{p.name, p.client}
			verdict, failures := r.Judge(cell, Run(t, r, cell, planted, Seeds...), others)
			if verdict != Red {
				t.Errorf("row %s is %v", r.ID, verdict)
			}
			t.Logf("row %s: %s", r.ID, failures)
		})
	}
}

func usualBreaker() *breaker.Breaker {
	return breaker.New(breaker.Config{ConsecutiveFailures: 10, FailureRate: 0.5, Window: 10 * s, OpenFor: s})
}

// fifo serves its queue oldest first. Each call waits up to wait for a slot.
func fifo(wait time.Duration) resilience.Middleware {
	free := make(chan struct{}, slots)
	return func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			timer := time.NewTimer(wait)
			defer timer.Stop()
			select {
			case free <- struct{}{}:
			case <-timer.C:
				return errors.New("no slot")
			case <-ctx.Done():
				return ctx.Err()
			}
			return resilience.AtEnd(ctx, next, func(error) { <-free })
		}
	}
}

// holdBody returns a response only once the first byte of its body has arrived.
type holdBody struct{ http.RoundTripper }

func (h holdBody) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := h.RoundTripper.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	first := make([]byte, 1)
	n, _ := resp.Body.Read(first)
	resp.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(first[:n]), resp.Body), resp.Body}
	return resp, nil
}

// keepConn hides everything by which a client could abandon a connection.
type keepConn struct{ base http.RoundTripper }

func (k keepConn) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Method == http.MethodOptions {
		return nil, errors.New("not sent")
	}
	req = req.Clone(req.Context())
	req.Close = false
	return k.base.RoundTrip(req)
}

// countCancellations makes a canceled call a failure.
func countCancellations(b *breaker.Breaker) resilience.Middleware {
	return func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			return b.Do(context.WithoutCancel(ctx), func(context.Context) error {
				err := next(ctx)
				if errors.Is(err, context.Canceled) {
					return errors.New("canceled")
				}
				return err
			})
		}
	}
}

// endlessProbes lets no probe of b end within a minute.
func endlessProbes(b *breaker.Breaker) resilience.Middleware {
	return func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			if b.State() != breaker.HalfOpen {
				return b.Do(ctx, next)
			}
			go func() {
				_ = b.Do(context.WithoutCancel(ctx), func(context.Context) error {
					time.Sleep(time.Minute)
					return errors.New("late")
				})
			}()
			return errors.New("probe has not ended")
		}
	}
}

// leakSlots releases the slot of a call unless its caller cancels.
func leakSlots(next resilience.Func) resilience.Func {
	free := make(chan struct{}, slots)
	return func(ctx context.Context) error {
		select {
		case free <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		return resilience.AtEnd(ctx, next, func(error) {
			if ctx.Err() == nil {
				<-free
			}
		})
	}
}

// hostWaits sends nothing to the host until the Retry-After of any answer has passed.
func hostWaits(next resilience.Func) resilience.Func {
	var until atomic.Pointer[time.Time]
	return func(ctx context.Context) error {
		if at := until.Load(); at != nil && time.Now().Before(*at) {
			return errors.New("host asked to wait")
		}
		err := next(ctx)
		if d := resilience.RetryAfter(err); d > 0 {
			at := time.Now().Add(d)
			until.Store(&at)
		}
		return err
	}
}
