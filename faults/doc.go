// Package faults makes calls slow, wrong or endless on purpose, to test the policies
// around them.
//
//	script := faults.New(faults.Config{
//		Enabled: true,
//		Seed:    1,
//		Plans: []faults.Plan{
//			{Kind: faults.Latency, Delay: 50 * time.Millisecond},
//			{Kind: faults.Fail, At: 2 * time.Second, For: time.Second, Share: 0.3},
//			{Kind: faults.Hang, At: 5 * time.Second, Count: 10},
//		},
//	})
//	client := &http.Client{Transport: faults.Transport(script, nil)}
//
// A [Script] decides for each call which of its plans apply: the delays of all Latency plans add up
// and come first, and of the others the first decides how the call ends. [Func], [Transport] and
// [Handler] put it around a function, an http.RoundTripper and an http.Handler. Calls that arrive in
// the same order at the same times meet the same faults if the Seed is the same.
//
// A script does nothing until it is enabled, so that a program may carry one. In a registry, a file
// or a command switches it on: {"faults/backend": {"Enabled": true}}.
//
// In a bubble of testing/synctest all times are exact, if the script is made inside.
package faults
