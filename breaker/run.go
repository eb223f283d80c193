package breaker

import "time"

// burstSpan is how long after the first failure of a run other calls that were in flight then may fail as
// part of the same event, such as a lost connection. It is also how long a run with such a burst opens
// nothing: retries that meet a server that restarts fail, too.
const burstSpan = 250 * time.Millisecond

// A moment is when a run of failures began.
type moment struct {
	number uint32 // counts the beginnings of runs
	at     time.Duration
}

// A failure is a failed call or a broken stream.
type failure struct {
	admitted   uint32 // the number of the last moment before the call was admitted
	at         time.Duration
	timeout    bool          // it was noticed because too much time passed
	retryAfter time.Duration // that the dependency asked for; 0 if it did not
}

// interrupted reports whether f is one event with the failure at m: its call was in flight at m and failed
// soon after. Calls are ordered by numbers, not by time, so that the clock is not read for each call.
func (m moment) interrupted(f failure) bool {
	return int32(f.admitted-m.number) < 0 && f.at-m.at <= burstSpan
}

// A run is consecutive failures of one kind, calls or streams. The zero run has none.
type run struct {
	count      int           // of failures; a burst counts as one. 0 after a success
	timeouts   int           // of count
	retryAfter time.Duration // the longest one

	// The first failure of the last run and its burst. A success does not reset them: failures that belong
	// to the burst may still arrive.
	first moment
	burst int // the number of failures in the burst; 0 before the first run
}

// add counts f. If f begins a run, it does so at moment number. add reports whether f belongs to the burst of
// its run, as the first failure or a later one; otherwise it counts by itself.
func (r *run) add(f failure, number uint32) (inBurst bool) {
	switch {
	case r.first.interrupted(f): // never by the zero moment
		inBurst = true
		r.burst++
	case r.count == 0:
		inBurst = true
		*r = run{first: moment{number, f.at}, burst: 1, count: 1}
	default:
		r.count++
	}
	if f.timeout && (!inBurst || r.burst == 1) {
		r.timeouts++
	}
	if r.count > 0 {
		r.retryAfter = max(r.retryAfter, f.retryAfter)
	}
	return inBurst
}

// end ends the run because of a success.
func (r *run) end() { r.count, r.timeouts, r.retryAfter = 0, 0, 0 }

// undecided reports whether the run may still turn out to be a single event: it has a burst and is young.
// If half of it are timeouts, it is not: each of them has waited long enough.
func (r *run) undecided(now time.Duration) bool {
	return r.burst > 1 && now-r.first.at < burstSpan && 2*r.timeouts < r.count
}

// tooManyConsecutive reports whether the failures in r reach ConsecutiveFailures.
func (c *Config) tooManyConsecutive(r *run, now time.Duration) bool {
	return c.ConsecutiveFailures > 0 && r.count >= c.ConsecutiveFailures && !r.undecided(now)
}

// tooManyInWindow reports whether the failures in the window, of which a burst counts as one, reach
// FailuresInWindow or FailureRate.
func (c *Config) tooManyInWindow(succeeded, failed int64) bool {
	return c.FailuresInWindow > 0 && failed >= int64(c.FailuresInWindow) ||
		c.FailureRate > 0 && succeeded+failed >= int64(c.MinCalls) && failureRate(failed, succeeded) >= c.FailureRate
}
