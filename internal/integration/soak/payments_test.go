package soak_test

import (
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/faults"
)

// A mode is how the payments service is: the faults that its requests meet before and
// after they have had their effect.
type mode struct{ before, after []faults.Plan }

var (
	healthy = mode{}
	// hanging takes requests and does not answer; some have their effect.
	hanging = mode{
		before: []faults.Plan{{Kind: faults.Hang, Share: 0.5}},
		after:  []faults.Plan{{Kind: faults.Hang}},
	}
	// refusing cuts connections.
	refusing = mode{before: []faults.Plan{{Kind: faults.Refuse}}}
	// limping is slow, and fails one request in three, before or after its effect.
	limping = mode{
		before: []faults.Plan{
			{Kind: faults.Latency, Spread: 100 * time.Millisecond},
			{Kind: faults.Status, Status: http.StatusInternalServerError, Share: 1. / 6},
		},
		after: []faults.Plan{{Kind: faults.Status, Status: http.StatusInternalServerError, Share: 1. / 5}},
	}
	asking      = asksFor(time.Second)
	askingAYear = asksFor(365 * 24 * time.Hour)
)

// asksFor answers 503 with Retry-After.
func asksFor(d time.Duration) mode {
	return mode{before: []faults.Plan{{Kind: faults.Status, RetryAfter: d}}}
}

// payments is the service that charges customers, and what it has done: each command
// once, however often it is asked.
type payments struct {
	*httptest.Server
	t             *testing.T
	before, after *faults.Script

	mu   sync.Mutex
	done map[string]bool // by command
}

func newPayments(t *testing.T) *payments {
	p := &payments{
		t:      t,
		before: faults.New(faults.Config{Enabled: true, Seed: rand.Uint64()}),
		after:  faults.New(faults.Config{Enabled: true, Seed: rand.Uint64()}),
		done:   map[string]bool{},
	}
	apply := faults.Handler(p.before, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		status := p.apply(r)
		faults.Handler(p.after, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
		})).ServeHTTP(w, r)
	}))
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // before that the server does not see that the client leaves
		apply.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		p.CloseClientConnections()
		p.Close()
	})
	return p
}

func (p *payments) is(m mode) {
	require.NoError(p.t, p.before.Update(func(c *faults.Config) { c.Plans = m.before }))
	require.NoError(p.t, p.after.Update(func(c *faults.Config) { c.Plans = m.after }))
}

// apply does what r asks for and returns the status of the answer.
func (p *payments) apply(r *http.Request) int {
	command := r.Header.Get("Idempotency-Key")
	switch {
	case command == "": // a look at a payment that does not exist
		return http.StatusNotFound
	case strings.Contains(command, "declined") && strings.HasSuffix(command, "/do"):
		return http.StatusPaymentRequired
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if undone := strings.TrimSuffix(command, "/do") + "/undo"; p.done[undone] {
		return http.StatusConflict // its undo came first
	}
	p.done[command] = true
	return http.StatusOK
}

// charged reports whether the customer of an order has paid and not been refunded.
func (p *payments) charged(order string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.done[order+"/charge/do"] && !p.done[order+"/charge/undo"]
}
