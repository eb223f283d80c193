package resiliencehttp

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strconv"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/throttle"
)

// Refuse answers a request that a policy refused with err. It is for handlers that call
// something else under policies of their own, and have not written anything yet.
//
// Refuse writes 429 if the client is over a limit: err matches [throttle.ErrLimited], and
// the Reason of its [throttle.LimitedError] is neither Outage nor Shed. It
// writes 503 if there is no capacity: a bulkhead is full, a circuit is open, a policy
// refused for another reason (Refused() bool is true), or time ran out
// ([context.DeadlineExceeded]). [Server] says what the response looks like. The client does
// not learn err.
//
// Refuse writes 503, too, if the client seems to have gone, whatever err is: net/http says so
// of one that has only closed its sending side, and would answer it with an empty 200.
//
// Refuse reports whether the request is done with: true if it wrote a response, and false,
// without writing anything, for any other err. Such is the error
// of a retrier that made an attempt before it met an open circuit: the attempt has failed,
// although errors.Is finds breaker.ErrOpen.
func (s Server) Refuse(w http.ResponseWriter, r *http.Request, err error) bool {
	if err == nil {
		return false
	}
	if !isRefusal(err) && !gone(r) {
		return false
	}
	s.refuse(w, r, err, refusal{})
	return true
}

// Status returns the status that answers a request whose work returned err: 200 for nil, 429
// or 503 for what [Server.Refuse] answers, and 500 for any other error.
func Status(err error) int {
	_, over := limited(err)
	switch {
	case err == nil:
		return http.StatusOK
	case !isRefusal(err):
		return http.StatusInternalServerError
	case over:
		return http.StatusTooManyRequests
	}
	return http.StatusServiceUnavailable
}

// isRefusal reports whether Refuse answers err.
func isRefusal(err error) bool {
	return behavior.IsRefused(err) || errors.Is(err, context.DeadlineExceeded)
}

// gone reports whether the client of r has gone. After a deadline, the client still waits
// for an answer.
func gone(r *http.Request) bool { return errors.Is(r.Context().Err(), context.Canceled) }

// A problem is a problem document (RFC 9457) of a type that
// draft-ietf-httpapi-ratelimit-headers-11 registers.
type problem struct {
	Type     string   `json:"type"`
	Title    string   `json:"title"`
	Status   int      `json:"status"`
	Violated []string `json:"violated-policies,omitempty"`
}

const problemTypes = "https://iana.org/assignments/http-problem-types#"

// A refusal is what refuse must know besides the error.
type refusal struct {
	told     bool     // the fields of the quota are already set
	encoding []string // the Content-Encoding of a writer that compresses; nil if there is none
}

// refuse writes the response for a request that a policy refused with err.
func (s Server) refuse(w http.ResponseWriter, r *http.Request, err error, as refusal) {
	p := problem{
		Type:   problemTypes + "temporary-reduced-capacity",
		Title:  "The server has no capacity for the request right now",
		Status: http.StatusServiceUnavailable,
	}
	h := w.Header()
	for name := range h {
		if slices.Contains(replaced, http.CanonicalHeaderKey(name)) { // a handler may have set "ETag" itself
			delete(h, name)
		}
	}
	if limit, ok := limited(err); ok {
		p.Type = problemTypes + "quota-exceeded"
		p.Title = "The quota for such requests is used up"
		p.Status = http.StatusTooManyRequests
		if limit != nil && limit.Limit > 0 {
			p.Violated = []string{s.quotaName(limit.Quota)}
			if !as.told {
				s.tellRefusal(h, limit)
			}
		}
	}
	if wait := retryAfterSeconds(err); wait > 0 {
		h.Set("Retry-After", strconv.FormatInt(wait, 10))
	}
	h.Set("Cache-Control", "no-store")
	if as.encoding != nil {
		h["Content-Encoding"] = as.encoding
	}
	refusing(w, err)
	if s.OnRefuse != nil {
		own := &refusalWriter{ResponseWriter: w, status: p.Status}
		s.OnRefuse(own, r, err)
		if own.wrote {
			return
		}
	}
	body, _ := json.Marshal(p) // strings and a number
	h.Set("Content-Type", "application/problem+json")
	if as.encoding == nil {
		h.Set("Content-Length", strconv.Itoa(len(body)))
	}
	w.WriteHeader(p.Status)
	_, _ = w.Write(body)
}

// replaced are the fields that belong to the response in whose place a refusal is written
// (RFC 9110, section 8; RFC 9111, section 5; RFC 9530).
var replaced = []string{
	"Accept-Ranges", "Age", "Cache-Control", "Cdn-Cache-Control", "Content-Digest", "Content-Disposition",
	"Content-Encoding", "Content-Language", "Content-Length", "Content-Location", "Content-Range", "Content-Type",
	"Etag", "Expires", "Last-Modified", "Repr-Digest", "Retry-After",
}

// A refusalWriter is what OnRefuse writes to.
type refusalWriter struct {
	http.ResponseWriter
	status int  // unless OnRefuse sets another
	wrote  bool // the status has been written
}

func (w *refusalWriter) WriteHeader(status int) {
	w.wrote = w.wrote || status >= 200
	w.ResponseWriter.WriteHeader(status)
}

func (w *refusalWriter) Write(p []byte) (int, error) {
	w.begin()
	return w.ResponseWriter.Write(p)
}

func (w *refusalWriter) Flush() {
	w.begin()
	_ = http.NewResponseController(w.ResponseWriter).Flush()
}

func (w *refusalWriter) begin() {
	if !w.wrote {
		w.WriteHeader(w.status)
	}
}

func (w *refusalWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// limited reports whether the client has used up its quota, with the error that says so if
// there is one. It is false if a limiter refused for a reason of the server's own.
func limited(err error) (*throttle.LimitedError, bool) {
	e, ok := errors.AsType[*throttle.LimitedError](err)
	if !ok {
		return nil, errors.Is(err, throttle.ErrLimited)
	}
	switch e.Reason {
	case throttle.Outage, throttle.Shed:
		return nil, false
	}
	return e, true
}

// retryAfterSeconds returns the value of Retry-After for err: at least 1, or 0 if another
// request is of no use.
func retryAfterSeconds(err error) int64 {
	end := behavior.Read(err)
	if end.RetryAfter == 0 && !end.Retryable {
		return 0
	}
	return max(1, wholeSeconds(end.RetryAfter))
}
