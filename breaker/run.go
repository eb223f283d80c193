package breaker

import "time"

// burstSpan is the longest time between the first failure of a run and another failure of the same burst. If the
// burst of a run has more than one failure, the run does not open the breaker before burstSpan has elapsed. There is
// an exception for a run in which at least half of the failures are timeouts. With burstSpan, a breaker stays closed
// when a server restarts: the restart breaks the calls in flight, and the first retries of these calls also fail.
const burstSpan = 250 * time.Millisecond

// A moment is the start of a run of failures.
type moment struct {
	number uint32        // the run's number; the runs of a breaker are numbered from 1
	at     time.Duration // the time of the run's first failure
}

// A failure is a failed call or a stream that broke.
type failure struct {
	admitted   uint32        // the number of the newest run when the call was admitted; 0 before the first run
	at         time.Duration // the time of the failure
	timeout    bool          // the call timed out
	retryAfter time.Duration // the RetryAfter of the failure's error; 0 if none
}

// interrupted reports whether f and the failure at m are one event. They are one event if f's call was admitted
// before m and failed at most burstSpan after m. interrupted compares run numbers to find out whether the call was
// admitted before m, because a comparison of times would need a reading of the clock for each call.
func (m moment) interrupted(f failure) bool {
	return int32(f.admitted-m.number) < 0 && f.at-m.at <= burstSpan
}

// A run is a series of consecutive failed calls, or of consecutive broken streams. The zero run has no failures.
type run struct {
	count      int           // number of failures, where a burst counts as one; 0 after a success
	timeouts   int           // number of timeouts in count; a burst is a timeout if its first failure is a timeout
	retryAfter time.Duration // the longest retryAfter of the failures

	// A success does not reset first and burst, because failures that belong to the burst may still arrive.
	first moment // the start of the last run
	burst int    // number of failures in the burst of the last run; 0 before the first run
}

// add counts f. If f starts a new run, number becomes the number of the new run. add reports whether f belongs to
// the burst of the run. The first failure of a run always belongs to the burst.
func (r *run) add(f failure, number uint32) (inBurst bool) {
	switch {
	case r.first.interrupted(f): // false before the first run
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

// end ends the run. It is called after a success.
func (r *run) end() { r.count, r.timeouts, r.retryAfter = 0, 0, 0 }

// undecided reports whether the failures in the run may still turn out to be a single event. This is so if the run's
// burst has more than one failure and the run started less than burstSpan ago. It is not so if at least half of the
// failures are timeouts, because a call that timed out has waited long enough.
func (r *run) undecided(now time.Duration) bool {
	return r.burst > 1 && now-r.first.at < burstSpan && 2*r.timeouts < r.count
}

// tooManyConsecutive reports whether the failures in r reach ConsecutiveFailures.
func (c *Config) tooManyConsecutive(r *run, now time.Duration) bool {
	return c.ConsecutiveFailures > 0 && r.count >= c.ConsecutiveFailures && !r.undecided(now)
}

// tooManyInWindow reports whether the failures in the window reach FailuresInWindow or FailureRate. The caller
// must have counted a large burst as one failure; see window.events.
func (c *Config) tooManyInWindow(succeeded, failed int64) bool {
	return c.FailuresInWindow > 0 && failed >= int64(c.FailuresInWindow) ||
		c.FailureRate > 0 && succeeded+failed >= int64(c.MinCalls) && failureRate(failed, succeeded) >= c.FailureRate
}
