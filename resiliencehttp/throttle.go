package resiliencehttp

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/go-resilience/resilience/throttle"
)

// Throttle returns middleware that admits requests at the rate of l, and tells
// clients of it as the zero [Quota] does. It panics if l is nil.
func Throttle(l *throttle.Limiter) func(http.Handler) http.Handler { return Quota{}.Throttle(l) }

// ThrottleBy returns middleware that admits the requests of each key at the rate
// that g has for it, and tells clients of it as the zero [Quota] does; see there
// for what makes a good key. A nil key means [ClientIP] without trusted proxies.
// It panics if g is nil.
func ThrottleBy(g *throttle.Group[string], key func(*http.Request) string) func(http.Handler) http.Handler {
	return Quota{}.ThrottleBy(g, key)
}

// A Quota says how the clients of a server are told of its limit.
//
// Every response, admitted or not, carries the fields RateLimit-Policy and
// RateLimit (draft-ietf-httpapi-ratelimit-headers-11): r is what is left, and t the
// time in seconds after which there is more. A request that the limit refuses gets
// 429 with Retry-After, in whole seconds, at least 1 and no less than t, and a problem
// document of type quota-exceeded. A request that is refused for another reason than
// its quota, such as too many keys in a group, gets 503.
//
// A request may wait for as long as the limit's MaxWait says. Nothing is written for
// a client that has gone by then. Over HTTP/1.1 the server does not notice that a
// client has gone before the request's body has been read: set MaxWait where requests
// have bodies, so that those of clients that have gone do not wait on.
type Quota struct {
	// Name is what clients know the quota policy by. Empty means "default".
	Name string

	// Window is the time in which the burst refills, as clients are told it, rounded
	// up to whole seconds. Zero means what the limit itself has: a minute for 100
	// requests a minute and a burst of 100. If that is no whole number of seconds, or
	// Window is negative, clients are not told.
	Window time.Duration

	// Legacy adds X-RateLimit-Limit, X-RateLimit-Remaining and X-RateLimit-Reset:
	// what RateLimit-Policy and RateLimit call q, r and t.
	Legacy bool
}

// Throttle returns middleware that admits requests at the rate of l. It panics if
// l is nil.
func (q Quota) Throttle(l *throttle.Limiter) func(http.Handler) http.Handler {
	if l == nil {
		panic(errors.New("resiliencehttp: Throttle needs a Limiter, not nil"))
	}
	return q.middleware(func(*http.Request) meter { return limiter{l} })
}

// ThrottleBy returns middleware that admits the requests of each key at the rate
// that g has for it. A nil key means [ClientIP] without trusted proxies. It panics
// if g is nil.
//
// Whoever can choose keys can choose a new one for each request: take the key
// from what the server knows of the client, such as its address or the account
// that it has proved to be, not from what the client says.
func (q Quota) ThrottleBy(g *throttle.Group[string], key func(*http.Request) string) func(http.Handler) http.Handler {
	if g == nil {
		panic(errors.New("resiliencehttp: ThrottleBy needs a Group, not nil"))
	}
	if key == nil {
		key = ClientIP()
	}
	return q.middleware(func(r *http.Request) meter { return member{g, key(r)} })
}

// A meter is the limit that one request is subject to.
type meter interface {
	Wait(context.Context) error
	Peek() throttle.Decision
}

type limiter struct{ *throttle.Limiter }

type member struct {
	group *throttle.Group[string]
	key   string
}

func (m member) Wait(ctx context.Context) error { return m.group.Wait(ctx, m.key) }
func (m member) Peek() throttle.Decision        { return m.group.Peek(m.key) }

func (q Quota) middleware(of func(*http.Request) meter) func(http.Handler) http.Handler {
	if q.Name == "" {
		q.Name = "default"
	}
	name := sfString(q.Name)
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			m := of(r)
			err := m.Wait(r.Context())
			if gone(r) {
				return
			}
			q.write(w.Header(), name, m.Peek())
			if err != nil {
				refuse(w, err, q.Name)
				return
			}
			next.ServeHTTP(w, r)
		})
	}
}
