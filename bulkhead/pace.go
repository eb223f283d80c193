package bulkhead

import (
	"math"
	"time"
)

// A pace is how fast the slots of a standing queue are handed on. It is forgotten
// when the queue is empty: how it moved then says nothing about the next one.
//
// The slots are timed in batches, and the faster of the last two batches counts,
// so that a single pause does not make the queue look slow.
type pace struct {
	slots  int              // handed on in this batch
	since  time.Duration    // when this batch began
	recent [2]time.Duration // a slot's time in the last two batches; 0: not known yet
}

const paceBatch = 8

func (p *pace) restart(now time.Duration) { *p = pace{since: now} }

// handed records that n slots were handed on, and reports whether that ends a batch.
func (p *pace) handed(n int) bool {
	p.slots += n
	return p.slots >= paceBatch
}

// ended begins the next batch.
func (p *pace) ended(now time.Duration) {
	p.recent[0], p.recent[1] = p.recent[1], (now-p.since)/time.Duration(p.slots)
	p.slots, p.since = 0, now
}

// least returns how long it takes at the least until n slots are handed on: the
// mean less two standard deviations, were they freed at random. It is 0 as long
// as the pace is not known.
func (p *pace) least(n int) time.Duration {
	count := float64(n) - 2*math.Sqrt(float64(n))
	if count <= 0 {
		return 0
	}
	return time.Duration(count * float64(min(p.recent[0], p.recent[1])))
}
