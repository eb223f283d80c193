package main

import (
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"time"
)

// A fault is how a provider fails.
type fault int32

const (
	none       fault = iota
	truncating       // cuts off half of the streams
	busy             // responds with 429 and a Retry-After
	failing          // responds with 200, and an error as the first event
	hanging          // accepts requests and does not respond
	down             // responds with 503
)

// A provider is a fake API of a language model. It responds to a request with a stream of words.
type provider struct {
	*httptest.Server
	fault atomic.Int32
	seed  uint64
	calls atomic.Uint64
}

func newProvider(seed uint64) *provider {
	p := &provider{seed: seed}
	p.Server = httptest.NewServer(p)
	return p
}

func (p *provider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var request struct{ Length int }
	if err := json.NewDecoder(r.Body).Decode(&request); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	_, _ = io.Copy(io.Discard, r.Body)
	cutAt := -1
	switch fault(p.fault.Load()) {
	case truncating:
		random := rand.New(rand.NewPCG(p.seed, p.calls.Add(1)))
		if random.IntN(2) == 0 {
			cutAt = request.Length / 2
		}
	case busy:
		w.Header().Set("Retry-After", "1")
		http.Error(w, "too many requests", http.StatusTooManyRequests)
		return
	case failing:
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "event: error\ndata: overloaded\n\n")
		return
	case hanging:
		<-r.Context().Done()
		return
	case down:
		http.Error(w, "down", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Provider", r.Header.Get("Provider"))
	for i := range request.Length {
		if i == cutAt {
			panic(http.ErrAbortHandler)
		}
		if _, err := io.WriteString(w, "data: word\n\n"); err != nil {
			return
		}
		_ = http.NewResponseController(w).Flush()
		time.Sleep(time.Millisecond)
	}
	_, _ = io.WriteString(w, "data: end\n\n")
}
