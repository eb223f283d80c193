package saga

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/saga/internal/plan"
	"github.com/go-resilience/resilience/saga/store"
)

// Stats are the figures of one runner. The counters count since NewRunner and never go
// back.
type Stats struct {
	// Gauges.
	Held         int64 // sagas that the runner holds
	InFlight     int64 // attempts of Do and Undo under way
	Unregistered int64 // due sagas whose definition is not registered, at the last look

	// Counters.
	Claimed     int64
	TakenOver   int64 // of those, from an owner that had not released them
	Lost        int64 // claimed by another runner, abandoned while held, or their lease ended
	Stalled     int64 // reports of sagas that make no progress; see RunnerConfig.StalledAfter
	Commits     int64 // writes of a held saga's progress; one may record several results
	Deleted     int64 // ended sagas that this runner has deleted; see RunnerConfig.Keep
	StoreErrors int64
	HookPanics  int64 // of hooks and observers

	Sagas []SagaStats // by definition, in the order of their names
	Steps []StepStats // by definition, step and op, in the order of the definition

	// Stored are the numbers of the sagas in the store, those of all runners, at the last
	// look, whether Run is under way or not. Stored.Now is zero before the first look, and
	// after five minutes without a call of Runner.Stats.
	Stored store.Counts
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
}

// StepStats are the figures of the attempts of a step, or of one of its alternatives. The
// counters are those of the [Outcome] of the same name.
type StepStats struct {
	Saga        string // the definition's Name
	Step        string // the step or alternative
	Op          Op
	Done        int64
	NoEffect    int64
	InDoubt     int64
	Failed      int64
	Refused     int64
	Interrupted int64

	Took time.Duration // the sum of all attempts that were not refused
}

// figures are what a runner counts.
type figures struct {
	mu    sync.Mutex
	total Stats                   // without Sagas and Steps
	sagas map[string]*sagaFigures // by name of the definition
}

type sagaFigures struct {
	SagaStats
	steps []*stepFigures // of all versions
}

// stepFigures are those of a step, or of one of its alternatives.
type stepFigures struct {
	do, undo StepStats
	hasUndo  bool
}

// count changes the totals.
func (f *figures) count(change func(*Stats)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(&f.total)
}

// of returns the figures of the steps of a plan. Versions of a definition share those of steps
// that have the same name.
func (f *figures) of(p *plan.Plan) (list []*stepFigures) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.sagas == nil {
		f.sagas = make(map[string]*sagaFigures)
	}
	own := f.sagas[p.Name]
	if own == nil {
		own = &sagaFigures{SagaStats: SagaStats{Saga: p.Name}}
		f.sagas[p.Name] = own
	}
	for i := range p.Units {
		u := &p.Units[i]
		at := slices.IndexFunc(own.steps, func(s *stepFigures) bool { return s.do.Step == u.Name })
		if at < 0 {
			at = len(own.steps)
			own.steps = append(own.steps, &stepFigures{
				do: StepStats{Saga: p.Name, Step: u.Name, Op: OpDo}, undo: StepStats{Saga: p.Name, Step: u.Name, Op: OpUndo},
			})
		}
		own.steps[at].hasUndo = own.steps[at].hasUndo || u.HasUndo
		list = append(list, own.steps[at])
	}
	return list
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
func (f *figures) attempt(step *stepFigures, op Op, outcome Outcome, took time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := &step.do
	if op == OpUndo {
		s = &step.undo
	}
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
		s.Sagas = append(s.Sagas, f.sagas[name].SagaStats)
		for _, step := range f.sagas[name].steps {
			s.Steps = append(s.Steps, step.do)
			if step.hasUndo {
				s.Steps = append(s.Steps, step.undo)
			}
		}
	}
	return s
}
