package saga

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
	store "github.com/go-resilience/resilience/internal/sagastore"
)

// Stats are the figures of one runner. The counters count since NewRunner and never go
// back.
type Stats struct {
	// Gauges.
	Held     int64 // sagas that the runner holds
	InFlight int64 // attempts of Do and Undo under way

	// Counters.
	Claimed     int64
	TakenOver   int64 // of those, from an owner that had not released them
	Lost        int64 // claimed by another runner, abandoned while held, or without a heartbeat in time
	Stalled     int64 // reports of steps that fail again and again: see EventStalled
	Commits     int64 // writes of a held saga's progress; one may record several results
	Deleted     int64 // ended sagas that this runner has deleted; see RunnerConfig.Keep
	StoreErrors int64

	Sagas []SagaStats // by definition, in the order of their names

	// Stored are the numbers of the sagas in the store, those of all runners, at the last
	// look, whether Run is under way or not. Stored.Now is zero before the first look, and
	// after five minutes without a call of Runner.Stats.
	Stored Counts
}

// SagaStats are the figures of a registered definition: the sagas that this runner has
// recorded so. All of its versions count together.
type SagaStats struct {
	Saga        string // the definition's Name
	Started     int64  // by a Start of this runner, or as children by its sagas; a StartTx is not counted
	Completed   int64
	Compensated int64
	Stuck       int64 // became stuck
	Abandoned   int64

	Attempts map[Outcome]int64 // of all steps
}

// CountLimit is the highest number of a [Count]. It stands for so many or more: a store
// that has kept a million sagas does not read them all to count them.
const CountLimit = store.CountLimit

// Counts are the numbers of the sagas in a store that have not ended, at Now.
type Counts struct {
	Sagas []Count   // by definition, in the order of their names
	Now   time.Time // the store's clock
}

// A Count has the numbers of the sagas of a definition that have not ended, in all its versions.
type Count struct {
	Saga         string // the definition's Name
	Running      int
	Compensating int
	Stuck        int

	Due       int       // running or compensating sagas that a runner may claim
	OldestDue time.Time // when the first of them became due; zero if there is none
}

// Stats returns the runner's figures. It waits for nothing: at most every five seconds it
// has the numbers in the store looked up in the background, for the next call.
func (r *Runner) Stats() Stats {
	s, look := r.figures.stats()
	if look {
		go r.lookUp()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s.Held = int64(len(r.held))
	return s
}

// lookUp asks the store for the numbers of its sagas.
func (r *Runner) lookUp() {
	ctx := context.WithValue(context.Background(), oursKey{}, true)
	ctx, cancel := context.WithTimeout(ctx, r.cfg.LeaseTTL)
	defer cancel()
	counts, err := r.Counts(ctx)
	r.figures.lookedUp(counts, err)
	if err != nil {
		r.storeFailed(ctx, err)
	}
}

// Counts counts the sagas of all definitions and runners that have not ended.
func (r *Runner) Counts(ctx context.Context) (Counts, error) {
	found, err := r.store.Counts(ctx)
	if err != nil {
		return Counts{}, fmt.Errorf("saga: counts: %w", err)
	}
	counts := Counts{Now: found.Now}
	for _, c := range found.Sagas {
		counts.Sagas = append(counts.Sagas, Count(c))
	}
	return counts, nil
}

const (
	lookEvery = 5 * time.Second // at the numbers of the sagas in the store, for Stats
	lookKept  = 5 * time.Minute // if nobody has asked meanwhile
)

// figures are what a runner counts.
type figures struct {
	mu    sync.Mutex
	total Stats                 // without Sagas
	sagas map[string]*SagaStats // of registered definitions, by name; all versions share them
	seen  map[string]Count      // of all definitions, by name: see stored

	looked  time.Time // when the latest look began at the numbers in the store
	looking bool
	warned  time.Time // when a failure of the store was last logged
}

// count changes the totals.
func (f *figures) count(change func(*Stats)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(&f.total)
}

// register begins the figures of a definition.
func (f *figures) register(saga string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.sagas[saga] == nil {
		f.sagas[saga] = &SagaStats{Saga: saga, Attempts: make(map[Outcome]int64)}
	}
}

// saga changes the figures of a definition, if that is registered.
func (f *figures) saga(name string, change func(*SagaStats)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.sagas[name]; s != nil {
		change(s)
	}
}

// entry counts an entry of the log of a saga.
func (s *SagaStats) entry(kind EventKind) {
	switch kind {
	case EventCreated:
		s.Started++
	case EventStuck:
		s.Stuck++
	case EventCompleted:
		s.Completed++
	case EventCompensated:
		s.Compensated++
	case EventAbandoned:
		s.Abandoned++
	}
}

// stats returns the figures, and whether the numbers in the store are to be looked up. They are
// forgotten when they are so old that they would mislead.
func (f *figures) stats() (s Stats, look bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if age := time.Since(f.looked); !f.looking && age >= lookEvery {
		if age > lookKept {
			f.total.Stored = Counts{}
		}
		f.looking, f.looked, look = true, time.Now(), true
	}
	s = f.total
	s.Stored.Sagas = slices.Clone(s.Stored.Sagas)
	for _, name := range slices.Sorted(maps.Keys(f.sagas)) {
		d := *f.sagas[name]
		d.Attempts = maps.Clone(d.Attempts)
		s.Sagas = append(s.Sagas, d)
	}
	return s, look
}

// warn reports whether a failure of the store is to be logged: one a second.
func (f *figures) warn() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(f.warned) < time.Second {
		return false
	}
	f.warned = time.Now()
	return true
}

// lookedUp takes in the numbers in the store, unless they could not be looked up.
func (f *figures) lookedUp(counts Counts, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.looking = false
	if err == nil {
		f.total.Stored = counts
	}
}

// Kind returns "saga".
func (r *Runner) Kind() string { return "saga" }

// Settings returns [Runner.Config] without its functions.
func (r *Runner) Settings() any {
	cfg := r.Config()
	cfg.OnEvent, cfg.Inject, cfg.Extract = nil, nil, nil
	return cfg
}

// Figures returns what a runner shows over time: saga.sagas by status, saga.step.attempts by outcome,
// saga.claims, saga.stalls, saga.held and saga.in_flight. saga.stored, saga.due and
// saga.due.age_seconds are those of all runners on the store, so they must not be added up. They are
// there for each definition that is registered or was seen in the store, and 0 while it has no such
// saga.
func (r *Runner) Figures() []describe.Figure {
	var all []describe.Figure
	count := func(name string, n float64) {
		all = append(all, describe.Figure{Name: name, Counter: true, Value: n})
	}
	gauge := func(name string, v float64) { all = append(all, describe.Figure{Name: name, Value: v}) }
	s := r.Stats()
	for _, d := range s.Sagas {
		of := "{saga=" + d.Saga
		count("saga.sagas"+of+",status=started}", float64(d.Started))
		count("saga.sagas"+of+",status=completed}", float64(d.Completed))
		count("saga.sagas"+of+",status=compensated}", float64(d.Compensated))
		count("saga.sagas"+of+",status=stuck}", float64(d.Stuck))
		count("saga.sagas"+of+",status=abandoned}", float64(d.Abandoned))
		for _, o := range []Outcome{
			OutcomeDone, OutcomeNoEffect, OutcomeInDoubt, OutcomeFailed, OutcomeRefused, OutcomeInterrupted,
		} {
			count("saga.step.attempts"+of+",outcome="+strings.ReplaceAll(string(o), " ", "_")+"}", float64(d.Attempts[o]))
		}
	}
	for _, c := range r.figures.stored(s) {
		of := "{saga=" + c.Saga
		gauge("saga.stored"+of+",status=running}", float64(c.Running))
		gauge("saga.stored"+of+",status=compensating}", float64(c.Compensating))
		gauge("saga.stored"+of+",status=stuck}", float64(c.Stuck))
		gauge("saga.due"+of+"}", float64(c.Due))
		gauge("saga.due.age_seconds"+of+"}", c.waits(s.Stored.Now).Seconds())
	}
	count("saga.claims", float64(s.Claimed))
	count("saga.stalls", float64(s.Stalled))
	gauge("saga.held", float64(s.Held))
	gauge("saga.in_flight", float64(s.InFlight))
	return all
}

// stored returns the numbers in the store of all definitions that are registered or were seen in it,
// by name. One that has none has zeros, also before the store has answered: a metric that ends is
// taken for its last value, and one that comes late is seen by nobody.
func (f *figures) stored(s Stats) []Count {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, d := range s.Sagas {
		f.seen[d.Saga] = Count{Saga: d.Saga}
	}
	for name := range f.seen {
		f.seen[name] = Count{Saga: name}
	}
	for _, c := range s.Stored.Sagas {
		f.seen[c.Saga] = c
	}
	return slices.SortedFunc(maps.Values(f.seen), func(a, b Count) int { return strings.Compare(a.Saga, b.Saga) })
}

// waits returns for how long the first saga that is due has waited.
func (c *Count) waits(now time.Time) time.Duration {
	if c.OldestDue.IsZero() {
		return 0
	}
	return max(now.Sub(c.OldestDue), 0)
}

// Health asks the store, and returns nil, or what is wrong with the sagas in it: some are stuck, or
// have been due for a minute while no runner took them. The error is that of the
// store, if it does not answer. Its methods HealthState() string and Failed() bool return "stuck",
// "overdue" or "store down", and whether sagas fail because of it: unless they are late alone.
func (r *Runner) Health(ctx context.Context) error {
	counts, err := r.Counts(ctx)
	if err != nil {
		return &healthError{state: "store down", err: err}
	}
	return health(counts)
}

// dueAfter is how long a saga may be due until that needs attention.
const dueAfter = time.Minute

func health(counts Counts) error {
	stuck, due, waits := 0, 0, time.Duration(0)
	for i := range counts.Sagas {
		c := &counts.Sagas[i]
		stuck, due, waits = stuck+c.Stuck, due+c.Due, max(waits, c.waits(counts.Now))
	}
	var state string
	var details []string
	if due > 0 && waits >= dueAfter {
		state, details = "overdue", []string{fmt.Sprintf("%s due, the first for %v", number(due), waits.Round(time.Second))}
	}
	if stuck > 0 {
		state, details = "stuck", append([]string{number(stuck)}, details...)
	}
	if state == "" {
		return nil
	}
	return &healthError{state: state, detail: strings.Join(details, "; ")}
}

// number returns a number of sagas in words. One that is CountLimit means so many or more.
func number(n int) string {
	switch {
	case n >= CountLimit:
		return fmt.Sprintf("%d sagas or more", CountLimit)
	case n == 1:
		return "1 saga"
	}
	return fmt.Sprintf("%d sagas", n)
}

type healthError struct {
	state, detail string
	err           error
}

func (e *healthError) Error() string {
	if e.err != nil {
		return e.state + ": " + e.err.Error()
	}
	return e.state + ": " + e.detail
}

func (e *healthError) Unwrap() error        { return e.err }
func (e *healthError) HealthState() string  { return e.state }
func (e *healthError) HealthDetail() string { return e.detail }
func (e *healthError) Failed() bool         { return e.state != "overdue" }
