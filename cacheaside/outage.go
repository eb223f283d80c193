package cacheaside

import (
	"errors"
	"time"
)

// A shardState is what a process knows about a shard of the Store.
//
//	          a call fails                       a call fails
//	      ┌───────────────────────┐          ┌────────────────┐
//	      │                       v          v                │
//	shardUp ──────────────> shardSuspect ──────────> shardDown ┘
//	   ^  another shard hangs     │                      │
//	   └──────────────────────────┴──────────────────────┘
//	                     a call succeeds
//
// Calls of a shard that is up are always made. Of all shards that are suspects, one call is made at a time, and after
// it has failed none until a pause is over; the same holds for all shards that are down. So at most two callers wait
// for a Store that hangs in each pause, however many shards it has.
type shardState int

const (
	shardUp      shardState = iota // its last call succeeded, or none was made
	shardSuspect                   // another shard has hung, and this one has not answered since
	shardDown                      // its last call failed
)

// slowFailure is how long a failing call takes at least to be a wait. A faster failure makes no other shard a suspect,
// because it costs its caller nothing.
const slowFailure = 10 * time.Millisecond

// errPaused is the error of a call that is not made, because the last one failed less than a pause ago.
var errPaused = errors.New("the Store failed less than ErrorPause ago")

// An outage decides which calls of the Store are made while some of its shards fail.
type outage struct {
	shards [256]struct {
		state    shardState
		hung     bool          // its last failure was slow
		answered time.Duration // when its last successful call ended
	}
	down int                          // number of shards that are down
	next [shardDown + 1]time.Duration // by state, when the next call may be made
}

// admit reports whether a call of shard is made now.
func (o *outage) admit(shard uint8, now, pause time.Duration) bool {
	s := o.shards[shard].state
	if s == shardUp {
		return true
	}
	if now < o.next[s] {
		return false
	}
	o.next[s] = later(now, pause)
	return true
}

// admitChange is admit for a call that propagates a change. It is also made if the shard has failed without a wait,
// because the source has changed already.
func (o *outage) admitChange(shard uint8, now, pause time.Duration) bool {
	return o.shards[shard].state == shardDown && !o.shards[shard].hung || o.admit(shard, now, pause)
}

// succeed records the end of a call. The next shard in the same state is tried at once.
func (o *outage) succeed(shard uint8, now time.Duration) {
	s := &o.shards[shard]
	if s.state == shardDown {
		o.down--
	}
	o.next[s.state] = 0
	s.state, s.answered = shardUp, now
}

// fail records the end of a call that began at a time. If its shard was up, the others become suspects, but for those
// that have answered in the second half of the call: they do not hang.
func (o *outage) fail(shard uint8, began, now, pause time.Duration) {
	s := &o.shards[shard]
	was := s.state
	if was != shardDown {
		o.down++
	}
	s.state, s.hung = shardDown, now-began >= slowFailure
	if was != shardUp {
		return // admit has begun the pause
	}
	o.next[shardDown] = later(now, pause)
	if !s.hung {
		return
	}
	for i := range o.shards {
		if s := &o.shards[i]; s.state == shardUp && s.answered <= began+(now-began)/2 {
			s.state = shardSuspect
		}
	}
}
