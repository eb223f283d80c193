package resiliencehttp

import (
	"cmp"
	"context"
	"encoding/json"
	"iter"
	"net/http"
	"time"

	"github.com/go-resilience/resilience/policy"
)

// healthTimeout limits how long a request to [Health] waits for policies that query a server.
const healthTimeout = time.Second

// Health returns a handler that reports the health of policies, such as those of a *registry.Registry:
//
//	mux.Handle("GET /health", resiliencehttp.Health(reg))
//
// The response lists each policy by name:
//
//	{"status": "warn", "checks": [
//		{"name": "breaker/mail", "status": "pass", "state": "ok"},
//		{"name": "breaker/users", "status": "fail", "state": "open"}
//	]}
//
// Details and errors are not part of the response, because they may contain secrets. The status of the program is
// "pass" if every policy passes, and "warn" otherwise, with the HTTP status 200 in both cases: restarting a process
// does not repair its dependencies. The ctx of the policies ends after 1 second.
//
// Source: Health Endpoint Monitoring in the Cloud Design Patterns catalog
// (https://learn.microsoft.com/azure/architecture/patterns/health-endpoint-monitoring).
func Health(policies interface {
	Health(ctx context.Context) iter.Seq2[string, policy.Health]
}) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, http.StatusText(http.StatusMethodNotAllowed), http.StatusMethodNotAllowed)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), healthTimeout)
		defer cancel()
		report := healthReport{Status: policy.Pass.String(), Checks: []healthCheck{}}
		for name, h := range policies.Health(ctx) {
			report.Checks = append(report.Checks, checkOf(name, h))
			if h.Status > policy.Pass {
				report.Status = policy.Warn.String()
			}
		}
		body, _ := json.Marshal(report) // cannot fail: it holds strings only
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		_, _ = w.Write(append(body, '\n'))
	})
}

// A healthReport is the JSON response of [Health].
type healthReport struct {
	Status string        `json:"status"`
	Checks []healthCheck `json:"checks"`
}

// A healthCheck is the part of a healthReport about one policy.
type healthCheck struct {
	Name   string `json:"name"`
	Status string `json:"status"`
	State  string `json:"state"`
}

// checkOf returns the check of a policy. A policy that names no state has a general one.
func checkOf(name string, h policy.Health) healthCheck {
	general := [...]string{"ok", "degraded", "failing"}
	status := min(max(h.Status, policy.Pass), policy.Fail)
	return healthCheck{Name: name, Status: status.String(), State: cmp.Or(h.State, general[status])}
}
