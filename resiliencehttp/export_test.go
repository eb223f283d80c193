package resiliencehttp

import "net/http"

// BaseOf returns the Base of a client.
func BaseOf(c *ClientTransport) http.RoundTripper { return c.transport.base() }
