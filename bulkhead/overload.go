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

// A pressure measures how often callers cancel calls that had to wait at a level. It becomes 0 when a call starts to
// wait while no other call waits at its level.
type pressure int

const (
	perCancel    pressure = 8  // a cancellation adds as much as 8 served calls subtract
	fromNewest   pressure = 48 // at this pressure or more, the newest call is served first
	mostPressure pressure = 64
)

// canceled returns the pressure after the caller of a call that had to wait has canceled the call.
func (p pressure) canceled() pressure { return min(p+perCancel, mostPressure) }

// served returns the pressure after a waiting call was served.
func (p pressure) served() pressure { return max(p-1, 0) }

// order returns the order in which calls are served. If callers cancel the calls that wait too long, the oldest call
// has the least time left: its caller often cancels the call before the call returns. In this case, newest first is
// best. In a long burst of calls whose callers do not cancel, oldest first is best. Only cancellations distinguish
// the two cases. A few cancellations are not enough, because some calls come too late even without overload if
// service times vary. Newest first would then also lose the other calls that wait.
func (p pressure) order() order {
	if p >= fromNewest {
		return newestFirst
	}
	return oldestFirst
}

// tooClose reports whether the time left for a call is less than the time that calls typically take. If typical is 0,
// which means unknown, tooClose returns false.
func tooClose(left, typical time.Duration) bool { return typical > 0 && left < typical }

// A service estimates the time for which a call holds its slots. The zero service is ready to use.
type service struct {
	recent [31]time.Duration // a ring buffer of the last measured times
	n      int               // the number of times in recent
	next   int               // the index in recent for the next measured time
	median time.Duration     // the median of recent, unless stale is true
	stale  bool              // recent has changed since median was computed
	timed  int               // the number of timed calls that found free slots, since the last renew
}

const (
	fewTimes    = 8   // the minimum number of measured times for which typical returns their median
	sampleEvery = 256 // after the first measurements, one of 256 calls that find free slots is measured
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

// typical returns the median of the measured times. If too few calls have been measured, it returns 0. typical may
// sort the times, so it is called only for a call with a deadline.
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

// untimed returns the number of calls to skip before a call is measured again. Only calls that find free slots are
// counted.
func (s *service) untimed() int {
	if s.timed < len(s.recent) {
		s.timed++
		return 0
	}
	return sampleEvery - 1
}

// renew makes the bulkhead measure the next calls that find free slots. It is called when a call is refused because
// of the typical time, because a refused call provides no new measurement. Without renew, the bulkhead could continue
// to use the typical time of a slow period, and refuse calls that it could serve.
func (s *service) renew() { s.timed = 0 }

// An ending is the state of a call's ctx when the call ends.
type ending struct {
	cut  bool // the call was cut short because its ctx was done
	gone bool // the ctx of the call is done
}

// endingOf returns the ending of a call that ran under ctx and returned err. A call that returned nil was not cut
// short, even if ctx is done.
func endingOf(ctx context.Context, err error) ending {
	kind := behavior.ReadUnder(ctx, err).Kind
	cut := kind == behavior.Canceled || kind == behavior.Overran
	return ending{cut: cut, gone: cut || ctx.Err() != nil}
}

// endingOfWork returns the ending of work that may have continued after the call's function had returned. Unlike
// endingOf, it does not check whether ctx is done, because outer policies may have canceled ctx when they returned. It
// checks ctx's deadline and err.
func endingOfWork(ctx context.Context, err error) ending {
	if behavior.Read(err).Kind != behavior.Failed {
		return ending{}
	}
	deadline, ok := ctx.Deadline()
	cut := errors.Is(err, context.Canceled) || ok && !time.Now().Before(deadline)
	return ending{cut: cut, gone: cut}
}
