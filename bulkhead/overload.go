package bulkhead

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// An order says which call of a line is served next.
type order int

const (
	oldestFirst order = iota
	newestFirst
)

// A demand is what the order of a line depends on.
type demand struct {
	standing  time.Duration // time for which a call of the line has been waiting at every moment
	abandoned bool          // a caller that waited has given up
	sinceGone time.Duration // time since the last of these gave up
	maxWait   time.Duration // Config.MaxWait
}

// patience replaces MaxWait in the order of a queue where that is [Unlimited].
const patience = time.Second

// order returns the order in which a line is served. If callers give up, the oldest call of a line that stands has
// the least time left, and often its caller is gone before the call returns. Patient callers that arrive in a long
// burst are best served oldest first. Only callers that give up tell the two apart.
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
}

const (
	fewTimes    = 8  // fewer durations do not make a typical time
	sampleEvery = 64 // of the calls that find free slots, one in so many is timed
)

// add adds the time for which a call held its slots, in place of the oldest.
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
	if s.n < len(s.recent) {
		return 0
	}
	return sampleEvery - 1
}

// An ending is what the end of a call tells about its caller.
type ending struct {
	cut  bool // the caller's ctx cut the call short
	gone bool // the caller's ctx has ended
}

// endingOf returns how a call ended that was made under ctx and returned err. A call whose ctx has ended and that
// returned nil was not cut short: it took as long as it takes.
func endingOf(ctx context.Context, err error) ending {
	kind := behavior.ReadUnder(ctx, err).Kind
	cut := kind == behavior.Canceled || kind == behavior.Overran
	return ending{cut: cut, gone: cut || ctx.Err() != nil}
}

// endingOfWork is endingOf for work that may have continued after its function had returned. Outer policies may have
// canceled ctx long before, which tells nothing; its deadline is the caller's.
func endingOfWork(ctx context.Context, err error) ending {
	if behavior.Read(err).Kind != behavior.Failed {
		return ending{}
	}
	deadline, ok := ctx.Deadline()
	cut := errors.Is(err, context.Canceled) || ok && !time.Now().Before(deadline)
	return ending{cut: cut, gone: cut}
}
