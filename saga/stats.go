package saga

import (
	"maps"
	"slices"
	"sync"
	"time"

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
	Lost        int64 // claimed by another runner, abandoned while held, or their lease ended
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

	// Took is the sum of the whole lives, from Start to end, of the sagas that were
	// Completed, Compensated or Abandoned.
	Took time.Duration

	Attempts AttemptStats // of all steps
}

// AttemptStats are the figures of the attempts of steps. The counters are those of the [Outcome]
// of the same name.
type AttemptStats struct {
	Done        int64
	NoEffect    int64
	InDoubt     int64
	Failed      int64
	Refused     int64
	Interrupted int64

	Took time.Duration // the sum of all attempts that were not refused
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

// figures are what a runner counts.
type figures struct {
	mu    sync.Mutex
	total Stats                 // without Sagas
	sagas map[string]*SagaStats // by name of the definition
}

// count changes the totals.
func (f *figures) count(change func(*Stats)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(&f.total)
}

// of begins the figures of a definition. All versions share them.
func (f *figures) of(saga string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.sagas == nil {
		f.sagas = make(map[string]*SagaStats)
	}
	if f.sagas[saga] == nil {
		f.sagas[saga] = &SagaStats{Saga: saga}
	}
}

// entry counts an entry of the log of a saga. life is how old the saga is.
func (f *figures) entry(saga string, kind EventKind, life time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	own := f.sagas[saga]
	if own == nil {
		return // not registered
	}
	switch kind {
	case EventCreated:
		own.Started++
	case EventCompleted:
		own.Completed++
		own.Took += life
	case EventCompensated:
		own.Compensated++
		own.Took += life
	case EventAbandoned:
		own.Abandoned++
		own.Took += life
	case EventStuck:
		own.Stuck++
	}
}

// attempt counts an attempt of a step.
func (f *figures) attempt(saga string, outcome Outcome, took time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := &f.sagas[saga].Attempts
	switch outcome {
	case OutcomeDone:
		s.Done++
	case OutcomeNoEffect:
		s.NoEffect++
	case OutcomeInDoubt:
		s.InDoubt++
	case OutcomeFailed:
		s.Failed++
	case OutcomeInterrupted:
		s.Interrupted++
	case OutcomeRefused:
		s.Refused++
		return // Took is of the others
	}
	s.Took += took
}

// stats returns the figures.
func (f *figures) stats() Stats {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.total
	for _, name := range slices.Sorted(maps.Keys(f.sagas)) {
		s.Sagas = append(s.Sagas, *f.sagas[name])
	}
	return s
}
