package console_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/registry"
)

// An operator opens a breaker by the console, as a script does.
func ExampleNew() {
	circuit := breaker.New(breaker.Config{Name: "users"})
	reg := registry.New()
	reg.MustAdd(circuit)

	page := console.New(reg, console.Config{
		Allow: func(r *http.Request, op console.Operation) error {
			if r.Header.Get("Authorization") != "Bearer let-me-in" {
				return errors.New("operators only")
			}
			return nil
		},
		Audit: func(_ context.Context, op console.Operation, err error) {
			fmt.Println("audit:", op.Action, op.Policy, op.For, "-", op.Note, "-", err)
		},
	})
	defer page.Close()
	mux := http.NewServeMux()
	mux.Handle("/debug/resilience/", http.StripPrefix("/debug/resilience", page))
	server := httptest.NewServer(mux)
	defer server.Close()

	act := func(token string) int {
		form := url.Values{"action": {"trip"}, "policy": {"breaker/users"}, "for": {"1m"}, "note": {"failover"}}
		req, _ := http.NewRequest("POST", server.URL+"/debug/resilience/act", strings.NewReader(form.Encode()))
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		req.Header.Set("Accept", "application/json")
		req.Header.Set("Authorization", "Bearer "+token)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			return 0
		}
		defer res.Body.Close()
		return res.StatusCode
	}
	fmt.Println(act("please"), circuit.State())
	fmt.Println(act("let-me-in"), circuit.State())
	// Output:
	// audit: trip breaker/users 1m0s - failover - operators only
	// 403 closed
	// audit: trip breaker/users 1m0s - failover - <nil>
	// 200 open
}
