package breaker

// A State is what a [Breaker] does with calls, in words.
type State string

const (
	Closed     State = "closed"      // calls pass
	HalfOpen   State = "half-open"   // a few calls pass, as probes
	Open       State = "open"        // calls are refused until a time
	ForcedOpen State = "forced open" // calls are refused until Enable
	Disabled   State = "disabled"    // calls pass and are counted, until Enable
)
