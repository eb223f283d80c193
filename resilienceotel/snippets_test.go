package resilienceotel_test

import (
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resilienceotel"
)

// The snippet of README.md, for the compiler: see TestSnippetsCompile. It is not run.
func _(reg *registry.Registry) error {
	stop, err := resilienceotel.Observe(reg, resilienceotel.Config{})
	defer stop()
	return err
}
