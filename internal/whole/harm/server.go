package harm

import (
	"context"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"time"
)

// A Handler is the server of a row. It must return when r's ctx is done, unless the row is Stubborn.
type Handler func(w *World, rw http.ResponseWriter, r *Request)

// A Request is a request as the server receives it. The random numbers of a request depend only on the seed,
// the call and the attempt. Therefore the server behaves in the same way for all clients, in whatever order
// goroutines run.
type Request struct {
	*http.Request
	Call    int // the number of the caller's call, from 0
	Attempt int // the number of this request among those of its call, from 0
	Number  int // the number of this request among all requests, from 0
	random  *rand.Rand
}

// callHeader is the header field with the number of the call. Every client copies it into each attempt.
const callHeader = "Harm-Call"

// serve counts a request, waits for a worker if the row has workers, and calls the row's Handler.
func (w *World) serve(rw http.ResponseWriter, hr *http.Request) {
	call, _ := strconv.Atoi(hr.Header.Get(callHeader))
	w.mu.Lock()
	r := &Request{Request: hr, Call: call, Attempt: w.attempts[call], Number: len(w.sent)}
	w.attempts[call]++
	w.sent = append(w.sent, w.Now())
	w.mu.Unlock()
	r.random = rand.New(rand.NewPCG(w.seed, uint64(call)<<16|uint64(r.Attempt)))
	if w.workers != nil {
		canceled := hr.Context().Done()
		if w.row.Stubborn {
			canceled = nil
		}
		select {
		case w.workers <- struct{}{}:
			defer func() { <-w.workers }()
		case <-canceled:
			return
		}
	}
	w.row.Server(w, rw, r)
}

// Chance reports true with probability p.
func (r *Request) Chance(p float64) bool { return r.random.Float64() < p }

// DialedBefore reports whether the request's connection was dialed before at, a time since the start of the
// run.
func (r *Request) DialedBefore(w *World, at time.Duration) bool {
	return r.Context().Value(connKey{}).(*conn).dialed.Sub(w.start) < at
}

type connKey struct{}

func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// During serves with inner from start until end, and with outer otherwise.
func During(start, end time.Duration, inner, outer Handler) Handler {
	return func(w *World, rw http.ResponseWriter, r *Request) {
		if now := w.Now(); now >= start && now < end {
			inner(w, rw, r)
			return
		}
		outer(w, rw, r)
	}
}

// Share serves requests with some with probability p, and with others otherwise.
func Share(p float64, some, others Handler) Handler {
	return func(w *World, rw http.ResponseWriter, r *Request) {
		if r.Chance(p) {
			some(w, rw, r)
			return
		}
		others(w, rw, r)
	}
}

// FirstAttempts serves the first attempt of each call with first, and the others with others.
func FirstAttempts(first, others Handler) Handler {
	return func(w *World, rw http.ResponseWriter, r *Request) {
		if r.Attempt == 0 {
			first(w, rw, r)
			return
		}
		others(w, rw, r)
	}
}

// EveryNth serves every nth request with some, and the others with others.
func EveryNth(n int, some, others Handler) Handler {
	return func(w *World, rw http.ResponseWriter, r *Request) {
		if r.Number%n == n-1 {
			some(w, rw, r)
			return
		}
		others(w, rw, r)
	}
}

// OldConns serves a request with some if it arrives after the time before, on a connection that was dialed
// earlier than that. It serves all other requests with others.
func OldConns(before time.Duration, some, others Handler) Handler {
	return func(w *World, rw http.ResponseWriter, r *Request) {
		if w.Now() >= before && r.DialedBefore(w, before) {
			some(w, rw, r)
			return
		}
		others(w, rw, r)
	}
}

// Path serves the requests for path with some, and the others with others.
func Path(path string, some, others Handler) Handler {
	return func(w *World, rw http.ResponseWriter, r *Request) {
		if r.URL.Path == path {
			some(w, rw, r)
			return
		}
		others(w, rw, r)
	}
}

// Takes answers after d. If the row is Stubborn, it completes a request even if its client has canceled.
func Takes(d time.Duration) Handler {
	return func(w *World, rw http.ResponseWriter, r *Request) { w.work(d, rw, r) }
}

// TakesExp answers after an exponentially distributed time with the given mean.
func TakesExp(mean time.Duration) Handler {
	return func(w *World, rw http.ResponseWriter, r *Request) {
		w.work(time.Duration(r.random.ExpFloat64()*float64(mean)), rw, r)
	}
}

func (w *World) work(d time.Duration, rw http.ResponseWriter, r *Request) {
	ctx := r.Context()
	if w.row.Stubborn {
		ctx = context.Background()
	}
	if sleep(ctx, d) == nil {
		_, _ = io.WriteString(rw, "ok\n")
	}
}

// Silent never answers.
func Silent(_ *World, _ http.ResponseWriter, r *Request) { <-r.Context().Done() }

// Status answers with code, and with Retry-After if retryAfter is not zero.
func Status(code int, retryAfter time.Duration) Handler {
	return func(_ *World, rw http.ResponseWriter, _ *Request) {
		if retryAfter > 0 {
			rw.Header().Set("Retry-After", strconv.Itoa(int(retryAfter/time.Second)))
		}
		rw.WriteHeader(code)
	}
}

// Unavailable answers with 503.
var Unavailable = Status(http.StatusServiceUnavailable, 0)

// Reads reads the request's body and then answers.
func Reads(_ *World, rw http.ResponseWriter, r *Request) {
	if _, err := io.Copy(io.Discard, r.Body); err == nil {
		_, _ = io.WriteString(rw, "ok\n")
	}
}

// GoAway answers after d. Once per period, it asks each client to open a new connection, and closes the old
// one when the requests in flight have been answered. It does this with GOAWAY over HTTP/2 and with
// Connection: close over HTTP/1.1.
func GoAway(period, d time.Duration) Handler {
	return func(w *World, rw http.ResponseWriter, r *Request) {
		if r.DialedBefore(w, w.Now()/period*period) {
			rw.Header().Set("Connection", "close")
		}
		w.work(d, rw, r)
	}
}

// A Stream is a response that is a stream of events. Its header is sent immediately.
type Stream struct {
	First  time.Duration // the time until the first event
	Every  time.Duration // the time between events
	Events int
	CutAt  int // the number of events after which the stream is cut; zero means never
}

// Serve sends the stream. It is a Handler.
func (s Stream) Serve(_ *World, rw http.ResponseWriter, r *Request) {
	rw.Header().Set("Content-Type", "text/event-stream")
	rw.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(rw).Flush
	_ = flush()
	wait := s.First
	for n := range s.Events {
		if sleep(r.Context(), wait) != nil {
			return
		}
		if wait = s.Every; s.CutAt > 0 && n >= s.CutAt {
			panic(http.ErrAbortHandler)
		}
		_, _ = io.WriteString(rw, "data: x\n\n")
		_ = flush()
	}
	_, _ = io.WriteString(rw, streamEnd)
}

// streamEnd is the last event of a complete stream.
const streamEnd = "data: end\n\n"

// sleep waits for d. If ctx is done first, it returns ctx's error.
func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
