package resiliencehttp

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/throttle"
)

// Refuse answers a request that a policy refused with err. It is for handlers that call
// something else under policies of their own.
//
// Refuse writes 429 if a limit refused ([throttle.ErrLimited]). It writes 503 if there is
// no capacity: a bulkhead is full, a circuit is open, another policy refused (Refused()
// bool is true), or time ran out ([context.DeadlineExceeded]). The response has a
// Retry-After field, in whole seconds and at least 1, and a problem document (RFC 9457)
// that does not tell err.
//
// Refuse reports whether the request is done with: true if it wrote a response, or if the
// client has gone, and false, without writing anything, for any other err.
func Refuse(w http.ResponseWriter, r *http.Request, err error) bool {
	if err == nil {
		return false
	}
	if gone(r) {
		return true
	}
	if !behavior.IsRefused(err) && !errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	refuse(w, err, "")
	return true
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

// refuse writes the response for a request that a policy refused with err. quota is the
// name of the quota that the request exceeds, or empty.
func refuse(w http.ResponseWriter, err error, quota string) {
	p := problem{
		Type:   problemTypes + "temporary-reduced-capacity",
		Title:  "The server has no capacity for the request right now",
		Status: http.StatusServiceUnavailable,
	}
	if limited(err) {
		p.Type = problemTypes + "quota-exceeded"
		p.Title = "The quota for such requests is used up"
		p.Status = http.StatusTooManyRequests
		if quota != "" {
			p.Violated = []string{quota}
		}
	}
	body, _ := json.Marshal(p) // strings and a number
	refusing(w, err)
	h := w.Header()
	for _, field := range []string{"Content-Encoding", "ETag", "Last-Modified"} {
		h.Del(field) // of the response that this one replaces
	}
	if wait := retryAfterSeconds(err); wait > 0 {
		h.Set("Retry-After", strconv.FormatInt(wait, 10))
	}
	h.Set("Content-Type", "application/problem+json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(p.Status)
	_, _ = w.Write(body)
}

// limited reports whether the client has used up its quota. It is false if a limiter
// refused for a reason of the server's own.
func limited(err error) bool {
	e, ok := errors.AsType[*throttle.LimitedError](err)
	if !ok {
		return errors.Is(err, throttle.ErrLimited)
	}
	switch e.Reason {
	case throttle.TooManyKeys, throttle.Outage, throttle.Shed:
		return false
	}
	return true
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
