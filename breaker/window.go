package breaker

import (
	"math"
	"time"
)

// Counts are the results in a window.
type Counts struct {
	Calls     int64 // Succeeded and Failed
	Succeeded int64
	Failed    int64
	// FailedInARow have failed since the last success, in the window or not. Work that goes on is
	// none until it has ended well, or gone on for a Window.
	FailedInARow int64
}

// share returns the share of failed calls, 0 if there are none.
func share(failed, succeeded int64) float64 {
	return float64(failed) / float64(max(1, failed+succeeded))
}

const slotsInTime = 10 // a result leaves after 0.9 to 1 times Window

// A window counts the results of a time, in ten slots, or those of the last calls, each in a
// slot of its own. It is a ring: the slot with number n is at n modulo their number.
type window struct {
	slots       []slot
	retryAfters *[]retryAfters // by slot; nil until a failure has a RetryAfter
	width       time.Duration  // of a slot; 0 if each is a call
	end         time.Duration  // of the newest slot
	newest      int64          // its number, at least len(slots)
	succeeded   int64          // in all slots
	failed      int64
}

type slot struct{ succeeded, failed uint32 }

// retryAfters are the longest RetryAfter of the failures in a slot, and of those in the present row.
type retryAfters struct{ ever, inRow time.Duration }

// begin counts anew.
func (w *window) begin(cfg *Config, now time.Duration) {
	n, width := slotsInTime, cfg.Window/slotsInTime
	if cfg.WindowCalls > 0 {
		n, width = cfg.WindowCalls, 0
	}
	*w = window{slots: make([]slot, n), width: width, newest: int64(n)}
	w.advance(now)
}

// advance drops the results that are too old.
func (w *window) advance(now time.Duration) {
	if w.width == 0 || now < w.end {
		return
	}
	n := int64(now/w.width) + slotsInTime
	for i := range min(n-w.newest, slotsInTime) {
		w.drop(n - i)
	}
	w.newest, w.end = n, now-now%w.width+w.width
}

// place returns where a result counts that arrives now.
func (w *window) place(now time.Duration) int {
	if w.width == 0 {
		w.newest++
		w.drop(w.newest)
	}
	w.advance(now)
	return w.at(w.newest)
}

func (w *window) at(n int64) int { return int(n % int64(len(w.slots))) }

func (w *window) drop(n int64) {
	i := w.at(n)
	w.succeeded -= int64(w.slots[i].succeeded)
	w.failed -= int64(w.slots[i].failed)
	w.slots[i] = slot{}
	if w.retryAfters != nil {
		(*w.retryAfters)[i] = retryAfters{}
	}
}

func (w *window) succeed(now time.Duration) {
	if s := &w.slots[w.place(now)]; s.succeeded < math.MaxUint32 {
		s.succeeded++
		w.succeeded++
	}
}

func (w *window) fail(now, retryAfter time.Duration) { w.failAt(w.place(now), retryAfter) }

func (w *window) failAt(i int, retryAfter time.Duration) {
	if s := &w.slots[i]; s.failed < math.MaxUint32 {
		s.failed++
		w.failed++
	}
	if retryAfter > 0 {
		if w.retryAfters == nil {
			all := make([]retryAfters, len(w.slots))
			w.retryAfters = &all
		}
		a := &(*w.retryAfters)[i]
		a.ever, a.inRow = max(a.ever, retryAfter), max(a.inRow, retryAfter)
	}
}

// breakOff counts a failure in place of the newest success, if there is one. Among the last
// calls it takes that one's place: otherwise calls that all break off would never be enough.
func (w *window) breakOff(now, retryAfter time.Duration) {
	for n := w.newest; w.succeeded > 0; n-- {
		if i := w.at(n); w.slots[i].succeeded > 0 {
			w.slots[i].succeeded--
			w.succeeded--
			if w.width == 0 {
				w.failAt(i, retryAfter)
				return
			}
			break
		}
	}
	w.fail(now, retryAfter)
}

// endRow forgets which failures are in the present row.
func (w *window) endRow() {
	if w.retryAfters != nil {
		for i := range *w.retryAfters {
			(*w.retryAfters)[i].inRow = 0
		}
	}
}

// longest returns the longest RetryAfter of the failures in the window, or of those of them
// that are in the present row.
func (w *window) longest(inRow bool) (d time.Duration) {
	if w.retryAfters == nil {
		return 0
	}
	for _, a := range *w.retryAfters {
		if inRow {
			a.ever = a.inRow
		}
		d = max(d, a.ever)
	}
	return d
}
