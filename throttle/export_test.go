package throttle

import (
	"time"

	"github.com/go-resilience/resilience/throttle/internal/shared"
)

// SetRand makes a draw its probabilities from random, in [0, 1).
func (a *Adaptive) SetRand(random func() float64) { a.rand = random }

// SlotOf returns the hash slot of a key in Redis.
func SlotOf(key string) uint16 { return shared.SlotOf(key) }

// OutageSlots returns of how many slots an outage is remembered.
func (s *Shared) OutageSlots() int { return s.redis.Stats().Slots }

// Never is the wait of a call that costs more than there can be.
const Never = never

// An Arrival is what a call finds for which the tokens are not there.
type Arrival struct{ Wait, MaxWait, Left, Ahead time.Duration }

// Refusal returns why the call may not wait.
func (a Arrival) Refusal() Reason { return arrival{a.Wait, a.MaxWait, a.Left, a.Ahead}.refusal() }
