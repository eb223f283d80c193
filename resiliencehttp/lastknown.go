package resiliencehttp

import (
	"bytes"
	"errors"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/maypok86/otter/v2"

	"github.com/go-resilience/resilience/internal/behavior"
)

// LastKnown returns an http.RoundTripper that sends requests through next, usually a
// [Transport], and answers a GET that fails with the last good response of the same key.
//
//	client.Transport = resiliencehttp.LastKnown(client.Transport, 64<<20, time.Hour, func(r *http.Request) string {
//		if strings.HasPrefix(r.URL.Path, "/products/") {
//			return r.URL.String() // the same for everybody
//		}
//		return "" // never remembered
//	})
//
// key returns what identifies the answer to a request, or "" for a request that LastKnown is
// to leave alone. It sees the request as the caller made it, without what next adds, such as
// a signature. Two requests of one key get each other's answers, whatever their fields are:
// where an answer depends on who asks, or on a field of the request, the key must have that,
// too. For a request that changes something, key returns that of the GET that shows it.
//
// A GET fails if next returns an error, or a status that [DefaultClassify] treats as a failure
// of the server, or 429. One whose caller has canceled it, or whose deadline has passed, is
// answered too: its timeout is a common way to fail. A GET with a body or a precondition
// (If-Match and its like) is neither answered nor remembered. One with a Range may be
// answered by the whole.
//
// A response is good if its status is 200 and the caller has read its body to the end. It is
// remembered unless it is longer than an eighth of capacity. It is forgotten when another
// request of its key is answered with 401, 403, 404 or 410, or without failing and with a
// Cache-Control of no-store, and when a request of any method but GET, HEAD, OPTIONS and TRACE
// may have changed something: unless its status is 4xx, or a policy refused it. A GET that
// began before that is not remembered. Other directives of Cache-Control, and Vary, are not
// heeded.
//
// The answer has an Age, at most maxAge, and a Cache-Status (RFC 9211) of "last-known; hit".
// It has no Set-Cookie, since the cookies may have changed since.
//
// capacity is the number of bytes that bodies, fields and keys take together, without those of
// responses that are being read. If there is no room, the least used responses are dropped.
// LastKnown panics if next or key is nil, or capacity or maxAge is not positive.
func LastKnown(next http.RoundTripper, capacity int64, maxAge time.Duration, key func(*http.Request) string) http.RoundTripper {
	if next == nil || key == nil || capacity < 1 || maxAge <= 0 {
		panic(errors.New("resiliencehttp: LastKnown needs a RoundTripper, a capacity of 1 or more, an age above 0 and a key"))
	}
	l := &lastKnown{next: next, key: key, maxAge: maxAge, longest: capacity / 8}
	l.answers = otter.Must(&otter.Options[string, *known]{
		MaximumWeight:    uint64(capacity),
		Weigher:          func(key string, k *known) uint32 { return uint32(min(k.size(key), math.MaxInt32)) },
		OnAtomicDeletion: l.dropped,
	})
	return l
}

type lastKnown struct {
	next    http.RoundTripper
	key     func(*http.Request) string
	maxAge  time.Duration
	longest int64
	answers *otter.Cache[string, *known]
	turns   atomic.Uint64
	gone    atomic.Uint64 // the latest of those that were dropped: of no key, anything older is kept
}

// A known is a good response, or the note that one was forgotten.
type known struct {
	turn     uint64         // of its request; of a note, when it was made
	gone     uint64         // the turn of the key's latest note, 0 if there was none
	response *http.Response // without a body; nil in a note
	body     []byte
	at       time.Time // when the request was sent
	age      time.Duration
}

// size returns about how many bytes k and its key take.
func (k *known) size(key string) int {
	n := 200 + len(key) + len(k.body)
	if k.response != nil {
		for name, values := range k.response.Header {
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
	key := l.key(req)
	if key == "" {
		return l.next.RoundTrip(req)
	}
	k := &known{turn: l.turns.Add(1), at: time.Now()}
	res, err := l.next.RoundTrip(req)
	if err == nil && res == nil {
		return nil, nil
	}
	failed := err != nil
	if !failed {
		complete(res, req)
		failed = classify(res, false) != nil
	}
	switch {
	case mayChange(req, res, err), !failed && withdraws(res):
		turn := l.turns.Add(1)
		l.keep(key, &known{turn: turn, gone: turn})
	case !answerable(req):
	case !failed:
		l.remember(key, k, res)
	default:
		if last := l.last(key); last != nil {
			if err == nil {
				_ = res.Body.Close()
			}
			return last.again(req), nil
		}
	}
	return res, err
}

// mayChange reports whether a request may have changed what is known: it is not one that
// only reads, and it was neither refused by a policy nor turned away by the server (4xx).
func mayChange(req *http.Request, res *http.Response, err error) bool {
	switch req.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return false
	}
	if err != nil {
		return !behavior.IsRefused(err)
	}
	return res.StatusCode < 400 || res.StatusCode >= 500
}

// withdraws reports whether a response says that what was known before is no longer so.
func withdraws(res *http.Response) bool {
	switch res.StatusCode {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusGone:
		return true
	}
	return noStore(res.Header)
}

// noStore reports whether Cache-Control has the directive no-store.
func noStore(h http.Header) bool {
	for directive := range strings.SplitSeq(strings.Join(canonical(h)["Cache-Control"], ","), ",") {
		if strings.EqualFold(strings.TrimSpace(directive), "no-store") {
			return true
		}
	}
	return false
}

// canonical returns a copy of h with the names that net/http gives fields. A Base may not.
func canonical(h http.Header) http.Header {
	c := make(http.Header, len(h))
	for name, values := range h {
		name = http.CanonicalHeaderKey(name)
		c[name] = append(c[name], values...)
	}
	return c
}

// answerable reports whether an earlier response may answer req.
func answerable(req *http.Request) bool {
	for name := range req.Header {
		if len(name) > 3 && strings.EqualFold(name[:3], "If-") {
			return false
		}
	}
	return (req.Method == "" || req.Method == http.MethodGet) && (req.Body == nil || req.Body == http.NoBody)
}

// last returns the response that answers a request that fails, or nil.
func (l *lastKnown) last(key string) *known {
	k, ok := l.answers.GetIfPresent(key)
	if !ok || k.response == nil || k.age+time.Since(k.at) > l.maxAge {
		return nil
	}
	return k
}

// keep makes k the latest of its key, unless what is there, or may have been, is of a later
// turn.
func (l *lastKnown) keep(key string, k *known) {
	l.answers.Compute(key, func(last *known, found bool) (*known, otter.ComputeOp) {
		if found && last.turn > k.turn || k.turn < l.gone.Load() {
			return last, otter.CancelOp
		}
		if found {
			k.gone = max(k.gone, last.gone)
		}
		return k, otter.WriteOp
	})
}

// dropped records the note that is lost with an answer for which there is no room.
func (l *lastKnown) dropped(e otter.DeletionEvent[string, *known]) {
	for e.WasEvicted() {
		gone := l.gone.Load()
		if e.Value.gone <= gone || l.gone.CompareAndSwap(gone, e.Value.gone) {
			return
		}
	}
}

// CloseIdleConnections forwards to next.
func (l *lastKnown) CloseIdleConnections() {
	if next, ok := l.next.(interface{ CloseIdleConnections() }); ok {
		next.CloseIdleConnections()
	}
}

// remember has the response kept, as k, when the caller has read all of it.
func (l *lastKnown) remember(key string, k *known, res *http.Response) {
	if res.StatusCode != http.StatusOK || res.ContentLength > l.longest {
		return
	}
	kept := *res
	kept.Header, kept.Body, kept.Request, kept.TLS = canonical(res.Header), nil, nil, nil
	kept.Trailer, kept.TransferEncoding = nil, nil
	kept.Header.Del("Set-Cookie")
	seconds, _ := strconv.Atoi(kept.Header.Get("Age")) // the greatest int if it is out of range
	k.age = time.Duration(min(max(0, seconds), math.MaxInt32)) * time.Second
	k.response = &kept
	if res.Body == http.NoBody { // the caller need not read it
		l.keep(key, k)
		return
	}
	res.Body = &remembered{ReadCloser: res.Body, length: res.ContentLength, longest: l.longest, whole: func(body []byte) {
		k.body = body
		l.keep(key, k)
	}}
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
	length  int64 // of all of it; 0 or negative: not known
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
	case err == io.EOF, len(b.read) > 0 && int64(len(b.read)) == b.length: // a decoder may not read on to the EOF
		b.whole(b.read)
		b.whole = nil
	}
	return n, err
}
