package breaker

import "time"

// Counts are the calls in a window.
type Counts struct {
	Calls     int64 // Succeeded and Failed, without ignored calls
	Succeeded int64
	Failed    int64
	// Slow is how many calls, failed or not, took SlowAfter or longer, or failed when
	// the deadline of their caller passed: see [Config].Patience.
	Slow int64
	// FailedInARow is how many calls have failed since the last success, in the window
	// or not. A success whose body is still being read is not one yet.
	FailedInARow int64
}

func (c Counts) failureRate() float64 { return rate(c.Failed, c.Calls) }
func (c Counts) slowRate() float64    { return rate(c.Slow, c.Calls) }

func rate(n, of int64) float64 {
	if of == 0 {
		return 0
	}
	return float64(n) / float64(of)
}

// A window remembers the calls of a length of time, or a number of calls.
type window interface {
	succeeded(n int64) // counts fast successes before the window slides
	slide(now time.Duration) (until time.Duration)
	add(failed, slow bool)
	counts() Counts
}

func newWindow(c *Config) window {
	if c.WindowCalls > 0 {
		return newCallWindow(c.WindowCalls)
	}
	return newTimeWindow(c.Window)
}

// A tally counts the calls of a window or of one of its buckets.
type tally struct{ calls, failed, slow int64 }

func (t *tally) add(failed, slow bool) {
	t.calls++
	if failed {
		t.failed++
	}
	if slow {
		t.slow++
	}
}

func (t *tally) remove(o tally) {
	t.calls -= o.calls
	t.failed -= o.failed
	t.slow -= o.slow
}

func (t *tally) counts() Counts {
	return Counts{Calls: t.calls, Succeeded: t.calls - t.failed, Failed: t.failed, Slow: t.slow}
}

const buckets = 10

// A timeWindow slides over buckets of a tenth of its length.
type timeWindow struct {
	width   time.Duration // of a bucket
	current int64         // the number of the newest bucket
	end     time.Duration // of that bucket
	total   tally
	bucket  [buckets]tally // by its number modulo buckets
}

func newTimeWindow(length time.Duration) *timeWindow {
	return &timeWindow{width: length / buckets, end: length / buckets}
}

func (w *timeWindow) succeeded(n int64) {
	w.total.calls += n
	w.bucket[w.current%buckets].calls += n
}

func (w *timeWindow) add(failed, slow bool) {
	w.total.add(failed, slow)
	w.bucket[w.current%buckets].add(failed, slow)
}

func (w *timeWindow) counts() Counts { return w.total.counts() }

// slide drops the buckets that have become too old, and returns the end of the newest.
func (w *timeWindow) slide(now time.Duration) time.Duration {
	if now >= w.end {
		newest := int64(now / w.width)
		for i := range min(newest-w.current, buckets) {
			old := &w.bucket[(newest-i)%buckets]
			w.total.remove(*old)
			*old = tally{}
		}
		w.current = newest
		w.end = now - now%w.width + w.width
	}
	return w.end
}

// A callWindow is a ring of the last calls.
type callWindow struct {
	total tally
	ring  []mark
	next  int
}

type mark uint8

const (
	markCall mark = 1 << iota
	markFailed
	markSlow
)

// tally returns what a call with this mark has added; the zero mark is no call.
func (m mark) tally() tally {
	return tally{int64(m & markCall), int64(m & markFailed / markFailed), int64(m & markSlow / markSlow)}
}

func newCallWindow(n int) *callWindow { return &callWindow{ring: make([]mark, n)} }

func (w *callWindow) succeeded(n int64) {
	for range min(n, int64(len(w.ring))) { // they leave no other call
		w.add(false, false)
	}
}

func (w *callWindow) slide(time.Duration) time.Duration { return forever }

func (w *callWindow) add(failed, slow bool) {
	m := markCall
	if failed {
		m |= markFailed
	}
	if slow {
		m |= markSlow
	}
	w.total.remove(w.ring[w.next].tally())
	w.total.add(failed, slow)
	w.ring[w.next] = m
	w.next++
	if w.next == len(w.ring) {
		w.next = 0
	}
}

func (w *callWindow) counts() Counts { return w.total.counts() }
