package resiliencehttp

import (
	"context"
	"net/http"
	"sync"

	"github.com/go-resilience/resilience/retry"
)

// A failedResponse is the error of a response with a failed status.
type failedResponse struct {
	*http.Response
	failure error
}

func (e *failedResponse) Error() string { return e.failure.Error() }
func (e *failedResponse) Unwrap() error { return e.failure }

// newHedger returns the Hedger of cfg for responses.
func newHedger(cfg retry.HedgeConfig) *retry.Hedger[*http.Response] {
	cfg.Discard = func(v any) {
		if resp, ok := v.(*http.Response); ok {
			_ = resp.Body.Close()
		}
	}
	return retry.NewHedger[*http.Response](cfg)
}

// hedged sends req, and sends it again beside itself if that takes too long. It returns as
// send does.
func (t *Transport) hedged(req *http.Request) (resp *http.Response, failure, err error) {
	var mu sync.Mutex
	var first bool
	var failed []*failedResponse
	resp, err = t.hedger().Do(req.Context(), func(ctx context.Context) (*http.Response, error) {
		r := req.WithContext(ctx)
		mu.Lock()
		again := first
		first = true
		mu.Unlock()
		if again && req.GetBody != nil {
			body, err := req.GetBody()
			if err != nil {
				return nil, err
			}
			r.Body = body
		}
		resp, failure, err := t.send(r)
		if failure == nil || err != nil {
			return resp, err
		}
		f := &failedResponse{resp, failure}
		mu.Lock()
		defer mu.Unlock()
		failed = append(failed, f)
		return nil, f
	})
	for i, f := range failed {
		if err != nil && i == len(failed)-1 {
			return f.Response, f.failure, nil
		}
		_ = f.Body.Close()
	}
	return resp, nil, err
}

// mayHedge reports whether req may be sent twice at once.
func (t *Transport) mayHedge(req *http.Request) bool {
	return t.Hedge != nil && t.replayable(req) && (req.Body == nil || req.Body == http.NoBody || req.GetBody != nil)
}
