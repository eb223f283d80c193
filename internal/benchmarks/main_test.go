package benchmarks

import (
	"context"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/resiliencehttp"
)

// TestMain sends a request through a Transport before anything is measured, as most
// programs do: from then on policies look whether a response still holds what they
// lend, so that all figures are of a program that speaks HTTP.
func TestMain(m *testing.M) {
	t := &resiliencehttp.Transport{
		Base:       answers{},
		Middleware: func(next resilience.Func) resilience.Func { return next },
	}
	req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://example.test/", nil)
	if err != nil {
		panic(err)
	}
	resp, err := t.RoundTrip(req)
	if err != nil {
		panic(err)
	}
	_ = resp.Body.Close()
	os.Exit(m.Run())
}

// answers is a transport that answers at once.
type answers struct{}

func (answers) RoundTrip(req *http.Request) (*http.Response, error) {
	return &http.Response{
		StatusCode: http.StatusOK, ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{},
		Body: io.NopCloser(strings.NewReader("")), Request: req,
	}, nil
}
