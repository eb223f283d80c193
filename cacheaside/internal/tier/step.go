package tier

import "github.com/go-resilience/resilience/cacheaside/internal/entry"

// A Step is what a load does with the answer of a Store.
type Step int

const (
	Use       Step = iota // return the value, which is fresh
	UseOld                // return the value, which is past its TTL
	Load                  // load the value, and fill the Store
	LoadAlone             // load the value, which is not kept
	AskAgain              // ask for the lease: the value cannot be read
	Unpause               // ask for the lease: there is nothing to serve during the pause
	Rest                  // ask again after a rest
	Refuse                // the State is none of those that there are
)

// Next returns the step after an answer: its State and what its value may be used for.
func Next(s State, value entry.Standing, absent, none bool) Step {
	switch s {
	case Hit:
		if none {
			return AskAgain
		}
		return Use
	case Leased:
		return Load
	case Fenced:
		return LoadAlone
	case Missed: // a load failed recently, and the next is not due
		switch {
		case value == entry.Dead || absent:
			return Unpause
		case value == entry.Fresh:
			return Use
		}
		return UseOld
	case Busy:
		if value == entry.Stale {
			return UseOld
		}
		return Rest
	}
	return Refuse
}
