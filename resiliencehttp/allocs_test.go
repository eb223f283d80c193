package resiliencehttp_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/resiliencehttp"
)

// TestNewClientAllocatesLittle bounds what the default policies allocate for a GET. The allocations of net/http and of
// the server differ between versions of Go, so they are subtracted.
func TestNewClientAllocatesLittle(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "a short answer")
	}))
	defer server.Close()
	allocs := func(client *http.Client) float64 {
		return testing.AllocsPerRun(2000, func() {
			resp, err := client.Get(server.URL)
			require.NoError(t, err)
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		})
	}
	base := &http.Transport{}
	defer base.CloseIdleConnections()
	plain := allocs(&http.Client{Transport: base})
	ours := allocs(resiliencehttp.NewClient(resiliencehttp.ClientConfig{Base: base}))
	require.LessOrEqual(t, ours-plain, 32.)
}
