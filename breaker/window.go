package breaker

import "time"

// Counts are the calls in a window.
type Counts struct {
	Calls     int64 // that were counted: not those that were ignored
	Succeeded int64 // slow ones included
	Failed    int64
	Slow      int64 // that took SlowAfter or longer, failed or not
}

func (c *Counts) add(n Counts) {
	c.Calls += n.Calls
	c.Succeeded += n.Succeeded
	c.Failed += n.Failed
	c.Slow += n.Slow
}

func (c *Counts) remove(n Counts) {
	c.add(Counts{-n.Calls, -n.Succeeded, -n.Failed, -n.Slow})
}

// A window remembers calls: those of the last time, or the last so many.
type window interface {
	add(failed, slow bool)
	counts() Counts
	clear()
}

func one(failed, slow bool) Counts {
	n := Counts{Calls: 1}
	if failed {
		n.Failed = 1
	} else {
		n.Succeeded = 1
	}
	if slow {
		n.Slow = 1
	}
	return n
}

const buckets = 10

// A timeWindow slides over buckets of a tenth of its length.
type timeWindow struct {
	now     func() time.Duration
	width   time.Duration // of a bucket
	current int64         // the number of the newest bucket, since the beginning
	total   Counts
	bucket  [buckets]Counts // by its number modulo buckets
}

func newTimeWindow(length time.Duration, now func() time.Duration) *timeWindow {
	return &timeWindow{now: now, width: length / buckets}
}

func (w *timeWindow) add(failed, slow bool) {
	w.slide()
	n := one(failed, slow)
	w.total.add(n)
	w.bucket[w.current%buckets].add(n)
}

func (w *timeWindow) counts() Counts {
	w.slide()
	return w.total
}

func (w *timeWindow) clear() {
	w.total, w.bucket = Counts{}, [buckets]Counts{}
}

func (w *timeWindow) slide() {
	newest := int64(w.now() / w.width)
	if newest <= w.current {
		return
	}
	for i := range min(newest-w.current, buckets) {
		old := &w.bucket[(newest-i)%buckets]
		w.total.remove(*old)
		*old = Counts{}
	}
	w.current = newest
}

// A callWindow is a ring of the last calls.
type callWindow struct {
	total Counts
	ring  []mark
	next  int
}

type mark uint8

const (
	markCall mark = 1 << iota
	markFailed
	markSlow
)

func newCallWindow(n int) *callWindow { return &callWindow{ring: make([]mark, n)} }

func (w *callWindow) add(failed, slow bool) {
	m := markCall
	if failed {
		m |= markFailed
	}
	if slow {
		m |= markSlow
	}
	if old := w.ring[w.next]; old == 0 {
		w.total.Calls++
	} else {
		w.count(old, -1)
	}
	w.count(m, +1)
	w.ring[w.next] = m
	w.next++
	if w.next == len(w.ring) {
		w.next = 0
	}
}

func (w *callWindow) count(m mark, n int64) {
	if m&markFailed != 0 {
		w.total.Failed += n
	} else {
		w.total.Succeeded += n
	}
	if m&markSlow != 0 {
		w.total.Slow += n
	}
}

func (w *callWindow) counts() Counts { return w.total }

func (w *callWindow) clear() {
	clear(w.ring)
	w.total, w.next = Counts{}, 0
}
