package breaker

import (
	"errors"
	"time"

	"github.com/sony/gobreaker/v2"
)

// A machine is a gobreaker state machine that a Breaker uses for a limited time. A closed machine is used from the
// first failure until the breaker opens. An open machine is used from an opening until the breaker opens or closes
// again. gobreaker decides when the breaker opens, which calls are probes, and when the breaker closes. The Breaker
// decides how many failures are too many, and calculates the open time. The Breaker also handles the probes that
// gobreaker does not handle: probes that hang, probes that return late, and probes whose streams break.
type machine struct {
	*gobreaker.TwoStepCircuitBreaker[struct{}]
	tooMany bool // the failures recorded so far are enough to open the machine
}

var (
	errIgnored = errors.New("breaker: ignored") // reported to gobreaker, never returned to a caller
	errFailed  = errors.New("breaker: failed")  // reported to gobreaker, never returned to a caller
)

// newMachine returns a closed machine.
func newMachine(settings gobreaker.Settings) *machine {
	m := new(machine)
	settings.ReadyToTrip = func(gobreaker.Counts) bool { return m.tooMany }
	settings.IsExcluded = func(err error) bool { return err == errIgnored }
	m.TwoStepCircuitBreaker = gobreaker.NewTwoStepCircuitBreaker[struct{}](settings)
	return m
}

// newOpenMachine returns a machine that is open for openFor and then half-open. The half-open machine admits at most
// probes calls. It closes when that number of calls has succeeded.
func newOpenMachine(openFor time.Duration, probes int) *machine {
	m := newMachine(gobreaker.Settings{
		MaxRequests: uint32(probes),
		// A Breaker becomes half-open when openFor has elapsed. gobreaker becomes half-open only after more than Timeout
		// has elapsed.
		Timeout: max(1, openFor-1),
	})
	m.fail(true)
	return m
}

// fail reports a failure to a closed machine. The failure opens the machine if tooMany is true. opened reports
// whether the machine is open now.
func (m *machine) fail(tooMany bool) (opened bool) {
	m.tooMany = tooMany
	done, _ := m.Allow()
	done(errFailed)
	return m.State() == gobreaker.StateOpen
}

// closed reports whether enough probes have succeeded.
func (m *machine) closed() bool { return m.State() == gobreaker.StateClosed }
