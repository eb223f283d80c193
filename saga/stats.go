package saga

import "sync/atomic"

// Stats are the figures of one runner, counted since NewRunner.
type Stats struct {
	Held     int64 // sagas that it holds now
	Attempts int64 // attempts of Do and Undo that run now

	Started     int64 // by a Start of this runner; whether a StartTx is committed it cannot know
	Claimed     int64 // from the store
	TakenOver   int64 // of those, from an owner that had not given them up
	Completed   int64
	Compensated int64
	Stuck       int64
	Refused     int64 // calls refused before the participant was called: no attempts
	Parked      int64 // given up until a later attempt
	Failing     int64 // reports of sagas that make no progress: see OnFailing
	Released    int64 // handed over because the runner stopped
	Lost        int64 // taken by another, or the lease ran out

	Commits     int64 // writes of a state: one for each result or for several together
	StoreErrors int64
	// Unregistered is how many sagas were due, when last looked at, that this
	// runner does not know.
	Unregistered int64
}

type counters struct {
	attempts, started, claimed, takenOver, completed, compensated, stuck         atomic.Int64
	refused, parked, failing, released, lost, commits, storeErrors, unregistered atomic.Int64
}

// Stats returns the runner's figures. List shows the sagas of all runners.
func (r *Runner) Stats() Stats {
	r.mu.Lock()
	held := len(r.held)
	r.mu.Unlock()
	c := &r.count
	return Stats{
		Held: int64(held), Attempts: c.attempts.Load(),
		Started: c.started.Load(), Claimed: c.claimed.Load(), TakenOver: c.takenOver.Load(),
		Completed: c.completed.Load(), Compensated: c.compensated.Load(), Stuck: c.stuck.Load(),
		Refused: c.refused.Load(), Parked: c.parked.Load(), Failing: c.failing.Load(), Released: c.released.Load(), Lost: c.lost.Load(),
		Commits: c.commits.Load(), StoreErrors: c.storeErrors.Load(), Unregistered: c.unregistered.Load(),
	}
}
