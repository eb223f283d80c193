// Package clients shows clients of other modules that send their requests through a resiliencehttp.ClientTransport:
// OAuth 2.0 tokens, traces, and the SDK of a service. The examples run with go test.
package clients
