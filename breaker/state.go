package breaker

import "fmt"

// A State is what a [Breaker] does with calls.
type State uint8

const (
	Closed     State = iota // calls pass
	HalfOpen                // a few calls pass, as probes
	Open                    // calls are refused until a time
	ForcedOpen              // calls are refused until Enable
	Disabled                // calls pass and are counted, until Enable
)

var stateNames = [...]string{"closed", "half-open", "open", "forced open", "disabled"}

// String returns the state in words: "half-open".
func (s State) String() string {
	if int(s) >= len(stateNames) {
		return fmt.Sprintf("breaker.State(%d)", uint8(s))
	}
	return stateNames[s]
}

// MarshalText returns the text of [State.String].
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
