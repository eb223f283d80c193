package resiliencehttp_test

import (
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/throttle"
)

func FuzzRetryAfter(f *testing.F) {
	for _, s := range []string{"", "0", "120", "9223372037", "99999999999999999999", "-1",
		"Fri, 31 Dec 1999 23:59:59 GMT", "Friday, 31-Dec-99 23:59:59 GMT", "Fri Dec 31 23:59:59 1999"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, value string) {
		d := (&resiliencehttp.StatusError{Header: http.Header{"Retry-After": {value}}}).RetryAfter()
		require.GreaterOrEqual(t, d, time.Duration(0))
		digits := strings.TrimSpace(value)
		if digits != "" && strings.Trim(digits, "0123456789") == "" {
			require.Equal(t, strings.Trim(digits, "0") == "", d == 0)
			require.True(t, d%time.Second == 0 || d == 1<<63-1)
		}
	})
}

func FuzzClientIP(f *testing.F) {
	f.Add("1.2.3.4")
	f.Add("a, b")
	proxy := netip.MustParseAddr("10.0.0.1")
	clientIP := resiliencehttp.ClientIP(netip.PrefixFrom(proxy, 32))
	f.Fuzz(func(t *testing.T, x string) {
		r := httptest.NewRequest("GET", "/", nil)
		r.RemoteAddr = "10.0.0.1:80"
		r.Header["X-Forwarded-For"] = []string{x, "192.0.2.9"}
		// The proxy's own line says who it is; all else can only cast doubt on it.
		require.Contains(t, []string{"192.0.2.9", "10.0.0.1"}, clientIP(r))
	})
}

func FuzzFieldsAreStructured(f *testing.F) {
	f.Add("name", 1.5, 10)
	for _, name := range []string{"", `"\`, "tab\tline\nbreak", "größe", "\xff\x00", strings.Repeat("x", 100)} {
		f.Add(name, 1e12, 1<<50)
	}
	f.Fuzz(func(t *testing.T, name string, rate float64, burst int) {
		cfg := throttle.Config{Rate: rate, Burst: burst}
		if cfg.Validate() != nil {
			t.Skip()
		}
		h := resiliencehttp.Server{LimitName: name}.Throttle(throttle.New(cfg))(hello)
		for range 2 {
			w := get(h)
			if rate == throttle.Unlimited {
				require.NotContains(t, w.Header(), "Ratelimit-Policy") // there is nothing to tell
				continue
			}
			require.Regexp(t, structured, w.Header().Get("RateLimit-Policy"))
			require.Regexp(t, structured, w.Header().Get("RateLimit"))
		}
	})
}
