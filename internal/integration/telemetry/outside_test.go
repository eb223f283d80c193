package telemetry_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A policy of another module appears in a registry, in a console, in a health endpoint and as metrics.
func TestPolicyOfAnotherModule(t *testing.T) {
	root, err := filepath.Abs("../../..")
	require.NoError(t, err)
	dir := t.TempDir()
	put := func(name string, text ...[]byte) {
		var all []byte
		for _, part := range text {
			all = append(all, part...)
		}
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), all, 0o600))
	}
	file := func(name string) []byte { return []byte(read(t, name)) }
	put("main.go", file("testdata/outside/main.go"))
	put("go.sum", file("../../../resilienceotel/go.sum"), file("../../../go.sum"))
	mod := strings.NewReplacer(
		"module github.com/go-resilience/resilience/resilienceotel", "module example.com/outside",
		"=> ..", "=> "+root,
	).Replace(read(t, "../../../resilienceotel/go.mod"))
	for _, module := range []string{"resilienceotel", "console"} {
		mod += "\nrequire github.com/go-resilience/resilience/" + module + " v0.0.0\n" +
			"replace github.com/go-resilience/resilience/" + module + " => " + root + "/" + module + "\n"
	}
	put("go.mod", []byte(mod))
	run := exec.Command("go", "run", ".")
	run.Dir = dir
	run.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
	var diagnostics bytes.Buffer // includes "go: downloading" if a module is not cached
	run.Stderr = &diagnostics
	text, err := run.Output()
	require.NoError(t, err, "%s%s", text, &diagnostics)
	require.Equal(t, `settings: gate/visitors.Limit: 1 -> 2
settings: gate/visitors: Limit is 0: must be 1 or more
event: gate visitors refused WARN [passed=2]
metrics: {"gate/visitors":{"gate.calls{outcome=passed}":2,"gate.calls{outcome=refused}":1,"gate.full_ratio":1}}
health: gate/visitors warn full all of 2 have passed
health: {"status":"warn","checks":[{"name":"gate/visitors","status":"warn","state":"full"}]}
console: visitors true
console: full true
console: all of 2 have passed true
console: gate.calls true
console: outcome = passed true
console: &#34;Limit&#34;: 2 true
console: gate.full true
metric: resilience.gate.calls  resilience.name=visitors,resilience.outcome=passed 2
metric: resilience.gate.calls  resilience.name=visitors,resilience.outcome=refused 1
metric: resilience.gate.full 1 1
`, string(text))
}
