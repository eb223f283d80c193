// Package clients shows how clients of other modules send their requests through a resiliencehttp.ClientTransport. Its
// examples use OAuth 2.0 tokens, traces, and the SDK of a service. Run them with go test.
package clients
