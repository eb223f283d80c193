package resiliencehttp

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/go-resilience/resilience/throttle"
)

// Throttle returns middleware that admits requests at the rate of l and tells clients about
// it as the zero [Quota] does. It panics if l is nil.
func Throttle(l *throttle.Limiter) func(http.Handler) http.Handler { return Quota{}.Throttle(l) }

// ThrottleBy returns middleware that admits the requests of each key at the rate that g has
// for it, and tells clients about it as the zero [Quota] does. [Quota.ThrottleBy] says what
// makes a good key. A nil key means [ClientIP] without trusted proxies. ThrottleBy panics if
// g is nil.
func ThrottleBy(g *throttle.Group[string], key func(*http.Request) string) func(http.Handler) http.Handler {
	return Quota{}.ThrottleBy(g, key)
}

// A Quota says how a server tells its clients about a limit.
//
// Every response, admitted or not, carries the fields RateLimit-Policy and RateLimit
// (draft-ietf-httpapi-ratelimit-headers-11): r is how many requests are left, and t the
// seconds until there are more. A request that the limit refuses gets 429 with Retry-After
// and a problem document of type quota-exceeded; Retry-After is in whole seconds, at least
// 1 and at least t. A request that is refused for a reason other than its quota, such as
// too many keys in a group, gets 503.
//
// A request waits for at most the limit's MaxWait. If its client hangs up meanwhile, nothing
// is written. Over HTTP/1.1 the server does not notice that a client has gone before the
// request's body has been read: bound the wait by MaxWait if requests have bodies.
type Quota struct {
	// Name is the name of the quota policy in the fields. Empty means "default".
	Name string

	// Window is the time in which the burst refills, rounded up to whole seconds for
	// the fields. Zero means the time of the limit itself, such as a minute for 100
	// requests a minute and a burst of 100, if that is a whole number of seconds. A
	// negative Window is left out of the fields.
	Window time.Duration

	// Legacy adds the fields X-RateLimit-Limit, X-RateLimit-Remaining and
	// X-RateLimit-Reset, which have the values of q, r and t.
	Legacy bool
}

// Throttle returns middleware that admits requests at the rate of l. It panics if l is nil.
func (q Quota) Throttle(l *throttle.Limiter) func(http.Handler) http.Handler {
	if l == nil {
		panic(errors.New("resiliencehttp: Throttle needs a Limiter, not nil"))
	}
	return q.middleware(func(*http.Request) meter { return limiter{l} })
}

// ThrottleBy returns middleware that admits the requests of each key at the rate that g has
// for it. A nil key means [ClientIP] without trusted proxies. ThrottleBy panics if g is nil.
//
// Take the key from what the server knows about the client, such as its address or its
// authenticated account. A client that can choose its key can choose a new one for each
// request, and has no limit.
func (q Quota) ThrottleBy(g *throttle.Group[string], key func(*http.Request) string) func(http.Handler) http.Handler {
	if g == nil {
		panic(errors.New("resiliencehttp: ThrottleBy needs a Group, not nil"))
	}
	if key == nil {
		key = ClientIP()
	}
	return q.middleware(func(r *http.Request) meter { return member{g, key(r)} })
}

// A meter is the limit that applies to one request.
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
