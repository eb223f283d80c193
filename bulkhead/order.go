package bulkhead

import "time"

// An Order says which of the waiting calls of one level is served first.
type Order string

const (
	// FIFO serves the call that has waited longest. A call whose deadline, or MaxWait,
	// the queue cannot meet at its present pace is refused immediately. The pace is
	// known once 16 slots have been handed on since the queue was last empty; until
	// then, no call is refused for it. A full queue refuses the new call.
	FIFO Order = "FIFO"

	// LIFO serves the newest call: under overload some calls are served fast, where
	// FIFO would serve all of them late. A full queue refuses the oldest call
	// for the new one.
	LIFO Order = "LIFO"

	// CoDel is FIFO until the queue has not been empty for MaxWait (100 ms if that is
	// negative). From then on, until the queue is empty, it is LIFO, and whenever a slot
	// is handed on, calls that have waited for more than a twentieth of that time are
	// refused: controlled delay with adaptive LIFO, as in Maurer, Fail at Scale, ACM
	// Queue 13(8), 2015.
	CoDel Order = "CoDel"
)

// CoDel allows a wait of one codelFraction of the time after which a queue stands. That
// is MaxWait, or codelInterval.
const (
	codelInterval = 100 * time.Millisecond
	codelFraction = 20
)

func (r *rules) standing() time.Duration {
	if r.MaxWait > 0 {
		return r.MaxWait
	}
	return codelInterval
}
