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
// A shard that is up is always called. All suspects together are called one at a time, and after a call has failed they
// are not called until a pause is over. The same holds for all shards that are down. So in each pause, at most two
// callers wait for a Store that hangs, whatever its number of shards. The price is that a healthy suspect is skipped
// while another suspect is being called.
type shardState int

const (
	shardUp      shardState = iota // its last call succeeded, or it was not called
	shardSuspect                   // another shard has hung, and this one has not answered since
	shardDown                      // its last call failed
)

// slowFailure is the least duration of a failed call that counts as hung. A faster failure makes no other shard a
// suspect, because its caller hardly waits.
const slowFailure = 10 * time.Millisecond

// errPaused is the error of a call that is not made, because another call failed less than a pause ago.
var errPaused = errors.New("the Store failed less than ErrorPause ago")

// An outage decides which shards are called while some of them fail.
type outage struct {
	shards [256]struct {
		state    shardState
		hung     bool          // it is down, and counts as hung since its last failure
		answered time.Duration // when its last successful call returned
	}
	down int                          // number of shards that are down
	next [shardDown + 1]time.Duration // by state: when a shard in that state may be called
}

// admit reports whether shard is called now. A call that propagates a change is also made to a shard that is down but
// did not hang, because the source has already changed.
func (o *outage) admit(shard uint8, change bool, now, pause time.Duration) bool {
	s := &o.shards[shard]
	switch {
	case s.state == shardUp, change && s.state == shardDown && !s.hung:
		return true
	case now < o.next[s.state]:
		return false
	}
	o.next[s.state] = later(now, pause)
	return true
}

// succeed records a call that succeeded. The next shard in the same state may be called immediately.
func (o *outage) succeed(shard uint8, now time.Duration) {
	s := &o.shards[shard]
	if s.state == shardDown {
		o.down--
	}
	o.next[s.state] = 0
	s.state, s.answered = shardUp, now
}

// fail records a failed call that started at began. If the Store has begun to hang, then all shards that are down count
// as hung, and the others become suspects, except for the shards that have answered in the second half of the call.
func (o *outage) fail(shard uint8, began, now, pause time.Duration) {
	s := &o.shards[shard]
	was, hung := s.state, now-began >= slowFailure
	begins := hung && (was == shardUp || was == shardDown && !s.hung)
	s.state, s.hung = shardDown, hung
	if was != shardDown {
		o.down++
	}
	if was == shardUp || begins { // otherwise admit has started the pause
		o.next[shardDown] = later(now, pause)
	}
	if !begins {
		return
	}
	for i := range o.shards {
		s := &o.shards[i]
		if s.state == shardUp && s.answered <= began+(now-began)/2 {
			s.state = shardSuspect
		}
		s.hung = s.state == shardDown
	}
}
