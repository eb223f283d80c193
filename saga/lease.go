package saga

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// A lease is what the rest of the runner has of a saga that it holds: it extends the lease or
// ends it, and asks the goroutine of the saga to look around. It is safe for concurrent use.
type lease struct {
	epoch  int64
	stop   context.CancelCauseFunc // ends the attempts
	timer  *time.Timer             // fires at the end
	signal chan struct{}           // a field below has changed
	over   atomic.Bool             // the saga is written back or has ended

	asked atomic.Pointer[string] // the note of a cancellation request, until heed has seen it
	news  atomic.Bool            // a signal has come, or a child has ended, since the last look

	term time.Duration // its length

	mu    sync.Mutex
	until time.Time // its end, by the local clock
	gone  bool
}

func newLease(epoch int64, stop context.CancelCauseFunc, since time.Time, term time.Duration) *lease {
	l := &lease{epoch: epoch, stop: stop, signal: make(chan struct{}, 1), term: term, until: since.Add(term)}
	l.timer = time.AfterFunc(time.Until(l.until), l.lose)
	return l
}

// renew moves the end of the lease, after a heartbeat that was sent at since.
func (l *lease) renew(since time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer.Stop() {
		l.until = since.Add(l.term)
		l.timer.Reset(time.Until(l.until))
	}
}

// lose gives up a saga that another runner has, or may have by now, and ends its
// attempts.
func (l *lease) lose() {
	l.mu.Lock()
	l.gone = true
	l.mu.Unlock()
	l.stop(errLost)
	l.nudge()
}

// lost reports whether this owner may no longer act. A process that was stopped learns
// it here before its timers fire.
func (l *lease) lost() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.gone || !time.Now().Before(l.until)
}

// nudge wakes the goroutine of the saga.
func (l *lease) nudge() {
	select {
	case l.signal <- struct{}{}:
	default:
	}
}

// cancel passes on a request to turn back.
func (l *lease) cancel(note string) {
	l.asked.Store(&note)
	l.nudge()
}

// tellNews says that something outside has happened.
func (l *lease) tellNews() {
	l.news.Store(true)
	l.nudge()
}
