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

// Refuse answers a request with what err, the error of a policy, says about it,
// and reports whether it says anything: 429 where a limit refused
// ([throttle.ErrLimited]), and 503 where there is no capacity: a bulkhead is
// full, a circuit is open, or else a policy refused, as Refused() bool says, or
// time ran out ([context.DeadlineExceeded]). With it go Retry-After, in whole
// seconds and at least 1, and a problem document (RFC 9457) that does not tell
// the error itself.
//
// It is for handlers that call something else under policies of their own. For a
// client that has gone it writes nothing, and reports true.
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

// gone reports whether the client of r has gone. One whose deadline has passed waits
// for an answer.
func gone(r *http.Request) bool { return errors.Is(r.Context().Err(), context.Canceled) }

// A problem is a document of RFC 9457, of a type that
// draft-ietf-httpapi-ratelimit-headers-11 registers.
type problem struct {
	Type     string   `json:"type"`
	Title    string   `json:"title"`
	Status   int      `json:"status"`
	Violated []string `json:"violated-policies,omitempty"`
}

const problemTypes = "https://iana.org/assignments/http-problem-types#"

// refuse answers for a policy that refused with err; quota is the name of the
// quota that this violates, if clients know one.
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
		h.Del(field) // of the response that is not to be
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

// limited reports whether the client has used up what it may use, as opposed to
// the server being unable to tell.
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

// retryAfterSeconds returns when to come back after err, in seconds: at least 1;
// 0 if it is of no use to come back.
func retryAfterSeconds(err error) int64 {
	end := behavior.Read(err)
	if end.RetryAfter == 0 && !end.Retryable {
		return 0
	}
	return max(1, wholeSeconds(end.RetryAfter))
}
