package faults

import (
	"errors"
	"fmt"
	"slices"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Config configures a [Script]. A script with the zero Config does nothing.
type Config struct {
	// Name identifies the script in a registry.Registry, which requires a name. The name of a script cannot
	// change.
	Name string
	// Enabled specifies whether the plans apply. If Enabled is false, calls run as if there were no script.
	Enabled bool
	// Seed is the seed of the random decisions. With the same seed, the script makes the same decisions
	// again.
	Seed uint64
	// Plans lists the faults. A Latency plan only delays a call, and every other plan decides how the call
	// ends. If several plans that are not Latency plans apply to a call, the first of them decides.
	Plans []Plan
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	var errs []error
	for i, p := range c.Plans {
		f := invalid.Fields{Type: fmt.Sprintf("faults.Config.Plans[%d]", i)}
		f.Need(slices.Contains(kinds, p.Kind), "Kind", fmt.Sprintf("%q", p.Kind), fmt.Sprintf("one of %q", kinds))
		f.Need(p.At >= 0, "At", p.At, "0 or more")
		f.Need(p.For >= 0, "For", p.For, "0 (for no end) or more")
		f.Need(p.Share >= 0 && p.Share <= 1, "Share", p.Share, "0 (for 1) or in (0, 1]")
		f.Need(p.Count >= 0, "Count", p.Count, "0 (for no limit) or more")
		f.Need(p.Delay >= 0, "Delay", p.Delay, "0 or more")
		f.Need(p.Spread >= 0, "Spread", p.Spread, "0 or more")
		f.Need(p.Status == 0 || p.Status >= 200 && p.Status <= 599, "Status", p.Status, "0 (for 503) or in [200, 599]")
		f.Need(p.RetryAfter >= 0, "RetryAfter", p.RetryAfter, "0 (for none) or more")
		f.Need(p.Bytes >= 0, "Bytes", p.Bytes, "0 or more")
		f.Need(p.Rate >= 0, "Rate", p.Rate, "0 (for 1000) or more")
		errs = append(errs, f.Err())
	}
	return errors.Join(errs...)
}
