package resiliencehttp_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/resiliencehttp"
)

func byURL(r *http.Request) string { return r.URL.String() }

// A shop is a server and a client that remembers what it said.
type shop struct {
	http.RoundTripper
	t      *testing.T
	status int // 0: the server is down
	body   io.Reader
	fields []string
	length int64 // of body; negative: not told
}

func newShop(t *testing.T, capacity int64, key func(*http.Request) string) *shop {
	s := &shop{t: t, status: 200, length: -1}
	s.RoundTripper = resiliencehttp.LastKnown(rounds(func(r *http.Request) (*http.Response, error) {
		if s.status == 0 {
			return nil, errors.New("down")
		}
		res := reply(r, s.status, "")
		for i := 0; i < len(s.fields); i += 2 {
			res.Header[s.fields[i]] = []string{s.fields[i+1]} // as it is written
		}
		if s.body != nil {
			res.Body, res.ContentLength = io.NopCloser(s.body), s.length
		}
		return res, nil
	}), capacity, time.Minute, key)
	return s
}

// ask returns the response to a request.
func (s *shop) ask(method, url string, fields ...string) *http.Response {
	r := request(s.t, method, url)
	for i := 0; i < len(fields); i += 2 {
		r.Header[fields[i]] = []string{fields[i+1]}
	}
	res, _ := s.RoundTrip(r)
	return res
}

// get has the server say body, and the caller read it.
func (s *shop) get(url, body string, fields ...string) {
	s.status, s.body = 200, strings.NewReader(body)
	require.Equal(s.t, body, text(s.t, s.ask("GET", url, fields...)))
}

// known returns what is answered while the server is down.
func (s *shop) known(url string, fields ...string) string {
	s.status = 0
	if res := s.ask("GET", url, fields...); res != nil {
		return text(s.t, res)
	}
	return ""
}

func TestLastKnownAnswersWhileTheServerIsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, 1<<20, byURL)
		s.fields = []string{"Age", "5", "Set-Cookie", "a=b"}
		s.get("http://a/x", "1")
		s.get("http://a/x", "2")
		time.Sleep(7 * time.Second)
		for _, s.status = range []int{0, 503, 429} {
			res := s.ask("GET", "http://a/x")
			require.Equal(t, 200, res.StatusCode)
			require.Equal(t, "12", res.Header.Get("Age"))
			require.Equal(t, "last-known; hit", res.Header.Get("Cache-Status"))
			require.EqualValues(t, 1, res.ContentLength)
			require.Empty(t, res.Cookies())
			require.Equal(t, "2", text(t, res))
		}
		require.Empty(t, s.known("http://a/never"))
		require.Nil(t, s.ask("HEAD", "http://a/x"), "only a GET is answered")
		time.Sleep(48 * time.Second)
		require.Equal(t, "2", s.known("http://a/x"))
		time.Sleep(time.Second)
		require.Empty(t, s.known("http://a/x"), "older than a minute")
	})
}

func TestLastKnownGoesByTheKeyAlone(t *testing.T) {
	s := newShop(t, 1<<20, func(r *http.Request) string { return r.Header.Get("User") })
	s.get("http://a/x", "mine", "User", "me")
	s.get("http://a/x", "yours", "User", "you")
	s.get("http://a/x", "nobody's")
	require.Equal(t, "mine", s.known("http://b/", "User", "me", "Cookie", "a=b"))
	require.Equal(t, "yours", s.known("http://a/x", "User", "you"))
	require.Empty(t, s.known("http://a/x"), "the key says that nothing is remembered")
}

func TestLastKnownForgets(t *testing.T) {
	for _, c := range []struct {
		method, field string
		status        int
		forgotten     bool
	}{
		{"GET", "", 401, true}, {"GET", "", 403, true}, {"GET", "", 404, true}, {"HEAD", "", 404, true}, {"GET", "", 410, true},
		{"GET", "", 400, false}, {"GET", "", 503, false}, {"HEAD", "", 200, false}, {"OPTIONS", "", 200, false},
		{"GET", "max-age=5, No-Store", 200, true}, {"GET", "no-store", 304, true}, {"HEAD", "no-store", 200, true},
		{"GET", "no-store", 503, false}, {"GET", "private, no-cache", 304, false},
		{"PUT", "", 200, true}, {"DELETE", "", 204, true}, {"POST", "", 303, true}, {"PATCH", "", 200, true},
		{"PUT", "", 500, true}, {"PUT", "", 0, true}, {"PUT", "", 400, false}, {"PUT", "", 409, false}, {"PUT", "", 404, true},
	} {
		s := newShop(t, 1<<20, byURL)
		s.get("http://a/x", "old")
		s.status, s.fields = c.status, []string{"cache-control", c.field}
		s.body = strings.NewReader("other")
		if res := s.ask(c.method, "http://a/x"); res != nil {
			text(t, res)
		}
		s.fields = nil
		require.Equal(t, map[bool]string{true: "", false: "old"}[c.forgotten], s.known("http://a/x"), c)
		s.get("http://a/x", "new")
		require.Equal(t, "new", s.known("http://a/x"), c)
	}
}

func TestLastKnownForgetsWhatIsStillBeingRead(t *testing.T) {
	s := newShop(t, 1<<20, byURL)
	s.body = strings.NewReader("old")
	res := s.ask("GET", "http://a/x")
	s.body = strings.NewReader("")
	s.ask("PUT", "http://a/x")
	require.Equal(t, "old", text(t, res))
	require.Empty(t, s.known("http://a/x"), "the GET began before the PUT")
}

// The same, if there was no room for what told of the PUT.
func TestLastKnownForgetsWhatIsStillBeingReadWhenItIsFull(t *testing.T) {
	s := newShop(t, 8000, byURL)
	for _, again := range []bool{false, true} { // also if the key has been remembered since
		s.status, s.body = 200, strings.NewReader("old")
		res := s.ask("GET", "http://a/x")
		s.body = strings.NewReader("")
		s.ask("PUT", "http://a/x")
		if again {
			s.get("http://a/x", "new")
		}
		for i := range 5000 {
			s.get(fmt.Sprint("http://a/", i), "x")
		}
		require.Equal(t, "old", text(t, res))
		require.NotEqual(t, "old", s.known("http://a/x"), again)
	}
}

func TestLastKnownReadsFieldsInAnyCase(t *testing.T) {
	s := newShop(t, 1<<20, byURL)
	s.fields = []string{"age", "50", "set-cookie", "a=b"}
	s.get("http://a/x", "old")
	s.status = 0
	res := s.ask("GET", "http://a/x")
	require.Equal(t, http.Header{"Age": {"50"}, "Cache-Status": {"last-known; hit"}}, res.Header)
	s.fields = []string{"Age", "99999999999999999999"}
	s.get("http://a/x", "older")
	require.Empty(t, s.known("http://a/x"))
}

func TestLastKnownLeavesOtherRequestsAlone(t *testing.T) {
	s := newShop(t, 1<<20, byURL)
	s.get("http://a/new", "conditional", "if-none-match", `"1"`)
	require.Empty(t, s.known("http://a/new"))
	s.get("http://a/x", "kept")
	for _, name := range []string{"If-Match", "if-none-match", "If-Modified-Since", "If-Unmodified-Since", "If-Range"} {
		require.Empty(t, s.known("http://a/x", name, `"1"`), name)
	}
	r := request(t, "GET", "http://a/x")
	r.Body = io.NopCloser(strings.NewReader("query"))
	_, err := s.RoundTrip(r)
	require.Error(t, err)
	require.Equal(t, "kept", s.known("http://a/x"))
}

// A base answers as a server that has said all there is.
type base struct {
	res    *http.Response // nil: the server is down
	closed int
}

func (b *base) RoundTrip(*http.Request) (*http.Response, error) {
	if b.res == nil {
		return nil, errors.New("down")
	}
	res := *b.res
	return &res, nil
}

func (b *base) CloseIdleConnections() { b.closed++ }

func TestLastKnownAnswersWithWhatBelongsToTheResponse(t *testing.T) {
	b := &base{res: &http.Response{StatusCode: 200, Header: http.Header{"A": {"1"}}, Trailer: http.Header{"B": nil}, TransferEncoding: []string{"chunked"}}}
	known := resiliencehttp.LastKnown(b, 1<<20, time.Hour, byURL)
	first, err := known.RoundTrip(request(t, "GET", "http://a/x"))
	require.NoError(t, err)
	require.Empty(t, text(t, first), "the Body is never nil")
	b.res = nil
	for _, method := range []string{"GET", ""} {
		again := request(t, "GET", "http://a/x")
		again.Method, again.Body = method, http.NoBody
		res, err := known.RoundTrip(again)
		require.NoError(t, err)
		require.Same(t, again, res.Request)
		require.Equal(t, http.Header{"A": {"1"}, "Age": {"0"}, "Cache-Status": {"last-known; hit"}}, res.Header)
		require.Nil(t, res.Trailer)
		require.Nil(t, res.TransferEncoding)
		res.Header.Set("A", "2")
	}
	known.(interface{ CloseIdleConnections() }).CloseIdleConnections()
	require.Equal(t, 1, b.closed)
}

func TestLastKnownIsBounded(t *testing.T) {
	s := newShop(t, 8000, byURL)
	for i := range 500 {
		s.get(fmt.Sprint("http://a/", i), "x")
	}
	require.Eventually(t, func() bool { // otter evicts a moment later
		kept := 0
		for i := range 500 {
			kept += len(s.known(fmt.Sprint("http://a/", i)))
		}
		return kept > 0 && kept*200 <= 8000
	}, time.Minute, 10*time.Millisecond)
	s.get("http://a/long", strings.Repeat("x", 1001))
	require.Empty(t, s.known("http://a/long"), "a body longer than an eighth is not kept")
	for _, build := range []func(){
		func() { resiliencehttp.LastKnown(nil, 1, 1, byURL) },
		func() { resiliencehttp.LastKnown(http.DefaultTransport, 0, 1, byURL) },
		func() { resiliencehttp.LastKnown(http.DefaultTransport, 1, 0, byURL) },
		func() { resiliencehttp.LastKnown(http.DefaultTransport, 1, 1, nil) },
	} {
		require.Panics(t, build)
	}
}

func TestLastKnownIsBoundedForOneResponse(t *testing.T) {
	s := newShop(t, 8000, byURL)
	for _, length := range []int64{-1, 1000} {
		s.length = length
		s.get("http://a/longest", strings.Repeat("x", 1000))
		require.Len(t, s.known("http://a/longest"), 1000)
	}
	for _, fields := range [][]string{{strings.Repeat("A", 8000), ""}, {"A", strings.Repeat("a", 8000)}} {
		s := newShop(t, 8000, byURL)
		s.fields = fields
		s.get("http://a/x", "x")
		s.fields = nil
		require.Eventually(t, func() bool { return s.known("http://a/x") == "" }, time.Minute, 10*time.Millisecond)
	}
}

func TestLastKnownKeepsABodyThatADecoderHasRead(t *testing.T) {
	down := false
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if down {
			w.WriteHeader(503)
			return
		}
		_, _ = io.WriteString(w, `{"a":1}`) // has a Content-Length
	}))
	defer server.Close()
	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Retry: resiliencehttp.Disabled})
	client.Transport = resiliencehttp.LastKnown(client.Transport, 1<<20, time.Hour, byURL)
	resp, err := client.Get(server.URL)
	require.NoError(t, err)
	_, err = io.ReadFull(resp.Body, make([]byte, 7)) // no Read sees the EOF
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	down = true
	resp, err = client.Get(server.URL)
	require.NoError(t, err)
	require.Equal(t, 200, resp.StatusCode)
	require.Equal(t, `{"a":1}`, text(t, resp))
}

// A RoundTripper that does not know the length of a body leaves it at 0.
func TestLastKnownKeepsAllOfABodyWithoutALength(t *testing.T) {
	s := newShop(t, 1<<20, byURL)
	s.body, s.length = strings.NewReader("1"), 0
	res := s.ask("GET", "http://a/x")
	n, err := res.Body.Read(nil)
	require.Zero(t, n)
	require.NoError(t, err)
	require.Equal(t, "1", text(t, res))
	require.Equal(t, "1", s.known("http://a/x"))
}

func TestLastKnownNeedsAKeyAndRoom(t *testing.T) {
	base := rounds(func(r *http.Request) (*http.Response, error) { return reply(r, 200, ""), nil })
	require.Panics(t, func() { resiliencehttp.LastKnown(base, 0, time.Hour, byURL) })
	s := newShop(t, 1<<20, byURL)
	s.get("/a", "a", "Te", "trailers") // a short name
	for _, f := range []func(){
		func() { resiliencehttp.LastKnown(base, 1, time.Hour, nil) },
		func() { resiliencehttp.LastKnown(base, -1, time.Hour, byURL) },
	} {
		require.PanicsWithError(t, "resiliencehttp: LastKnown needs a RoundTripper, a capacity of 1 or more, an age above 0 and a key", f)
	}
	client := &http.Client{Transport: resiliencehttp.LastKnown(base, 1, time.Hour, byURL)}
	client.CloseIdleConnections() // base has none
}
