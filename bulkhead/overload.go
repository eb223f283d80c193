package bulkhead

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// An order determines which waiting call in a line is served next.
type order int

const (
	oldestFirst order = iota
	newestFirst
)

// A pressure measures how often callers cancel calls that had to wait at a level. When a call starts to wait while no
// other call waits at its level, the pressure of the level is 0.
type pressure int

const (
	perCancel    pressure = 8  // a cancellation counts as much as this number of served calls
	fromNewest   pressure = 48 // from this pressure on, the newest call is served first
	mostPressure pressure = 64
)

// canceled returns the pressure after the caller of a call that had to wait has canceled the call.
func (p pressure) canceled() pressure { return min(p+perCancel, mostPressure) }

// served returns the pressure after a waiting call was served.
func (p pressure) served() pressure { return max(p-1, 0) }

// order returns the order in which calls are served. If callers cancel calls that wait too long, the oldest call has
// the least time left. Its caller often cancels the call before the call returns, so newest first is best. In a long
// burst of calls from patient callers, oldest first is best. Only cancellations distinguish the two situations. A few
// cancellations are not enough: if service times vary, some calls come too late even without overload. Newest first
// would then also lose the other calls that wait.
func (p pressure) order() order {
	if p >= fromNewest {
		return newestFirst
	}
	return oldestFirst
}

// tooClose reports whether the time left for a call is less than the time that calls typically take. If the typical
// time is not known (0), tooClose returns false.
func tooClose(left, typical time.Duration) bool { return typical > 0 && left < typical }

// A service estimates how long a call holds its slots. The zero service is ready to use.
type service struct {
	recent [31]time.Duration // a ring buffer of the last measured times
	n      int               // the number of times in recent
	next   int               // the index in recent for the next measured time
	median time.Duration     // the median of recent, unless stale is true
	stale  bool              // recent has changed since median was computed
	timed  int               // the number of timed calls that found free slots, since the last renew
}

const (
	fewTimes    = 8   // the minimum number of measured times for a typical time
	sampleEvery = 256 // of this number of calls that find free slots, one call is timed
)

// add adds the time for which a call held its slots. If the ring buffer is full, the new time replaces the oldest time.
func (s *service) add(d time.Duration) {
	s.recent[s.next] = d
	s.next++
	s.n = max(s.n, s.next)
	if s.next == len(s.recent) {
		s.next = 0
	}
	s.stale = true
}

// typical returns the median of the measured times. If too few calls have been timed, it returns 0. typical may sort
// the times, so it is called only for a call with a deadline.
func (s *service) typical() time.Duration {
	if s.n < fewTimes {
		return 0
	}
	if s.stale {
		sorted := s.recent
		slices.Sort(sorted[:s.n])
		s.median, s.stale = sorted[s.n/2], false
	}
	return s.median
}

// untimed returns the number of calls to skip before a call is timed again. Only calls that find free slots are
// counted.
func (s *service) untimed() int {
	if s.timed < len(s.recent) {
		s.timed++
		return 0
	}
	return sampleEvery - 1
}

// renew makes the bulkhead time the next calls that find free slots. It is called when a call is refused because of the
// typical time. A refused call gives no new time. Without renew, the bulkhead could continue to use the typical time of
// a slow period, and refuse calls that it could serve.
func (s *service) renew() { s.timed = 0 }

// An ending is the state of a call's ctx at the end of the call.
type ending struct {
	cut  bool // the call was cut short because its ctx was done
	gone bool // the ctx of the call is done
}

// endingOf returns the ending of a call that ran under ctx and returned err. A call that returned nil ran for its full
// time. Such a call was not cut short, even if ctx is done.
func endingOf(ctx context.Context, err error) ending {
	kind := behavior.ReadUnder(ctx, err).Kind
	cut := kind == behavior.Canceled || kind == behavior.Overran
	return ending{cut: cut, gone: cut || ctx.Err() != nil}
}

// endingOfWork is like endingOf, but for work that may have continued after the call's function had returned. Outer
// policies may have canceled ctx by then. Therefore endingOfWork uses only ctx's deadline and err.
func endingOfWork(ctx context.Context, err error) ending {
	if behavior.Read(err).Kind != behavior.Failed {
		return ending{}
	}
	deadline, ok := ctx.Deadline()
	cut := errors.Is(err, context.Canceled) || ok && !time.Now().Before(deadline)
	return ending{cut: cut, gone: cut}
}
