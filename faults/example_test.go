package faults_test

import (
	"context"
	"fmt"

	"github.com/go-resilience/resilience/faults"
)

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
