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

// Stats are the figures of one runner. The counters count since NewRunner.
type Stats struct {
	// Gauges.
	Held     int64 // sagas that the runner holds
	InFlight int64 // attempts of Do and Undo under way

	// Counters.
	Claimed     int64
	TakenOver   int64 // of those, from an owner that had not released them
	Lost        int64 // see EventLost
	Stalled     int64 // see EventStalled
	Commits     int64 // writes of a held saga's progress; one may record several results
	Deleted     int64 // see RunnerConfig.Keep
	StoreErrors int64

	Sagas []SagaStats // by definition, in the order of their names
}

// SagaStats count the sagas and attempts of a registered definition, in all its versions, that this
// runner has recorded.
type SagaStats struct {
	Saga        string // the definition's Name
	Started     int64  // by Start, or as children; not by StartTx
	Completed   int64
	Compensated int64
	Stuck       int64 // became stuck
	Abandoned   int64

	Attempts map[Outcome]int64 // of all steps
}

// CountLimit is the highest number of a [Count]. It stands for so many or more.
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

// Stats returns the runner's figures.
func (r *Runner) Stats() Stats {
	s := r.figures.stats()
	r.mu.Lock()
	defer r.mu.Unlock()
	s.Held = int64(len(r.held))
	return s
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

// figures are what a runner counts, and has seen in the store.
type figures struct {
	mu     sync.Mutex
	total  Stats                 // without Held and Sagas
	sagas  map[string]*SagaStats // of registered definitions, by name
	warned time.Time             // when a failure of the store was last logged

	// The numbers in the store, by name, of all definitions that are registered or were seen in it. One
	// that has none has zeros, also before the store has answered: a metric that ends is taken for its
	// last value, and one that comes late is seen by nobody.
	stored  map[string]Count
	at      time.Time // of stored, by the store's clock
	looked  time.Time // when the latest look at the store began
	looking bool
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
		f.stored[saga] = Count{Saga: saga}
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

func (f *figures) stats() Stats {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.total
	for _, name := range slices.Sorted(maps.Keys(f.sagas)) {
		d := *f.sagas[name]
		d.Attempts = maps.Clone(d.Attempts)
		s.Sagas = append(s.Sagas, d)
	}
	return s
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

const (
	lookEvery = 5 * time.Second // at the numbers of the sagas in the store
	lookKept  = 5 * time.Minute // if nobody has asked meanwhile: they would mislead
)

// stored returns the numbers of the sagas in the store at the last look, by name, and the time of it. It
// waits for nothing: the next look is in the background.
func (r *Runner) stored() ([]Count, time.Time) {
	f := &r.figures
	f.mu.Lock()
	defer f.mu.Unlock()
	if age := time.Since(f.looked); !f.looking && age >= lookEvery {
		if age > lookKept {
			f.store(Counts{})
		}
		f.looking, f.looked = true, time.Now()
		go r.look()
	}
	byName := func(a, b Count) int { return strings.Compare(a.Saga, b.Saga) }
	return slices.SortedFunc(maps.Values(f.stored), byName), f.at
}

// look asks the store for the numbers of its sagas.
func (r *Runner) look() {
	ctx := context.WithValue(context.Background(), oursKey{}, true)
	ctx, cancel := context.WithTimeout(ctx, r.cfg.LeaseTTL)
	defer cancel()
	counts, err := r.Counts(ctx)
	r.figures.mu.Lock()
	r.figures.looking = false
	if err == nil {
		r.figures.store(counts)
	}
	r.figures.mu.Unlock()
	if err != nil {
		r.storeFailed(ctx, err)
	}
}

// store takes in the numbers in the store. The caller holds f.mu.
func (f *figures) store(counts Counts) {
	for name := range f.stored {
		f.stored[name] = Count{Saga: name}
	}
	for _, c := range counts.Sagas {
		f.stored[c.Saga] = c
	}
	f.at = counts.Now
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
// saga.due.age_seconds are those of all runners on the store, at most some seconds old: do not add them
// up. They are there, if only as 0, for each definition that is registered or was seen in the store.
func (r *Runner) Figures() []describe.Figure {
	var all []describe.Figure
	count := func(name string, n int64) {
		all = append(all, describe.Figure{Name: name, Counter: true, Value: float64(n)})
	}
	gauge := func(name string, v float64) { all = append(all, describe.Figure{Name: name, Value: v}) }
	s := r.Stats()
	for _, d := range s.Sagas {
		of := "{saga=" + d.Saga
		count("saga.sagas"+of+",status=started}", d.Started)
		count("saga.sagas"+of+",status=completed}", d.Completed)
		count("saga.sagas"+of+",status=compensated}", d.Compensated)
		count("saga.sagas"+of+",status=stuck}", d.Stuck)
		count("saga.sagas"+of+",status=abandoned}", d.Abandoned)
		for _, o := range []Outcome{
			OutcomeDone, OutcomeNoEffect, OutcomeInDoubt, OutcomeFailed, OutcomeRefused, OutcomeInterrupted,
		} {
			count("saga.step.attempts"+of+",outcome="+strings.ReplaceAll(string(o), " ", "_")+"}", d.Attempts[o])
		}
	}
	stored, at := r.stored()
	for _, c := range stored {
		of := "{saga=" + c.Saga
		gauge("saga.stored"+of+",status=running}", float64(c.Running))
		gauge("saga.stored"+of+",status=compensating}", float64(c.Compensating))
		gauge("saga.stored"+of+",status=stuck}", float64(c.Stuck))
		gauge("saga.due"+of+"}", float64(c.Due))
		gauge("saga.due.age_seconds"+of+"}", c.waits(at).Seconds())
	}
	count("saga.claims", s.Claimed)
	count("saga.stalls", s.Stalled)
	gauge("saga.held", float64(s.Held))
	gauge("saga.in_flight", float64(s.InFlight))
	return all
}

// waits returns for how long the first saga that is due has waited.
func (c *Count) waits(now time.Time) time.Duration {
	if c.OldestDue.IsZero() {
		return 0
	}
	return max(now.Sub(c.OldestDue), 0)
}

// Health asks the store, and returns what is wrong with the sagas in it, or nil: some are stuck, or have
// been due for a minute while no runner took them, or the store does not answer. The methods
// HealthState() string and Failed() bool of the error return "stuck", "overdue" or "store down", and
// whether sagas fail: not if they are only overdue.
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
