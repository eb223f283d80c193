package breaker

import (
	"errors"
	"time"

	"github.com/sony/gobreaker/v2"
)

// A machine is a gobreaker, told what a generation is: it lives from the first failure until the breaker opens,
// or from an opening until the breaker opens or closes again. gobreaker decides when the breaker opens, which
// calls probe and when the breaker closes. The Breaker decides which failures are too many, for how long to
// open, and about probes that hang, break or are overdue, which gobreaker does not know.
type machine struct {
	*gobreaker.TwoStepCircuitBreaker[struct{}]
	tooMany bool // the failures so far open it
}

var (
	errIgnored = errors.New("breaker: ignored") // reported to gobreaker, never returned
	errFailed  = errors.New("breaker: failed")  // reported to gobreaker, never returned
)

// newMachine returns a closed machine.
func newMachine(settings gobreaker.Settings) *machine {
	m := new(machine)
	settings.ReadyToTrip = func(gobreaker.Counts) bool { return m.tooMany }
	settings.IsExcluded = func(err error) bool { return err == errIgnored }
	m.TwoStepCircuitBreaker = gobreaker.NewTwoStepCircuitBreaker[struct{}](settings)
	return m
}

// newOpenMachine returns a machine that is open for openFor and then half-open: it admits at most probes calls
// and closes when as many have succeeded.
func newOpenMachine(openFor time.Duration, probes int) *machine {
	m := newMachine(gobreaker.Settings{
		MaxRequests: uint32(probes),
		Timeout:     max(1, openFor-1), // gobreaker becomes half-open after it, a Breaker at the end of openFor
	})
	m.fail(true)
	return m
}

// fail reports a failure to a closed machine. It reports whether that opens the machine.
func (m *machine) fail(tooMany bool) (opened bool) {
	m.tooMany = tooMany
	done, _ := m.Allow()
	done(errFailed)
	return m.State() == gobreaker.StateOpen
}

// closed reports whether enough probes have succeeded.
func (m *machine) closed() bool { return m.State() == gobreaker.StateClosed }
