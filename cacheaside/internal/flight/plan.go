package flight

import (
	"time"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
)

// A Call is what a call asks about a key.
type Call struct {
	SkipMemory bool          // no entry in memory, and no flight under way, will do
	Stale      time.Duration // how long after its TTL an entry may be served, if longer than its own stale time
	Early      bool          // the entry is to be refreshed, though it is fresh
}

// A Move is what a call does.
type Move int

const (
	Serve   Move = iota // return the entry
	Refresh             // return the entry, and launch a flight that replaces it
	Wait                // wait for the flight that is under way
	Launch              // launch a flight, and wait for it
)

// Decide returns the move of a call that finds an entry, or nil, and whether a flight is
// under way; and what the entry may be used for.
func Decide[V any](e *entry.Entry[V], now time.Duration, call Call, underWay bool) (Move, entry.Standing) {
	how := e.Standing(now)
	if how < entry.Stale && e != nil && !e.Absent && now < entry.After(e.Fresh, call.Stale) {
		how = entry.Stale
	}
	paused := e.Paused(now)
	switch {
	case how == entry.Dead || how == entry.Kept && !paused:
		if underWay {
			return Wait, how
		}
		return Launch, how
	case !underWay && !paused && (how == entry.Stale || call.Early):
		return Refresh, how
	}
	return Serve, how
}

// A Plan is the move of a call, with the entry and the flight that it is about.
type Plan[K comparable, V any] struct {
	Move     Move
	Entry    *entry.Entry[V] // to be served, or to be replaced; may be nil
	Standing entry.Standing
	Flight   *Flight[K, V] // to be waited for; nil if it must be launched
}

// Plan returns what a call for key does. It is called under the lock under which the
// plan's flight is launched or joined.
func (t *Table[K, V]) Plan(key K, now time.Duration, call Call) (p Plan[K, V]) {
	if call.SkipMemory && t.Entries != nil {
		t.overtake(key)
		p.Move = Launch
		return p
	}
	p.Flight, p.Entry = t.current(key), t.Peek(key)
	p.Move, p.Standing = Decide(p.Entry, now, call, p.Flight != nil)
	return p
}
