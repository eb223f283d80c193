package resiliencehttp

import (
	"cmp"
	"iter"
	"net/http"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/internal/delay"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/retry"
)

// ClientConfig configures a [ClientTransport]. The zero ClientConfig is ready to use.
//
// A policy that is nil has the default that its field describes. [Disabled] switches a policy off. A
// policy of your own may serve all hosts, or be the By of a Group whose key is [HostOf]:
//
//	breakers := resilience.NewGroup(func(string) *breaker.Breaker {
//		return breaker.New(breaker.Config{ConsecutiveFailures: 3})
//	}, resilience.GroupConfig{})
//	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{
//		Breaker:  breakers.By(resiliencehttp.HostOf),
//		Bulkhead: resiliencehttp.Disabled,
//	})
type ClientConfig struct {
	// Name is the name of each policy of the client. A registry.Registry does not accept policies whose
	// name is empty.
	Name string

	// Timeout limits a whole request: its attempts, the waits between them, and the reading of the
	// response. Zero means 30 seconds until the response begins, and then 10 minutes for a download or a
	// stream, so that a body that is never closed does not hold its slot forever. [resilience.Unlimited]
	// means no limit. A redirect is a request of its own.
	Timeout time.Duration

	// AttemptTimeout limits each attempt, including the reading of its response. Zero means no limit other
	// than ResponseHeaderTimeout and Idle.
	AttemptTimeout time.Duration

	// ResponseHeaderTimeout and Idle are described at [Transport]: how long a server may be silent before
	// the header of its response, and while it sends the body. Zero means 10 seconds, or a third of Timeout
	// if that is less and no AttemptTimeout is set; but no Idle for a response of type text/event-stream or
	// multipart/*, whose sender may pause. [resilience.Unlimited] means no limit. A report or a model that
	// thinks needs more.
	ResponseHeaderTimeout, Idle time.Duration

	// Retry sends requests again that may be repeated. The default, for each host, makes up to 4 attempts.
	// It waits between 50 and 100ms at first, twice as long each further time, and longer if Retry-After
	// asks for it. Its budget limits retries to a fifth of the host's load, plus 10 a second. It does not wait
	// for an open breaker.
	Retry resilience.Middleware

	// Breaker refuses requests to a host that is down. The default is a breaker for each host. It opens
	// after 25 consecutive failures, or when half of at least 20 requests within 10 seconds have failed. It
	// opens for 0.9 to 1 seconds, or for the Retry-After of the failures, up to 30 seconds: a process sends
	// about one request a second to a dead host. A probe may take as long as an attempt: the lesser of
	// ResponseHeaderTimeout and AttemptTimeout, up to 30 seconds. A caller's deadline is a failure only after 0.9
	// seconds, or nine tenths of ResponseHeaderTimeout or AttemptTimeout if that is less: where callers have less
	// time, set one of them, or a host that hangs opens nothing.
	Breaker resilience.Middleware

	// Throttle limits the rate of requests. The default is none.
	Throttle resilience.Middleware

	// Bulkhead limits how many requests are in flight at once, each until its response has
	// been read. The default is 100 for each host. Up to 1000 more wait, each for up to a
	// second. If a host can work on fewer requests than that, requests queue in the host: use a
	// group of bulkheads of package bulkhead/adaptive, which find the limit of each host.
	Bulkhead resilience.Middleware

	// Base, Judge, RetryAfter, Prepare, Hedge, HedgeIf, Replayable and MaxBuffer are the fields of
	// [Transport] with these names. If Base is nil and [http.DefaultTransport] is an [http.Transport], Base is
	// a copy of it that sends an HTTP/2 ping after 15 seconds of silence, and closes a connection that
	// does not answer within 5 seconds.
	Base       http.RoundTripper
	Judge      func(*http.Response, *Ahead) error
	RetryAfter func(*http.Response) time.Duration
	Prepare    func(*http.Request) error
	Hedge      *hedge.Hedger[*http.Response]
	HedgeIf    func(*http.Request) bool
	Replayable func(*http.Request) bool
	MaxBuffer  int64
}

// Validate returns an error that names each invalid field, or nil.
func (c ClientConfig) Validate() error {
	f := invalid.Fields{Type: "resiliencehttp.ClientConfig"}
	limit := func(name string, d time.Duration) {
		f.Need(d >= 0 || d == resilience.Unlimited, name, d, "0 (for the default), more, or Unlimited")
	}
	limit("Timeout", c.Timeout)
	limit("ResponseHeaderTimeout", c.ResponseHeaderTimeout)
	limit("Idle", c.Idle)
	f.Need(c.AttemptTimeout >= 0, "AttemptTimeout", c.AttemptTimeout, "0 (for none) or more")
	f.Need(c.MaxBuffer >= 0, "MaxBuffer", c.MaxBuffer, "0 (for none) or more")
	return f.Err()
}

const (
	defaultTimeout  = 30 * time.Second
	defaultReading  = 10 * time.Minute
	defaultSilence  = 10 * time.Second       // ResponseHeaderTimeout and Idle
	defaultPatience = 900 * time.Millisecond // that of a breaker without a SlowAfter
	defaultFailures = 25                     // consecutive; a restart of 200ms fails about 20 at 50 requests a second
	defaultLimit    = 100
	defaultAttempts = 4 // with their delays they last through a restart of 200ms

	defaultOpenFor    = 900 * time.Millisecond // up to a tenth is added
	defaultRetryAfter = 30 * time.Second
)

// withDefaults returns c with the limits of time that zero stands for.
func (c ClientConfig) withDefaults() ClientConfig {
	silence := defaultSilence
	if c.AttemptTimeout == 0 && c.Timeout > 0 {
		silence = max(1, min(silence, c.Timeout/3))
	}
	c.ResponseHeaderTimeout = cmp.Or(c.ResponseHeaderTimeout, silence)
	c.Idle = cmp.Or(c.Idle, silence)
	return c
}

// A ClientTransport is an [http.RoundTripper] that limits the time of each request, sends a request again
// if that may help, and keeps the failures of one host from the others. SDKs, oauth2 and otelhttp take
// it as their base. It is safe for concurrent use; build one for each dependency and share it.
//
// Its groups hold the default policies of each host, whose key is that of [HostOf]:
//
//	b, ok := transport.Breakers.Get("api.example.com:443")
//
// A group is nil if the policy was set in the [ClientConfig].
type ClientTransport struct {
	// Retries has the retrier of each host.
	Retries *resilience.Group[string, *retry.Retrier]
	// Budgets has the budgets of Retries.
	Budgets *Budgets
	// Breakers has the breaker of each host.
	Breakers *resilience.Group[string, *breaker.Breaker]
	// Bulkheads has the bulkhead of each host.
	Bulkheads *resilience.Group[string, *bulkhead.Bulkhead]

	transport *Transport
}

// NewTransport returns a transport that limits the time of each request, sends it again where that
// may help, and keeps the failures of one host from the others. [ClientConfig] has the defaults;
// the reasons are in docs/decisions/http-client.md. NewTransport panics if cfg is invalid.
//
// The policies run in this order, the outermost first: Timeout, Hedge, Retry, Breaker, Throttle,
// Bulkhead, AttemptTimeout with ResponseHeaderTimeout and Idle.
func NewTransport(cfg ClientConfig) *ClientTransport {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	idleByDefault := cfg.Idle == 0
	cfg = cfg.withDefaults()
	c := &ClientTransport{}
	if cfg.Retry == nil {
		c.Retries = resilience.NewGroup(cfg.newRetrier, resilience.GroupConfig{})
		c.Budgets = &Budgets{c.Retries}
		cfg.Retry = c.Retries.By(HostOf)
	}
	if cfg.Breaker == nil {
		c.Breakers = resilience.NewGroup(cfg.newBreaker, resilience.GroupConfig{})
		cfg.Breaker = c.Breakers.By(HostOf)
	}
	if cfg.Bulkhead == nil {
		c.Bulkheads = resilience.NewGroup(cfg.newBulkhead, resilience.GroupConfig{})
		cfg.Bulkhead = c.Bulkheads.By(HostOf)
	}
	t := &Transport{
		Base: cfg.Base,
		Middleware: resilience.Chain(cfg.Retry, cfg.Breaker, cfg.Throttle, cfg.Bulkhead,
			resilience.NamedTimeout(cfg.Name, cfg.AttemptTimeout)),
		Judge:                 cfg.Judge,
		RetryAfter:            cfg.RetryAfter,
		ResponseHeaderTimeout: cfg.ResponseHeaderTimeout,
		Idle:                  cfg.Idle,
		Prepare:               cfg.Prepare,
		Hedge:                 cfg.Hedge,
		HedgeIf:               cfg.HedgeIf,
		Replayable:            cfg.Replayable,
		MaxBuffer:             cfg.MaxBuffer,
		name:                  cfg.Name,
		idleByDefault:         idleByDefault,
	}
	t.passed = t.timeout(cmp.Or(cfg.Timeout, defaultTimeout))
	if cfg.Timeout == 0 {
		t.readingPassed = t.timeout(defaultReading)
	}
	if t.Base == nil {
		t.Base = withPings(http.DefaultTransport)
	}
	t.base() // http.DefaultTransport as it is now, if that is meant
	c.transport = t
	return c
}

const (
	pingAfter   = 15 * time.Second // of silence of an HTTP/2 connection
	pingTimeout = 5 * time.Second
)

// withPings returns a copy of base that closes an HTTP/2 connection if the network has lost it. It returns nil if
// base is not a transport of net/http.
func withPings(base http.RoundTripper) http.RoundTripper {
	t, ok := base.(*http.Transport)
	if !ok {
		return nil
	}
	t = t.Clone()
	var cfg http.HTTP2Config
	if t.HTTP2 != nil {
		cfg = *t.HTTP2
	}
	cfg.SendPingTimeout = cmp.Or(cfg.SendPingTimeout, pingAfter)
	cfg.PingTimeout = cmp.Or(cfg.PingTimeout, pingTimeout)
	t.HTTP2 = &cfg
	return t
}

// NewClient returns an [http.Client] whose Transport is the [ClientTransport] of cfg. NewClient panics if cfg
// is invalid. Use [NewTransport] to reach the policies.
func NewClient(cfg ClientConfig) *http.Client { return &http.Client{Transport: NewTransport(cfg)} }

// RoundTrip sends req through the policies, like [Transport.RoundTrip].
func (c *ClientTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	return c.transport.RoundTrip(req)
}

// CloseIdleConnections calls CloseIdleConnections of Base, if it has that method.
func (c *ClientTransport) CloseIdleConnections() { c.transport.CloseIdleConnections() }

// Policies returns the groups of default policies that the transport has, for a registry.Registry:
//
//	reg.MustAdd(transport.Policies()...)
func (c *ClientTransport) Policies() []policy.Describer {
	var all []policy.Describer
	if c.Retries != nil {
		all = append(all, c.Retries)
	}
	if c.Breakers != nil {
		all = append(all, c.Breakers)
	}
	if c.Bulkheads != nil {
		all = append(all, c.Bulkheads)
	}
	return all
}

// Budgets finds the retry budgets of the hosts of a [ClientTransport]. Each belongs to the host's retrier.
type Budgets struct {
	retries *resilience.Group[string, *retry.Retrier]
}

// Get returns the budget of a host, and reports whether it exists. It does not create one.
func (b *Budgets) Get(host string) (*retry.Budget, bool) {
	r, ok := b.retries.Get(host)
	if !ok {
		return nil, false
	}
	return r.Config().Budget, true
}

// All returns the hosts with their budgets, in no particular order.
func (b *Budgets) All() iter.Seq2[string, *retry.Budget] {
	return func(yield func(string, *retry.Budget) bool) {
		for host, r := range b.retries.All() {
			if !yield(host, r.Config().Budget) {
				return
			}
		}
	}
}

// newRetrier returns the default retrier of a host.
func (c ClientConfig) newRetrier(string) *retry.Retrier {
	return retry.New(retry.Config{
		Name:     c.Name,
		Attempts: defaultAttempts,
		Backoff:  delay.Exponential(100*time.Millisecond, 2*time.Second, delay.Equal),
		Budget:   retry.NewBudget(retry.BudgetConfig{Name: c.Name}),
	})
}

// newBreaker returns the default breaker of a host.
func (c ClientConfig) newBreaker(string) *breaker.Breaker {
	return breaker.New(breaker.Config{
		Name:                c.Name,
		ConsecutiveFailures: defaultFailures,
		FailureRate:         0.5,
		MinCalls:            20,
		Window:              10 * time.Second,
		Patience:            c.patience(),
		OpenFor:             defaultOpenFor,
		ProbeTimeout:        c.answersWithin(),
		MaxRetryAfter:       defaultRetryAfter,
	})
}

// newBulkhead returns the default bulkhead of a host.
func (c ClientConfig) newBulkhead(string) *bulkhead.Bulkhead {
	return bulkhead.New(bulkhead.Config{Name: c.Name, Limit: defaultLimit, MaxWait: time.Second})
}

// patience returns how long a request must have run, when the deadline of its caller passes,
// to count as a failure of the host.
func (c ClientConfig) patience() time.Duration {
	return max(1, min(defaultPatience, c.answersWithin()/10*9))
}

// answersWithin returns how long a server may take until it answers, up to 30 seconds.
func (c ClientConfig) answersWithin() time.Duration {
	least := 30 * time.Second
	for _, limit := range []time.Duration{c.AttemptTimeout, c.ResponseHeaderTimeout} {
		if limit > 0 {
			least = min(least, limit)
		}
	}
	return least
}

// Disabled is the [resilience.Middleware] that does nothing: no such policy in a [ClientConfig].
func Disabled(next resilience.Func) resilience.Func { return next }
