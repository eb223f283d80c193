package resiliencehttp_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/throttle"
)

var hello = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "hello") })

func get(h http.Handler, change ...func(*http.Request)) *httptest.ResponseRecorder {
	r := httptest.NewRequest("GET", "/", nil)
	for _, f := range change {
		f(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func from(addr string) func(*http.Request) {
	return func(r *http.Request) { r.RemoteAddr = addr }
}

func TestLongKeysAreKeptShort(t *testing.T) {
	tenants := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 0.001, Burst: 1}})
	key := func(r *http.Request) string { return r.Header.Get("Tenant") }
	h := resiliencehttp.Server{}.ThrottleBy(tenants, key)(hello)
	as := func(n int) func(*http.Request) {
		return func(r *http.Request) { r.Header.Set("Tenant", strings.Repeat("x", 1<<20)+strconv.Itoa(n)) }
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for n := range 64 {
		require.Equal(t, 200, get(h, as(n)).Code, "each key has a limit of its own")
	}
	require.Equal(t, 429, get(h, as(7)).Code, "and the same each time")
	runtime.GC()
	runtime.ReadMemStats(&after)
	require.Less(t, int64(after.HeapAlloc)-int64(before.HeapAlloc), int64(16<<20))
	require.Equal(t, 64, tenants.Stats().Keys)
	for n, kept := range map[int]bool{200: true, 201: false} {
		long := strings.Repeat("x", n)
		var keys keysOf
		get(resiliencehttp.Server{}.ThrottleBy(&keys, func(*http.Request) string { return long })(hello))
		require.Equal(t, kept, keys[0] == long, n)
	}
}

// keysOf is a limit that admits all, and keeps their keys.
type keysOf []string

func (k *keysOf) Admit(_ context.Context, key string) (throttle.Decision, error) {
	*k = append(*k, key)
	return throttle.Decision{}, nil
}

// A problem is what a refusal looks like to a client.
type problem struct {
	Type     string
	Title    string
	Status   int
	Violated []string `json:"violated-policies"`
}

func problemOf(t *testing.T, w *httptest.ResponseRecorder) problem {
	t.Helper()
	require.Equal(t, "application/problem+json", w.Header().Get("Content-Type"))
	var p problem
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &p))
	require.Equal(t, w.Code, p.Status)
	require.NotEmpty(t, p.Title)
	return p
}

const problemTypes = "https://iana.org/assignments/http-problem-types#"

func TestThrottleRefusesAndTells(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := throttle.New(throttle.Config{Rate: throttle.PerMinute(60), Burst: 60})
		h := resiliencehttp.Server{LimitName: "search"}.Throttle(limit)(hello)
		for i := range 60 {
			w := get(h)
			require.Equal(t, 200, w.Code)
			require.Equal(t, "hello", w.Body.String())
			require.Equal(t, `"search";q=60;w=60`, w.Header().Get("RateLimit-Policy"))
			require.Equal(t, fmt.Sprintf(`"search";r=%d;t=1`, 59-i), w.Header().Get("RateLimit"))
			require.Empty(t, w.Header().Get("Retry-After"))
		}
		time.Sleep(100 * time.Millisecond)
		w := get(h)
		require.Equal(t, 429, w.Code)
		require.Equal(t, "1", w.Header().Get("Retry-After"), "0.9 s, rounded up")
		require.Equal(t, []string{`"search";r=0;t=1`}, w.Header().Values("RateLimit"), "not later than Retry-After")
		p := problemOf(t, w)
		require.Equal(t, problemTypes+"quota-exceeded", p.Type)
		require.Equal(t, "The quota for such requests is used up", p.Title)
		require.Equal(t, strconv.Itoa(w.Body.Len()), w.Header().Get("Content-Length"))
		require.Equal(t, []string{"search"}, p.Violated)

		time.Sleep(900 * time.Millisecond)
		require.Equal(t, 200, get(h).Code)
	})
}

func TestThrottleRoundsRetryAfterUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := resiliencehttp.Server{}.Throttle(throttle.New(throttle.Config{Rate: 0.1, Burst: 1}))(hello)
		require.Equal(t, 200, get(h).Code)
		for _, c := range []struct {
			after time.Duration
			want  string
		}{{0, "10"}, {time.Nanosecond, "10"}, {time.Second - time.Nanosecond, "9"}, {8 * time.Second, "1"},
			{time.Second - time.Nanosecond, "1"}} {
			time.Sleep(c.after)
			w := get(h)
			require.Equal(t, 429, w.Code)
			require.Equal(t, c.want, w.Header().Get("Retry-After"))
		}
		time.Sleep(time.Nanosecond)
		w := get(h)
		require.Equal(t, 200, w.Code)
		require.Equal(t, `"default";q=1;w=10`, w.Header().Get("RateLimit-Policy"))
	})
}

func TestQuotaTellsTheWindow(t *testing.T) {
	for _, c := range []struct {
		name  string
		rate  float64
		burst int
		want  string
	}{
		{"whole seconds", throttle.PerMinute(7), 7, `"default";q=7;w=60`},
		{"a part of a second says nothing", 100, 20, `"default";q=20`},
		{"nor does a second and a half", 100, 150, `"default";q=150`},
	} {
		t.Run(c.name, func(t *testing.T) {
			limit := throttle.New(throttle.Config{Rate: c.rate, Burst: c.burst})
			w := get(resiliencehttp.Server{}.Throttle(limit)(hello))
			require.Equal(t, c.want, w.Header().Get("RateLimit-Policy"))
		})
	}
}

func TestRateLimitSaysWhatTheNextRefusalSays(t *testing.T) {
	for name, c := range map[string]struct {
		cfg  throttle.Config
		want []string // of one response after the other
	}{
		"WholeSeconds": {throttle.Config{Rate: throttle.PerMinute(5), Burst: 5},
			[]string{"r=4;t=12", "r=3;t=12", "r=2;t=12", "r=1;t=12", "r=0;t=12", "r=0;t=12"}},
		"PartsOfSeconds": {throttle.Config{Rate: throttle.PerMinute(7), Burst: 3},
			[]string{"r=2;t=9", "r=1;t=9", "r=0;t=9", "r=0;t=9"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := resiliencehttp.Server{}.Throttle(throttle.New(c.cfg))(hello)
				for i, want := range c.want {
					w := get(h)
					require.Equal(t, `"default";`+want, w.Header().Get("RateLimit"))
					if i == len(c.want)-1 {
						require.Equal(t, 429, w.Code)
						require.Equal(t, want, "r=0;t="+w.Header().Get("Retry-After"))
					}
				}
				time.Sleep(13 * time.Second) // more than one token, less than two
				require.Equal(t, 200, get(h).Code)
			})
		})
	}
	full := throttle.New(throttle.Config{Rate: 1, Burst: 5, Cost: func(context.Context) int { return 0 }})
	require.Equal(t, `"default";r=5;t=0`, get(resiliencehttp.Server{}.Throttle(full)(hello)).Header().Get("RateLimit"))
}

func TestRateLimitTellsTheQuotaThatBinds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // from midnight UTC
		limit := throttle.Config{Rate: 2, Burst: 2,
			Quotas: []throttle.Quota{{N: 3, Window: throttle.Window{Per: throttle.Day}},
				{N: 50, Window: throttle.Window{Every: time.Hour}}}}
		group := throttle.NewGroup(throttle.GroupConfig[string]{Config: limit})
		s := resiliencehttp.Server{LimitName: "plan"}
		time.Sleep(10 * time.Hour)
		for name, h := range map[string]http.Handler{
			"Throttle":   s.Throttle(throttle.New(limit))(hello),
			"ThrottleBy": s.ThrottleBy(group, nil)(hello),
		} {
			start := time.Now()
			w := get(h)
			require.Equal(t, `"plan";q=2;w=1`, w.Header().Get("RateLimit-Policy"), name)
			require.Equal(t, `"plan";r=1;t=1`, w.Header().Get("RateLimit"))
			time.Sleep(time.Second)
			w = get(h)
			require.Equal(t, `"plan";q=2;w=1`, w.Header().Get("RateLimit-Policy"), "one is left of both")
			time.Sleep(time.Second)
			w = get(h)
			require.Equal(t, 200, w.Code)
			require.Equal(t, `"plan per day";q=3;w=86400`, w.Header().Get("RateLimit-Policy"))
			left := strconv.Itoa(int(time.Until(start.Truncate(24*time.Hour).Add(24*time.Hour)) / time.Second))
			require.Equal(t, `"plan per day";r=0;t=`+left, w.Header().Get("RateLimit"), "until midnight")
			w = get(h)
			require.Equal(t, 429, w.Code)
			require.Equal(t, `"plan per day";r=0;t=`+left, w.Header().Get("RateLimit"))
			require.Equal(t, left, w.Header().Get("Retry-After"))
			require.Equal(t, []string{"plan per day"}, problemOf(t, w).Violated)
		}
		guarded := inside(s, group.By(func(context.Context) string { return "192.0.2.1" }))
		w := get(guarded)
		require.Equal(t, 429, w.Code)
		require.Equal(t, `"plan per day";q=3`, w.Header().Get("RateLimit-Policy"))
		require.Equal(t, `"plan per day";r=0;t=`+w.Header().Get("Retry-After"), w.Header().Get("RateLimit"))
		require.Equal(t, []string{"plan per day"}, problemOf(t, w).Violated)
	})
}

func TestRequestThatCanNeverBeAdmitted(t *testing.T) {
	limit := throttle.New(throttle.Config{Rate: 1, Burst: 1, Cost: func(context.Context) int { return 2 }})
	w := get(resiliencehttp.Server{}.Throttle(limit)(hello))
	require.Equal(t, 413, w.Code)
	require.Empty(t, w.Header().Get("Retry-After"), "it is of no use to come back")
}

// member is a String with Integer parameters (RFC 9651).
const member = `"(?:[ !#-\[\]-~]|\\["\\])*"(?:;[a-z*][a-z0-9_.*-]*=\d{1,15})*`

// structured is a List of members.
var structured = regexp.MustCompile(`^` + member + `(?:[ \t]*,[ \t]*` + member + `)*$`)

func TestFieldsAreStructured(t *testing.T) {
	inner := resiliencehttp.Server{}.Throttle(throttle.New(throttle.Config{Rate: 1}))(hello)
	w := get(resiliencehttp.Server{LimitName: "a\tb~"}.Throttle(throttle.New(throttle.Config{Rate: 1}))(inner))
	for _, field := range []string{"RateLimit-Policy", "RateLimit"} {
		values := w.Header().Values(field)
		require.Len(t, values, 2, "one of each quota")
		require.Contains(t, values[0], `"a_b~";`)
		require.Regexp(t, structured, strings.Join(values, ", "))
	}
}

// What an inner policy refuses is not charged by the limits outside it, as in throttle.Limiter.Do.
func TestInnerRefusalReturnsOuterTokens(t *testing.T) {
	var s resiliencehttp.Server
	full := bulkhead.New(bulkhead.Config{Limit: 1})
	_, err := full.Begin(t.Context())
	require.NoError(t, err)
	inner := func() *throttle.Limiter { return throttle.New(throttle.Config{Rate: 0.001, Burst: 5}) }
	handler := inner()
	own := throttle.New(throttle.Config{Rate: 0.001, Burst: 100})
	for name, c := range map[string]struct {
		inner  func(http.Handler) http.Handler
		served int
	}{
		"Throttle": {s.Throttle(inner()), 5},
		"ThrottleBy": {s.ThrottleBy(throttle.NewGroup(throttle.GroupConfig[string]{
			Config: throttle.Config{Rate: 0.001, Burst: 5},
		}), nil), 5},
		"Bulkhead": {s.Bulkhead(full), 0},
		"Refuse": {func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, err := own.Admit(r.Context()) // the handler's own limit is charged
				require.NoError(t, err)
				if err := handler.Wait(r.Context()); err != nil {
					require.True(t, s.Refuse(w, r, err))
					return
				}
				next.ServeHTTP(w, r)
			})
		}, 5},
		"Failure": {func(http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				require.True(t, s.Refuse(w, r, context.DeadlineExceeded), "the request was served until then")
			})
		}, 100},
	} {
		t.Run(name, func(t *testing.T) {
			outer := throttle.New(throttle.Config{Rate: 0.001, Burst: 100})
			tenants := throttle.NewGroup(throttle.GroupConfig[string]{Config: outer.Config()})
			h := s.Throttle(outer)(s.ThrottleBy(tenants, nil)(c.inner(hello)))
			for range 100 {
				get(h)
			}
			for left := 100 - c.served; left > 0; left-- {
				require.True(t, outer.Allow(), left)
				require.True(t, tenants.Allow("192.0.2.1"), left)
			}
			require.False(t, outer.Allow())
			require.False(t, tenants.Allow("192.0.2.1"))
		})
	}
	require.False(t, own.Allow())
}

// An admitter is a limit that is no pointer.
type admitter struct{}

func (admitter) Admit(context.Context, string) (throttle.Decision, error) {
	return throttle.Decision{}, nil
}

func TestThrottleByOfALimitThatIsNoPointer(t *testing.T) {
	require.Equal(t, 200, get(resiliencehttp.Server{}.ThrottleBy(admitter{}, nil)(hello)).Code)
}

func TestThrottleByLeavesOthersAlone(t *testing.T) {
	tenants := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 0.001, Burst: 3}})
	server := httptest.NewServer(resiliencehttp.Server{}.ThrottleBy(tenants, nil)(hello))
	defer server.Close()
	h := server.Config.Handler
	refused := 0
	for i := range 1000 {
		if get(h, from(fmt.Sprintf("192.0.2.1:%d", i+1)), func(r *http.Request) {
			// What the client says of itself changes nothing.
			r.Header.Set("X-Forwarded-For", fmt.Sprintf("10.0.%d.%d", i/256, i%256))
			r.Header.Set("X-Real-IP", fmt.Sprintf("10.2.%d.%d", i/256, i%256))
			r.Header.Set("Priority", "u=0")
		}).Code == 429 {
			refused++
		}
	}
	require.Equal(t, 997, refused)
	require.Equal(t, 200, get(h, from("192.0.2.2:1")).Code)
	resp, err := http.Get(server.URL)
	require.Equal(t, "hello", answer(t, resp, err))
}

func TestThrottleWaitsAsTheLimitHasIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: -1})
		h := resiliencehttp.Server{}.Throttle(limit)(hello)
		require.Equal(t, 200, get(h).Code)
		start := time.Now()
		require.Equal(t, 200, get(h).Code)
		require.Equal(t, time.Second, time.Since(start))

		// One that seems to have gone may have closed its sending side alone.
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		w := get(h, func(r *http.Request) { *r = *r.WithContext(ctx) })
		require.GreaterOrEqual(t, w.Code, 429)

		// One whose time is up is still there.
		ctx, cancel = context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		w = get(h, func(r *http.Request) { *r = *r.WithContext(ctx) })
		require.GreaterOrEqual(t, w.Code, 429)
	})
}

func TestClientIP(t *testing.T) {
	proxies := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8:ffff::/48"),
		netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("::ffff:172.16.0.0/112"),
		netip.MustParsePrefix("::ffff:0.0.0.0/95"),
		netip.MustParsePrefix("2001:db8:eeee::/112")}
	before := slices.Clone(proxies)
	for _, c := range []struct {
		name, remote, x, want string
	}{
		{"Address", "192.0.2.7:1234", "", "192.0.2.7"},
		{"IPv6", "[2001:db8:1:2:3:4:5:6]:1234", "", "2001:db8:1:2::/64"},
		{"Zone", "[fe80::1%eth0]:1234", "", "fe80::/64"},
		{"Mapped", "[::ffff:192.0.2.7]:1234", "", "192.0.2.7"},
		{"WithoutPort", "192.0.2.7", "", "192.0.2.7"},
		{"UnixSocket", "@", "9.9.9.9", "@"},
		{"NotTrusted", "192.0.2.7:1", "9.9.9.9", "192.0.2.7"},
		{"TrailingComma", "10.0.0.1:1", "192.0.2.9,", "192.0.2.9"},
		{"EmptyMembers", "10.0.0.1:1", ", 6.6.6.6,, 192.0.2.9 , ,", "192.0.2.9"},
		{"OnlyCommas", "10.0.0.1:1", ",,", "10.0.0.1"},
		{"GarbageLeftOfTrusted", "10.0.0.1:1", "192.0.2.9, garbage, 10.2.2.2", "10.0.0.1"},
		{"TrustedWithZone", "[fe80::1%eth0]:1", "192.0.2.9", "192.0.2.9"},
		{"ZoneInTheField", "10.0.0.1:1", "192.0.2.9, fe80::2%eth1", "192.0.2.9"},
		{"TrustedAsMapped", "172.16.0.1:1", "192.0.2.9", "192.0.2.9"},
		{"MappedTrustedAsMapped", "[::ffff:172.16.0.1]:1", "192.0.2.9", "192.0.2.9"},
		{"NextToTrustedAsMapped", "172.17.0.1:1", "192.0.2.9", "172.17.0.1"},
		{"Trusted", "10.0.0.1:1", "192.0.2.9", "192.0.2.9"},
		{"TrustedMapped", "[::ffff:10.0.0.1]:1", "192.0.2.9", "192.0.2.9"},
		{"TrustedIPv6", "[2001:db8:ffff::1]:1", "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"},
		{"TrustedSaysNothing", "10.0.0.1:1", "", "10.0.0.1"},
		{"FromTheRight", "10.0.0.1:1", "6.6.6.6, 192.0.2.9, 10.1.1.1", "192.0.2.9"},
		{"OnlyTrusted", "10.0.0.1:1", "10.3.3.3,10.2.2.2", "10.3.3.3"},
		{"MadeUpOnTheLeft", "10.0.0.1:1", "garbage, 192.0.2.9", "192.0.2.9"},
		{"Garbage", "10.0.0.1:1", "192.0.2.9, garbage", "10.0.0.1"},
		{"WithPort", "10.0.0.1:1", "192.0.2.9:4711", "192.0.2.9"},
		{"InBrackets", "10.0.0.1:1", "[2001:db8:1:2::9]", "2001:db8:1:2::/64"},
		{"OpenBracket", "10.0.0.1:1", "[192.0.2.9", "10.0.0.1"},
		{"CloseBracket", "10.0.0.1:1", "192.0.2.9]", "10.0.0.1"},
		{"IPv4InBrackets", "10.0.0.1:1", "[192.0.2.9]", "10.0.0.1"},
		{"IPv6OpenBracket", "10.0.0.1:1", "[2001:db8:1:2::9", "10.0.0.1"},
		{"IPv6CloseBracket", "10.0.0.1:1", "2001:db8:1:2::9]", "10.0.0.1"},
		{"NextToALongPrefix", "[2001:db8:dddd::1]:1", "192.0.2.9", "2001:db8:dddd::/64"},
		{"TrustedBesideMapped", "[::fffe:1:2]:1", "192.0.2.9", "192.0.2.9"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := httptest.NewRequest("GET", "/", nil)
			r.RemoteAddr = c.remote
			if c.x != "" {
				r.Header.Set("X-Forwarded-For", c.x)
			}
			require.Equal(t, c.want, resiliencehttp.ClientIP(proxies...)(r))
		})
	}

	require.Equal(t, before, proxies)
	all := netip.MustParsePrefix("::ffff:0.0.0.0/96") // of IPv4
	require.Equal(t, "192.0.2.9", resiliencehttp.ClientAddress("172.16.0.1:1", []string{"192.0.2.9"}, all))

	r := httptest.NewRequest("GET", "/", nil)
	r.RemoteAddr = "10.0.0.1:1"
	r.Header["X-Forwarded-For"] = []string{"6.6.6.6", "192.0.2.9"} // a line of the client's, and one of the proxy's
	require.Equal(t, "192.0.2.9", resiliencehttp.ClientIP(proxies...)(r))
}

func TestClientIPOfALongFieldAllocatesLittle(t *testing.T) {
	key := resiliencehttp.ClientIP(netip.MustParsePrefix("10.0.0.0/8"))
	r := httptest.NewRequest("GET", "/", nil)
	r.RemoteAddr = "10.0.0.1:1"
	for _, many := range []string{",", "10.0.0.2,", "x"} {
		long := strings.Repeat(many, 1<<20/len(many))
		r.Header = http.Header{"X-Forwarded-For": {long}}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		key(r)
		runtime.ReadMemStats(&after)
		require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(64<<10), many)
	}
}
