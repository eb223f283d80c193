// Package faults injects faults into calls, such as delays, errors and hangs, to test the policies around them.
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
// A [Script] decides for each call which of its plans apply. First, the call is delayed by the sum of all Latency
// plans; then the first of the other plans decides how the call ends. [Func], [Transport] and [Handler] apply a
// script to a function, an http.RoundTripper and an http.Handler. With the same Seed, calls that arrive in the same
// order at the same times have the same faults.
//
// A script does nothing until it is enabled, so a program may contain one. In a registry, settings enable it:
// {"faults/backend": {"Enabled": true}}.
//
// If the script is created in a bubble of testing/synctest, all times are exact.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
package faults
