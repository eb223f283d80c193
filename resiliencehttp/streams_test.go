package resiliencehttp_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/resiliencehttp"
)

// A streamed body delivers its parts, each after its pause, and then ends with end, or is silent
// until its ctx ends if that is nil.
type streamed struct {
	ctx   context.Context
	parts []part
	end   error
}

type part struct {
	pause time.Duration
	text  string
}

func (s *streamed) Read(p []byte) (int, error) {
	if len(s.parts) == 0 {
		if s.end != nil {
			return 0, s.end
		}
		<-s.ctx.Done()
		return 0, context.Cause(s.ctx)
	}
	next := &s.parts[0]
	select {
	case <-time.After(next.pause):
	case <-s.ctx.Done():
		return 0, context.Cause(s.ctx)
	}
	next.pause = 0
	n := copy(p, next.text)
	if next.text = next.text[n:]; next.text == "" {
		s.parts = s.parts[1:]
	}
	return n, nil
}

func (s *streamed) Close() error { return nil }

// streams answers the n-th request with the n-th stream, and all others with the last.
func streams(sent *int, all ...streamed) roundTripper {
	return func(r *http.Request) (*http.Response, error) {
		s := all[min(*sent, len(all)-1)]
		*sent++
		if s.parts == nil && s.end == nil { // silent before its headers
			<-r.Context().Done()
			return nil, context.Cause(r.Context())
		}
		s.ctx, s.parts = r.Context(), slices.Clone(s.parts)
		resp := response(200, nil, "Content-Type", "text/event-stream")
		resp.Body, resp.ContentLength, resp.Request = &s, -1, r
		return resp, nil
	}
}

func TestSilenceBeforeTheFirstByteIsTriedAgain(t *testing.T) {
	good := streamed{parts: []part{{0, "hello"}}, end: io.EOF}
	for name, first := range map[string]streamed{
		"BeforeTheHeaders": {},
		"AfterTheHeaders":  {parts: []part{{time.Hour, "late"}}, end: io.EOF},
		"BrokenAtOnce":     {end: io.ErrUnexpectedEOF},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sent := 0
				var seen watch
				transport := &resiliencehttp.Transport{
					Base: streams(&sent, first, good), ResponseHeaderTimeout: time.Second, HoldBody: true,
					Middleware: resilience.Chain(retries(3).Wrap, seen.Wrap),
				}
				start := time.Now()
				resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
				require.Equal(t, "hello", answer(t, resp, err))
				require.Equal(t, 2, sent)
				require.Error(t, seen.seen()[0])
				require.False(t, resilience.Answered(seen.seen()[0]))
				require.LessOrEqual(t, time.Since(start), time.Second)

				// A POST may have had its effect.
				sent = 0
				_, err = transport.RoundTrip(httptest.NewRequest("POST", "http://h/", nil))
				require.Error(t, err)
				passed, late := errors.AsType[*resilience.TimeoutError](err)
				require.Equal(t, name != "BrokenAtOnce", late, "%v", err)
				if late {
					require.Equal(t, time.Second, passed.After)
				}
				require.Equal(t, 1, sent)
			})
		})
	}
}

func TestSilenceWithinABodyIsAFailureOfTheServer(t *testing.T) {
	for name, c := range map[string]struct {
		parts []part
		takes time.Duration
		text  string
	}{
		"AfterTheFirstEvent": {[]part{{0, "a"}}, 2 * time.Second, "a"},
		"InTheMiddle": {[]part{{time.Second, "a"}, {time.Second, "b"}, {1900 * time.Millisecond, "c"}},
			5900 * time.Millisecond, "abc"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sent := 0
				circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
				transport := &resiliencehttp.Transport{Base: streams(&sent, streamed{parts: c.parts}), Idle: 2 * time.Second,
					Middleware: circuit.Wrap}
				start := time.Now()
				resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
				require.NoError(t, err)
				body, err := io.ReadAll(resp.Body)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Equal(t, c.text, string(body))
				require.Equal(t, c.takes, time.Since(start))
				synctest.Wait() // the end of the ctx may be what tells the breaker, beside the Read
				require.Equal(t, breaker.Open, circuit.State())
				require.NoError(t, resp.Body.Close())
			})
		})
	}
}

func TestReaderThatPausesCostsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sent := 0
		circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
		transport := &resiliencehttp.Transport{
			Base: streams(&sent,
				streamed{parts: []part{{0, "a"}, {time.Second, "b"}, {time.Second, "c"}}, end: io.EOF}),
			ResponseHeaderTimeout: 2 * time.Second, Idle: 2 * time.Second, Middleware: circuit.Wrap,
		}
		resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
		require.NoError(t, err)
		var read bytes.Buffer
		for {
			time.Sleep(time.Hour)
			n, err := io.CopyN(&read, resp.Body, 1)
			if n == 0 {
				require.Equal(t, io.EOF, err)
				break
			}
		}
		require.Equal(t, "abc", read.String())
		require.Equal(t, breaker.Closed, circuit.State())
		require.EqualValues(t, 0, circuit.Stats().Failed)
	})
}

// ResponseHeaderTimeout covers the first byte for a Judge that reads ahead. Idle counts from then on.
func TestSilenceAheadOfAJudge(t *testing.T) {
	for name, c := range map[string]struct {
		header, idle time.Duration
		parts        []part
		takes        time.Duration
		fails        bool
	}{
		"HeaderAlone": {time.Second, 0, []part{{500 * time.Millisecond, "data"}, {time.Minute, ": x\n\n"}},
			time.Minute + 500*time.Millisecond, false},
		"IdleAlone": {0, time.Second, []part{{time.Minute, "data: x\n\n"}}, time.Second, true},
		"Both":      {time.Second, 2 * time.Second, []part{{0, "data"}, {time.Minute, ": x\n\n"}}, 2 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				transport := &resiliencehttp.Transport{ResponseHeaderTimeout: c.header, Idle: c.idle, Judge: judgeEvents,
					Base: streams(new(int), streamed{parts: c.parts, end: io.EOF})}
				start := time.Now()
				resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
				require.Equal(t, c.takes, time.Since(start))
				if c.fails {
					require.ErrorIs(t, err, context.DeadlineExceeded)
				} else {
					require.Equal(t, "data: x\n\n", answer(t, resp, err))
				}
			})
		})
	}
}

// A failed response is read ahead while another attempt may follow, for a second. Idle counts from byte to byte, and
// not while nobody reads.
func TestIdleOfAFailedResponseIsFromByteToByte(t *testing.T) {
	slowly := func(n int) []part { return slices.Repeat([]part{{100 * time.Millisecond, "x"}}, n) }
	for name, c := range map[string]struct {
		body      streamed
		text      int
		get, post time.Duration // a POST is not read ahead
	}{
		"Slow":   {streamed{parts: slowly(25), end: io.EOF}, 25, 2500 * time.Millisecond, 2500 * time.Millisecond},
		"Silent": {streamed{parts: slowly(3)}, 3, 1500 * time.Millisecond, 800 * time.Millisecond},
		"Later":  {streamed{parts: slowly(15)}, 15, 2 * time.Second, 2 * time.Second},
	} {
		for method, took := range map[string]time.Duration{"GET": c.get, "POST": c.post} {
			t.Run(name+method, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					transport := &resiliencehttp.Transport{Idle: 500 * time.Millisecond, Middleware: retries(1).Wrap,
						Base: roundTripper(func(r *http.Request) (*http.Response, error) {
							body := c.body
							body.ctx, body.parts = r.Context(), slices.Clone(body.parts)
							resp := response(503, nil)
							resp.Body, resp.ContentLength = &body, -1
							return resp, nil
						})}
					start := time.Now()
					resp, err := transport.RoundTrip(httptest.NewRequest(method, "http://h/", nil))
					require.NoError(t, err)
					body, err := io.ReadAll(resp.Body)
					require.Len(t, body, c.text)
					if c.body.end == io.EOF {
						require.NoError(t, err)
					} else {
						passed, ok := errors.AsType[*resilience.TimeoutError](err)
						require.True(t, ok, "%v", err)
						require.Equal(t, 500*time.Millisecond, passed.After)
					}
					require.Equal(t, took, time.Since(start))
					require.NoError(t, resp.Body.Close())
				})
			})
		}
	}
}

func TestReaderOfALongFailedResponseMayPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		long := strings.Repeat("x", 64<<10+1)
		transport := &resiliencehttp.Transport{Idle: 5 * time.Second, Middleware: retries(1).Wrap,
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				resp := response(503, nil)
				resp.Body = &streamed{ctx: r.Context(), parts: []part{{1500 * time.Millisecond, long}, {0, "rest"}}, end: io.EOF}
				return resp, nil
			})}
		resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
		require.NoError(t, err)
		_, err = io.ReadFull(resp.Body, make([]byte, 1))
		require.NoError(t, err)
		time.Sleep(time.Minute)
		require.Equal(t, long[1:]+"rest", answer(t, resp, nil))
	})
}

const overloaded = "event: error\ndata: {\"type\":\"overloaded\"}\n\n"

// judgeEvents finds an error in the first event of a stream. A provider that says that it is
// overloaded has done nothing.
func judgeEvents(resp *http.Response, ahead *resiliencehttp.Ahead) error {
	if err := resiliencehttp.DefaultJudge(resp, ahead); err != nil {
		return err
	}
	if name, data, err := ahead.Event(); err == nil && name == "error" {
		return resiliencehttp.Resend(errors.New(data))
	}
	return nil
}

func TestJudgeFindsAFailureInTheFirstEvent(t *testing.T) {
	bad := streamed{parts: []part{{time.Second, overloaded}}, end: io.EOF}
	good := streamed{parts: []part{{0, ": a comment\n\nda"}, {0, "ta: hello\n\ndata: world\n\n"}}, end: io.EOF}
	whole := ": a comment\n\ndata: hello\n\ndata: world\n\n"
	for _, method := range []string{"GET", "POST"} {
		synctest.Test(t, func(t *testing.T) {
			sent := 0
			var seen watch
			transport := &resiliencehttp.Transport{Base: streams(&sent, bad, bad, good), Judge: judgeEvents,
				Middleware: resilience.Chain(retries(3).Wrap, seen.Wrap)}
			resp, err := transport.RoundTrip(httptest.NewRequest(method, "http://h/", nil))
			require.Equal(t, whole, answer(t, resp, err), "what was read ahead is there again")
			require.Equal(t, 3, sent)
			require.EqualError(t, seen.seen()[0], `{"type":"overloaded"}`)

			transport.Base = streams(new(int), bad)
			resp, err = transport.RoundTrip(httptest.NewRequest(method, "http://h/", nil))
			require.Nil(t, resp, "it is no answer")
			require.ErrorContains(t, err, "overloaded")

			// The next provider, before the caller has seen a byte.
			one := &resiliencehttp.Transport{Base: streams(new(int), bad), Judge: judgeEvents, Middleware: retries(1).Wrap}
			two := &resiliencehttp.Transport{Base: streams(new(int), good), Judge: judgeEvents, Middleware: retries(1).Wrap}
			resp, err = resiliencehttp.Failover(one, two).RoundTrip(httptest.NewRequest(method, "http://h/", nil))
			require.Equal(t, whole, answer(t, resp, err))
		})
	}
}

func TestResendIsForWhatHadNoEffect(t *testing.T) {
	for status, sent := range map[int]int64{429: 3, 400: 3, 500: 3, 503: 3, 529: 3, 502: 1, 504: 1} {
		server := serve(t, false, statuses("", status))
		transport := &resiliencehttp.Transport{Base: server.Base, Middleware: retries(3).Wrap,
			Judge: func(resp *http.Response, ahead *resiliencehttp.Ahead) error {
				return resiliencehttp.Resend(fmt.Errorf("status %d", resp.StatusCode))
			}}
		req, _ := http.NewRequest("POST", server.URL, strings.NewReader("x"))
		resp, err := transport.RoundTrip(req)
		answer(t, resp, err)
		require.Equal(t, status, resp.StatusCode)
		require.Equal(t, sent, server.requests.Load(), status)

		req, _ = http.NewRequest("POST", server.URL, struct{ io.Reader }{strings.NewReader("x")})
		resp, err = transport.RoundTrip(req)
		answer(t, resp, err)
		require.Equal(t, sent+1, server.requests.Load(), "its body is gone")
	}
	// Without it, a POST is sent once, whatever the Judge says.
	sent := 0
	transport := &resiliencehttp.Transport{Middleware: retries(3).Wrap,
		Base:  roundTripper(func(*http.Request) (*http.Response, error) { sent++; return response(200, http.NoBody), nil }),
		Judge: func(*http.Response, *resiliencehttp.Ahead) error { return io.ErrUnexpectedEOF }}
	_, err := transport.RoundTrip(httptest.NewRequest("POST", "http://h/", nil))
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Equal(t, 1, sent)

	// An attempt after it that is certainly not sent is no reason to give up.
	sent = 0
	transport.Judge = func(resp *http.Response, ahead *resiliencehttp.Ahead) error {
		return resiliencehttp.Resend(resiliencehttp.DefaultJudge(resp, ahead))
	}
	transport.Base = roundTripper(func(r *http.Request) (*http.Response, error) {
		if sent++; sent == 2 {
			return nil, &net.OpError{Op: "dial", Err: errors.New("refused")}
		}
		_, _ = io.ReadAll(r.Body)
		return response([]int{0, 429, 0, 200}[sent], http.NoBody), nil
	})
	req, _ := http.NewRequest("POST", "http://h/", strings.NewReader("x"))
	resp, err := transport.RoundTrip(req)
	answer(t, resp, err)
	require.Equal(t, 200, resp.StatusCode)

	require.NoError(t, resiliencehttp.Resend(nil))
	err = resiliencehttp.Resend(resilience.Answer(io.EOF))
	require.True(t, resilience.Answered(err))
	require.True(t, resilience.Retryable(err))
	require.ErrorIs(t, err, io.EOF)
}

func TestAhead(t *testing.T) {
	long := strings.Repeat("x", 64<<10)
	for name, c := range map[string]struct {
		method, body string
		status       int
		encoding     string
		judge        func(t *testing.T, ahead *resiliencehttp.Ahead)
	}{
		"Bytes": {"GET", "hello", 200, "", func(t *testing.T, ahead *resiliencehttp.Ahead) {
			for _, n := range []int{0, 2, 5, 1} {
				read, err := ahead.Bytes(n)
				require.NoError(t, err)
				require.Equal(t, "hello"[:n], string(read))
			}
			read, err := ahead.Bytes(-1)
			require.NoError(t, err)
			require.Empty(t, read)
			read, err = ahead.Bytes(6)
			require.Equal(t, io.EOF, err)
			require.Equal(t, "hello", string(read))
		}},
		"AllThatFits": {"GET", long, 200, "", func(t *testing.T, ahead *resiliencehttp.Ahead) {
			read, err := ahead.Bytes(64 << 10)
			require.NoError(t, err)
			require.Len(t, read, 64<<10)
			_, err = ahead.Bytes(64<<10 + 1)
			require.ErrorIs(t, err, resiliencehttp.ErrTooLong)
		}},
		"TooLong": {"GET", long + "yz", 200, "", func(t *testing.T, ahead *resiliencehttp.Ahead) {
			read, err := ahead.Bytes(1 << 20)
			require.ErrorIs(t, err, resiliencehttp.ErrTooLong)
			require.Len(t, read, 64<<10)
		}},
		"EventTooLong": {"GET", "data: " + long + "\n\n", 200, "", func(t *testing.T, ahead *resiliencehttp.Ahead) {
			_, _, err := ahead.Event()
			require.ErrorIs(t, err, resiliencehttp.ErrTooLong)
		}},
		"Events": {"GET", "\ufeffevent: a\r\nid: 1\r\ndata: one\r\ndata:two\r\n\r\nevent: none\r\r" +
			": comment\rdata:  3\n\ndata\n\ndata: cut", 200, "",
			func(t *testing.T, ahead *resiliencehttp.Ahead) {
				for _, want := range [][2]string{{"a", "one\ntwo"}, {"message", " 3"}, {"message", ""}} {
					name, data, err := ahead.Event()
					require.NoError(t, err)
					require.Equal(t, want, [2]string{name, data})
				}
				_, _, err := ahead.Event()
				require.Equal(t, io.EOF, err)
			}},
		"LineFeedFirst": {"GET", "\ndata: x\n\n", 200, "", func(t *testing.T, ahead *resiliencehttp.Ahead) {
			_, data, err := ahead.Event()
			require.NoError(t, err)
			require.Equal(t, "x", data)
		}},
		"Encoded": {"GET", "data: x\n\n", 200, "br", func(t *testing.T, ahead *resiliencehttp.Ahead) {
			_, _, err := ahead.Event()
			require.ErrorIs(t, err, resiliencehttp.ErrEncoded)
			read, err := ahead.Bytes(4)
			require.NoError(t, err)
			require.Equal(t, "data", string(read))
		}},
		"Head":        {"HEAD", "", 200, "br", nothingAhead},
		"NoContent":   {"GET", "", 204, "", nothingAhead},
		"NotModified": {"GET", "", 304, "", nothingAhead},
		"Switching":   {"GET", "", 101, "", nothingAhead},
		"Empty":       {"GET", "", 200, "", nothingAhead},
	} {
		t.Run(name, func(t *testing.T) {
			transport := &resiliencehttp.Transport{
				Base: roundTripper(func(r *http.Request) (*http.Response, error) {
					resp := response(c.status, strings.NewReader(c.body))
					if c.encoding != "" {
						resp.Header.Set("Content-Encoding", c.encoding)
					}
					return resp, nil
				}),
				Judge: func(_ *http.Response, ahead *resiliencehttp.Ahead) error { c.judge(t, ahead); return nil },
			}
			resp, err := transport.RoundTrip(httptest.NewRequest(c.method, "http://h/", nil))
			require.Equal(t, c.body, answer(t, resp, err))
		})
	}
}

func TestAheadOfNothing(t *testing.T) {
	nothingAhead(t, nil) // that of DefaultJudge
}

func TestHoldBodyOfResponsesWithoutBodies(t *testing.T) {
	for _, body := range []io.ReadCloser{http.NoBody, nil} {
		transport := &resiliencehttp.Transport{ResponseHeaderTimeout: time.Second, HoldBody: true,
			Base: roundTripper(func(*http.Request) (*http.Response, error) {
				return &http.Response{StatusCode: 200, Body: body}, nil
			})}
		resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
		require.NoError(t, err)
		require.Equal(t, http.NoBody, resp.Body)
	}
}

func nothingAhead(t *testing.T, ahead *resiliencehttp.Ahead) {
	read, err := ahead.Bytes(1)
	require.Equal(t, io.EOF, err)
	require.Empty(t, read)
	_, _, err = ahead.Event()
	require.Equal(t, io.EOF, err)
}

func TestAheadSeesWhatTheCallerWould(t *testing.T) {
	server := serve(t, false, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		_, _ = io.WriteString(z, "data: hello\n\n")
		_ = z.Close()
	})
	transport := &resiliencehttp.Transport{Base: server.Base,
		Judge: func(_ *http.Response, ahead *resiliencehttp.Ahead) error {
			_, data, err := ahead.Event()
			require.NoError(t, err)
			require.Equal(t, "hello", data)
			return nil
		}}
	resp, err := (&http.Client{Transport: transport}).Get(server.URL)
	require.Equal(t, "data: hello\n\n", answer(t, resp, err))
}

func TestBreakAheadIsTheAttemptsFailure(t *testing.T) {
	sent := 0
	transport := &resiliencehttp.Transport{
		Base: streams(&sent, streamed{parts: []part{{0, "ha"}}, end: io.ErrUnexpectedEOF},
			streamed{parts: []part{{0, "hello"}}, end: io.EOF}),
		Judge: func(_ *http.Response, ahead *resiliencehttp.Ahead) error {
			_, _ = ahead.Bytes(5)
			return nil // whatever this says
		},
		Middleware: retries(2).Wrap,
	}
	resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
	require.Equal(t, "hello", answer(t, resp, err))
	require.Equal(t, 2, sent)
}

func TestBreakTellsOfAFailureThatTheReaderFinds(t *testing.T) {
	server := serve(t, false, func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "half an answer") })
	for _, timeout := range []time.Duration{0, time.Minute} { // an http.Client with a Timeout wraps the Body
		for _, hedged := range []bool{false, true} {
			circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
			transport := &resiliencehttp.Transport{Base: server.Base, Middleware: circuit.Wrap}
			if hedged {
				transport.Hedge = hedge.New[*http.Response](hedge.Config{Delay: time.Hour, Ratio: hedge.Unlimited})
			}
			client := &http.Client{Transport: transport, Timeout: timeout}
			resp, err := client.Get(server.URL)
			require.NoError(t, err)
			require.False(t, resiliencehttp.ReportFailure(resp, nil))
			require.Equal(t, breaker.Closed, circuit.State())
			require.True(t, resiliencehttp.ReportFailure(resp, errors.New("an error event")))
			require.Equal(t, breaker.Open, circuit.State())
			require.False(t, resiliencehttp.ReportFailure(resp, errors.New("again")))
			require.Equal(t, "half an answer", answer(t, resp, nil), "it can still be read")

			circuit.Reset()
			resp, err = client.Get(server.URL)
			answer(t, resp, err)
			require.False(t, resiliencehttp.ReportFailure(resp, errors.New("late")), "it has ended")
			require.Equal(t, breaker.Closed, circuit.State())
		}
	}
	resp, err := (&http.Client{Transport: server.Base}).Get(server.URL)
	require.NoError(t, err)
	require.False(t, resiliencehttp.ReportFailure(resp, errors.New("not ours")))
	require.NoError(t, resp.Body.Close())
	require.False(t, resiliencehttp.ReportFailure(nil, io.EOF))
	require.False(t, resiliencehttp.ReportFailure(&http.Response{}, io.EOF))
}

// TestBreakTellsEachTransport: one that sends through others, by Failover, say, hides none of their circuits.
func TestBreakTellsEachTransport(t *testing.T) {
	in, out := breaker.New(breaker.Config{ConsecutiveFailures: 1}), breaker.New(breaker.Config{ConsecutiveFailures: 1})
	base := roundTripper(func(*http.Request) (*http.Response, error) { return response(200, strings.NewReader("x")), nil })
	inner := &resiliencehttp.Transport{Base: base, Middleware: in.Wrap}
	for _, wrap := range []resilience.Middleware{out.Wrap, resilience.Timeout(time.Minute), retries(1).Wrap} {
		client := &http.Client{Transport: &resiliencehttp.Transport{Base: resiliencehttp.Failover(inner), Middleware: wrap}}
		resp, err := client.Get("http://h/")
		require.NoError(t, err)
		require.True(t, resiliencehttp.ReportFailure(resp, errors.New("an error event")))
		require.Equal(t, breaker.Open, in.State())
		require.False(t, resiliencehttp.ReportFailure(resp, errors.New("again")))
		require.NoError(t, resp.Body.Close())

		in.Reset()
		out.Reset()
		// A request that is made under the ctx of an earlier one is none of it.
		first, err := client.Get("http://h/")
		require.NoError(t, err)
		req := httptest.NewRequest("GET", "http://h/", nil).WithContext(first.Request.Context())
		second, err := client.Transport.RoundTrip(req)
		require.NoError(t, err)
		require.True(t, resiliencehttp.ReportFailure(second, errors.New("an error event")))
		require.True(t, resiliencehttp.ReportFailure(first, errors.New("another")))
		require.NoError(t, first.Body.Close())
		require.NoError(t, second.Body.Close())
		in.Reset()
		out.Reset()
	}
}

// A body says when to come back, and the caller gets the whole of it in the end.
func TestJudgeReadsWhenToComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const busy = `{"retry_in": "20s"}`
		transport := &resiliencehttp.Transport{
			Base: roundTripper(func(*http.Request) (*http.Response, error) {
				return response(429, strings.NewReader(busy)), nil
			}),
			Judge: func(resp *http.Response, ahead *resiliencehttp.Ahead) error {
				body, _ := ahead.Bytes(len(busy))
				var hint struct {
					RetryIn string `json:"retry_in"`
				}
				require.NoError(t, json.Unmarshal(body, &hint))
				d, err := time.ParseDuration(hint.RetryIn)
				require.NoError(t, err)
				return after{resiliencehttp.DefaultJudge(resp, ahead), d}
			},
			Middleware: retries(2).Wrap,
		}
		start := time.Now()
		resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
		require.Equal(t, busy, answer(t, resp, err))
		require.GreaterOrEqual(t, time.Since(start), 20*time.Second)
	})
}

// An after is an error that says when to come back.
type after struct {
	error
	d time.Duration
}

func (a after) Unwrap() error             { return a.error }
func (a after) RetryAfter() time.Duration { return a.d }

func TestRetryAfterOfOtherFields(t *testing.T) {
	for field, want := range map[string]time.Duration{"retry-after-ms": 1500 * time.Millisecond,
		"Retry-After": 2 * time.Second} {
		var seen watch
		transport := &resiliencehttp.Transport{
			Base: roundTripper(func(*http.Request) (*http.Response, error) {
				if field == "Retry-After" {
					return response(429, http.NoBody, field, "2"), nil
				}
				return response(429, http.NoBody, field, "1500", "Retry-After", "9"), nil
			}),
			RetryAfter: func(resp *http.Response) time.Duration {
				d, _ := time.ParseDuration(resp.Header.Get("retry-after-ms") + "ms")
				return d
			},
			Middleware: seen.Wrap,
		}
		resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
		answer(t, resp, err)
		require.Equal(t, want, resilience.RetryAfter(seen.seen()[0]))
	}
}

func TestHedgeIf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sent atomic.Int64
		transport := &resiliencehttp.Transport{
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				sent.Add(1)
				time.Sleep(time.Minute)
				return response(200, http.NoBody), nil
			}),
			Hedge:   hedge.New[*http.Response](hedge.Config{Delay: time.Second, Ratio: hedge.Unlimited}),
			HedgeIf: func(r *http.Request) bool { return r.URL.Path == "/cheap" },
		}
		for path, want := range map[string]int64{"/cheap": 2, "/costly": 1} {
			sent.Store(0)
			resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://h"+path, nil))
			answer(t, resp, err)
			require.Equal(t, want, sent.Load(), path)
		}
	})
}

// The bodies and ways through ReverseProxy of a request that goes on to a second server.
func TestFailoverSendsTheBodyAgain(t *testing.T) {
	const text = "hello"
	first := serve(t, false, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(503)
	})
	second := serve(t, false, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, _ = fmt.Fprintf(w, "second got %s", body)
	})
	at := func(s *testServer) http.RoundTripper {
		u, err := url.Parse(s.URL)
		require.NoError(t, err)
		return &resiliencehttp.Transport{Middleware: retries(2).Wrap, Base: s.Base,
			Prepare: func(r *http.Request) error { r.URL.Host, r.Host = u.Host, ""; return nil }}
	}
	failover := resiliencehttp.Failover(at(first), at(second))
	for name, body := range map[string]func() io.Reader{
		"Strings": func() io.Reader { return strings.NewReader(text) },
		"Unknown": func() io.Reader { return io.MultiReader(strings.NewReader(text)) },
		"Pipe": func() io.Reader {
			r, w := io.Pipe()
			go func() { _, _ = io.WriteString(w, text); _ = w.Close() }()
			return r
		},
	} {
		for _, method := range []string{"POST", "PUT"} {
			for _, proxied := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/proxied=%v", name, method, proxied), func(t *testing.T) {
					client, to := &http.Client{Transport: failover}, first.URL
					if proxied {
						u, err := url.Parse(first.URL)
						require.NoError(t, err)
						proxy := httputil.NewSingleHostReverseProxy(u)
						proxy.Transport = failover
						gateway := httptest.NewServer(proxy)
						defer gateway.Close()
						client, to = gateway.Client(), gateway.URL
					}
					req, err := http.NewRequest(method, to, body())
					require.NoError(t, err)
					resp, err := client.Do(req)
					require.Equal(t, "second got hello", answer(t, resp, err))
				})
			}
		}
	}
	// A longer one has no failover, and is not cut.
	long := strings.Repeat("x", 1<<20+1)
	resp, err := (&http.Client{Transport: failover}).Post(first.URL, "", io.MultiReader(strings.NewReader(long)))
	answer(t, resp, err)
	require.Equal(t, 503, resp.StatusCode)
	resp, err = (&http.Client{Transport: resiliencehttp.Failover(at(second))}).Post(first.URL, "",
		io.MultiReader(strings.NewReader(long)))
	require.Equal(t, "second got "+long, answer(t, resp, err))
}

// TestFailoverKeepsTheOverloadedConnection, but does not wait for what is left of a response.
func TestFailoverKeepsTheOverloadedConnection(t *testing.T) {
	server := serve(t, false, statuses("overloaded", 503))
	fine := roundTripper(func(*http.Request) (*http.Response, error) {
		return response(200, strings.NewReader("ok")),
			nil
	})
	client := &http.Client{Transport: resiliencehttp.Failover(server.Base, fine)}
	for range 3 {
		resp, err := client.Post(server.URL, "", strings.NewReader("x"))
		require.Equal(t, "ok", answer(t, resp, err))
	}
	require.EqualValues(t, 3, server.requests.Load())
	require.EqualValues(t, 1, server.opened.Load())

	for length, waits := range map[int64]time.Duration{-1: time.Second, 1 << 20: 0} {
		synctest.Test(t, func(t *testing.T) {
			r, w := io.Pipe() // which is not written to
			slow := roundTripper(func(*http.Request) (*http.Response, error) {
				return &http.Response{StatusCode: 503, Body: r, ContentLength: length}, nil
			})
			begun := time.Now()
			resp, err := resiliencehttp.Failover(slow, fine).RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
			require.Equal(t, "ok", answer(t, resp, err))
			require.Equal(t, waits, time.Since(begun))
			_, err = w.Write([]byte("x"))
			require.ErrorIs(t, err, io.ErrClosedPipe)
		})
	}
}

func TestFailoverGoesOnOnlyWhereThatIsSafe(t *testing.T) {
	down := errors.New("down")
	for name, c := range map[string]struct {
		status    int
		err       error
		get, post bool // the second is asked
	}{
		"OK": {200, nil, false, false}, "NotFound": {404, nil, false, false}, "NotImplemented": {501, nil, false, false},
		"Overloaded": {429, nil, true, true}, "Unavailable": {503, nil, true, true}, "Site": {529, nil, true, true},
		"Internal": {500, nil, true, false}, "BadGateway": {502, nil, true, false}, "GatewayTimeout": {504, nil, true, false},
		"Broken":  {0, down, true, false},
		"Refused": {0, &breaker.OpenError{}, true, true},
		"Dial":    {0, &net.OpError{Op: "dial", Err: down}, true, true},
		"Read":    {0, &net.OpError{Op: "read", Err: down}, true, false},
	} {
		for method, want := range map[string]bool{"GET": c.get, "POST": c.post} {
			t.Run(name+method, func(t *testing.T) {
				asked, closed := 0, 0
				one := roundTripper(func(r *http.Request) (*http.Response, error) {
					if c.err != nil {
						return nil, c.err
					}
					resp := response(c.status, nil)
					resp.Body = closeCounter{strings.NewReader("first"), &closed}
					return resp, nil
				})
				two := roundTripper(func(r *http.Request) (*http.Response, error) {
					asked++
					return response(200, strings.NewReader("second")), nil
				})
				req := httptest.NewRequest(method, "http://h/", nil)
				resp, err := resiliencehttp.Failover(one, two).RoundTrip(req)
				switch {
				case want:
					require.Equal(t, "second", answer(t, resp, err))
					require.Equal(t, 1, asked)
					require.Same(t, req, resp.Request)
				case c.err != nil:
					require.ErrorIs(t, err, c.err)
					require.Zero(t, asked)
				default:
					require.Equal(t, "first", answer(t, resp, err))
					require.Equal(t, c.status, resp.StatusCode)
					require.Zero(t, asked)
				}
				if c.err == nil {
					require.Equal(t, 1, closed)
				}
			})
		}
	}
}

// What a Judge says of a response counts, whatever its status. A gateway (502, 504) does not know what the server
// behind it has done.
func TestFailoverGoesByTheErrorOfAJudge(t *testing.T) {
	said := errors.New("no money left")
	for _, status := range []int{200, 400, 500, 502, 504} {
		for name, c := range map[string]struct {
			judged    error
			get, post bool // the second is asked
		}{
			"Resend":  {resiliencehttp.Resend(said), true, status != 502 && status != 504},
			"Failure": {said, true, false},
			"Success": {nil, status >= 500, false},
		} {
			for method, want := range map[string]bool{"GET": c.get, "POST": c.post} {
				t.Run(fmt.Sprint(status, name, method), func(t *testing.T) {
					one := &resiliencehttp.Transport{
						Base:  roundTripper(func(*http.Request) (*http.Response, error) { return response(status, http.NoBody), nil }),
						Judge: func(*http.Response, *resiliencehttp.Ahead) error { return c.judged },
					}
					asked := 0
					two := roundTripper(func(*http.Request) (*http.Response, error) { asked++; return nil, &breaker.OpenError{} })
					resp, err := resiliencehttp.Failover(one, two).RoundTrip(httptest.NewRequest(method, "http://h/", nil))
					require.Equal(t, want, asked == 1)
					switch {
					case want && c.judged != nil:
						require.ErrorIs(t, err, said)
					case want:
						require.ErrorContains(t, err, fmt.Sprintf("1 of 2: resiliencehttp: status %d", status))
					case status >= 400 || c.judged == nil:
						answer(t, resp, err)
						require.Equal(t, status, resp.StatusCode)
					default:
						require.ErrorIs(t, err, said)
					}
				})
			}
		}
	}

	// That of a request that was hedged, too.
	hedged := &resiliencehttp.Transport{
		Base:  roundTripper(func(*http.Request) (*http.Response, error) { return response(400, http.NoBody), nil }),
		Judge: func(*http.Response, *resiliencehttp.Ahead) error { return said },
		Hedge: hedge.New[*http.Response](hedge.Config{Delay: time.Hour, Ratio: hedge.Unlimited}),
	}
	two := roundTripper(func(*http.Request) (*http.Response, error) { return nil, &breaker.OpenError{} })
	_, err := resiliencehttp.Failover(hedged, two).RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
	require.ErrorIs(t, err, said)
}

// An idler counts the calls of CloseIdleConnections.
type idler struct {
	roundTripper
	closed int
}

func (i *idler) CloseIdleConnections() { i.closed++ }

func TestFailoverClosesIdleConnectionsOfEach(t *testing.T) {
	first, last := &idler{}, &idler{}
	client := &http.Client{Transport: resiliencehttp.Failover(first, roundTripper(nil),
		&resiliencehttp.Transport{Base: last})}
	client.CloseIdleConnections()
	require.Equal(t, []int{1, 1}, []int{first.closed, last.closed})
	client.CloseIdleConnections()
	require.Equal(t, []int{2, 2}, []int{first.closed, last.closed})
}

func TestFailoverSendsAReadBodyAfterARefusal(t *testing.T) {
	signs := roundTripper(func(r *http.Request) (*http.Response, error) {
		_, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		return nil, &breaker.OpenError{}
	})
	echoes := roundTripper(func(r *http.Request) (*http.Response, error) { return response(200, r.Body), nil })
	req := httptest.NewRequest("POST", "http://h/", strings.NewReader("x"))
	resp, err := resiliencehttp.Failover(signs, echoes).RoundTrip(req)
	require.Equal(t, "x", answer(t, resp, err))
}

// A RoundTripper may read the body for longer than it takes.
func TestFailoverWhileTheBodyIsStillRead(t *testing.T) {
	sent := 0
	var reading sync.WaitGroup
	down := roundTripper(func(r *http.Request) (*http.Response, error) {
		sent++
		_, err := r.Body.Read(make([]byte, 1))
		require.NoError(t, err)
		reading.Go(func() { _, _ = r.Body.Read(make([]byte, 1)) })
		return nil, &net.OpError{Op: "dial", Err: errors.New("refused")}
	})
	req := httptest.NewRequest("POST", "http://h/", nil)
	req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(io.MultiReader(strings.NewReader("hello"))), nil }
	req.Body, _ = req.GetBody()
	_, err := resiliencehttp.Failover(down, down).RoundTrip(req)
	reading.Wait()
	require.Error(t, err)
	require.Equal(t, 1, sent, "the server may have got it")
}

func TestFailoverOfABodyThatFailsIsNoServersFault(t *testing.T) {
	unasked := roundTripper(func(r *http.Request) (*http.Response, error) {
		_, err := io.ReadAll(r.Body)
		return nil, err
	})
	failover, circuit := resiliencehttp.Failover(unasked, unasked), breaker.New(breaker.Config{ConsecutiveFailures: 1})
	err := circuit.Do(t.Context(), func(context.Context) error {
		_, err := failover.RoundTrip(httptest.NewRequest("PUT", "http://h/", broken{}))
		return err
	})
	require.ErrorContains(t, err, "broken")
	require.Equal(t, breaker.Closed, circuit.State())

	answers := roundTripper(func(r *http.Request) (*http.Response, error) {
		_, _ = io.ReadAll(r.Body)
		return &http.Response{StatusCode: http.StatusBadRequest, Body: http.NoBody}, nil
	})
	resp, err := resiliencehttp.Failover(answers, unasked).RoundTrip(httptest.NewRequest("PUT", "http://h/", broken{}))
	require.NoError(t, err, "the server has answered although it did not get the whole body")
	require.Equal(t, http.StatusBadRequest, resp.StatusCode)
}

// A counting body counts how often it is closed.
type counting struct {
	io.Reader
	closed int
}

func (c *counting) Close() error { c.closed++; return nil }

func TestFailoverClosesABodyThatIsNotSent(t *testing.T) {
	refuses := roundTripper(func(r *http.Request) (*http.Response, error) {
		return nil, errors.Join(&net.OpError{Op: "dial", Err: io.EOF}, r.Body.Close())
	})
	body := &counting{Reader: strings.NewReader("x")}
	_, err := resiliencehttp.Failover(refuses, refuses).RoundTrip(httptest.NewRequest("PUT", "http://h/", body))
	require.Error(t, err)
	require.Equal(t, 1, body.closed)
}

func TestFailoverNamesEach(t *testing.T) {
	fails := func(err error) http.RoundTripper {
		return roundTripper(func(*http.Request) (*http.Response, error) { return nil, err })
	}
	one, two := errors.New("one is down"), errors.New("two is down")
	_, err := resiliencehttp.Failover(fails(one), fails(two)).RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
	require.EqualError(t, err, "resiliencehttp: 1 of 2: one is down\nresiliencehttp: 2 of 2: two is down")
	_, err = resiliencehttp.Failover(fails(&breaker.OpenError{}),
		fails(&breaker.OpenError{})).RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
	require.True(t, resilience.Refused(err))

	// The last response is the caller's, and what an upstream said is passed on.
	busy := roundTripper(func(*http.Request) (*http.Response, error) {
		return response(429, strings.NewReader("busy"), "Retry-After", "7"), nil
	})
	resp, err := resiliencehttp.Failover(fails(one), busy).RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
	require.Equal(t, "busy", answer(t, resp, err))
	_, err = resiliencehttp.Failover(busy,
		fails(&breaker.OpenError{})).RoundTrip(httptest.NewRequest("POST", "http://h/", nil))
	w := httptest.NewRecorder()
	require.True(t, resiliencehttp.Server{}.Refuse(w, httptest.NewRequest("GET", "/", nil), err))
	require.Equal(t, 503, w.Code)
	require.Equal(t, "7", w.Header().Get("Retry-After"))

	bare := roundTripper(func(*http.Request) (*http.Response, error) { return &http.Response{StatusCode: 503}, nil })
	resp, err = resiliencehttp.Failover(bare, bare).RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
	require.Empty(t, answer(t, resp, err))

	require.Panics(t, func() { resiliencehttp.Failover() })
	require.Panics(t, func() { resiliencehttp.Failover(http.DefaultTransport, nil) })
}

func TestFailoverLeavesACallerAloneWhoHasGone(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	asked := 0
	failover := resiliencehttp.Failover(
		roundTripper(func(r *http.Request) (*http.Response, error) { cancel(); return nil, r.Context().Err() }),
		roundTripper(func(r *http.Request) (*http.Response, error) { asked++; return response(200, http.NoBody), nil }))
	_, err := failover.RoundTrip(httptest.NewRequest("GET", "http://h/", nil).WithContext(ctx))
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, asked)
}

// A proxy or a server accepts a connection and then fails to set it up.
func TestPostThatWasCertainlyNeverSentIsSentAgain(t *testing.T) {
	// once accepts connections, calls fault with the first, and passes the others on to the address.
	once := func(t *testing.T, to string, fault func(net.Conn)) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for n := 0; ; n++ {
				c, err := l.Accept()
				switch {
				case err != nil:
					return
				case n == 0:
					go fault(c)
				default:
					go pipeTo(c, to)
				}
			}
		}()
		return l.Addr().String()
	}
	through := func(tr *http.Transport, addr string) {
		tr.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, addr)
		}
	}
	// connect answers CONNECT by 503 the first time, and by a tunnel after that.
	connect := func(t *testing.T) *url.URL {
		var n atomic.Int64
		p := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if n.Add(1) == 1 {
				w.WriteHeader(503)
				return
			}
			c, _, err := w.(http.Hijacker).Hijack()
			if err == nil {
				_, _ = io.WriteString(c, "HTTP/1.1 200 Connection established\r\n\r\n")
				pipeTo(c, r.Host)
			}
		}))
		t.Cleanup(p.Close)
		u, _ := url.Parse(p.URL)
		return u
	}
	for name, c := range map[string]struct {
		fault func(t *testing.T, s *httptest.Server, tr *http.Transport)
		sent  bool // perhaps
	}{
		"ConnectIsAnswered503": {func(t *testing.T, s *httptest.Server, tr *http.Transport) {
			tr.Proxy = http.ProxyURL(connect(t))
		}, false},
		"HandshakeIsCutOff": {func(t *testing.T, s *httptest.Server, tr *http.Transport) {
			through(tr, once(t, s.Listener.Addr().String(), func(c net.Conn) { _ = c.Close() }))
		}, false},
		"ConnectionDiesAfterTheRequest": {func(t *testing.T, s *httptest.Server, tr *http.Transport) {
			through(tr, once(t, s.Listener.Addr().String(), func(c net.Conn) {
				_, _ = http.ReadRequest(bufio.NewReader(tls.Server(c, s.TLS)))
				_ = c.Close()
			}))
		}, true},
	} {
		for _, way := range []string{"retry", "wrapped", "failover"} {
			if way == "wrapped" && name != "HandshakeIsCutOff" {
				continue
			}
			t.Run(name+"/"+way, func(t *testing.T) {
				var posts atomic.Int64
				s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					_, _ = io.Copy(io.Discard, r.Body)
					posts.Add(1)
				}))
				defer s.Close()
				tr := s.Client().Transport.(*http.Transport).Clone()
				tr.Proxy = nil
				c.fault(t, s, tr)
				defer tr.CloseIdleConnections()
				var transport http.RoundTripper = &resiliencehttp.Transport{Base: tr, Middleware: retries(3).Wrap}
				switch way {
				case "wrapped":
					transport.(*resiliencehttp.Transport).Base = roundTripper(tr.RoundTrip)
				case "failover":
					transport = resiliencehttp.Failover(tr, tr)
				}
				resp, err := (&http.Client{Transport: transport}).Post(s.URL, "application/json", strings.NewReader(`{}`))
				if c.sent {
					require.Error(t, err)
					require.Zero(t, posts.Load())
					return
				}
				answer(t, resp, err)
				require.EqualValues(t, 1, posts.Load())
			})
		}
	}
}

func pipeTo(c net.Conn, to string) {
	defer c.Close()
	s, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	defer s.Close()
	go func() { _, _ = io.Copy(s, c) }()
	_, _ = io.Copy(c, s)
}

// A countingConn counts its writes.
type countingConn struct {
	net.Conn
	writes *atomic.Int64
}

func (c countingConn) Write(p []byte) (int, error) { c.writes.Add(1); return c.Conn.Write(p) }

func TestBodyInMemoryGoesOutInOneWrite(t *testing.T) {
	server := serve(t, false, func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) })
	var writes atomic.Int64
	base := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		return countingConn{c, &writes}, err
	}}
	defer base.CloseIdleConnections()
	for name, body := range map[string]func() io.Reader{
		"Bytes":   func() io.Reader { return bytes.NewReader([]byte("x")) },
		"Strings": func() io.Reader { return strings.NewReader("x") },
		"Buffer":  func() io.Reader { return bytes.NewBufferString("x") },
	} {
		client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Base: base, MaxBuffer: 100})
		for range 3 {
			writes.Store(0)
			req, err := http.NewRequest("PUT", server.URL, body())
			require.NoError(t, err)
			resp, err := client.Do(req)
			answer(t, resp, err)
			require.EqualValues(t, 1, writes.Load(), name)
		}
	}
}

// The HEADERS frame of such a response need not end the stream.
func TestEmptyResponseOverHTTP2IsReadToItsEnd(t *testing.T) {
	server := serve(t, true, func(w http.ResponseWriter, r *http.Request) {
		status := 304
		if r.URL.Path == "/204" {
			status = 204
		}
		w.WriteHeader(status)
		_ = http.NewResponseController(w).Flush()
		<-time.After(20 * time.Millisecond) // an access log, say
	})
	for name, transport := range map[string]http.RoundTripper{
		"NewClient": resiliencehttp.NewClient(resiliencehttp.ClientConfig{Base: server.Base}).Transport,
		"Timeout":   &resiliencehttp.Transport{Base: server.Base, Middleware: resilience.Timeout(time.Minute)},
	} {
		for _, path := range []string{"/204", "/304"} {
			resp, err := (&http.Client{Transport: transport}).Get(server.URL + path)
			require.Empty(t, answer(t, resp, err), name)
		}
	}
}

func TestConnectionAfter101IsANetConn(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	transport := &resiliencehttp.Transport{Middleware: resilience.Timeout(time.Minute),
		Base: roundTripper(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusSwitchingProtocols, Body: near}, nil
		})}
	resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
	require.NoError(t, err)
	conn, ok := resp.Body.(net.Conn)
	require.True(t, ok)
	require.Equal(t, near.RemoteAddr(), conn.RemoteAddr())
	require.ErrorIs(t, conn.(interface{ CloseWrite() error }).CloseWrite(), http.ErrNotSupported, "a pipe has none")
	require.NoError(t, conn.SetDeadline(time.Now().Add(-1)))
	_, err = conn.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, conn.Close())
}

func TestHoldBodyDelaysOnlyBodiesOfSuccesses(t *testing.T) {
	for name, status := range map[string]int{"connection": 101, "failure": 503} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				transport := &resiliencehttp.Transport{
					HoldBody: true, ResponseHeaderTimeout: time.Second, Middleware: retries(2).Wrap,
					Base: roundTripper(func(r *http.Request) (*http.Response, error) {
						resp := response(status, nil)
						resp.Body = &streamed{ctx: r.Context()}
						return resp, nil
					}),
				}
				start := time.Now()
				resp, err := transport.RoundTrip(request(t, "POST", "http://a/"))
				require.NoError(t, err)
				require.Equal(t, status, resp.StatusCode)
				require.Zero(t, time.Since(start))
				require.NoError(t, resp.Body.Close())
			})
		})
	}
}

// The caller's ctx does not end a connection after 101 Switching Protocols. Close ends it without an error.
func TestConnectionClosedAfterCancelSucceeds(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	var ends []error
	transport := &resiliencehttp.Transport{
		Middleware: func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error {
				return resilience.AtEnd(ctx, next, func(err error) { ends = append(ends, err) })
			}
		},
		Base: roundTripper(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusSwitchingProtocols, Body: near}, nil
		}),
	}
	ctx, cancel := context.WithCancel(t.Context())
	resp, err := transport.RoundTrip(request(t, "GET", "http://a/").WithContext(ctx))
	require.NoError(t, err)
	cancel()
	require.Empty(t, ends)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, []error{nil}, ends)
}
