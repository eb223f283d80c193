package resiliencehttp

import (
	"bytes"
	"errors"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/maypok86/otter/v2"
)

// LastKnown returns an http.RoundTripper that sends requests through next, usually a
// [Transport], and answers a GET that fails with the last good response to the same GET.
//
//	client := &http.Client{Transport: resiliencehttp.LastKnown(transport, 64<<20)}
//
// A request fails if next returns an error, or a status that [DefaultClassify] treats as
// a failure of the server, or 429. A request whose caller has canceled it, or whose
// deadline has passed, is answered too: its time-out is a common way to fail.
//
// A response is good if its status is 200 and the caller has read its body to the end.
// It is remembered unless it is longer than an eighth of capacity, its Cache-Control has
// no-store, no-cache, must-revalidate or private, or it varies by everything. It
// answers only requests that have the same URL, the same Host, and the same fields
// Authorization, Cookie and those that its Vary names (RFC 9111, section 4). Of responses
// that differ by other fields of the request, the last one is remembered.
//
// A GET with a body is neither remembered nor answered, nor is one whose Cache-Control has
// no-store or no-cache. A GET with a Range may be answered by the whole (status 200).
//
// The answer has an Age, and a Cache-Status (RFC 9211) of "last-known; hit". It has no
// Set-Cookie, since the cookies may have changed since.
//
// capacity is the number of bytes that bodies, fields and URLs take together, at least
// 1. If there is no room, the least used responses are dropped. LastKnown panics if capacity
// is less, or next is nil.
func LastKnown(next http.RoundTripper, capacity int64) http.RoundTripper {
	if next == nil || capacity < 1 {
		panic(errors.New("resiliencehttp: LastKnown needs a RoundTripper and a capacity of 1 or more"))
	}
	return &lastKnown{
		next:    next,
		longest: capacity / 8,
		answers: otter.Must(&otter.Options[string, *known]{
			MaximumWeight: uint64(capacity),
			Weigher:       func(key string, k *known) uint32 { return uint32(min(k.size(key), math.MaxInt32)) },
		}),
	}
}

type lastKnown struct {
	next    http.RoundTripper
	longest int64
	answers *otter.Cache[string, *known] // by keyOf the request
}

// A known is a good response.
type known struct {
	response  *http.Response // without a body
	body      []byte
	at        time.Time // when it was received
	age       time.Duration
	selecting http.Header // the fields of the request that Vary names
}

// size returns about how many bytes k and its key take.
func (k *known) size(key string) int {
	n := 200 + len(key) + len(k.body)
	for _, h := range []http.Header{k.response.Header, k.selecting} {
		for name, values := range h {
			n += len(name)
			for _, v := range values {
				n += len(v)
			}
		}
	}
	return n
}

// RoundTrip is that of http.RoundTripper.
func (l *lastKnown) RoundTrip(req *http.Request) (*http.Response, error) {
	res, err := l.next.RoundTrip(req)
	if !rememberable(req) || err == nil && res == nil {
		return res, err
	}
	if err == nil {
		complete(res, req)
		if classify(res, false) == nil {
			l.remember(req, res)
			return res, nil
		}
	}
	if k, ok := l.answers.GetIfPresent(keyOf(req)); ok && k.answers(req) {
		if err == nil {
			_ = res.Body.Close()
		}
		return k.again(req), nil
	}
	return res, err
}

// rememberable reports whether an earlier response may answer req.
func rememberable(req *http.Request) bool {
	return (req.Method == "" || req.Method == http.MethodGet) && req.URL != nil &&
		(req.Body == nil || req.Body == http.NoBody) &&
		!directs(req.Header, "no-store", "no-cache")
}

// keyOf returns what is the same in all requests that a response answers.
func keyOf(req *http.Request) string {
	return strings.Join([]string{
		req.URL.String(),
		req.Host,
		strings.Join(req.Header.Values("Authorization"), "\n"),
		strings.Join(req.Header.Values("Cookie"), "\n"),
	}, "\x00")
}

// CloseIdleConnections forwards to next.
func (l *lastKnown) CloseIdleConnections() {
	if next, ok := l.next.(interface{ CloseIdleConnections() }); ok {
		next.CloseIdleConnections()
	}
}

// remember has the response kept when the caller has read all of it.
func (l *lastKnown) remember(req *http.Request, res *http.Response) {
	if res.StatusCode != http.StatusOK || res.ContentLength > l.longest || !mayBeKept(res.Header) {
		return
	}
	key := keyOf(req)
	k := &known{at: time.Now(), selecting: http.Header{}}
	for _, name := range selecting(res.Header) {
		k.selecting[name] = slices.Clone(req.Header.Values(name))
	}
	if seconds, err := strconv.Atoi(res.Header.Get("Age")); err == nil {
		k.age = time.Duration(min(max(0, seconds), math.MaxInt32)) * time.Second
	}
	kept := *res
	kept.Header, kept.Body, kept.Request, kept.TLS = res.Header.Clone(), nil, nil, nil
	kept.Trailer, kept.TransferEncoding = nil, nil
	kept.Header.Del("Set-Cookie")
	k.response = &kept
	if res.Body == http.NoBody { // the caller need not read it
		l.answers.Set(key, k)
		return
	}
	res.Body = &remembered{ReadCloser: res.Body, length: res.ContentLength, longest: l.longest, whole: func(body []byte) {
		k.body = body
		l.answers.Set(key, k)
	}}
}

// mayBeKept reports whether a response may answer a later request (RFC 9111, sections
// 3 and 4.2.4).
func mayBeKept(h http.Header) bool {
	return !directs(h, "no-store", "no-cache", "must-revalidate", "private") && !slices.Contains(selecting(h), "*")
}

// directs reports whether Cache-Control has one of the directives.
func directs(h http.Header, directives ...string) bool {
	for _, field := range h.Values("Cache-Control") {
		for directive := range strings.SplitSeq(field, ",") {
			name, _, _ := strings.Cut(strings.ToLower(strings.TrimSpace(directive)), "=")
			if slices.Contains(directives, name) {
				return true
			}
		}
	}
	return false
}

// selecting returns the fields of a request that the response depends on, by its Vary.
func selecting(h http.Header) []string {
	var names []string
	for _, field := range h.Values("Vary") {
		for name := range strings.SplitSeq(field, ",") {
			if name = strings.TrimSpace(name); name != "" {
				names = append(names, http.CanonicalHeaderKey(name))
			}
		}
	}
	return names
}

// answers reports whether the response answers req.
func (k *known) answers(req *http.Request) bool {
	for name, values := range k.selecting {
		if !slices.Equal(values, req.Header.Values(name)) {
			return false
		}
	}
	return true
}

// again returns the response as the answer to req.
func (k *known) again(req *http.Request) *http.Response {
	res := *k.response
	res.Request = req
	res.Body = io.NopCloser(bytes.NewReader(k.body))
	res.ContentLength = int64(len(k.body))
	res.Header = res.Header.Clone()
	res.Header.Set("Age", strconv.FormatInt(int64((k.age+time.Since(k.at))/time.Second), 10))
	res.Header.Add("Cache-Status", "last-known; hit")
	return &res
}

// A remembered body is one that is kept while the caller reads it.
type remembered struct {
	io.ReadCloser
	read    []byte
	length  int64 // of all of it; negative: not known
	longest int64
	whole   func([]byte) // called with all of it; nil if that was too long, or has been called
}

func (b *remembered) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.whole == nil {
		return n, err
	}
	b.read = append(b.read, p[:n]...)
	switch {
	case int64(len(b.read)) > b.longest || err != nil && err != io.EOF:
		b.read, b.whole = nil, nil
	case err == io.EOF, int64(len(b.read)) == b.length: // a decoder may not read on to the EOF
		b.whole(b.read)
		b.whole = nil
	}
	return n, err
}
