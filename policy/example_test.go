package policy_test

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/go-resilience/resilience/policy"
)

// A Gate is a policy that refuses calls while it is shut.
type Gate struct {
	name    string
	shut    atomic.Bool
	refused atomic.Int64
}

var _ policy.Describer = (*Gate)(nil)

type GateStats struct {
	Refused int64 `counter:"calls{outcome=refused}"`
}

func (g *Gate) Stats() GateStats { return GateStats{Refused: g.refused.Load()} }

func (g *Gate) Describe() policy.Description {
	return policy.Description{
		Kind:    "gate",
		Name:    g.name,
		Metrics: func() []policy.Metric { return policy.Metrics("gate", g.Stats()) },
		Health: func(context.Context) policy.Health {
			if g.shut.Load() {
				return policy.Health{Status: policy.Fail, State: "shut"}
			}
			return policy.Health{}
		},
	}
}

// A policy of your own appears in a registry, on the console and in metrics through one method.
func ExampleDescriber() {
	gate := &Gate{name: "deploys"}
	gate.shut.Store(true)
	gate.refused.Add(3)

	d := gate.Describe()
	health := d.Health(context.Background())
	fmt.Println(d.Kind, d.Name, health.Status, health.State)
	for _, m := range d.Metrics() {
		fmt.Println(m.Name, m.Value)
	}
	// Output:
	// gate deploys fail shut
	// gate.calls{outcome=refused} 3
}

func ExampleMetrics() {
	type Stats struct {
		Admitted int64            `counter:"calls{outcome=admitted}"`
		Refusals map[string]int64 `counter:"calls{outcome=refused,reason=*}"`
		State    string           `gauge:"state{state=closed|open}"`
	}
	for _, m := range policy.Metrics("gate", Stats{
		Admitted: 12,
		Refusals: map[string]int64{"shut": 3},
		State:    "open",
	}) {
		fmt.Println(m.Name, m.Counter, m.Value)
	}
	// Output:
	// gate.calls{outcome=admitted} true 12
	// gate.calls{outcome=refused,reason=shut} true 3
	// gate.state{state=closed} false 0
	// gate.state{state=open} false 1
}

func ExampleMetric_Parse() {
	m := policy.Metric{Name: "bulkhead.wait.time_seconds{level=1}"}
	what, unit, attrs := m.Parse()
	fmt.Println(what, unit, attrs)
	// Output: bulkhead.wait.time s [{level 1}]
}
