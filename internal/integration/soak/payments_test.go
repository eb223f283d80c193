package soak_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A mode is how the payments service is.
type mode int32

const (
	healthy     mode = iota
	hanging          // takes requests and does not answer; some have their effect
	refusing         // cuts connections
	limping          // slow, and one request in three fails, before or after its effect
	asking           // 503 with Retry-After: 1
	askingAYear      // 503 with a Retry-After of a year
)

// payments is the service that charges customers, and what it has done: each command
// once, however often it is asked.
type payments struct {
	*httptest.Server
	mode atomic.Int32
	quit chan struct{}

	mu   sync.Mutex
	done map[string]bool // by command
}

func newPayments(t *testing.T) *payments {
	p := &payments{quit: make(chan struct{}), done: map[string]bool{}}
	p.Server = httptest.NewServer(p)
	t.Cleanup(func() {
		close(p.quit)
		p.Close()
	})
	return p
}

func (p *payments) is(m mode) { p.mode.Store(int32(m)) }

func (p *payments) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	switch mode(p.mode.Load()) {
	case hanging:
		if rand.IntN(2) == 0 {
			p.apply(r)
		}
		select {
		case <-r.Context().Done():
		case <-p.quit:
		}
		panic(http.ErrAbortHandler)
	case refusing:
		panic(http.ErrAbortHandler)
	case limping:
		time.Sleep(time.Duration(rand.IntN(100)) * time.Millisecond)
		switch rand.IntN(6) {
		case 0:
			p.apply(r)
			fallthrough
		case 1:
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
	case asking:
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	case askingAYear:
		w.Header().Set("Retry-After", fmt.Sprint(365*24*3600))
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	w.WriteHeader(p.apply(r))
}

// apply does what r asks for and returns the status of the answer.
func (p *payments) apply(r *http.Request) int {
	command := r.Header.Get("Idempotency-Key")
	switch {
	case command == "": // a look at a payment that does not exist
		return http.StatusNotFound
	case strings.Contains(command, "declined") && strings.HasSuffix(command, "/do"):
		return http.StatusPaymentRequired
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if undone := strings.TrimSuffix(command, "/do") + "/undo"; p.done[undone] {
		return http.StatusConflict // its undo came first
	}
	p.done[command] = true
	return http.StatusOK
}

// charged reports whether the customer of an order has paid and not been refunded.
func (p *payments) charged(order string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.done[order+"/charge/charge/do"] && !p.done[order+"/charge/charge/undo"]
}
