package bulkhead

import (
	"context"
	"time"
)

// Shares returns how many shares b knows.
func Shares(b *Bulkhead) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.queue.shares)
}

// A Waiting is a share of which calls wait, as the decisions about turns see it.
type Waiting struct {
	Name        string
	Held, Calls int
}

func queueOf(waiting []Waiting) (q queue) {
	q.shares, q.pressure = map[string]*share{}, make([]pressure, 1)
	for _, w := range waiting {
		of := q.shareFor(w.Name)
		q.count(of, w.Held, 0)
		for range w.Calls {
			q.add(&waiter{slots: slots{cost: 1, share: of}})
		}
	}
	return q
}

// Turns returns the shares that the next n slots go to, each of which is given back
// before the next.
func Turns(n int, waiting []Waiting) (order string) {
	q := queueOf(waiting)
	for range n {
		w := q.next()
		q.remove(w, true)
		order += w.share.name
	}
	return order
}

// TooClose is tooClose.
func TooClose(left, typical time.Duration) bool { return tooClose(left, typical) }

// Typical returns the typical time after calls that held their slots for the given times.
func Typical(times []time.Duration) time.Duration {
	var s service
	for _, d := range times {
		s.add(d)
	}
	return s.typical()
}

// Ending returns whether a call that ended was cut short, and whether its caller was gone.
func Ending(ctx context.Context, err error) (cut, gone bool) {
	e := endingOf(ctx, err)
	return e.cut, e.gone
}
