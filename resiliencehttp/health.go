package resiliencehttp

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"iter"
	"net/http"
	"reflect"
	"time"

	"github.com/go-resilience/resilience/policy"
)

// healthTimeout is the maximum time that a request to [Health] waits for policies whose health check queries
// a server.
const healthTimeout = time.Second

// Health returns a handler that reports the health of policies, such as the policies of a
// *registry.Registry:
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
// The response contains neither details nor errors, because they may contain secrets. The overall status is "pass" if
// every policy's status is "pass", and "warn" otherwise. The HTTP status of a GET or HEAD is always 200, so an
// orchestrator does not restart the process because of a dependency that is down. Any other method gets 405. The ctx
// that the health checks of the policies receive is canceled after 1 second. Health panics if policies is nil.
//
// Reference: Health Endpoint Monitoring in the Cloud Design Patterns catalog
// (https://learn.microsoft.com/azure/architecture/patterns/health-endpoint-monitoring).
func Health(policies interface {
	Health(ctx context.Context) iter.Seq2[string, policy.Health]
}) http.Handler {
	if v := reflect.ValueOf(policies); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		panic(errors.New("resiliencehttp: Health needs policies, not nil"))
	}
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

// checkOf returns the check of a policy. If the policy's health has no State, the State is derived from the
// Status.
func checkOf(name string, h policy.Health) healthCheck {
	general := [...]string{"ok", "degraded", "failing"}
	status := min(max(h.Status, policy.Pass), policy.Fail)
	return healthCheck{Name: name, Status: status.String(), State: cmp.Or(h.State, general[status])}
}
