package harm

import (
	"net/http"
	"time"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
)

// A Client is a kind of client with which the rows are run.
type Client struct {
	Name string

	// New returns a client whose requests are sent by base. Clients other than NewClient ignore cfg.
	New func(base *http.Transport, cfg Config) *http.Client
}

// A Config holds the settings of NewClient that a row changes.
type Config struct {
	HeaderTimeout time.Duration // the ResponseHeaderTimeout; zero means the default
	HedgeAfter    time.Duration // the delay after which requests are hedged; zero means no hedging
	Slots         int           // the number of slots of the bulkhead; zero means the default
}

// Plain is the client of net/http.
var Plain = Client{"plain", func(base *http.Transport, _ Config) *http.Client {
	return &http.Client{Transport: base}
}}

// Retries is a client with this module's retries and no other policy.
var Retries = Client{"retries", func(base *http.Transport, _ Config) *http.Client {
	return &http.Client{Transport: &resiliencehttp.Transport{Base: base, Middleware: retry.New(retry.Config{}).Wrap}}
}}

// NewClient is resiliencehttp.NewClient with its defaults.
var NewClient = Client{"NewClient", func(base *http.Transport, cfg Config) *http.Client {
	return newClient(base, cfg, resiliencehttp.ClientConfig{})
}}

// newClient returns a client with the policies of c, and with default policies where c has none.
func newClient(base http.RoundTripper, cfg Config, c resiliencehttp.ClientConfig) *http.Client {
	c.Base = base
	c.ResponseHeaderTimeout = cfg.HeaderTimeout
	if cfg.HedgeAfter > 0 {
		c.Hedge = hedge.New[*http.Response](hedge.Config{Delay: cfg.HedgeAfter, Ratio: 0.1})
	}
	if cfg.Slots > 0 && c.Bulkhead == nil {
		c.Bulkhead = bulkhead.New(bulkhead.Config{Limit: cfg.Slots, MaxWait: 3 * time.Second}).Wrap
	}
	return resiliencehttp.NewClient(c)
}
