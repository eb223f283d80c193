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

// An Admitter is a limit for each key: a *[throttle.Group] of strings.
type Admitter interface {
	// Admit takes what a request costs from the limit of key. It returns what is left, and
	// an error if the request is refused.
	Admit(ctx context.Context, key string) (throttle.Decision, error)
}

// Throttle returns middleware that admits requests at the rate of l.
//
// Every response, admitted or not, carries the fields RateLimit-Policy and RateLimit
// (draft-ietf-httpapi-ratelimit-headers-11): r is how many requests are left, and t the
// seconds until there are more. If the limit has quotas besides a rate, the fields tell about
// the one that has the fewest requests left, whose name ends with its window: "default per day".
// A request that the limit refuses gets 429, with a problem document of type quota-exceeded; 413 if
// it costs more than the limit can ever give; and 503 if its quota is not the reason, such as too
// many keys in a group.
//
// A request waits for at most the limit's MaxWait. If its client hangs up meanwhile, it is
// refused, with 503; over HTTP/1.1 that is not noticed before the request's body has been read.
//
// If a policy further in refuses the request, in middleware of Server or through [Server.Refuse], the request
// gets its tokens back. Throttle panics if l is nil.
func (s Server) Throttle(l *throttle.Limiter) func(http.Handler) http.Handler {
	if l == nil {
		panic(errors.New("resiliencehttp: Throttle needs a Limiter, not nil"))
	}
	return s.throttle(func(ctx context.Context, _ *http.Request) (throttle.Decision, error) { return l.Admit(ctx) })
}

// ThrottleBy returns middleware that admits the requests of each key at the rate that limit
// has for it, as [Server.Throttle] does. A nil key means [ClientIP] without trusted proxies.
// ThrottleBy panics if limit is nil.
//
// Take the key from what the server knows about the client, such as its authenticated account:
// a client that can choose its key has no limit. Of a key of more than 200 bytes its SHA-256 is
// kept.
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
			admission, ctx := refund.Start(r.Context()) // refuse of an inner middleware finds the charges
			d, err := admit(admission, r)
			s.tell(w.Header(), d)
			if err != nil {
				s.refuse(w, r, err, true)
				return
			}
			serveCopy(next, w, r, r.WithContext(ctx))
		})
	}
}

// serveCopy calls next with a copy of r. Afterwards r has the fields that next has set in the copy, except Body:
// net/http removes the files of r's MultipartForm, outer middleware reads the pattern that matched, and net/http
// treats a body of another type as one that was read.
func serveCopy(next http.Handler, w http.ResponseWriter, r, inner *http.Request) {
	defer func() {
		body := r.Body
		*r = *inner
		r.Body = body
	}()
	next.ServeHTTP(w, inner)
}

// shortKey returns a key from outside as a group keeps it: one of more than 200 bytes is its
// SHA-256. Otherwise whoever sends long keys fills the memory.
func shortKey(key string) string {
	if len(key) <= 200 {
		return key
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(key)))
}

// quotaName returns the name of a limit: that of its rate or, with the window, of one of its
// quotas.
func (s Server) quotaName(q throttle.Quota) string {
	name := cmp.Or(s.LimitName, "default")
	if q != (throttle.Quota{}) {
		name += " per " + q.Window.String()
	}
	return name
}

// tell sets the fields that tell a client about its quota. Several quotas in one chain make
// one list (RFC 9651, section 3.1).
func (s Server) tell(h http.Header, d throttle.Decision) {
	if d.Limit == throttle.Unlimited {
		return
	}
	name := sfString(s.quotaName(d.Quota))
	policy := name + ";q=" + sfInteger(int64(d.Limit))
	if d.Window > 0 && d.Window%time.Second == 0 { // else it cannot be told in whole seconds
		policy += ";w=" + sfInteger(seconds(d.Window))
	}
	h.Add("RateLimit-Policy", policy)
	if d.Remaining == 0 && d.ResetAfter == 0 {
		return // the limit cannot tell what is left
	}
	h.Add("RateLimit", name+";r="+sfInteger(int64(d.Remaining))+";t="+sfInteger(seconds(untilMore(d))))
}

// untilMore returns the time until more remains than d.Remaining, if no request takes any.
// It is never longer than the RetryAfter of a request that is refused meanwhile.
func untilMore(d throttle.Decision) time.Duration {
	taken := d.Limit - d.Remaining
	if taken <= 0 || d.Quota != (throttle.Quota{}) { // a quota gives nothing back before its end
		return d.ResetAfter
	}
	token := float64(d.Window) / float64(d.Limit)
	return d.ResetAfter - time.Duration(float64(taken-1)*token)
}

// seconds returns d in whole seconds, rounded up, except that a rounding error of a limit,
// about a nanosecond, does not add a second.
func seconds(d time.Duration) int64 {
	return int64(math.Ceil(max(0, d.Round(time.Microsecond).Seconds())))
}

// sfInteger returns n as an Integer of at most 15 digits (RFC 9651, section 4.1.4).
func sfInteger(n int64) string {
	return strconv.FormatInt(min(max(n, 0), 999_999_999_999_999), 10)
}

// sfString returns s as a String (RFC 9651, section 4.1.6). A character that a String cannot
// hold becomes an underscore.
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

// Refuse answers a request that a policy refused with err, in a handler that has policies of its
// own, a limit of package fleet for example, and has not written anything yet.
//
// Refuse writes 429 if the client is over a limit: err matches [throttle.ErrLimited], and
// the Reason of its [throttle.LimitedError] is neither Outage nor Shed nor CoolingDown; 413 if the
// Reason is TooCostly. It writes 503 if there is no capacity: another policy refused (Refused()
// bool is true), time ran out ([context.DeadlineExceeded]), or an upstream turned the request
// away: err has a [*StatusError] of 429, 503 or 529, whose Retry-After is passed on. It writes 503
// for any err if the client seems to have gone: net/http says so of one that has only closed its
// sending side, and would answer it with an empty 200. The client does not learn err.
//
// Refuse returns false, and writes nothing, for any other err, such as that of a retrier that made
// an attempt before it met an open circuit.
func (s Server) Refuse(w http.ResponseWriter, r *http.Request, err error) bool {
	left := errors.Is(r.Context().Err(), context.Canceled) // after a deadline, the client still waits
	if err == nil || !isRefusal(err) && !left {
		return false
	}
	s.refuse(w, r, err, false)
	return true
}

// problemOf returns the document for a request that is refused with err.
func problemOf(err error) problem {
	limit, ok := errors.AsType[*throttle.LimitedError](err)
	switch {
	case !isRefusal(err) || !errors.Is(err, throttle.ErrLimited): // or the client has gone
		return unavailable
	case !ok:
		return overQuota
	}
	switch limit.Reason {
	case throttle.TooCostly:
		return tooCostly
	case throttle.Outage, throttle.Shed, throttle.CoolingDown: // a reason of the server's own
		return unavailable
	}
	return overQuota
}

// isRefusal reports whether Refuse answers err.
func isRefusal(err error) bool {
	if status, ok := errors.AsType[*StatusError](err); ok && status.Throttled() {
		return true
	}
	return behavior.IsRefused(err) || errors.Is(err, context.DeadlineExceeded)
}

// A problem is a problem document (RFC 9457) of a type that
// draft-ietf-httpapi-ratelimit-headers-11 registers.
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

// refuse writes the response for a request that a policy refused with err. ahead is whether that
// was middleware, and no handler got the request: then the fields of the quota are set, and a
// Content-Encoding is that of a writer that compresses.
func (s Server) refuse(w http.ResponseWriter, r *http.Request, err error, ahead bool) {
	if behavior.IsRefused(err) {
		refund.Of(r.Context()).Refund()
	}
	p := problemOf(err)
	h := w.Header()
	compressed := ahead && h["Content-Encoding"] != nil
	for name := range h {
		field := http.CanonicalHeaderKey(name) // a handler may have set "ETag" itself
		if slices.Contains(replaced, field) && !(compressed && field == "Content-Encoding") {
			delete(h, name)
		}
	}
	if limit, ok := errors.AsType[*throttle.LimitedError](err); ok && p.Type == quotaExceeded && limit.Limit > 0 {
		p.Violated = []string{s.quotaName(limit.Quota)}
		if !ahead {
			s.tell(h, throttle.Decision{
				Quota: limit.Quota, Limit: limit.Limit, Window: limit.Quota.Window.Every, ResetAfter: limit.RetryAfter(),
			})
			if limit.RetryAfter() == 0 {
				h.Add("RateLimit", sfString(p.Violated[0])+";r=0") // for good
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
	body, _ := json.Marshal(p) // strings and a number
	h.Set("Content-Type", "application/problem+json")
	if !compressed {
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
	if status >= 200 {
		w.wrote = true
	}
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

// retryAfterSeconds returns the value of Retry-After for err: at least 1, or 0 if another
// request is of no use.
func retryAfterSeconds(err error) int64 {
	end := behavior.Read(err)
	if end.RetryAfter == 0 && !end.Retryable {
		return 0
	}
	return max(1, seconds(end.RetryAfter))
}
