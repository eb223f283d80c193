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

// A demand is the state that the order of a line depends on.
type demand struct {
	standing  time.Duration // how long the line has not been empty
	abandoned bool          // a caller whose call waited has canceled it
	sinceGone time.Duration // time since the last such cancellation
	maxWait   time.Duration // Config.MaxWait
}

// patience replaces MaxWait in the order of a queue where that is [Unlimited].
const patience = time.Second

// order returns the order in which a line is served. If callers cancel calls that wait too long, the oldest call has
// the least time left, and its caller often cancels it before it returns. In a long burst of patient callers, oldest
// first is best. Only cancellations distinguish the two situations.
func (d demand) order() order {
	maxWait := d.maxWait
	if maxWait < 0 {
		maxWait = patience
	}
	if d.standing > maxWait/10 && d.abandoned && d.sinceGone <= maxWait {
		return newestFirst
	}
	return oldestFirst
}

// tooClose reports whether a call that has to wait has less time left than calls typically take. It is false if the
// typical time is not known.
func tooClose(left, typical time.Duration) bool { return typical > 0 && left < typical }

// service estimates how long a call holds its slots. The zero service is ready to use.
type service struct {
	recent [31]time.Duration // a ring
	n      int               // durations in recent
	next   int               // the index in recent of the next duration
	median time.Duration     // of recent, if it is current
	stale  bool              // median is not current
	timed  int               // calls that found free slots and were timed, since the last renew
}

const (
	fewTimes    = 8  // fewer durations do not make a typical time
	sampleEvery = 64 // one in so many calls that find free slots is timed
)

// add adds the time for which a call held its slots. It replaces the oldest duration.
func (s *service) add(d time.Duration) {
	s.recent[s.next] = d
	s.next++
	s.n = max(s.n, s.next)
	if s.next == len(s.recent) {
		s.next = 0
	}
	s.stale = true
}

// typical returns the median, or 0 if too few calls have been timed. It sorts: call it only for a call with a deadline.
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

// untimed returns how many calls that find free slots are not timed before the next of them is.
func (s *service) untimed() int {
	if s.timed < len(s.recent) {
		s.timed++
		return 0
	}
	return sampleEvery - 1
}

// renew has the next calls timed, because a call was refused for the typical time. Refused calls are not timed: without
// renew, a time from a slow period would continue to refuse calls that could be served.
func (s *service) renew() { s.timed = 0 }

// An ending is the state of the caller when its call ended.
type ending struct {
	cut  bool // its ctx cut the call short
	gone bool // its ctx is done
}

// endingOf returns the ending of a call that ran under ctx and returned err. A call that returned nil was not cut
// short, even if ctx is done: it ran for its full time.
func endingOf(ctx context.Context, err error) ending {
	kind := behavior.ReadUnder(ctx, err).Kind
	cut := kind == behavior.Canceled || kind == behavior.Overran
	return ending{cut: cut, gone: cut || ctx.Err() != nil}
}

// endingOfWork is endingOf for work that may have continued after its function had returned. Outer policies may have
// canceled ctx by then, so only its deadline and err count.
func endingOfWork(ctx context.Context, err error) ending {
	if behavior.Read(err).Kind != behavior.Failed {
		return ending{}
	}
	deadline, ok := ctx.Deadline()
	cut := errors.Is(err, context.Canceled) || ok && !time.Now().Before(deadline)
	return ending{cut: cut, gone: cut}
}
