// Package faults makes calls slow, wrong or endless on purpose, to test what stands
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
// A [Script] decides for each call which of its plans apply. [Func], [Transport] and
// [Handler] put it around a function, an http.RoundTripper and an http.Handler. The
// same Seed gives the same decisions to the same sequence of calls. Times are counted
// from when the script was enabled. In a bubble of testing/synctest they are exact.
//
// A script does nothing until it is enabled, so that a program may carry one: added to
// a registry, it is switched on by {"faults/backend": {"Enabled": true}}.
//
// The plans that apply to a call act in their order: latencies add up, and the first
// other fault decides how the call ends.
package faults
