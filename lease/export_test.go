package lease

import (
	"time"

	"github.com/go-resilience/resilience/policy"
)

// DescribeEvent is what a registry receives for e.
func DescribeEvent(e Event) policy.Event { return e.describe() }

// DueRun exports dueRun.
func DueRun(s Schedule, last, now time.Time) (run, next time.Time, err error) {
	return dueRun(s, last, now)
}
