package saga

import (
	"time"

	"github.com/go-resilience/resilience/policy"
)

// SetChance replaces the source of the pauses by chance between two calls of the store.
func (r *Runner) SetChance(f func(below time.Duration) time.Duration) { r.chance = f }

// DescribeEvent returns e as a registry receives it from the runner of that name.
func DescribeEvent(e Event, runner string) policy.Event { return e.describe(runner) }
