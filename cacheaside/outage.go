package cacheaside

import (
	"errors"
	"time"
)

// A shardState is what this process assumes about a shard, a part of the Store that may fail while other parts work.
//
//	          a call fails                       a call fails
//	      ┌───────────────────────┐          ┌────────────────┐
//	      │                       v          v                │
//	shardUp ──────────────> shardSuspect ──────────> shardDown ┘
//	   ^  another shard hangs     │                      │
//	   └──────────────────────────┴──────────────────────┘
//	                     a call succeeds
//
// A shard that is up is always called. Of all suspect shards together, one is called in each pause, which is
// Config.ErrorPause long. If that call succeeds, the next suspect may be called immediately. The same rule applies to
// all shards that are down. So if the whole Store hangs, at most two callers wait for it in each pause, however many
// shards it has. The price is that a healthy suspect is skipped while another suspect is being called.
type shardState int

const (
	shardUp      shardState = iota // its last call succeeded, or it was not called
	shardSuspect                   // another shard has hung, and this one has not answered since
	shardDown                      // its last call failed
)

// slowFailure is the duration from which on a failed call counts as hung. A call that fails faster hardly delays its
// caller, so it does not make other shards suspects.
const slowFailure = 10 * time.Millisecond

// errPaused is the error for a call that the Cache does not make, because another call failed less than a pause ago.
var errPaused = errors.New("Store failed less than ErrorPause ago")

// An outage decides which shards are called while some of them fail.
type outage struct {
	shards [256]struct {
		state    shardState
		hung     bool          // the shard is down, and calls to it are assumed to hang
		answered time.Duration // time at which its last successful call returned
	}
	down int                          // number of shards that are down
	next [shardDown + 1]time.Duration // for each state, the time at which a shard in that state may be called
}

// admit reports whether shard may be called now. change reports whether the call propagates a change to the Store. Such
// a call may also be made to a shard that is down but does not hang, because the source has already changed.
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

// succeed records a call that succeeded. Another shard in the same state may then be called immediately.
func (o *outage) succeed(shard uint8, now time.Duration) {
	s := &o.shards[shard]
	if s.state == shardDown {
		o.down--
	}
	o.next[s.state] = 0
	s.state, s.answered = shardUp, now
}

// fail records a failed call that started at began. If the call has hung, and earlier calls to the shard did not, then
// the whole Store may have started to hang. In this case all shards that are down are assumed to hang, and the shards
// that are up become suspects. Only a shard that has answered another call during the second half of this call stays
// up.
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
