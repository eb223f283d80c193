package resiliencehttp

import (
	"cmp"
	"net/http"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/retry"
)

// ClientConfig says what the client of [NewClient] does. The zero ClientConfig is ready to
// use.
//
// A policy that is nil has the default that its field describes. [Disabled] means none. One of
// your own may be a policy for all hosts, or the By of a Group with [HostOf] as the key:
//
//	circuits := resilience.NewGroup(func(string) *breaker.Breaker {
//		return breaker.New(breaker.Config{ConsecutiveFailures: 3})
//	}, resilience.GroupConfig{})
//	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{
//		Breaker:  circuits.By(resiliencehttp.HostOf),
//		Bulkhead: resiliencehttp.Disabled,
//	})
type ClientConfig struct {
	// Name is that of each policy of the client. It may be empty unless Register is set.
	Name string

	// Timeout is how long a request may take in all: its attempts, the waits between them,
	// and the reading of the response. Negative means no limit. Zero means 30 seconds until
	// the response begins, and then 10 minutes for a download or a stream, so that a body that
	// is never closed does not hold its slot forever. A redirect is a request of its own.
	Timeout time.Duration

	// AttemptTimeout is how long each attempt may take, the reading of its response
	// included. Zero means no limit but FirstByte and Idle. Negative means that these have
	// no default either.
	AttemptTimeout time.Duration

	// FirstByte and Idle are those of [Transport]: for how long a server may be silent
	// before the first byte of its answer, and within it. Negative means no limit. Zero
	// means 10 seconds, or a third of Timeout if that is less and no AttemptTimeout is set: a
	// report, a model that thinks, or a long upload, which counts as silence, needs more.
	FirstByte, Idle time.Duration

	// Retry sends requests again that may be repeated. The default, for each host, makes up to
	// 3 attempts, waits up to 100 ms at first and longer if Retry-After asks for it, and has a
	// budget: retries add at most a fifth to the load of the host, and 10 a second besides. It
	// does not wait for an open circuit.
	Retry resilience.Middleware

	// Breaker refuses requests to a host that is down. The default is a circuit for each
	// host. It opens when half of at least 20 requests within 10 seconds have failed, or 10 in
	// a row. It opens for the lesser of FirstByte and AttemptTimeout, from 1 to 30 seconds, in
	// which a probe must return, and for twice as long after each further opening, up to 30
	// seconds, or for the Retry-After of the failures. A caller's deadline is a failure only
	// after 0.9 seconds, or nine tenths of FirstByte or AttemptTimeout: where callers have less
	// time, set one of them, or a host that hangs opens nothing.
	Breaker resilience.Middleware

	// Throttle limits how many requests are sent in a time. The default is none.
	Throttle resilience.Middleware

	// Bulkhead limits how many requests are under way at once, each until its response has
	// been read. The default is 100 for each host. Up to 1000 more wait, each for up to a
	// second. If a host can work on fewer requests than that, requests queue in the host: use a
	// group of bulkheads of package bulkhead/adaptive, which find the limit of each host.
	Bulkhead resilience.Middleware

	// Register, if not nil, is called by NewClient with the policies that it has made by
	// default. It may be the MustAdd of a registry.Registry.
	Register func(policies ...policy.Describer)

	// Transport, if not nil, has the other fields of the client's [Transport], which is a copy:
	// its Base, Judge, Hedge and so on. Its Middleware must be nil, and FirstByte and Idle 0.
	Transport *Transport
}

// Validate returns an error that names each invalid field, or nil.
func (c ClientConfig) Validate() error {
	f := invalid.Fields{Type: "resiliencehttp.ClientConfig"}
	f.Need(c.Register == nil || c.Name != "", "Name", `""`,
		"set where Register is: a registry finds policies by their names")
	f.Need(c.Transport == nil || c.Transport.Middleware == nil, "Transport.Middleware", "a function",
		"nil: NewClient sets it")
	f.Need(c.Transport == nil || c.Transport.FirstByte == 0, "Transport.FirstByte", "set", "0: FirstByte is")
	f.Need(c.Transport == nil || c.Transport.Idle == 0, "Transport.Idle", "set", "0: Idle is")
	return f.Err()
}

const (
	defaultTimeout  = 30 * time.Second
	defaultReading  = 10 * time.Minute
	defaultSilence  = 10 * time.Second       // FirstByte and Idle
	defaultPatience = 900 * time.Millisecond // that of a breaker without a SlowAfter
	defaultRow      = 10                     // failures in a row
	defaultLimit    = 100
)

func (c ClientConfig) withDefaults() ClientConfig {
	if c.AttemptTimeout >= 0 {
		silence := defaultSilence
		if c.AttemptTimeout == 0 && c.Timeout > 0 {
			silence = max(1, min(silence, c.Timeout/3))
		}
		c.FirstByte, c.Idle = cmp.Or(c.FirstByte, silence), cmp.Or(c.Idle, silence)
	}
	var made []policy.Describer
	if c.Retry == nil {
		retries := resilience.NewGroup(func(string) *retry.Retrier {
			return retry.New(retry.Config{Name: c.Name, Budget: retry.NewBudget(retry.BudgetConfig{Name: c.Name})})
		}, resilience.GroupConfig{})
		c.Retry = retries.By(HostOf)
		made = append(made, retries)
	}
	if c.Breaker == nil {
		circuits := resilience.NewGroup(func(string) *breaker.Breaker {
			return breaker.New(breaker.Config{
				Name:                c.Name,
				ConsecutiveFailures: defaultRow,
				FailureRate:         0.5,
				MinCalls:            20,
				Window:              10 * time.Second,
				Patience:            c.patience(),
				OpenFor:             c.openFor(),
				MaxOpenFor:          max(30*time.Second, c.openFor()),
			})
		}, resilience.GroupConfig{})
		c.Breaker = circuits.By(HostOf)
		made = append(made, circuits)
	}
	if c.Bulkhead == nil {
		slots := resilience.NewGroup(func(string) *bulkhead.Bulkhead {
			return bulkhead.New(bulkhead.Config{
				Name:    c.Name,
				Limit:   defaultLimit,
				MaxWait: time.Second,
			})
		}, resilience.GroupConfig{})
		c.Bulkhead = slots.By(HostOf)
		made = append(made, slots)
	}
	if c.Register != nil {
		c.Register(made...)
	}
	return c
}

// openFor is also the time in which a probe must return: with less than the server may take
// until it answers, the circuit of a slow host would never close again.
func (c ClientConfig) openFor() time.Duration { return max(time.Second, c.answersWithin()) }

// patience returns how long a request must have run, when the deadline of its caller passes,
// to count as a failure of the host.
func (c ClientConfig) patience() time.Duration {
	return max(1, min(defaultPatience, c.answersWithin()/10*9))
}

// answersWithin returns how long a server may take until it answers, up to 30 seconds.
func (c ClientConfig) answersWithin() time.Duration {
	least := 30 * time.Second
	for _, limit := range []time.Duration{c.AttemptTimeout, c.FirstByte} {
		if limit > 0 {
			least = min(least, limit)
		}
	}
	return least
}

// Disabled is the [resilience.Middleware] that does nothing: no such policy in a [ClientConfig].
func Disabled(next resilience.Func) resilience.Func { return next }

// NewClient returns a client that limits the time of each request, sends it again where that
// may help, and keeps the failures of one host from the others. [ClientConfig] has the defaults;
// the reasons are in docs/decisions/http-client.md. NewClient panics if cfg is not valid.
//
// The policies run in this order, the outermost first: Timeout, Hedge, Retry, Breaker,
// Throttle, Bulkhead, AttemptTimeout with FirstByte and Idle. Build a client once for each
// dependency, and share it: its policies know what they have seen themselves. Its Transport, which
// is a [Transport], may be wrapped.
func NewClient(cfg ClientConfig) *http.Client {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	cfg = cfg.withDefaults()
	given := cmp.Or(cfg.Transport, &Transport{})
	t := &Transport{
		Base: given.Base,
		Middleware: resilience.Chain(cfg.Retry, cfg.Breaker, cfg.Throttle, cfg.Bulkhead,
			resilience.NamedTimeout(cfg.Name, max(0, cfg.AttemptTimeout))),
		Judge:      given.Judge,
		RetryAfter: given.RetryAfter,
		FirstByte:  cfg.FirstByte,
		Idle:       cfg.Idle,
		Prepare:    given.Prepare,
		Hedge:      given.Hedge,
		HedgeIf:    given.HedgeIf,
		Replayable: given.Replayable,
		MaxBuffer:  given.MaxBuffer,
	}
	t.name = cfg.Name
	t.passed = t.timeout(cmp.Or(cfg.Timeout, defaultTimeout))
	if cfg.Timeout == 0 {
		t.readingPassed = t.timeout(defaultReading)
	}
	t.base() // http.DefaultTransport as it is now, if that is meant
	return &http.Client{Transport: t}
}
