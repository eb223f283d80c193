package saga

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-resilience/resilience/policy"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// Stats are the metrics of one [Runner]. [Runner.Describe] has additional metrics for each definition.
type Stats struct {
	Held     int64 `gauge:"held"`      // sagas that the runner holds
	InFlight int64 `gauge:"in_flight"` // attempts in progress

	// The following fields are counters that start at zero in NewRunner.
	Claimed     int64 `counter:"claims{from=released}"` // claims of due sagas that no runner held
	TakenOver   int64 `counter:"claims{from=crashed}"`  // claims of sagas that the previous owner had not released
	Lost        int64 `counter:"losses"`                // sagas that the runner lost; see EventLost
	Stalled     int64 `counter:"stalls"`                // the number of EventStalled
	Commits     int64 `counter:"commits"`               // writes of held sagas; one write may record several results
	Deleted     int64 `counter:"deletions"`             // ended sagas that were deleted; see RunnerConfig.Retention
	StoreErrors int64 `counter:"store.errors"`          // calls to the store that failed
}

// A Count counts the sagas of a definition that have not ended. All versions of the definition are counted together. A
// number of 10,000 means 10,000 or more.
type Count struct {
	Saga         string // the Name of the definition
	Running      int    // sagas that are Running
	Compensating int    // sagas that are Compensating
	Stuck        int    // sagas that are Stuck

	Due    int           // running or compensating sagas that a runner may claim
	DueFor time.Duration // the time since the first of the due sagas became due
}

// Stats returns the metrics of this runner.
func (r *Runner) Stats() Stats {
	var s Stats
	r.counters.count(func(total *Stats) { s = *total })
	r.mu.Lock()
	defer r.mu.Unlock()
	s.Held = int64(len(r.held))
	return s
}

// Counts counts the sagas in the store that have not ended, separately for each definition. The second result is the
// time of the store's clock.
func (r *Runner) Counts(ctx context.Context) (counts []Count, now time.Time, err error) {
	found, err := r.store.Counts(ctx)
	if err != nil {
		return nil, now, fmt.Errorf("saga: counts: %w", err)
	}
	for _, c := range found.Sagas {
		n := Count{Saga: c.Saga, Running: c.Running, Compensating: c.Compensating, Stuck: c.Stuck, Due: c.Due}
		if c.Due > 0 {
			n.DueFor = max(found.Now.Sub(c.OldestDue), 0)
		}
		counts = append(counts, n)
	}
	return counts, found.Now, nil
}

// counters are the metrics of a runner, and the numbers of sagas that the runner last read from the store.
type counters struct {
	mu     sync.Mutex
	total  Stats                       // the Stats of the runner, without Held
	sagas  map[string]map[string]int64 // metrics by definition and label, such as "status=started"
	warned time.Time                   // the time when a failure of the store was last logged

	// The numbers of the sagas in the store, by the name of the definition. The map includes all definitions that are
	// registered or were found in the store. A definition without sagas has zeros, even before the first query of the
	// store has returned. Otherwise alerts would retain the last value of a metric that disappears, and miss a metric that
	// appears late.
	stored  map[string]Count
	looked  time.Time // the time when the latest query of the numbers in the store started
	read    time.Time // the time when the latest successful query returned
	looking bool
}

// count changes the totals.
func (c *counters) count(change func(*Stats)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.total)
}

// register initializes the metrics of a definition.
func (c *counters) register(saga string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sagas[saga] == nil {
		c.sagas[saga] = make(map[string]int64)
		c.stored[saga] = Count{Saga: saga}
	}
}

// countSaga increments a metric of a definition if the definition is registered.
func (c *counters) countSaga(name, label string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if counts := c.sagas[name]; counts != nil {
		counts[label]++
	}
}

// warn reports whether to log a failure of the store. It returns true at most once per second.
func (c *counters) warn() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.warned) < time.Second {
		return false
	}
	c.warned = time.Now()
	return true
}

const (
	lookEvery = 5 * time.Second // the interval between queries of the numbers in the store
	lookKept  = 5 * time.Minute // the age at which the numbers of the last successful query are too old to be returned
)

// stored returns the numbers of the sagas in the store from the last query, sorted by the name of the definition. It
// does not wait for a query: if the numbers are old, it starts a query in the background.
func (r *Runner) stored() []Count {
	f := &r.counters
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(f.read) > lookKept {
		f.store(nil)
	}
	if !f.looking && time.Since(f.looked) >= lookEvery {
		f.looking, f.looked = true, time.Now()
		go r.look()
	}
	byName := func(a, b Count) int { return strings.Compare(a.Saga, b.Saga) }
	return slices.SortedFunc(maps.Values(f.stored), byName)
}

// look queries the numbers of the sagas in the store.
func (r *Runner) look() {
	ctx, cancel := context.WithTimeout(context.Background(), r.cfg.LeaseTTL)
	defer cancel()
	counts, _, err := r.Counts(ctx)
	r.counters.mu.Lock()
	r.counters.looking = false
	if err == nil {
		r.counters.store(counts)
		r.counters.read = time.Now()
	}
	r.counters.mu.Unlock()
	if err != nil {
		r.storeFailed(ctx, err)
	}
}

// store replaces the numbers of the sagas in the store. The caller holds c.mu.
func (c *counters) store(counts []Count) {
	for name := range c.stored {
		c.stored[name] = Count{Saga: name}
	}
	for _, n := range counts {
		c.stored[n.Saga] = n
	}
}

// Describe implements [policy.Describer].
//
// The metrics include the [Stats]. For each definition, saga.sagas counts the sagas by status, and saga.step.attempts
// counts the attempts of steps by outcome. The metrics saga.stored, saga.due and saga.due.age_seconds describe the
// sagas in the store, which all runners share. So do not add up saga.stored, saga.due or saga.due.age_seconds over
// several runners. The values of these three metrics are from the latest completed query of the store, and are 0 before
// the first query. If the last query started at least 5 seconds ago, a read of the metrics starts the next query in the
// background, and does not wait for it. While the store does not answer, the three metrics keep their last values for 5
// minutes and are then 0.
//
// The health check queries the store. A Health that is not Pass has one of these states:
//
//   - "store_down", with status Fail: the store does not answer, or returns an error.
//   - "store_fails", with status Fail: the runner's latest claim or heartbeat failed.
//   - "stuck", with status Fail: sagas are stuck.
//   - "stalled", with status Fail: a step of a saga that the runner holds does not return; see [EventStalled].
//   - "overdue", with status Warn: a saga has been due for 1 minute and no runner has claimed it.
//   - "unreadable", with status Warn: the runner has found sagas that it cannot read; see [Saga].Version.
func (r *Runner) Describe() policy.Description {
	return policy.Description{
		Kind:    "saga",
		Name:    r.cfg.Name,
		Metrics: r.metrics,
		Health:  r.health,
		Config:  func() any { return r.Config() },
		Observe: policy.Events(r.Observe, func(e Event) policy.Event { return e.describe(r.cfg.Name) }),
	}
}

func (r *Runner) metrics() []policy.Metric {
	var all []policy.Metric
	count := func(name string, n int64) {
		all = append(all, policy.Metric{Name: name, Counter: true, Value: float64(n)})
	}
	gauge := func(name string, v float64) { all = append(all, policy.Metric{Name: name, Value: v}) }
	r.counters.mu.Lock()
	for _, name := range slices.Sorted(maps.Keys(r.counters.sagas)) {
		labels, n := "{saga="+name+",", r.counters.sagas[name]
		for _, status := range []string{"started", "completed", "compensated", "stuck", "abandoned"} {
			count("saga.sagas"+labels+"status="+status+"}", n["status="+status])
		}
		for _, outcome := range []Outcome{
			OutcomeDone, OutcomeDeclined, OutcomeMaybeApplied, OutcomeFailed, OutcomeRefused, OutcomeInterrupted,
		} {
			count("saga.step.attempts"+labels+"outcome="+string(outcome)+"}", n["outcome="+string(outcome)])
		}
	}
	r.counters.mu.Unlock()
	for _, c := range r.stored() {
		labels := "{saga=" + c.Saga
		gauge("saga.stored"+labels+",status=running}", float64(c.Running))
		gauge("saga.stored"+labels+",status=compensating}", float64(c.Compensating))
		gauge("saga.stored"+labels+",status=stuck}", float64(c.Stuck))
		gauge("saga.due"+labels+"}", float64(c.Due))
		gauge("saga.due.age_seconds"+labels+"}", c.DueFor.Seconds())
	}
	return append(all, policy.Metrics("saga", r.Stats())...)
}

func (r *Runner) health(ctx context.Context) policy.Health {
	counts, _, err := r.Counts(ctx)
	if err != nil {
		return policy.Health{Status: policy.Fail, State: "store_down", Err: err}
	}
	r.mu.Lock()
	err = cmp.Or(r.claimErr, r.heartbeatErr)
	r.mu.Unlock()
	if err != nil { // the store can be read, but not written
		return policy.Health{Status: policy.Fail, State: "store_fails", Err: err}
	}
	h := healthOf(counts)
	if hung := r.hungSteps(); len(hung) > 0 {
		details := []string{hung[0] + " does not return"}
		if more := len(hung) - 1; more > 0 {
			details[0] = fmt.Sprintf("%s and %d more do not return", hung[0], more)
		}
		if h.Detail != "" {
			details = append(details, h.Detail)
		}
		if h.Status != policy.Fail {
			h.Status, h.State = policy.Fail, "stalled"
		}
		h.Detail = strings.Join(details, "; ")
	}
	if n, id, why := r.unreadSagas(); n > 0 {
		detail := fmt.Sprintf("saga %q: %v", id, why)
		if n > 1 {
			detail = fmt.Sprintf("%s cannot be read, such as %s", number(n), detail)
		}
		if h.Status == policy.Pass {
			h.Status = policy.Warn
		}
		h.State = cmp.Or(h.State, "unreadable")
		if h.Detail != "" {
			detail = h.Detail + "; " + detail
		}
		h.Detail = detail
	}
	return h
}

// hungSteps returns a text for each step that does not return, of the sagas that this runner holds.
func (r *Runner) hungSteps() (steps []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, h := range r.held {
		h.mu.Lock()
		for _, a := range h.overdue {
			if !h.lost {
				steps = append(steps, fmt.Sprintf("step %s of %s %q", a.step, h.p.name, id))
			}
		}
		h.mu.Unlock()
	}
	slices.Sort(steps)
	return steps
}

// dueAfter is the time for which a saga may be due before it is reported as overdue.
const dueAfter = time.Minute

func healthOf(counts []Count) policy.Health {
	stuck, due, waits := 0, 0, time.Duration(0)
	for _, c := range counts {
		stuck, due, waits = stuck+c.Stuck, due+c.Due, max(waits, c.DueFor)
	}
	var h policy.Health
	var details []string
	if waits >= dueAfter {
		h.Status, h.State = policy.Warn, "overdue"
		details = []string{fmt.Sprintf("%s due, the first for %v", number(due), waits.Round(time.Second))}
	}
	if stuck > 0 {
		h.Status, h.State = policy.Fail, "stuck"
		details = append([]string{number(stuck)}, details...)
	}
	h.Detail = strings.Join(details, "; ")
	return h
}

// number returns the text for a number of sagas. A number of store.CountLimit means that many sagas or more.
func number(n int) string {
	switch {
	case n >= store.CountLimit:
		return fmt.Sprintf("%d sagas or more", store.CountLimit)
	case n == 1:
		return "1 saga"
	}
	return fmt.Sprintf("%d sagas", n)
}
