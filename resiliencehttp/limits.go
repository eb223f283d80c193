package resiliencehttp

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/refund"
	"github.com/go-resilience/resilience/throttle"
)

// An Admitter limits the rate of requests for each key. A *[throttle.Group] with string keys is an Admitter.
type Admitter interface {
	// Admit takes the tokens that a request costs from the limit of key. It returns the state of the limit
	// and, if the request is refused, an error.
	Admit(ctx context.Context, key string) (throttle.Decision, error)
}

// Throttle returns middleware that admits requests at the rate of l.
//
// The response to each request, admitted or refused, has the header fields RateLimit-Policy and RateLimit
// (draft-ietf-httpapi-ratelimit-headers-11). In RateLimit, the parameter r is the number of requests that the
// limit still allows, and t is the number of seconds until that number increases. If the limit has quotas in
// addition to its rate, the fields describe only one of these limits: the one that allows the fewest requests.
// The name of a quota contains its window, as in "default per day". A limit that is Unlimited adds no fields.
//
// If the limit refuses a request, the client receives 429 with a problem document of type quota-exceeded, or
// 413 if the request costs more than the limit can ever allow. If the client did not cause the refusal, as with
// [throttle.Outage], the client receives 503.
//
// A request waits for its tokens for at most the limit's MaxWait. If the client disconnects during the wait,
// the request is refused with 503. Over HTTP/1.1, net/http notices a disconnection only after the request's
// body has been read.
//
// The tokens of an admitted request are refunded if inner middleware of Server refuses the request, or if the
// handler refuses it with [Server.Refuse]. Throttle panics if l is nil.
func (s Server) Throttle(l *throttle.Limiter) func(http.Handler) http.Handler {
	if l == nil {
		panic(errors.New("resiliencehttp: Throttle needs a Limiter, not nil"))
	}
	return s.throttle(func(ctx context.Context, _ *http.Request) (throttle.Decision, error) { return l.Admit(ctx) })
}

// ThrottleBy is like [Server.Throttle], with a separate limit for each key. The function key returns a request's key. A
// nil key means [ClientIP] without trusted proxies. ThrottleBy panics if limit is nil.
//
// Use a key that the client cannot choose, such as its authenticated account. A client that can choose a new key for
// each request is not limited. Do not use a secret such as an API key: keys appear in errors, events and logs. Use the
// account to which the API key belongs. If a key is longer than 200 bytes, its SHA-256 is used instead.
func (s Server) ThrottleBy(limit Admitter, key func(*http.Request) string) func(http.Handler) http.Handler {
	if v := reflect.ValueOf(limit); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		panic(errors.New("resiliencehttp: ThrottleBy needs a limit, not nil"))
	}
	if key == nil {
		key = ClientIP()
	}
	return s.throttle(func(ctx context.Context, r *http.Request) (throttle.Decision, error) {
		return limit.Admit(ctx, shortKey(key(r)))
	})
}

func (s Server) throttle(
	admit func(context.Context, *http.Request) (throttle.Decision, error),
) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			admission, ctx := refund.Start(r.Context()) // the tokens are refunded if inner middleware refuses the request
			d, err := admit(admission, r)
			s.setFields(w.Header(), d)
			if err != nil {
				s.refuse(w, r, err, true)
				return
			}
			serveCopy(next, w, r, r.WithContext(ctx))
		})
	}
}

// serveCopy calls next with inner, a copy of r, and then copies inner's fields back to r. The handler sets
// fields of its request that others read from r: net/http removes the files of the MultipartForm, and outer
// middleware reads the matched pattern. The field Body is not copied back, because net/http treats a Body of
// an unknown type as fully read.
func serveCopy(next http.Handler, w http.ResponseWriter, r, inner *http.Request) {
	defer func() {
		body := r.Body
		*r = *inner
		r.Body = body
	}()
	next.ServeHTTP(w, inner)
}

// shortKey returns key or, if key is longer than 200 bytes, its SHA-256. Groups store their keys, so a client
// could otherwise fill the memory with long keys.
func shortKey(key string) string {
	if len(key) <= 200 {
		return key
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(key)))
}

// quotaName returns the name of q for clients. The zero Quota represents the limit's rate, whose name has no
// window.
func (s Server) quotaName(q throttle.Quota) string {
	name := cmp.Or(s.LimitName, "default")
	if q != (throttle.Quota{}) {
		name += " per " + q.Window.String()
	}
	return name
}

// setFields adds the header fields that describe the state of a limit to the client. It does not replace
// existing fields, because a request may pass several limits. Their entries together form one list (RFC 9651,
// section 3.1).
func (s Server) setFields(h http.Header, d throttle.Decision) {
	if d.Limit == throttle.Unlimited {
		return
	}
	name := sfString(s.quotaName(d.Quota))
	policy := name + ";q=" + sfInteger(int64(d.Limit))
	if d.Window > 0 && d.Window%time.Second == 0 { // the parameter w allows whole seconds only
		policy += ";w=" + sfInteger(seconds(d.Window))
	}
	h.Add("RateLimit-Policy", policy)
	if d.Remaining == 0 && d.ResetAfter == 0 {
		return // the number of requests left is unknown
	}
	h.Add("RateLimit", name+";r="+sfInteger(int64(d.Remaining))+";t="+sfInteger(seconds(untilRefill(d))))
}

// untilRefill returns the time until the limit allows one more request than d.Remaining, if no other request
// takes tokens. A request that is refused during that time never has a shorter RetryAfter.
func untilRefill(d throttle.Decision) time.Duration {
	taken := d.Limit - d.Remaining
	if taken <= 0 || d.Quota != (throttle.Quota{}) { // the tokens of a quota return only at the end of its window
		return d.ResetAfter
	}
	token := float64(d.Window) / float64(d.Limit)
	return d.ResetAfter - time.Duration(float64(taken-1)*token)
}

// seconds returns d in whole seconds, rounded up. It first rounds d to microseconds, because a limit's
// rounding error of about 1ns would otherwise add a whole second.
func seconds(d time.Duration) int64 {
	return int64(math.Ceil(max(0, d.Round(time.Microsecond).Seconds())))
}

// sfInteger formats n as an Integer of at most 15 digits (RFC 9651, section 4.1.4).
func sfInteger(n int64) string {
	return strconv.FormatInt(min(max(n, 0), 999_999_999_999_999), 10)
}

// sfString formats s as a String (RFC 9651, section 4.1.6). It replaces each character that a String cannot contain by
// an underscore.
func sfString(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '_'
		}
		return r
	}, s)
	return `"` + escapes.Replace(s) + `"`
}

var escapes = strings.NewReplacer(`"`, `\"`, `\`, `\\`)

// Refuse writes the response to a request that a policy refused with err. Refuse is for handlers that use policies
// themselves, such as a limit of package throttle/fleet. The handler must call Refuse before it writes a response.
// The status is:
//
//   - 413 if err is a [throttle.LimitedError] whose Reason is TooCostly.
//   - 429 if the client is over a limit: err matches [throttle.ErrLimited], and the Reason of its LimitedError is none
//     of TooCostly, Outage, Shed and CoolingDown.
//   - 503 if there is no capacity: another policy refused the request ([resilience.Refused] is true), or err
//     matches [context.DeadlineExceeded].
//   - 503 if an upstream server is overloaded: err is a [*StatusError] with the status 429, 503 or 529. The
//     response passes on the Retry-After of err.
//   - 503 for any other err if net/http reports that the client has disconnected. net/http also reports a
//     disconnection if the client has closed only its sending side. Without the 503, such a client would receive an
//     empty response with status 200.
//
// The response does not contain the text of err. If none of the statuses applies to err, Refuse writes
// nothing and returns false. For example, a retrier's error is not a refusal if the first attempt was admitted and
// failed, even if an open breaker refused the second attempt.
func (s Server) Refuse(w http.ResponseWriter, r *http.Request, err error) bool {
	// After a deadline, r's ctx is also done, but the client still waits for a response.
	disconnected := errors.Is(r.Context().Err(), context.Canceled)
	if err == nil || !isRefusal(err) && !disconnected {
		return false
	}
	s.refuse(w, r, err, false)
	return true
}

// problemOf returns the problem document for a request that is refused with err.
func problemOf(err error) problem {
	limit, ok := errors.AsType[*throttle.LimitedError](err)
	switch {
	case !isRefusal(err) || !errors.Is(err, throttle.ErrLimited): // err is not a refusal, so the client has disconnected
		return unavailable
	case !ok:
		return overQuota
	}
	switch limit.Reason {
	case throttle.TooCostly:
		return tooCostly
	case throttle.Outage, throttle.Shed, throttle.CoolingDown: // the refusal is not caused by the client
		return unavailable
	}
	return overQuota
}

// isRefusal reports whether Refuse writes a response for err even if the client is connected.
func isRefusal(err error) bool {
	if status, ok := errors.AsType[*StatusError](err); ok && status.Throttled() {
		return true
	}
	return behavior.IsRefused(err) || errors.Is(err, context.DeadlineExceeded)
}

// A problem is a problem document (RFC 9457). draft-ietf-httpapi-ratelimit-headers-11 registers its types.
type problem struct {
	Type     string   `json:"type"`
	Title    string   `json:"title"`
	Status   int      `json:"status"`
	Violated []string `json:"violated-policies,omitempty"`
}

const (
	quotaExceeded   = "https://iana.org/assignments/http-problem-types#quota-exceeded"
	reducedCapacity = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
)

var (
	tooCostly   = problem{quotaExceeded, "The request is larger than its quota can ever allow", 413, nil}
	overQuota   = problem{quotaExceeded, "The quota for such requests is used up", 429, nil}
	unavailable = problem{reducedCapacity, "The server has no capacity for the request right now", 503, nil}
)

// refuse writes the response to a request that a policy refused with err. ahead reports whether middleware
// refused the request before a handler received it. In that case, the RateLimit fields are already set, and a
// Content-Encoding belongs to an outer ResponseWriter that compresses.
func (s Server) refuse(w http.ResponseWriter, r *http.Request, err error, ahead bool) {
	if behavior.IsRefused(err) {
		refund.Of(r.Context()).Refund()
	}
	p := problemOf(err)
	h := w.Header()
	compressed := ahead && h["Content-Encoding"] != nil
	for name := range h {
		field := http.CanonicalHeaderKey(name) // a handler may have set "ETag" directly, which is not the canonical form
		if slices.Contains(replaced, field) && !(compressed && field == "Content-Encoding") {
			delete(h, name)
		}
	}
	if limit, ok := errors.AsType[*throttle.LimitedError](err); ok && p.Type == quotaExceeded && limit.Limit > 0 {
		p.Violated = []string{s.quotaName(limit.Quota)}
		if !ahead {
			s.setFields(h, throttle.Decision{
				Quota: limit.Quota, Limit: limit.Limit, Window: limit.Quota.Window.Every,
				ResetAfter: limit.RetryAfter(),
			})
			if limit.RetryAfter() == 0 {
				h.Add("RateLimit", sfString(p.Violated[0])+";r=0") // no parameter t: the request can never be admitted
			}
		}
	}
	if wait := retryAfterSeconds(err); wait > 0 {
		h.Set("Retry-After", strconv.FormatInt(wait, 10))
	}
	h.Set("Cache-Control", "no-store")
	if s.OnRefuse != nil {
		refusal := &refusalWriter{ResponseWriter: w, status: p.Status}
		s.OnRefuse(refusal, r, err)
		if refusal.wrote {
			return
		}
	}
	body, _ := json.Marshal(p) // cannot fail: p holds strings and a number
	h.Set("Content-Type", "application/problem+json")
	if !compressed {
		h.Set("Content-Length", strconv.Itoa(len(body)))
	}
	w.WriteHeader(p.Status)
	_, _ = w.Write(body)
}

// replaced lists the header fields that describe the handler's body, which a refusal replaces (RFC 9110,
// section 8; RFC 9111, section 5; RFC 9530). If a refusal kept the handler's ETag, for example, a client
// could cache the refusal.
var replaced = []string{
	"Accept-Ranges", "Age", "Cache-Control", "Cdn-Cache-Control", "Content-Digest", "Content-Disposition",
	"Content-Encoding", "Content-Language", "Content-Length", "Content-Location", "Content-Range", "Content-Type",
	"Etag", "Expires", "Last-Modified", "Repr-Digest", "Retry-After",
}

// A refusalWriter is the ResponseWriter that OnRefuse receives. It records whether OnRefuse has written a
// response.
type refusalWriter struct {
	http.ResponseWriter
	status int  // used unless OnRefuse sets another status
	wrote  bool // the status has been written
}

func (w *refusalWriter) WriteHeader(status int) {
	if status >= 200 {
		w.wrote = true
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *refusalWriter) Write(p []byte) (int, error) {
	w.writeStatus()
	return w.ResponseWriter.Write(p)
}

func (w *refusalWriter) Flush() {
	w.writeStatus()
	_ = http.NewResponseController(w.ResponseWriter).Flush()
}

func (w *refusalWriter) writeStatus() {
	if !w.wrote {
		w.WriteHeader(w.status)
	}
}

func (w *refusalWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// retryAfterSeconds returns the value of the field Retry-After for err: at least 1, or 0 if a retry cannot
// succeed.
func retryAfterSeconds(err error) int64 {
	end := behavior.Read(err)
	if end.RetryAfter == 0 && !end.Retryable {
		return 0
	}
	return max(1, seconds(end.RetryAfter))
}
