package lease

import "github.com/go-resilience/resilience/policy"

// DescribeEvent is what a registry receives for e.
func DescribeEvent(e Event) policy.Event { return e.describe() }
