package breaker

import (
	"math"
	"time"
)

// Counts are the numbers of results in the window of a [Breaker].
type Counts struct {
	Succeeded int64
	Failed    int64
	// ConsecutiveFailures is the number of failures since the last success, even if some of the failures have left the
	// window. Failed calls and broken streams are counted separately, and ConsecutiveFailures is the larger of the two
	// numbers. Failures of calls in flight together may form a burst, which counts as one failure; see the package
	// documentation.
	ConsecutiveFailures int64
}

// failureRate returns the fraction of failed calls, or 0 if there are no calls.
func failureRate(failed, succeeded int64) float64 {
	return float64(failed) / float64(max(1, failed+succeeded))
}

const timeSlots = 10

// A window counts results in a ring of slots. A time-based window has timeSlots slots, each of a tenth of
// Config.Window. A window with WindowCalls has one slot per call. The slot with number n is at index n modulo the
// number of slots. Except for reset, the duration of a method does not depend on the number of slots.
type window struct {
	slots       []slot
	width       time.Duration // the duration of a slot; 0 if WindowCalls is set
	end         time.Duration // the time at which the newest slot ends; not used if WindowCalls is set
	newest      int64         // the number of the newest slot, at least len(slots)
	lastSuccess int64         // the number of the newest slot with a success; not used if succeeded is 0
	succeeded   int64         // the sum of succeeded of all slots
	failed      int64         // the sum of failed of all slots

	bursts []burst // the largest burst, then the largest of the later bursts, and so on
	hints  []hint  // the longest hint, then the longest of the later hints, and so on
}

type slot struct {
	succeeded, failed uint32
	back              uint32 // the number of slots back to the previous slot with a success; valid if succeeded is not 0
}

// A burst is a group of failures whose calls were in flight together.
type burst struct {
	first moment // the start of the run to which the burst belongs
	last  int64  // the number of the newest slot at the burst's last failure
	size  int64  // the number of failures in the burst
}

// A hint is the RetryAfter of a failure.
type hint struct {
	slot       int64         // the number of the newest slot at the failure
	retryAfter time.Duration // the RetryAfter of the failure
}

// reset empties the window.
func (w *window) reset(cfg *Config, now time.Duration) {
	n, width := timeSlots, cfg.Window/timeSlots
	if cfg.WindowCalls > 0 {
		n, width = cfg.WindowCalls, 0
	}
	*w = window{slots: make([]slot, n), width: width, newest: int64(n)}
	w.advance(now)
}

// advance clears the slots that are too old at now. It does nothing if WindowCalls is set.
func (w *window) advance(now time.Duration) {
	if w.width == 0 || now < w.end {
		return
	}
	n := int64(now/w.width) + timeSlots
	for i := range min(n-w.newest, timeSlots) {
		w.clear(n - i)
	}
	w.newest, w.end = n, now-now%w.width+w.width
}

// next returns the index of the slot that counts a result at now.
func (w *window) next(now time.Duration) int {
	if w.width == 0 {
		w.newest++
		w.clear(w.newest)
	}
	w.advance(now)
	return w.index(w.newest)
}

func (w *window) index(n int64) int { return int(n % int64(len(w.slots))) }

func (w *window) clear(n int64) {
	i := w.index(n)
	w.succeeded -= int64(w.slots[i].succeeded)
	w.failed -= int64(w.slots[i].failed)
	w.slots[i] = slot{}
}

func (w *window) succeed(now time.Duration) {
	s := &w.slots[w.next(now)]
	if s.succeeded == 0 {
		s.back = uint32(min(w.newest-w.lastSuccess, math.MaxUint32))
		w.lastSuccess = w.newest
	}
	if s.succeeded < math.MaxUint32 {
		s.succeeded++
		w.succeeded++
	}
}

// fail counts a failure. retryAfter is the RetryAfter of the failure, or 0 if the failure has none.
func (w *window) fail(now, retryAfter time.Duration) { w.failAt(w.next(now), retryAfter) }

func (w *window) failAt(i int, retryAfter time.Duration) {
	if s := &w.slots[i]; s.failed < math.MaxUint32 {
		s.failed++
		w.failed++
	}
	if retryAfter > 0 {
		w.addHint(retryAfter)
	}
}

// replaceSuccess counts a failure and removes the newest success, if the window has a success. If WindowCalls is set,
// the failure takes the slot of the success. If a call whose stream breaks took two slots, the window might never
// hold enough calls to reach MinCalls.
func (w *window) replaceSuccess(now, retryAfter time.Duration) {
	w.advance(now)
	if w.succeeded == 0 {
		w.fail(now, retryAfter)
		return
	}
	i := w.index(w.lastSuccess)
	s := &w.slots[i]
	s.succeeded--
	w.succeeded--
	if s.succeeded == 0 {
		w.lastSuccess -= int64(s.back)
	}
	if w.width > 0 {
		i = w.index(w.newest)
	}
	w.failAt(i, retryAfter)
}

// addHint stores the RetryAfter of a failure. It removes the earlier hints that are not longer, because dropOld
// would drop those hints before the new one.
func (w *window) addHint(retryAfter time.Duration) {
	w.dropOld()
	n := len(w.hints)
	for n > 0 && w.hints[n-1].retryAfter <= retryAfter {
		n--
	}
	w.hints = w.hints[:n]
	if n == 0 || w.hints[n-1].slot < w.newest {
		w.hints = append(w.hints, hint{w.newest, retryAfter})
	}
}

// longestRetryAfter returns the longest RetryAfter of the failures in the window. It returns 0 if no failure has a
// RetryAfter.
func (w *window) longestRetryAfter() time.Duration {
	w.dropOld()
	if len(w.hints) == 0 {
		return 0
	}
	return w.hints[0].retryAfter
}

// addToBurst adds f to the newest burst if f's call was in flight when the newest burst started. Otherwise
// addToBurst starts a new burst, with first as the start. The window must have counted f already. addToBurst
// removes the earlier bursts that are not larger, because dropOld would drop those bursts before the new one.
func (w *window) addToBurst(f failure, first moment) {
	w.dropOld()
	n := len(w.bursts) - 1
	if n < 0 || !w.bursts[n].first.interrupted(f) {
		w.bursts = append(w.bursts, burst{first: first})
		n++
	}
	newest := w.bursts[n]
	newest.size++
	newest.last = w.newest
	for n > 0 && w.bursts[n-1].size <= newest.size {
		n--
	}
	w.bursts = append(w.bursts[:n], newest)
}

// events returns the number of failures in the window. If the largest burst has at least half of the failures,
// the burst counts as one failure.
func (w *window) events() int64 {
	w.dropOld()
	if len(w.bursts) == 0 {
		return w.failed
	}
	largest := w.bursts[0]
	size := min(largest.size, w.failed) // some failures of the burst may have left the window
	if w.width == 0 {
		size = min(size, int64(len(w.slots))-(w.newest-largest.last))
	}
	if size*2 < w.failed {
		return w.failed
	}
	return w.failed - (size - 1)
}

// dropOld drops the hints and bursts that have left the window.
func (w *window) dropOld() {
	oldest := w.newest - int64(len(w.slots)) + 1
	for len(w.hints) > 0 && w.hints[0].slot < oldest {
		w.hints = w.hints[1:]
	}
	for len(w.bursts) > 0 && w.bursts[0].last < oldest {
		w.bursts = w.bursts[1:]
	}
}
