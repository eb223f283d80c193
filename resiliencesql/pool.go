package resiliencesql

import (
	"fmt"

	"github.com/go-resilience/resilience/internal/describe"
)

// What package registry reads of a pool: see its documentation.

func (p *pool) Kind() string { return "pool" }

func (p *pool) Figures() []describe.Figure {
	s := p.Stats()
	return []describe.Figure{
		{Name: "pool.limit", Value: float64(s.MaxOpenConnections)}, // 0 is any number
		{Name: "pool.in_use", Value: float64(s.InUse)},
		{Name: "pool.idle", Value: float64(s.Idle)},
		describe.Count("pool.waits", s.WaitCount),
		{Name: "pool.wait.time_seconds", Counter: true, Value: s.WaitDuration.Seconds()},
	}
}

func (p *pool) Health() error {
	if s := p.Stats(); s.MaxOpenConnections > 0 && s.InUse >= s.MaxOpenConnections {
		return &describe.Ailment{State: "full", Detail: fmt.Sprintf("all of %d in use", s.InUse)}
	}
	return nil
}
