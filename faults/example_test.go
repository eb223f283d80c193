package faults_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/go-resilience/resilience/faults"
)

// A script does nothing until it is enabled.
func ExampleNew() {
	script := faults.New(faults.Config{Name: "users", Plans: []faults.Plan{{Kind: faults.Fail, Share: 0.5}}})
	fetch := faults.Func(script, func(context.Context) error { return nil })
	fmt.Println(fetch(context.Background()))
	_ = script.Update(func(c *faults.Config) { c.Enabled, c.Plans[0].Share = true, 1 })
	fmt.Println(fetch(context.Background()))
	fmt.Println(script.Stats().Injected)
	// Output:
	// <nil>
	// faults: injected failure
	// map[fail:1]
}

// The client sees an overloaded server. No request is sent.
func ExampleTransport() {
	script := faults.New(faults.Config{Enabled: true, Plans: []faults.Plan{
		{Kind: faults.Status, RetryAfter: 2 * time.Second},
	}})
	client := &http.Client{Transport: faults.Transport(script, nil)}
	resp, err := client.Get("http://users.example")
	if err != nil {
		panic(err)
	}
	defer resp.Body.Close()
	fmt.Println(resp.Status, resp.Header.Get("Retry-After"))
	// Output: 503 Service Unavailable 2
}

// The connection breaks after the first five bytes of the response's body.
func ExampleHandler() {
	script := faults.New(faults.Config{Enabled: true, Plans: []faults.Plan{{Kind: faults.Reset, Bytes: 5}}})
	server := httptest.NewServer(faults.Handler(script, http.HandlerFunc(
		func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello world") })))
	defer server.Close()
	resp, err := http.Get(server.URL)
	if err != nil {
		panic(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	fmt.Printf("%s, %v\n", body, err)
	// Output: hello, unexpected EOF
}

// The first two calls fail, the third is made.
func ExampleFunc() {
	script := faults.New(faults.Config{Enabled: true, Plans: []faults.Plan{
		{Kind: faults.Fail, Count: 2},
	}})
	fetch := faults.Func(script, func(context.Context) error { return nil })
	for range 3 {
		fmt.Println(fetch(context.Background()))
	}
	// Output:
	// faults: injected failure
	// faults: injected failure
	// <nil>
}
