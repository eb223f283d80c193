package main

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRun(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, run(&out))
	text := out.String()
	require.Equal(t, 5, strings.Count(text, "hello a"))
	require.Equal(t, 1, strings.Count(text, " 429 "))
	require.Equal(t, 2, strings.Count(text, "hello b"))
	require.Equal(t, 1, strings.Count(text, " 503 "))
	require.Equal(t, 2, strings.Count(text, "/health"))
}

// A request that waits does not keep the server from stopping.
func TestServeCancelsRequestsAfterGrace(t *testing.T) {
	started := make(chan struct{})
	s := newServer(func(ctx context.Context) error {
		close(started)
		<-ctx.Done()
		return ctx.Err()
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- serve(ctx, l, s.handler(), 10*time.Millisecond) }()
	status := make(chan int)
	go func() {
		resp, err := http.Get("http://" + l.Addr().String() + "/report")
		if err != nil {
			t.Error(err)
			status <- 0
			return
		}
		_ = resp.Body.Close()
		status <- resp.StatusCode
	}()
	<-started
	stop()
	require.Equal(t, http.StatusServiceUnavailable, <-status)
	require.NoError(t, <-ended)
}
