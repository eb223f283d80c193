package resiliencehttp

import (
	"cmp"
	"net/http"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/retry"
)

// ClientConfig says what the client of [NewClient] does. The zero ClientConfig is ready to
// use.
//
// A policy that is nil has the default that its field describes. [Disabled] means none. A
// policy of your own may be the Wrap of one policy for all hosts, the By of a Group with
// [HostOf] as the key, or any other middleware:
//
//	circuits := breaker.NewGroup(breaker.GroupConfig[string]{Config: breaker.Config{Failures: 3}})
//	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{
//		Breaker:  circuits.By(resiliencehttp.HostOf),
//		Bulkhead: resiliencehttp.Disabled,
//	})
type ClientConfig struct {
	// Name is that of each policy of the client, in errors, events and figures. It may be
	// empty unless Register is set.
	Name string

	// Timeout is how long a request may take in all: its attempts, the waits between them,
	// and the reading of the response. Negative means no limit. Zero means 30 seconds: by
	// then most callers, and the proxies before them, have given up. A long download needs
	// more, and a stream no limit, here and in AttemptTimeout.
	//
	// A redirect is a request of its own. To limit all redirects together, give the request
	// a ctx with a deadline, or set the Timeout of the client that NewClient returns.
	Timeout time.Duration

	// AttemptTimeout is how long each attempt may take, the reading of its response
	// included. Negative means no limit. Zero means a third of Timeout, so that a request
	// that hangs is sent three times, or 10 seconds if there is no Timeout.
	AttemptTimeout time.Duration

	// Retry sends requests again that may be repeated. The default is a [retry.Retrier]
	// that makes up to 3 attempts, as more seldom help, waits up to 100 ms at first and
	// longer if Retry-After asks for it, and has a budget for each host: retries add at
	// most a fifth to its load, and 10 a second besides, so that they do not keep a host
	// down that is overloaded. It does not wait for an open circuit.
	Retry resilience.Middleware

	// Breaker refuses requests to a host that is down. The default is a circuit for each
	// host. It opens when half of at least 20 requests within 10 seconds have failed: a
	// share, since a host that fails now and then is not down, of enough requests to mean
	// something. It opens for a second, so that a short failure costs little, and twice as
	// long after each probe that fails, up to 30 seconds. A Retry-After of a failure is
	// heeded for the whole host.
	Breaker resilience.Middleware

	// Throttle limits how many requests are sent in a time. The default is none, as only
	// you know what you may send.
	Throttle resilience.Middleware

	// Bulkhead limits how many requests are under way at once, each until its response has
	// been read. The default is 100 for each host, which at 100 ms for a request is 1000 a
	// second: a host that hangs holds no more connections and goroutines than that. A
	// request waits up to a second for its turn, as long as a burst may take, and up to
	// 1000 wait.
	Bulkhead resilience.Middleware

	// Register, if not nil, is called by NewClient with the policies that it has made by
	// default, each with the Name of the client. It may be the MustAdd of a
	// registry.Registry, which then shows and changes them while the client is in use.
	Register func(policies ...interface{ Name() string })

	// Transport, if not nil, has the fields of the client's [Transport], which is another
	// one: its Base, Hedge, Fallback and so on. Its Middleware must be nil.
	Transport *Transport
}

// Validate returns an error that names each invalid field, or nil.
func (c ClientConfig) Validate() error {
	f := invalid.Fields{Type: "resiliencehttp.ClientConfig"}
	f.Need(c.Register == nil || c.Name != "", "Name", `""`, "set where Register is: a registry finds policies by their names")
	f.Need(c.Transport == nil || c.Transport.Middleware == nil, "Transport.Middleware", "a function", "nil: NewClient sets it")
	return f.Err()
}

const (
	defaultTimeout        = 30 * time.Second
	defaultAttemptTimeout = 10 * time.Second
	defaultPatience       = 900 * time.Millisecond // that of a breaker without a SlowAfter
	defaultLimit          = 100
)

func (c ClientConfig) withDefaults() ClientConfig {
	c.Timeout = cmp.Or(c.Timeout, defaultTimeout)
	if c.Timeout > 0 {
		c.AttemptTimeout = cmp.Or(c.AttemptTimeout, max(1, c.Timeout/3))
	}
	c.AttemptTimeout = cmp.Or(c.AttemptTimeout, defaultAttemptTimeout)
	var made []interface{ Name() string }
	if c.Retry == nil {
		budgets := retry.NewBudgetGroup(retry.BudgetGroupConfig[string]{Config: retry.BudgetConfig{Name: c.Name}})
		retries := retry.New(retry.Config{Name: c.Name, BudgetFor: budgets.By(HostOf)})
		c.Retry = retries.Wrap
		made = append(made, retries, budgets)
	}
	if c.Breaker == nil {
		circuits := breaker.NewGroup(breaker.GroupConfig[string]{Config: breaker.Config{
			Name:        c.Name,
			FailureRate: 0.5,
			MinCalls:    20,
			Window:      10 * time.Second,
			Patience:    c.patience(),
			OpenFor:     time.Second,
			MaxOpenFor:  30 * time.Second,
		}})
		c.Breaker = circuits.By(HostOf)
		made = append(made, circuits)
	}
	if c.Bulkhead == nil {
		slots := bulkhead.NewGroup(bulkhead.GroupConfig[string]{Config: bulkhead.Config{
			Name:    c.Name,
			Limit:   defaultLimit,
			MaxWait: time.Second,
		}})
		c.Bulkhead = slots.By(HostOf)
		made = append(made, slots)
	}
	if c.Register != nil {
		c.Register(made...)
	}
	return c
}

// patience returns how long a request must have run, when the deadline of its caller passes,
// to count as a failure of the host.
func (c ClientConfig) patience() time.Duration {
	if c.AttemptTimeout > 0 {
		return max(1, min(defaultPatience, c.AttemptTimeout/10*9))
	}
	return defaultPatience
}

// Disabled is the [resilience.Middleware] that does nothing. In a [ClientConfig] it means
// that there is no such policy.
func Disabled(next resilience.Func) resilience.Func { return next }

// NewClient returns a client that limits the time of each request, sends it again where that
// may help, and keeps the failures of one host from the others. See [ClientConfig] for what
// it does by default, and why. It panics if cfg is not valid.
//
//	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Name: "payments"})
//
// The policies run in this order, the outermost first: Fallback, Timeout, Hedge, Retry,
// Breaker, Throttle, Bulkhead, AttemptTimeout. Build a client once for each dependency, and
// share it: its policies know what they have seen themselves. Jar, CheckRedirect and Timeout
// of the http.Client may be set before its first request, and its Transport, which is a
// [Transport], may be wrapped, as by [LastKnown].
func NewClient(cfg ClientConfig) *http.Client {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	cfg = cfg.withDefaults()
	of := cmp.Or(cfg.Transport, &Transport{})
	t := &Transport{
		Base:         of.Base,
		Middleware:   resilience.Chain(cfg.Retry, cfg.Breaker, cfg.Throttle, cfg.Bulkhead),
		Classify:     of.Classify,
		Prepare:      of.Prepare,
		RetryBody:    of.RetryBody,
		MaxRetryBody: of.MaxRetryBody,
		Hedge:        of.Hedge,
		Fallback:     of.Fallback,
		Replayable:   of.Replayable,
		MaxBuffer:    of.MaxBuffer,
	}
	if t.Base == nil {
		t.Base = baseOf(t)
	}
	t.limit(cfg.Name, cfg.Timeout, cfg.AttemptTimeout)
	return &http.Client{Transport: t}
}

// limit sets the limits of a request and of its attempts. A limit that is not positive is
// none.
func (t *Transport) limit(name string, call, attempt time.Duration) {
	if call > 0 {
		t.timeout, t.passed = call, &resilience.TimeoutError{Name: name, After: call}
	}
	if attempt > 0 {
		t.attemptTimeout, t.attemptPassed = attempt, &resilience.TimeoutError{Name: name, After: attempt}
	}
}
