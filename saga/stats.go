package saga

import (
	"cmp"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// Stats are the figures of one runner. The counters count since NewRunner and never go
// back.
type Stats struct {
	// Gauges.
	Held         int64 // sagas that the runner holds
	InFlight     int64 // attempts of Do and Undo under way
	Unregistered int64 // due sagas whose definition is not registered, at the last look

	// Counters. Completed, Compensated, Stuck and Abandoned count the sagas that this
	// runner has recorded so.
	Started     int64 // by a Start of this runner, or as children by its sagas; a StartTx is not counted
	Claimed     int64
	TakenOver   int64 // of those, from an owner that had not released them
	Completed   int64
	Compensated int64
	Stuck       int64
	Abandoned   int64
	Parked      int64 // written back until their next attempt
	Released    int64 // handed over because the runner stopped
	Lost        int64 // claimed by another runner, abandoned while held, or their lease ended
	Stalled     int64 // reports of sagas that make no progress; see OnStalled
	Refused     int64 // attempts that a policy refused
	Commits     int64 // writes of a held saga's progress; one may record several results
	Deleted     int64 // ended sagas that this runner has deleted; see RunnerConfig.Keep
	StoreErrors int64

	Sagas []SagaStats // by definition, in the order of their names
	Steps []StepStats // by definition, step and op, in the order of the definition

	// Stored are the numbers of the sagas in the store, those of all runners, at the last
	// look, whether Run is under way or not. Stored.Now is zero before the first look, and
	// after five minutes without a call of Runner.Stats.
	Stored Counts
}

// SagaStats are the figures of a registered definition. All of its versions count
// together.
type SagaStats struct {
	Saga        string // the definition's Name
	Started     int64
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

// counters are the counters of Stats that have no definition.
type counters struct {
	inFlight, started, claimed, takenOver, completed, compensated, stuck, abandoned       atomic.Int64
	parked, released, lost, stalled, refused, commits, storeErrors, unregistered, deleted atomic.Int64
}

// sagaCounts are the counters of a definition.
type sagaCounts struct {
	started, completed, compensated, stuck, abandoned, took atomic.Int64

	steps []*stepCounts // of all versions
}

// stepCounts are the counters of a step, or of one of its alternatives.
type stepCounts struct {
	name    string
	hasUndo bool
	do      opCounts
	undo    opCounts
}

type opCounts struct {
	done, noEffect, inDoubt, failed, refused, interrupted, took atomic.Int64
}

func (c *stepCounts) op(op Op) *opCounts {
	if op == OpUndo {
		return &c.undo
	}
	return &c.do
}

func (c *opCounts) count(outcome Outcome, took time.Duration) {
	if outcome != OutcomeRefused {
		c.took.Add(int64(took))
	}
	switch outcome {
	case OutcomeDone:
		c.done.Add(1)
	case OutcomeNoEffect:
		c.noEffect.Add(1)
	case OutcomeInDoubt:
		c.inDoubt.Add(1)
	case OutcomeFailed:
		c.failed.Add(1)
	case OutcomeRefused:
		c.refused.Add(1)
	case OutcomeInterrupted:
		c.interrupted.Add(1)
	}
}

// register returns a program with its counters. Versions of a definition share the
// counters of steps that have the same name. The caller holds r.mu.
func (r *Runner) register(p program) *registered {
	plan := p.planned()
	counts := r.sagas[plan.name]
	if counts == nil {
		counts = new(sagaCounts)
		r.sagas[plan.name] = counts
	}
	reg := &registered{program: p, counts: counts}
	for i := range plan.units {
		u := &plan.units[i]
		at := slices.IndexFunc(counts.steps, func(c *stepCounts) bool { return c.name == u.name })
		if at < 0 {
			at = len(counts.steps)
			counts.steps = append(counts.steps, &stepCounts{name: u.name})
		}
		counts.steps[at].hasUndo = counts.steps[at].hasUndo || u.hasUndo
		reg.steps = append(reg.steps, counts.steps[at])
	}
	return reg
}

// Stats returns the runner's figures. It waits for nothing: at most every five seconds it
// has the numbers in the store looked up in the background, for the next call.
func (r *Runner) Stats() Stats {
	r.look()
	c := &r.count
	s := Stats{
		InFlight: c.inFlight.Load(), Unregistered: c.unregistered.Load(),
		Started: c.started.Load(), Claimed: c.claimed.Load(), TakenOver: c.takenOver.Load(),
		Completed: c.completed.Load(), Compensated: c.compensated.Load(), Stuck: c.stuck.Load(), Abandoned: c.abandoned.Load(),
		Parked: c.parked.Load(), Released: c.released.Load(), Lost: c.lost.Load(), Stalled: c.stalled.Load(),
		Refused: c.refused.Load(), Commits: c.commits.Load(), StoreErrors: c.storeErrors.Load(), Deleted: c.deleted.Load(),
	}
	if stored := r.stored.Load(); stored != nil {
		s.Stored = Counts{slices.Clone(stored.Sagas), stored.Now}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s.Held = int64(len(r.held))
	for name, counts := range r.sagas {
		s.Sagas = append(s.Sagas, counts.stats(name))
		s.Steps = append(s.Steps, counts.stepStats(name)...)
	}
	slices.SortFunc(s.Sagas, func(a, b SagaStats) int { return strings.Compare(a.Saga, b.Saga) })
	slices.SortStableFunc(s.Steps, func(a, b StepStats) int { return cmp.Compare(a.Saga, b.Saga) })
	return s
}

func (c *sagaCounts) stats(name string) SagaStats {
	return SagaStats{
		Saga: name, Started: c.started.Load(), Completed: c.completed.Load(), Compensated: c.compensated.Load(),
		Stuck: c.stuck.Load(), Abandoned: c.abandoned.Load(), Took: time.Duration(c.took.Load()),
	}
}

func (c *sagaCounts) stepStats(name string) []StepStats {
	list := make([]StepStats, 0, 2*len(c.steps))
	for _, step := range c.steps {
		list = append(list, step.do.stats(name, step.name, OpDo))
		if step.hasUndo {
			list = append(list, step.undo.stats(name, step.name, OpUndo))
		}
	}
	return list
}

func (c *opCounts) stats(saga, step string, op Op) StepStats {
	return StepStats{
		Saga: saga, Step: step, Op: op,
		Done: c.done.Load(), NoEffect: c.noEffect.Load(), InDoubt: c.inDoubt.Load(), Failed: c.failed.Load(),
		Refused: c.refused.Load(), Interrupted: c.interrupted.Load(), Took: time.Duration(c.took.Load()),
	}
}
