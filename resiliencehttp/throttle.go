package resiliencehttp

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"reflect"

	"github.com/go-resilience/resilience/throttle"
)

// An Admitter is a limit for each key: a *[throttle.Group] of strings or, for the instances
// of a service together, a *[throttle.Shared].
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
// the one that has the fewest requests left; the name of a quota ends with its window, such
// as "default per day". A request that the limit refuses gets 429, with a problem
// document of type quota-exceeded; its Retry-After is at least t. A request that is refused
// for a reason other than its quota, such as too many keys in a group, gets 503. While a
// [throttle.Shared] cannot tell what is left, RateLimit is missing.
//
// A request waits for at most the limit's MaxWait. If its client hangs up meanwhile, it is
// refused, with 503. Over HTTP/1.1 the server does not notice that a client has gone before the
// request's body has been read: bound the wait by MaxWait if requests have bodies.
//
// Throttle panics if l is nil.
func (s Server) Throttle(l *throttle.Limiter) func(http.Handler) http.Handler {
	if l == nil {
		panic(errors.New("resiliencehttp: Throttle needs a Limiter, not nil"))
	}
	return s.throttle(func(r *http.Request) (throttle.Decision, error) { return l.Admit(r.Context()) })
}

// ThrottleBy returns middleware that admits the requests of each key at the rate that limit
// has for it, and tells clients about it as [Server.Throttle] does. A nil key means
// [ClientIP] without trusted proxies. ThrottleBy panics if limit is nil.
//
// Take the key from what the server knows about the client, such as its address or its
// authenticated account. A client that can choose its key can choose a new one for each
// request, and has no limit. Of a key of more than 200 bytes its SHA-256 is kept.
func (s Server) ThrottleBy(limit Admitter, key func(*http.Request) string) func(http.Handler) http.Handler {
	if v := reflect.ValueOf(limit); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		panic(errors.New("resiliencehttp: ThrottleBy needs a limit, not nil"))
	}
	if key == nil {
		key = ClientIP()
	}
	return s.throttle(func(r *http.Request) (throttle.Decision, error) {
		return limit.Admit(r.Context(), shortKey(key(r)))
	})
}

func (s Server) throttle(admit func(*http.Request) (throttle.Decision, error)) func(http.Handler) http.Handler {
	rate := sfString(s.quotaName(throttle.Quota{}))
	return s.exempting(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			d, err := admit(r)
			s.tell(w.Header(), rate, d)
			if err != nil {
				s.refuse(w, r, err, refusal{told: true, encoding: w.Header()["Content-Encoding"]})
				return
			}
			next.ServeHTTP(w, r)
		})
	})
}

// shortKey returns a key from outside as a group keeps it: one of more than 200 bytes is its
// SHA-256. Otherwise whoever sends long keys fills the memory.
func shortKey(key string) string {
	if len(key) <= 200 {
		return key
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(key)))
}
