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
// If the field Retry, Breaker or Bulkhead is nil, each host gets its own default policy. To switch a policy
// off, set its field to [Disabled]. A policy that is set in a field applies to all hosts together. To have a
// separate policy for each host, set the field to the result of [resilience.Group.By] for the key [HostOf]:
//
//	breakers := resilience.NewGroup(func(string) *breaker.Breaker {
//		return breaker.New(breaker.Config{FailureRate: 0.9, Window: 10 * time.Second, OpenFor: time.Second})
//	}, resilience.GroupConfig{})
//	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{
//		Breaker:  breakers.By(resiliencehttp.HostOf),
//		Bulkhead: resiliencehttp.Disabled,
//	})
type ClientConfig struct {
	// Name is the name that all default policies get. Name must be set if the policies are added to a
	// registry.Registry.
	Name string

	// Timeout limits a whole request: its attempts, the waits between them, and the reading of the response.
	// Zero means 30 seconds until the response starts, and then 10 minutes for reading the response. Without
	// the limit of 10 minutes, a body that is never closed would hold its slot forever.
	// [resilience.Unlimited] means no limit. Each redirect is a separate request with its own Timeout.
	Timeout time.Duration

	// AttemptTimeout limits each attempt, including the reading of its response. Zero means that only
	// ResponseHeaderTimeout and Idle limit an attempt.
	AttemptTimeout time.Duration

	// ResponseHeaderTimeout is the maximum wait for the header of a response. Idle is the maximum time that a
	// Read of the response's body waits for data. See [Transport]. Zero means 10 seconds. If Timeout is set
	// but AttemptTimeout is zero, the default is instead a third of Timeout, but at most 10 seconds.
	// [resilience.Unlimited] means no limit.
	//
	// The default of Idle does not apply to responses of type text/event-stream or multipart/*, whose sender
	// may pause. Set a longer ResponseHeaderTimeout if the server needs more time to compute a response, such
	// as a report or the answer of a language model.
	ResponseHeaderTimeout, Idle time.Duration

	// Retry retries requests that may be repeated; see [Transport]. The default is a retrier for each host, with
	// up to 4 attempts per request. The first delay between attempts is 38 to 75ms, and each further delay is
	// about twice as long. After a response with a Retry-After, the delay is at least the Retry-After. A budget
	// for each host limits retries to 20% of the host's requests, plus 10 per second. If the breaker is open,
	// the retrier stops instead of waiting.
	//
	// With the defaults, requests outlast a server's restart of 200ms. For a longer restart, more attempts alone
	// are not enough: the failures of several callers open the breaker, and the open breaker ends the retries.
	// To outlast a longer restart, also set Breaker.
	Retry resilience.Middleware

	// Breaker refuses requests to a host that is down. The default is a breaker for each host. The default
	// breaker opens after 25 consecutive failures, or if at least half of the requests in the last 7 seconds
	// failed and there were at least 20 of them. The default breaker stays open for 0.9 to 1 second, or for
	// the Retry-After of the failures, up to 30 seconds. A process therefore sends about one request per
	// second to a host that is down. The breaker's ProbeTimeout is Timeout, AttemptTimeout,
	// ResponseHeaderTimeout or 30 seconds, whichever is shortest.
	//
	// If a request fails because Timeout or the caller's deadline has expired, the default breaker counts a failure
	// only if the request had at least a minimum time. This time includes waits for Throttle and for a slot. The
	// minimum time is 0.9 seconds, or 90% of ProbeTimeout if that is shorter. If your callers' deadlines give a
	// request less than 0.9 seconds, set ResponseHeaderTimeout or AttemptTimeout to less than the callers'
	// deadlines. Otherwise a host that hangs does not open the breaker.
	//
	// If a host is still useful when half of its requests fail, set a group of breakers with a higher
	// FailureRate, as in the example above.
	Breaker resilience.Middleware

	// Throttle limits the rate of requests. Nil means no limit.
	Throttle resilience.Middleware

	// Bulkhead limits the number of requests in flight. A request is in flight until its response has been
	// read. The default is a bulkhead for each host, with 100 slots. Up to 1,000 more requests wait for a
	// slot, each for up to 3 seconds. If a host can process fewer than 100 requests concurrently, requests queue
	// in the host. To find the right limit for each host automatically, use a group of bulkheads of package
	// bulkhead/adaptive.
	Bulkhead resilience.Middleware

	// The fields below have the same meaning as in [Transport], except for a nil Base. If
	// [http.DefaultTransport] is an [http.Transport], a nil Base means a copy of that transport. The copy
	// checks HTTP/2 connections: it sends a ping on a connection that has received nothing for 15 seconds, and
	// closes the connection if no reply arrives within 5 seconds.
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
	defaultSilence  = 10 * time.Second       // the default of ResponseHeaderTimeout and Idle
	defaultPatience = 900 * time.Millisecond // same as the default of package breaker
	defaultFailures = 25                     // a restart of 200ms causes about 20 failures at 50 requests per second
	defaultWindow   = 7 * time.Second        // see docs/decisions/http-client.md
	defaultLimit    = 100
	defaultMaxWait  = 3 * time.Second // patient callers outlast most of a 10s period in which a server is slow
	defaultAttempts = 4               // 4 attempts with their delays outlast a server's restart of 200ms

	defaultOpenFor    = 900 * time.Millisecond // the breaker adds a random time of up to 10%
	defaultRetryAfter = 30 * time.Second
)

// withDefaults returns c with default values for ResponseHeaderTimeout and Idle. NewTransport sets the
// default of Timeout.
func (c ClientConfig) withDefaults() ClientConfig {
	silence := defaultSilence
	if c.AttemptTimeout == 0 && c.Timeout > 0 {
		silence = max(1, min(silence, c.Timeout/3))
	}
	c.ResponseHeaderTimeout = cmp.Or(c.ResponseHeaderTimeout, silence)
	c.Idle = cmp.Or(c.Idle, silence)
	return c
}

// A ClientTransport is an [http.RoundTripper] that limits the time of each request, retries requests, and
// isolates each host from the failures of other hosts. Create a ClientTransport with [NewTransport]. SDKs,
// oauth2 and otelhttp can use it as their base transport. A ClientTransport is safe for concurrent use;
// create one for each dependency and share it.
//
// The exported fields are groups that hold the default policies of each host. The keys of these groups have
// the form that [HostOf] returns:
//
//	b, ok := transport.Breakers.Get("api.example.com:443")
//
// A field is nil if its policy was set in the [ClientConfig]. Budgets is nil if Retry was set.
type ClientTransport struct {
	// Retries holds the retrier of each host.
	Retries *resilience.Group[string, *retry.Retrier]
	// Budgets provides access to the retry budget of each host.
	Budgets *Budgets
	// Breakers holds the breaker of each host.
	Breakers *resilience.Group[string, *breaker.Breaker]
	// Bulkheads holds the bulkhead of each host.
	Bulkheads *resilience.Group[string, *bulkhead.Bulkhead]

	transport *Transport
}

// NewTransport returns a [ClientTransport]. [ClientConfig] describes the defaults; docs/decisions/http-client.md
// explains them. NewTransport panics if cfg is invalid; see [ClientConfig.Validate].
//
// The policies run in this order, from the outermost to the innermost: Timeout, Hedge, Retry, Breaker, Throttle,
// Bulkhead, and finally AttemptTimeout, ResponseHeaderTimeout and Idle.
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
	t.base() // reads the variable http.DefaultTransport now, so a later change of it does not affect t
	c.transport = t
	return c
}

const (
	pingAfter   = 15 * time.Second // time since an HTTP/2 connection last received a frame
	pingTimeout = 5 * time.Second
)

// withPings returns a copy of base that pings idle HTTP/2 connections. Without pings, requests would hang on
// a connection that the network has silently dropped. withPings returns nil if base is not a transport of
// net/http.
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

// NewClient returns an [http.Client] whose Transport is a [ClientTransport] with cfg. NewClient panics if cfg is
// invalid; see [ClientConfig.Validate]. Use [NewTransport] for access to the policies.
func NewClient(cfg ClientConfig) *http.Client { return &http.Client{Transport: NewTransport(cfg)} }

// RoundTrip sends req through the policies, like [Transport.RoundTrip].
func (c *ClientTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	return c.transport.RoundTrip(req)
}

// CloseIdleConnections calls Base's method CloseIdleConnections, if Base has one.
func (c *ClientTransport) CloseIdleConnections() { c.transport.CloseIdleConnections() }

// Policies returns the transport's groups of default policies, for a registry.Registry:
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

// Budgets provides access to the retry budgets of a [ClientTransport]. The retrier of each host has its own
// budget.
type Budgets struct {
	retries *resilience.Group[string, *retry.Retrier]
}

// Get returns the budget of a host, and reports whether the budget exists. Get does not create a budget. host
// must have the form that [HostOf] returns.
func (b *Budgets) Get(host string) (*retry.Budget, bool) {
	r, ok := b.retries.Get(host)
	if !ok {
		return nil, false
	}
	return r.Config().Budget, true
}

// All iterates over the hosts and their budgets in no particular order.
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
		Backoff:  delay.Exponential(75*time.Millisecond, 2*time.Second, delay.Equal),
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
		Window:              defaultWindow,
		Patience:            c.patience(),
		OpenFor:             defaultOpenFor,
		ProbeTimeout:        c.answersWithin(),
		MaxRetryAfter:       defaultRetryAfter,
	})
}

// newBulkhead returns the default bulkhead of a host.
func (c ClientConfig) newBulkhead(string) *bulkhead.Bulkhead {
	return bulkhead.New(bulkhead.Config{Name: c.Name, Limit: defaultLimit, MaxWait: defaultMaxWait})
}

// patience returns the Patience of a default breaker. It is shorter than 900ms if attempts are limited to a
// shorter time. If attempts are limited to 500ms, for example, callers may have deadlines of 500ms too, and
// with a Patience of 900ms, a host that hangs would never open its breaker.
func (c ClientConfig) patience() time.Duration {
	return max(1, min(defaultPatience, c.answersWithin()/10*9))
}

// answersWithin returns the maximum time that an attempt waits for the server's answer, but at most 30
// seconds. Timeout may be the only limit, because the other limits may be longer or unlimited.
func (c ClientConfig) answersWithin() time.Duration {
	least := 30 * time.Second
	for _, limit := range []time.Duration{c.Timeout, c.AttemptTimeout, c.ResponseHeaderTimeout} {
		if limit > 0 {
			least = min(least, limit)
		}
	}
	return least
}

// Disabled is a [resilience.Middleware] that only calls next. In a [ClientConfig], it switches a policy off.
func Disabled(next resilience.Func) resilience.Func { return next }
