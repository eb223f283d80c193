// Package faults tests the policies around calls. To do so, it injects faults, such as delays, errors and
// hangs, into the calls.
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
// A [Script] has a list of plans, and each [Plan] describes a fault. For each call, the script decides which
// plans apply. All Latency plans that apply delay the call by the sum of their delays. Of the plans that
// apply and are not Latency plans, the first one decides how the call ends. [Func], [Transport] and [Handler]
// apply a script to a function, an http.RoundTripper and an http.Handler. With the same Seed, calls that
// arrive in the same order and at the same times get the same faults.
//
// A script does nothing until it is enabled, so even a production program may contain a script. If the script
// is in a registry.Registry, settings can enable it: {"faults/backend": {"Enabled": true}}.
//
// In a bubble of testing/synctest, the times of plans and delays are exact. For exact times, create the
// script in the bubble of the test.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
package faults
