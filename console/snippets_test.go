package console_test

import (
	"log/slog"
	"net/http"

	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
)

// The snippet of README.md, for the compiler: see TestSnippetsCompile. It is not run.
func _(retries, circuit, slots policy.Describer) (registry.Report, error) {
	reg := registry.New()
	reg.MustAdd(retries, circuit, slots) // each has a Name
	reg.Observe(registry.Log(slog.Default()))
	http.Handle("/debug/resilience/", http.StripPrefix("/debug/resilience",
		console.New(reg, console.Config{}))) // behind your login

	report, err := reg.Apply([]byte(`{"breaker/users": {"Failures": 10, "OpenFor": "45s"}}`))

	return report, err
}
