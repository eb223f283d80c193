package resiliencehttp

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/invalid"
)

// A Check reports the health of one dependency, by a breaker, a bulkhead or a function.
type Check struct {
	// Name is the name of the dependency in the report. It is required.
	Name string

	// Critical makes the whole report fail if this check fails.
	Critical bool

	// Breaker fails while it is open or forced open, and warns while it is half-open or disabled.
	// Of Breaker, Bulkhead and Probe, exactly one must be set.
	Breaker *breaker.Breaker

	// Bulkhead warns while all of its slots are taken. It never fails: a busy bulkhead is
	// not broken.
	Bulkhead *bulkhead.Bulkhead

	// Probe fails if it returns an error, panics, or takes longer than Timeout. It
	// runs on a goroutine of its own, one at a time.
	Probe func(context.Context) error

	// Timeout ends a Probe. Zero means a second.
	Timeout time.Duration

	// MaxAge is for how long a result is reported before the check is made again. Zero
	// means a second.
	MaxAge time.Duration

	// Detail adds to the report why the check does not pass, which may be the text of an
	// error. Leave it off if the report is public.
	Detail bool
}

// Validate returns an error that names each invalid field, or nil.
func (c Check) Validate() error {
	f := invalid.Fields{Type: "resiliencehttp.Check"}
	sources := 0
	for _, set := range []bool{c.Breaker != nil, c.Bulkhead != nil, c.Probe != nil} {
		if set {
			sources++
		}
	}
	f.Need(c.Name != "", "Name", `""`, "set")
	f.Need(sources == 1, "Probe", fmt.Sprintf("one of %d that are set", sources), "set if neither Breaker nor Bulkhead is, and no other")
	f.Need(c.Timeout >= 0, "Timeout", c.Timeout, "0 (for 1s) or more")
	f.Need(c.MaxAge >= 0, "MaxAge", c.MaxAge, "0 (for 1s) or more")
	return f.Err()
}

// Health returns a handler that reports the health of all checks: with 200, or with 503 if a
// Critical check fails.
//
//	{"status": "fail", "checks": [
//		{"name": "users", "status": "fail", "state": "open", "critical": true, "since": "2026-03-01T12:00:00Z"},
//		{"name": "mail", "status": "pass", "state": "ok", "critical": false, "since": "2026-03-01T09:00:00Z"}
//	]}
//
// A status is pass, warn or fail. The whole fails if a Critical check fails, and otherwise
// warns if any check does not pass. The state is that of a breaker ("closed", "half-open",
// ...), of a bulkhead ("free" or "full") or of a probe ("ok", "failed" or "timed out").
// since is when the handler first saw that state, or when the breaker changed to it.
//
// A result is kept for MaxAge, so that polling costs nothing, and many polls at once run a
// Probe once. A Probe that does not return in time is not run again until it has returned.
// If the deadline of a request's ctx passes before there is a result, the answer is 503.
// Health panics if a check is not valid.
//
// Source: Health Endpoint Monitoring in the Cloud Design Patterns catalog
// (https://learn.microsoft.com/azure/architecture/patterns/health-endpoint-monitoring).
func Health(checks ...Check) http.Handler { return HealthOf(nil, checks...) }

// HealthOf returns the handler of [Health] for checks and, beside them, for policies by
// name: resiliencehttp.HealthOf(reg.Health), where reg is a *registry.Registry. A policy
// passes if its error is nil. It fails if the error has a method Failed() bool that returns
// true, and warns otherwise. Its state is "ok", or what the method HealthState() string of
// the error returns, or else "ailing". No policy is critical, and the texts of the errors
// are not told.
//
// The policies are asked once in a second at most, by one goroutine, with a ctx that ends
// after 900 ms. A poll waits for them for a second at most. If they have not all been told by
// then, or the function panics, a check by the name "policies" stands for the others: it
// fails, and its state is "timed out" or "failed". A function that hangs is not called again
// until it has returned.
func HealthOf(policies func(context.Context) iter.Seq2[string, error], checks ...Check) http.Handler {
	h := &health{}
	if policies != nil {
		h.policies = &policyHealth{all: policies}
	}
	for _, c := range checks {
		if err := c.Validate(); err != nil {
			panic(err)
		}
		c.Timeout, c.MaxAge = cmp.Or(c.Timeout, time.Second), cmp.Or(c.MaxAge, time.Second)
		h.checks = append(h.checks, &checkup{Check: c})
	}
	return h
}

type health struct {
	checks   []*checkup
	policies *policyHealth // nil if there are none
}

type report struct {
	Status string   `json:"status"`
	Checks []result `json:"checks"`
}

type result struct {
	Name     string    `json:"name"`
	Status   string    `json:"status"`
	State    string    `json:"state"`
	Critical bool      `json:"critical"`
	Since    time.Time `json:"since"`
	Detail   string    `json:"detail,omitempty"`
}

const (
	pass = "pass"
	warn = "warn"
	fail = "fail"
)

func (h *health) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, http.StatusText(http.StatusMethodNotAllowed), http.StatusMethodNotAllowed)
		return
	}
	for _, c := range h.checks {
		c.refresh() // the probes run at the same time
	}
	all := report{Status: pass, Checks: make([]result, 0, len(h.checks))}
	for _, c := range h.checks {
		result, ok := c.result(r.Context())
		if !ok {
			Server{}.Refuse(w, r, context.DeadlineExceeded) // unless the client has gone
			return
		}
		all.Checks = append(all.Checks, result)
		switch {
		case result.Status == fail && c.Critical:
			all.Status = fail
		case result.Status != pass && all.Status == pass:
			all.Status = warn
		}
	}
	if h.policies != nil {
		for _, result := range h.policies.results() {
			all.Checks = append(all.Checks, result)
			if result.Status != pass && all.Status == pass {
				all.Status = warn
			}
		}
	}
	body, _ := json.Marshal(all) // strings, booleans and times of this century
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if all.Status == fail {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_, _ = w.Write(append(body, '\n'))
}

// A checkup is a Check and its latest result.
type checkup struct {
	Check
	mu      sync.Mutex
	latest  result
	at      time.Time     // of latest; zero before the first
	pending chan struct{} // closed when the latest Probe has a result; nil before the first
	running bool          // a Probe has not returned, although it may have a result
}

// refresh gets a new result, or starts the Probe that does, if the latest is too old.
func (c *checkup) refresh() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running || time.Since(c.at) < c.MaxAge {
		return
	}
	switch {
	case c.Breaker != nil:
		c.set(c.ofBreaker())
	case c.Bulkhead != nil:
		c.set(c.ofBulkhead())
	default:
		c.running = true
		c.pending = make(chan struct{})
		go c.probe(c.pending)
	}
}

// result waits for the Probe that refresh has started and returns the latest result. ok is
// false if ctx ends before.
func (c *checkup) result(ctx context.Context) (r result, ok bool) {
	c.mu.Lock()
	pending := c.pending
	c.mu.Unlock()
	if pending != nil {
		select {
		case <-pending:
		case <-ctx.Done():
			return result{}, false
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.latest, true
}

// set makes r the latest result, and fills in Since unless r has it.
func (c *checkup) set(r result) {
	c.at = time.Now()
	r.Name, r.Critical = c.Name, c.Critical
	if r.Since.IsZero() {
		r.Since = c.at
		if r.State == c.latest.State {
			r.Since = c.latest.Since
		}
	}
	if !c.Detail {
		r.Detail = ""
	}
	r.Since = r.Since.UTC()
	c.latest = r
}

func (c *checkup) ofBreaker() result {
	s := c.Breaker.Stats()
	r := result{Status: warn, State: string(s.State), Since: s.Since}
	switch s.State {
	case breaker.Closed:
		r.Status = pass
		return r
	case breaker.Open, breaker.ForcedOpen:
		r.Status = fail
	}
	if s.LastErr != nil {
		r.Detail = s.LastErr.Error()
	}
	return r
}

func (c *checkup) ofBulkhead() result {
	s := c.Bulkhead.Stats()
	if s.InFlight < s.Limit {
		return result{Status: pass, State: "free"}
	}
	queued := 0
	for _, n := range s.Queued {
		queued += n
	}
	return result{Status: warn, State: "full", Detail: fmt.Sprintf("%d of %d in flight, %d waiting", s.InFlight, s.Limit, queued)}
}

// probe runs the Probe. It sets the result when the Probe returns or its time is up,
// whichever is first.
func (c *checkup) probe(pending chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), c.Timeout)
	defer cancel()
	settle := func(r result) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.set(r)
		close(pending)
	}
	timedOut := result{Status: fail, State: "timed out", Detail: fmt.Sprintf("no answer after %v", c.Timeout)}
	stop := context.AfterFunc(ctx, func() { settle(timedOut) })
	err := errors.New("the Probe ended its goroutine")
	defer func() {
		// A panic says something about the dependency. It is no reason to end the
		// process.
		if p := recover(); p != nil {
			err = fmt.Errorf("the Probe panicked: %v", p)
		}
		if stop() {
			r := result{Status: pass, State: "ok"}
			switch {
			case ctx.Err() != nil: // the Probe heeded it before AfterFunc ran
				r = timedOut
			case err != nil:
				r = result{Status: fail, State: "failed", Detail: err.Error()}
			}
			settle(r)
		}
		c.mu.Lock()
		c.running = false
		c.mu.Unlock()
	}()
	err = c.Probe(ctx)
}

// policyHealth is the health of policies by name.
type policyHealth struct {
	all func(context.Context) iter.Seq2[string, error]

	mu     sync.Mutex
	latest *asking // nil before the first
}

// An asking is one call of a function for all policies.
type asking struct {
	at   time.Time
	done chan struct{} // closed when it has ended

	list   []result          // so far
	before map[string]result // of the asking before, by name
}

func (a *asking) ended() bool {
	select {
	case <-a.done:
		return true
	default:
		return false
	}
}

const (
	askTime  = 900 * time.Millisecond // of a function that heeds its ctx
	pollTime = time.Second            // of one that does not
)

// results returns the health of each policy, at most a second old, and of all of them if it
// is not known of each.
func (p *policyHealth) results() []result {
	a := p.refresh()
	select {
	case <-a.done:
	case <-time.After(time.Until(a.at.Add(pollTime))):
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if a.ended() {
		return a.list
	}
	return append(slices.Clip(a.list), unknown("timed out", a.at))
}

// refresh returns the latest asking, a new one if that is too old and has ended.
func (p *policyHealth) refresh() *asking {
	p.mu.Lock()
	defer p.mu.Unlock()
	last := p.latest
	if last != nil && (!last.ended() || time.Since(last.at) < time.Second) {
		return last
	}
	a := &asking{at: time.Now(), done: make(chan struct{}), before: map[string]result{}}
	if last != nil {
		for _, r := range last.list {
			a.before[r.Name] = r
		}
	}
	p.latest = a
	go p.ask(a)
	return a
}

func (p *policyHealth) ask(a *asking) {
	ctx, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	whole := false
	defer func() {
		_ = recover() // no reason to end the process
		if !whole {
			p.note(a, unknown("failed", time.Now()))
		}
		close(a.done)
	}()
	for name, err := range p.all(ctx) {
		p.note(a, policyResult(name, err))
	}
	whole = true
}

func (p *policyHealth) note(a *asking, r result) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if last, ok := a.before[r.Name]; ok && last.State == r.State {
		r.Since = last.Since
	}
	a.list = append(a.list, r)
}

// unknown returns what is told of the policies whose health is not known.
func unknown(state string, since time.Time) result {
	return result{Name: "policies", Status: fail, State: state, Since: since.UTC()}
}

func policyResult(name string, err error) result {
	r := result{Name: name, Status: pass, State: "ok", Since: time.Now().UTC()}
	if err == nil {
		return r
	}
	r.Status, r.State = warn, "ailing"
	if e, ok := errors.AsType[interface {
		error
		Failed() bool
	}](err); ok && e.Failed() {
		r.Status = fail
	}
	if e, ok := errors.AsType[interface {
		error
		HealthState() string
	}](err); ok {
		r.State = e.HealthState()
	}
	return r
}
