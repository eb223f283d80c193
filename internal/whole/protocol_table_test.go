package whole_test

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/bulkhead/adaptive"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/resiliencesql"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/throttle"
	shedding "github.com/go-resilience/resilience/throttle/adaptive"
	"github.com/go-resilience/resilience/throttle/fleet"
)

var update = flag.Bool("update", false, "write the table of TestPoliciesReadEveryEnd into docs/protocol.md")

// An end is one way in which a call can end: made by the real packages, so that the
// table holds what their errors say, and not what they should.
type end struct {
	name string
	says says
	// err returns the error of the call. It runs in the bubble of its consumer,
	// since some errors tell the time.
	err func(*testing.T) error
	// under, if not nil, is the ctx of the caller, which ends during the call.
	under func(context.Context) (context.Context, context.CancelFunc)
	// within, if not nil, runs the consumer where the call is to be made.
	within func(t *testing.T, consumer func(context.Context, resilience.Func))
}

// says is what an end says, as the page of the protocol has it.
type says struct {
	kind    kind
	retry   word          // Retryable
	after   time.Duration // RetryAfter
	own     time.Duration // RetryAfter as the dependency itself says it
	shed    bool          // Throttled, or a timeout
	timeout bool          // and no method of the protocol
	cache   string        // what a cache makes of it, where that is its own word
	final   bool          // a word of package saga: the step is not tried again
	clean   bool          // and took no effect
}

type kind string

const (
	done     kind = "done"
	answered kind = "answered"
	refused  kind = "refused"
	canceled kind = "the caller left"
	overran  kind = "the caller's deadline passed early"
	hung     kind = "the caller's deadline passed late"
	failed   kind = "failed"
)

type word int

const (
	unsaid word = iota
	yes
	no
)

var (
	errDeclined = errors.New("card declined")
	errDown     = errors.New("down")
)

// ends are the rows of the table.
var ends = []end{
	{name: "nil", says: says{kind: done}, err: func(*testing.T) error { return nil }},
	{name: "an error", says: says{kind: failed}, err: func(*testing.T) error { return errors.New("connection reset") }},
	{name: "resilience.Timeout passed", says: says{kind: failed, shed: true, timeout: true},
		err: func(t *testing.T) error {
			return resilience.Timeout(time.Millisecond)(hang)(t.Context())
		}},
	{name: "retry.Permanent", says: says{kind: failed, retry: no}, err: func(*testing.T) error {
		return retry.Permanent(errors.New("malformed"))
	}},

	{name: "resilience.Answer", says: says{kind: answered}, err: func(*testing.T) error {
		return resilience.Answer(errDeclined)
	}},
	{name: "cacheaside.ErrNotFound from a Get", says: says{kind: answered, cache: "not found"}, err: notFound},
	{name: "saga.Declined", says: says{kind: answered, retry: no, final: true, clean: true},
		err: func(*testing.T) error { return saga.Declined(errDeclined) }},
	{name: "saga.Permanent", says: says{kind: answered, retry: no, final: true},
		err: func(*testing.T) error { return saga.Permanent(errDeclined) }},
	{name: "a compensated saga", says: says{kind: answered, retry: no, final: true}, err: compensated},

	{name: "breaker open", says: says{kind: refused, retry: no, after: 30 * time.Second}, err: openBreaker},
	{name: "breaker half-open", says: says{kind: refused, retry: yes, after: 10 * time.Millisecond}, err: halfOpenBreaker},
	{name: "breaker forced open", says: says{kind: refused, retry: no, after: 30 * time.Second}, err: forcedOpenBreaker},
	{name: "bulkhead full", says: says{kind: refused, retry: yes}, err: fullBulkhead},
	{name: "limiter empty", says: says{kind: refused, retry: yes, after: time.Second}, err: emptyLimiter},
	{name: "a fleet in an outage", says: says{kind: refused, retry: yes, after: 100 * time.Millisecond},
		err: sharedInOutage},
	{name: "Adaptive sheds", says: says{kind: refused, retry: yes}, err: adaptiveSheds},

	{name: "SQL, a duplicate key", says: says{kind: answered, retry: no}, err: sqlState("23505")},
	{name: "SQL, a deadlock", says: says{kind: answered, retry: yes}, err: sqlState("40P01")},
	{name: "SQL, too many connections", says: says{kind: failed, retry: yes}, err: sqlState("53300")},
	{name: "SQL, the outcome is unknown", says: says{kind: failed, retry: no}, err: sqlState("08007")},

	{name: "HTTP 404", says: says{kind: done}, err: status(404, "")},
	{name: "HTTP 408", says: says{kind: answered, retry: yes}, err: status(408, "")},
	{name: "HTTP 425", says: says{kind: answered, retry: yes}, err: status(425, "")},
	{name: "HTTP 429", says: says{kind: answered, retry: yes, shed: true}, err: status(429, "")},
	{name: "HTTP 429, Retry-After: 2", says: says{kind: answered, retry: yes, after: 2 * time.Second, shed: true},
		err: status(429, "2")},
	{name: "HTTP 500", says: says{kind: failed, retry: yes}, err: status(500, "")},
	{name: "HTTP 502", says: says{kind: failed, retry: yes}, err: status(502, "")},
	{name: "HTTP 503", says: says{kind: failed, retry: yes, shed: true}, err: status(503, "")},
	{name: "HTTP 503, Retry-After: 2",
		says: says{kind: failed, retry: yes, after: 2 * time.Second, own: 2 * time.Second, shed: true}, err: status(503,
			"2")},
	{name: "HTTP 503, Retry-After: a date",
		says: says{kind: failed, retry: yes, after: 2 * time.Second, own: 2 * time.Second, shed: true}, err: status(503,
			"date")},
	{name: "HTTP POST, 503, Retry-After: 2",
		says: says{kind: failed, retry: no, after: 2 * time.Second, own: 2 * time.Second,
			shed: true}, err: func(t *testing.T) error {
			return exchange(t, http.MethodPost, 503, "2")
		}},

	{name: "a hedge, refused and failed", says: says{kind: failed}, err: func(t *testing.T) error {
		return hedged(t, fullBulkhead(t), errors.New("connection reset"))
	}},
	{name: "a hedge, refused twice", says: says{kind: refused, retry: yes}, err: func(t *testing.T) error {
		return hedged(t, fullBulkhead(t), fullBulkhead(t))
	}},

	{name: "the caller canceled", says: says{kind: canceled},
		under: func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(10*time.Millisecond, cancel)
			return ctx, cancel
		}},
	{name: "the caller's deadline, after 10 ms", says: says{kind: overran, shed: true},
		under: func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, 10*time.Millisecond)
		}},
	{name: "the caller's deadline, after 2 s", says: says{kind: hung, shed: true},
		under: func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, 2*time.Second)
		}},
}

func hang(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

func fail(context.Context) error { return errDown }

func notFound(t *testing.T) error {
	c := cacheaside.New(cacheaside.Config[int, int]{
		Load: func(context.Context, int) (int, error) { return 0, fmt.Errorf("user 42: %w", cacheaside.ErrNotFound) },
	})
	defer c.Close()
	_, err := c.Get(t.Context(), 42)
	return err
}

func compensated(t *testing.T) error {
	sg := &saga.Saga[int]{Name: "trip", Steps: []saga.Step[int]{{
		Name: "charge",
		Do:   func(context.Context, *int) error { return saga.Declined(errDeclined) },
		Undo: func(context.Context, *int) error { return nil },
	}}}
	return saga.Run(t.Context(), sg, new(int))
}

func openBreaker(t *testing.T) error {
	b := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	_ = b.Do(t.Context(), fail)
	return b.Do(t.Context(), fail)
}

func halfOpenBreaker(t *testing.T) error {
	b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Millisecond})
	_ = b.Do(t.Context(), fail)
	time.Sleep(b.Stats().OpenLeft)
	var err error
	_ = b.Do(t.Context(), func(ctx context.Context) error { // the probe
		err = b.Do(ctx, fail)
		return nil
	})
	return err
}

func forcedOpenBreaker(t *testing.T) error {
	b := breaker.New(breaker.Config{})
	b.ForceOpen(errors.New("maintenance"))
	return b.Do(t.Context(), fail)
}

func fullBulkhead(t *testing.T) error {
	b := bulkhead.New(bulkhead.Config{Limit: 1})
	var err error
	_ = b.Do(t.Context(), func(ctx context.Context) error {
		err = b.Do(ctx, fail)
		return nil
	})
	return err
}

func emptyLimiter(t *testing.T) error {
	l := throttle.New(throttle.Config{Rate: 1, Burst: 1})
	_ = l.Do(t.Context(), fail)
	return l.Do(t.Context(), fail)
}

func sharedInOutage(t *testing.T) error {
	s := fleet.New(fleet.Config{
		Name: "search", Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Rate("all", 1, 1)} },
		Eval: func(context.Context, string, []string, ...any) (any, error) {
			return nil, errors.New("connection refused")
		},
	})
	return s.Do(t.Context(), fail)
}

func adaptiveSheds(t *testing.T) error {
	a := shedding.New(shedding.Config{Throttled: func(error) bool { return true }})
	for {
		err := a.Do(t.Context(), fail)
		if errors.Is(err, throttle.ErrLimited) {
			return err
		}
	}
}

func status(code int, retryAfter string) func(*testing.T) error {
	return func(t *testing.T) error { return exchange(t, http.MethodGet, code, retryAfter) }
}

// exchange returns what a policy under a Transport is told of a response.
func exchange(t *testing.T, method string, code int, retryAfter string) error {
	if retryAfter == "date" {
		retryAfter = time.Now().Add(2 * time.Second).UTC().Format(http.TimeFormat)
	}
	var told error
	client := http.Client{Transport: &resiliencehttp.Transport{
		Base: roundTripper(func(req *http.Request) (*http.Response, error) {
			header := http.Header{}
			if retryAfter != "" {
				header.Set("Retry-After", retryAfter)
			}
			return &http.Response{
				StatusCode: code, Header: header, Request: req,
				ProtoMajor: 1, ProtoMinor: 1, Body: io.NopCloser(strings.NewReader("")),
			}, nil
		}),
		Middleware: func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error { told = next(ctx); return told }
		},
	}}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://users.test/", nil)
	require.NoError(t, err)
	resp, err := client.Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return told
}

type roundTripper func(*http.Request) (*http.Response, error)

func (rt roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return rt(req) }

// hedged returns the error of a Hedger whose two calls return errs.
func hedged(t *testing.T, errs ...error) error {
	calls := make(chan error, len(errs))
	for _, err := range errs {
		calls <- err
	}
	_, err := hedge.New[int](hedge.Config{Delay: time.Millisecond, Ratio: hedge.Unlimited}).Do(t.Context(),
		func(context.Context) (int, error) {
			time.Sleep(5 * time.Millisecond)
			return 0, <-calls
		})
	return err
}

// A consumer is a column of the table: a policy around a call that ends like that.
type consumer struct {
	name string
	// want returns what must happen after an end that says s.
	want func(s says) string
	// got returns what happens after the end: call ends like that, each time.
	got  func(t *testing.T, caller caller, call resilience.Func) string
	slow bool // got takes a thousand calls
}

// A caller returns the ctx of a call.
type caller func() (context.Context, context.CancelFunc)

var consumers = []consumer{
	{name: "breaker", want: wantOfBreaker, got: gotOfBreaker},
	{name: "retry", want: wantOfRetry, got: gotOfRetry},
	{name: "bulkhead, adaptive", want: wantOfBulkhead, got: gotOfBulkhead, slow: true},
	{name: "throttle/adaptive", want: wantOfAdaptive, got: gotOfAdaptive},
	{name: "cacheaside, a load", want: wantOfCache, got: gotOfCache},
	{name: "saga, a step", want: wantOfSaga, got: gotOfSaga},
}

func wantOfBreaker(s says) string {
	switch {
	case s.kind == done || s.kind == answered:
		return "success"
	case s.kind == refused || s.kind == canceled || s.kind == overran:
		return "ignored"
	case s.own > 0:
		return "failure, for " + s.own.String()
	default:
		return "failure"
	}
}

// gotOfBreaker tells by how many failures more it takes to open the breaker.
func gotOfBreaker(t *testing.T, caller caller, call resilience.Func) string {
	ctx, cancel := caller()
	defer cancel()
	b := breaker.New(breaker.Config{ConsecutiveFailures: 3})
	_ = b.Do(t.Context(), fail)
	_ = b.Do(ctx, call)
	for _, result := range []string{"failure", "ignored"} {
		_ = b.Do(t.Context(), fail)
		if s := b.Stats(); s.State == breaker.Open {
			if s.OpenLeft < 25*time.Second { // not by itself; an HTTP date has whole seconds, and a tenth is random
				result += ", for " + s.OpenLeft.Round(time.Second).String()
			}
			return result
		}
	}
	return "success"
}

const backoffOfTest = 20 * time.Millisecond

func wantOfRetry(s says) string {
	switch {
	case s.kind == answered && s.retry == yes:
	case s.kind != refused && s.kind != failed, s.retry == no:
		return "ends"
	}
	charge := ", charged"
	if s.kind == refused {
		charge = ""
	}
	if s.after > backoffOfTest {
		return "waits " + s.after.String() + charge
	}
	return "retries" + charge
}

func gotOfRetry(t *testing.T, caller caller, call resilience.Func) string {
	ctx, cancel := caller()
	defer cancel()
	budget := retry.NewBudget(retry.BudgetConfig{})
	charge := ""
	r := retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(backoffOfTest), Budget: budget})
	r.Observe(func(_ context.Context, e retry.Event) {
		if e.Kind == retry.EventRetried && budget.Stats().Allowed > 0 {
			charge = ", charged"
		}
	})
	var calls []time.Time
	_ = r.Do(ctx, func(ctx context.Context) error {
		calls = append(calls, time.Now())
		return call(ctx)
	})
	if len(calls) < 2 {
		return "ends"
	}
	waited := calls[1].Sub(calls[0])
	for _, after := range []time.Duration{100 * time.Millisecond, time.Second, 2 * time.Second, 30 * time.Second} {
		// A date has no more than seconds. The breaker adds up to a tenth at random, and the retrier a tenth of that.
		if waited >= after-10*time.Millisecond && waited <= after+after*22/100 {
			return "waits " + after.String() + charge
		}
	}
	if waited == backoffOfTest {
		return "retries" + charge
	}
	return "waits " + waited.String() + charge
}

func wantOfBulkhead(s says) string {
	switch {
	case s.kind == done || s.kind == answered:
		return "sample"
	case s.kind == overran || s.kind == hung || s.kind == failed && (s.shed || s.own > 0):
		return "overload"
	default:
		return "no sample"
	}
}

// gotOfBulkhead tells by what becomes of the limit: it has learned how long a call
// takes, and then all calls end like that. A probe lowers it and puts it back.
func gotOfBulkhead(t *testing.T, caller caller, call resilience.Func) string {
	const limit, callers = 8, 20 // it grows if it may
	b := adaptive.New(adaptive.Config{Bulkhead: bulkhead.Config{Queue: callers, MaxWait: time.Hour}, Initial: limit})
	several := func(do func()) {
		var calls sync.WaitGroup
		for range callers {
			calls.Go(func() {
				for range 20 {
					do()
				}
			})
		}
		calls.Wait()
	}
	several(func() {
		_ = b.Do(t.Context(), func(context.Context) error {
			time.Sleep(10 * time.Millisecond)
			return nil
		})
	})
	var given adaptive.Config
	require.NoError(t, b.Update(func(c *adaptive.Config) { given = *c; c.Min, c.Max = limit, limit }))
	require.NoError(t, b.Update(func(c *adaptive.Config) { *c = given }))
	require.Equal(t, limit, b.Stats().Limit)
	got := "no sample"
	var over atomic.Bool
	var watcher sync.WaitGroup
	watcher.Go(func() {
		for ; got == "no sample" && !over.Load(); time.Sleep(time.Millisecond) {
			switch s := b.Stats(); {
			case s.Probing:
			case s.Limit > limit:
				got = "sample"
			case s.Limit < limit:
				got = "overload"
			}
		}
	})
	several(func() {
		ctx, cancel := caller()
		defer cancel()
		_ = b.Do(ctx, func(ctx context.Context) error {
			time.Sleep(10 * time.Millisecond)
			return call(ctx)
		})
	})
	over.Store(true)
	watcher.Wait()
	return got
}

func wantOfAdaptive(s says) string {
	switch {
	case s.kind == refused || s.kind == canceled:
		return "no sample"
	case s.shed:
		return "throttled"
	default:
		return "accepted"
	}
}

func gotOfAdaptive(t *testing.T, caller caller, call resilience.Func) string {
	ctx, cancel := caller()
	defer cancel()
	a := shedding.New(shedding.Config{})
	_ = a.Do(ctx, call)
	if a.Stats().Probability > 0 { // a request without an accept
		return "throttled"
	}
	_ = a.Do(t.Context(), func(context.Context) error { return &resiliencehttp.StatusError{StatusCode: 429} })
	if a.Stats().Probability > 0 { // as after one request
		return "no sample"
	}
	return "accepted"
}

func wantOfCache(s says) string {
	switch {
	case s.cache != "":
		return s.cache
	case s.kind == done:
		return "kept"
	case s.kind == answered:
		return "answered"
	case s.kind == refused:
		return "refused"
	default:
		return "failed"
	}
}

// gotOfCache loads a key once. A load does not end with the call that began it, so
// that the end of the caller is the end of the load only where the load heeds it.
func gotOfCache(t *testing.T, caller caller, call resilience.Func) string {
	ctx, cancel := caller()
	defer cancel()
	c := cacheaside.New(cacheaside.Config[int, int]{
		Load: func(context.Context, int) (int, error) { return 42, call(ctx) },
	})
	defer c.Close()
	_, _ = c.Get(context.Background(), 1)
	switch s := c.Stats(); {
	case s.Loaded > 0:
		return "kept"
	case s.NotFound > 0:
		return "not found"
	case s.Refused > 0:
		return "refused"
	case s.Failed > 0:
		return "failed"
	default:
		return "answered"
	}
}

func wantOfSaga(s says) string {
	switch {
	case s.kind == done:
		return "done"
	case s.kind == refused:
		return "no attempt"
	case s.kind == canceled || s.kind == overran || s.kind == hung:
		return "turns back"
	case s.clean:
		return "has no effect"
	case s.final || s.kind == answered && s.retry != yes:
		return "aborts"
	default:
		return "attempt"
	}
}

// gotOfSaga runs a step with two attempts, whose third call works.
func gotOfSaga(t *testing.T, caller caller, call resilience.Func) string {
	ctx, cancel := caller()
	defer cancel()
	calls, undone := 0, false
	sg := &saga.Saga[int]{Name: "order", Steps: []saga.Step[int]{{
		Name: "charge", Attempts: 2,
		Backoff: func(int) time.Duration { return backoffOfTest },
		Do: func(ctx context.Context, _ *int) error {
			if calls++; calls > 2 {
				return nil
			}
			return call(ctx)
		},
		Undo: func(context.Context, *int) error { undone = true; return nil },
	}}}
	err := saga.Run(ctx, sg, new(int))
	switch {
	case err == nil && calls == 1:
		return "done"
	case err == nil && calls == 3:
		return "no attempt"
	case ctx.Err() != nil && calls == 1 && undone:
		return "turns back"
	case calls == 2 && undone:
		return "attempt"
	case calls == 1 && undone:
		return "aborts"
	case calls == 1:
		return "has no effect"
	}
	return fmt.Sprintf("%d calls, undone: %v, %v", calls, undone, err)
}

// always returns a caller whose calls are all made under ctx.
func always(ctx context.Context) caller {
	return func() (context.Context, context.CancelFunc) { return ctx, func() {} }
}

// consume returns what consumer c makes of an end.
func consume(t *testing.T, c consumer, e end) (got string) {
	synctest.Test(t, func(t *testing.T) {
		switch {
		case e.within != nil:
			e.within(t, func(ctx context.Context, call resilience.Func) {
				var once sync.Once
				got = c.got(t, always(ctx), func(ctx context.Context) error {
					err := ctx.Err()
					once.Do(func() { err = call(ctx) })
					return err
				})
			})
		case e.under != nil:
			got = c.got(t, func() (context.Context, context.CancelFunc) { return e.under(t.Context()) }, hang)
		default:
			err := e.err(t)
			got = c.got(t, always(t.Context()), func(context.Context) error { return err })
		}
	})
	return got
}

// wrapped are the ways in which an error reaches a policy. None changes what it says.
var wrapped = map[string]func(*testing.T, error) error{
	"wrapped": func(_ *testing.T, err error) error { return fmt.Errorf("users: %w", err) },
	"after retries": func(t *testing.T, err error) error {
		return nested(t, retrying.Wrap, fmt.Errorf("users: %w", err)) // a Permanent that is outermost loses its mark
	},
	"wrapped, after retries, in a timeout": func(t *testing.T, err error) error {
		err = fmt.Errorf("shard 3: %w", err)
		return fmt.Errorf("users: %w", nested(t, resilience.Chain(retrying.Wrap, resilience.Timeout(time.Hour)), err))
	},
}

var retrying = retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(0), MaxRetryAfter: time.Nanosecond})

// nested returns what mw makes of err where a retrier further out is at work.
func nested(t *testing.T, mw resilience.Middleware, err error) (inner error) {
	outer := retry.New(retry.Config{})
	_ = outer.Do(t.Context(), func(ctx context.Context) error {
		inner = mw(func(context.Context) error { return err })(retry.Fresh(ctx))
		return nil
	})
	return inner
}

// speaks reports whether the error has a method of the protocol.
func (s says) speaks() bool {
	return s.kind != failed || s.retry != unsaid || s.after > 0 || s.shed && !s.timeout
}

// join returns what two joined errors say together: what the first that speaks says, without a
// refusal beside a call that was made. The longest RetryAfter, that one of them is a timeout, and the
// words of package saga, count wherever they are.
func join(a, b says) says {
	both := a
	if a.kind == refused && b.kind != refused || !a.speaks() && (b.speaks() && b.kind != refused) {
		both = b
	}
	switch {
	case a.kind == refused && b.kind != refused:
		both.after = b.after
	case a.kind != refused && b.kind == refused:
		both.after = a.after
	default:
		both.after = max(a.after, b.after)
	}
	if both.own = 0; both.kind == failed {
		both.own = both.after
	}
	both.timeout = a.timeout || b.timeout
	both.shed = both.shed && (both.speaks() || both.timeout) || both.kind == failed && (both.timeout || both.after > 0)
	both.final = a.final || b.final
	both.clean = both.final && (a.clean || a.kind == refused) && (b.clean || b.kind == refused)
	both.cache = ""
	if both.kind == answered {
		both.cache = cmp.Or(a.cache, b.cache)
	}
	return both
}

// errorsOf returns the ends that are errors, whoever the caller is.
func errorsOf(ends []end) []end {
	return slices.DeleteFunc(slices.Clone(ends), func(e end) bool { return e.err == nil || e.says.kind == done })
}

// TestPoliciesReadEveryEnd holds the protocol between the patterns: each way in
// which a call can end, made by the real packages, is read by each of them as the
// table says. It prints the table, which is that of docs/protocol.md; -update writes
// it there. Ends that all patterns treat alike share a line.
func TestPoliciesReadEveryEnd(t *testing.T) {
	var table strings.Builder
	table.WriteString("| the call ends with |")
	for _, c := range consumers {
		table.WriteString(" " + c.name + " |")
	}
	table.WriteString("\n|---|" + strings.Repeat("---|", len(consumers)) + "\n")
	var lines []string             // the treatments, in order of their first end
	names := map[string][]string{} // the names of the ends, by line
	for _, e := range ends {
		line := ""
		for _, c := range consumers {
			got := consume(t, c, e)
			line += " " + got + " |"
			if want := c.want(e.says); got != want {
				t.Errorf("%s, %s: %s, want %s", e.name, c.name, got, want)
			}
		}
		if names[line] == nil {
			lines = append(lines, line)
		}
		names[line] = append(names[line], e.name)
	}
	for _, line := range lines {
		table.WriteString("| " + strings.Join(names[line], "; ") + " |" + line + "\n")
	}
	t.Log("\n" + table.String())

	const page, begin, end = "../../docs/protocol.md", "<!-- table -->\n", "<!-- end of table -->"
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	before, rest, ok := strings.Cut(string(text), begin)
	require.True(t, ok)
	present, after, ok := strings.Cut(rest, end)
	require.True(t, ok)
	if *update {
		require.NoError(t, os.WriteFile(page, []byte(before+begin+table.String()+end+after), 0o666))
		return
	}
	assert.Equal(t, table.String(), present,
		"go test -run TestPoliciesReadEveryEnd . -update writes the table into %s", page)
}

// TestPoliciesReadEveryEndThroughWraps: what an error says survives every layer.
func TestPoliciesReadEveryEndThroughWraps(t *testing.T) {
	for _, e := range errorsOf(ends) {
		for way, wrap := range wrapped {
			inside := end{name: e.name + ", " + way, says: e.says, err: func(t *testing.T) error { return wrap(t, e.err(t)) }}
			for _, c := range consumers {
				if c.slow && testing.Short() {
					continue
				}
				if got, want := consume(t, c, inside), c.want(inside.says); got != want {
					t.Errorf("%s, %s: %s, want %s", inside.name, c.name, got, want)
				}
			}
		}
	}
}

// TestPoliciesReadEveryJoin: of joined errors the first part that says something decides, but for
// RetryAfter. The adaptive
// limit takes a thousand calls for each answer, and is asked about one of all ends
// that say the same.
func TestPoliciesReadEveryJoin(t *testing.T) {
	all := errorsOf(ends)
	first := map[says]string{}
	for _, e := range all {
		if _, ok := first[e.says]; !ok {
			first[e.says] = e.name
		}
	}
	for _, a := range all {
		for _, b := range all {
			slow := first[a.says] == a.name && first[b.says] == b.name && a.name <= b.name && !testing.Short()
			both := end{
				name: a.name + " and " + b.name,
				says: join(a.says, b.says),
				err:  func(t *testing.T) error { return errors.Join(a.err(t), b.err(t)) },
			}
			for _, c := range consumers {
				if c.slow && !slow {
					continue
				}
				if got, want := consume(t, c, both), c.want(both.says); got != want {
					t.Errorf("%s, %s: %s, want %s", both.name, c.name, got, want)
				}
			}
		}
	}
}

// sqlState returns the error of a statement, as a database with pgx or lib/pq has it.
func sqlState(state string) func(*testing.T) error {
	return func(t *testing.T) error {
		judge := resiliencesql.Middleware(resiliencesql.Config{Code: func(error) string { return state }})
		return judge(func(context.Context) error { return errors.New("SQLSTATE " + state) })(context.Background())
	}
}
