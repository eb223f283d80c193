package registry_test

import (
	"database/sql"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/registry"
)

type aPool struct{ sql.DBStats }

func (*aPool) Name() string         { return "orders" }
func (p *aPool) Stats() sql.DBStats { return p.DBStats }

func TestAPoolThatIsUsedUpIsWorthKnowing(t *testing.T) {
	reg := registry.New()
	p := &aPool{sql.DBStats{MaxOpenConnections: 4, InUse: 3, Idle: 1, WaitCount: 7, WaitDuration: 1500e6}}
	reg.MustAdd(p)
	e, ok := reg.Get("pool", "orders")
	require.True(t, ok)
	require.NoError(t, e.Health(t.Context()))
	p.InUse = 4
	ill, _ := errors.AsType[*registry.HealthError](e.Health(t.Context()))
	require.Equal(t, &registry.HealthError{State: "full", Detail: "4 of 4 in use"}, ill)
	var lines []string
	for f := range e.Figures() {
		lines = append(lines, f.String())
	}
	require.Equal(t, []string{"pool.limit 4", "pool.in_use 4", "pool.idle 1", "pool.waits 7", "pool.wait.time 1.5"}, lines)
	p.MaxOpenConnections = 0 // no limit
	require.NoError(t, e.Health(t.Context()))
	require.True(t, reg.Remove(p))
}
