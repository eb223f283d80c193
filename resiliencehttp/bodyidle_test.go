package resiliencehttp_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
)

// A pausingBody is a body whose parts are sent a pause apart.
func pausingBody(t *testing.T, pause time.Duration, parts ...string) io.Reader {
	r, w := io.Pipe()
	go func() {
		defer w.Close()
		for i, part := range parts {
			if i > 0 {
				select {
				case <-time.After(pause):
				case <-t.Context().Done():
					return
				}
			}
			if _, err := io.WriteString(w, part); err != nil {
				return
			}
		}
	}()
	return r
}

// readAll returns a handler within one slot that reads its request's body, and the error of the last body.
func readAll(t *testing.T, s resiliencehttp.Server) (_ http.HandlerFunc, _ *bulkhead.Bulkhead, failed *error) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	failed = new(error)
	return s.Bulkhead(slots)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if *failed = err; err != nil {
			http.Error(w, err.Error(), http.StatusRequestTimeout)
			return
		}
		_, _ = w.Write(b)
	})).ServeHTTP, slots, failed
}

func TestTricklingClientReturnsItsSlot(t *testing.T) {
	for name, protocols := range wires {
		for _, idle := range []time.Duration{0, 2 * time.Second, resilience.Unlimited} {
			limit := idle
			if idle == 0 {
				limit = 30 * time.Second
			}
			t.Run(name+" "+idle.String(), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					h, slots, failed := readAll(t, resiliencehttp.Server{BodyIdle: idle})
					base := serveMemory(t, h, protocols())
					client := &http.Client{Transport: base}
					ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
					defer cancel()
					go func() {
						req, _ := http.NewRequestWithContext(ctx, "POST", "http://a/", pausingBody(t, 2*time.Hour, "a", "b"))
						if resp, err := client.Do(req); err == nil {
							_ = resp.Body.Close()
						}
					}()
					synctest.Wait()
					require.Equal(t, 1, slots.Stats().InFlight)
					time.Sleep(max(limit, 0) - time.Millisecond)
					require.Equal(t, 1, slots.Stats().InFlight)
					time.Sleep(2 * time.Millisecond)
					if idle == resilience.Unlimited {
						require.Equal(t, 1, slots.Stats().InFlight)
						cancel()
						synctest.Wait()
						return
					}
					require.Zero(t, slots.Stats().InFlight)
					passed, ok := errors.AsType[*resilience.TimeoutError](*failed)
					require.True(t, ok, "%v", *failed)
					require.Equal(t, limit, passed.After)
					resp, err := client.Post("http://a/", "text/plain", strings.NewReader("hello"))
					require.NoError(t, err)
					require.Equal(t, "hello", answer(t, resp, nil))
				})
			})
		}
	}
}

func TestSlowBodyWithinBodyIdleIsRead(t *testing.T) {
	for name, protocols := range wires {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, _, _ := readAll(t, resiliencehttp.Server{BodyIdle: 2 * time.Second})
				client := &http.Client{Transport: serveMemory(t, h, protocols())}
				for range 2 { // on the same connection
					resp, err := client.Post("http://a/", "text/plain", pausingBody(t, time.Second, "a", "b", "c", "d", "e"))
					require.NoError(t, err)
					require.Equal(t, "abcde", answer(t, resp, nil))
					time.Sleep(time.Minute)
				}
			})
		})
	}
}

// A handler may pause before it reads the body, between two Reads, and after the body.
func TestBodyIdleIgnoresPausesOfTheHandler(t *testing.T) {
	for name, protocols := range wires {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				slots := bulkhead.New(bulkhead.Config{Limit: 1})
				s := resiliencehttp.Server{BodyIdle: 2 * time.Second}
				base := serveMemory(t, s.Bulkhead(slots)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					time.Sleep(time.Minute)
					var all []byte
					for p := make([]byte, 1); ; time.Sleep(time.Minute) {
						n, err := r.Body.Read(p)
						if all = append(all, p[:n]...); err != nil {
							break
						}
					}
					time.Sleep(time.Minute)
					if r.Context().Err() == nil {
						_, _ = w.Write(all)
					}
				})).ServeHTTP, protocols())
				resp, err := (&http.Client{Transport: base}).Post("http://a/", "text/plain",
					pausingBody(t, 90*time.Second, "a", "b"))
				require.NoError(t, err)
				require.Equal(t, "ab", answer(t, resp, nil))
			})
		})
	}
}

// A handler that does not read the body may write for longer than BodyIdle; net/http reads the body then.
func TestUnreadBodyDoesNotEndTheResponse(t *testing.T) {
	for name, protocols := range wires {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				slots := bulkhead.New(bulkhead.Config{Limit: 1})
				s := resiliencehttp.Server{BodyIdle: 2 * time.Second}
				base := serveMemory(t, s.Bulkhead(slots)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					for range 10 {
						_, _ = io.WriteString(w, "x")
						_ = http.NewResponseController(w).Flush()
						select {
						case <-time.After(time.Second):
						case <-r.Context().Done():
							return
						}
					}
				})).ServeHTTP, protocols())
				resp, err := (&http.Client{Transport: base}).Post("http://a/", "text/plain", strings.NewReader("abc"))
				require.NoError(t, err)
				require.Equal(t, strings.Repeat("x", 10), answer(t, resp, nil))
			})
		})
	}
}

// net/http reads from the connection after the end of the body, and cancels the request if that read fails.
func TestBodyIdleEndsWithTheBody(t *testing.T) {
	drain := func(r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }
	wrap := func(f func(io.Reader) io.Reader) func(*http.Request) {
		return func(r *http.Request) {
			r.Body = struct {
				io.Reader
				io.Closer
			}{f(r.Body), r.Body}
		}
	}
	for name, c := range map[string]struct{ outer, inner func(*http.Request) }{
		"read twice": {nil, func(r *http.Request) { drain(r); drain(r) }},
		"outer read": {drain, drain},
		"outer replaced": {wrap(func(r io.Reader) io.Reader {
			b, _ := io.ReadAll(r)
			return bytes.NewReader(b)
		}), drain},
		"outer buffered": {wrap(func(r io.Reader) io.Reader { return bufio.NewReader(r) }), func(r *http.Request) {
			_, _ = io.ReadFull(iotest.OneByteReader(r.Body), make([]byte, 2))
		}},
		"outer buffered, read": {wrap(func(r io.Reader) io.Reader { return bufio.NewReader(r) }), func(r *http.Request) {
			_, _ = io.Copy(io.Discard, iotest.OneByteReader(r.Body))
		}},
		"closed": {nil, func(r *http.Request) { _ = r.Body.Close() }},
	} {
		for version, protocols := range wires {
			t.Run(name+" "+version, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					slots := bulkhead.New(bulkhead.Config{Limit: 1})
					h := resiliencehttp.Server{}.Bulkhead(slots)(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
						c.inner(r)
						select {
						case <-r.Context().Done():
							t.Error(r.Context().Err())
						case <-time.After(time.Minute):
						}
					}))
					base := serveMemory(t, func(w http.ResponseWriter, r *http.Request) {
						if c.outer != nil {
							c.outer(r)
						}
						h.ServeHTTP(w, r)
					}, protocols())
					resp, err := (&http.Client{Transport: base}).Post("http://a/", "text/plain", strings.NewReader("abc"))
					require.NoError(t, err)
					require.NoError(t, resp.Body.Close())
				})
			})
		}
	}
}

// Over HTTP/1.1, net/http also reads the rest of a body when the handler writes, or closes the body.
func TestPartlyReadBodyReturnsItsSlot(t *testing.T) {
	read := func(r *http.Request) {
		_, err := r.Body.Read(make([]byte, 1))
		require.NoError(t, err)
	}
	flush := func(w http.ResponseWriter) { _ = http.NewResponseController(w).Flush() }
	for name, h := range map[string]http.HandlerFunc{
		"Flush":  func(w http.ResponseWriter, r *http.Request) { read(r); flush(w) },
		"Close":  func(_ http.ResponseWriter, r *http.Request) { read(r); _ = r.Body.Close() },
		"Unread": func(w http.ResponseWriter, _ *http.Request) { flush(w) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				slots := bulkhead.New(bulkhead.Config{Limit: 1})
				s := resiliencehttp.Server{BodyIdle: 2 * time.Second}
				// If Bulkheads are nested, the deadline of the inner one also counts.
				outer := bulkhead.New(bulkhead.Config{Limit: 1})
				base := serveMemory(t, s.Bulkhead(outer)(s.Bulkhead(slots)(h)).ServeHTTP, nil)
				req, err := http.NewRequest("POST", "http://a/", pausingBody(t, time.Hour, "a", "b"))
				require.NoError(t, err)
				req.ContentLength = 2
				go func() {
					if resp, err := (&http.Client{Transport: base}).Do(req); err == nil {
						_ = resp.Body.Close()
					}
				}()
				time.Sleep(2*time.Second - time.Millisecond)
				require.Equal(t, 1, slots.Stats().InFlight)
				time.Sleep(2 * time.Millisecond)
				require.Zero(t, slots.Stats().InFlight)
			})
		})
	}
}

func TestBodyIdleKeepsReadTimeoutOfTheServer(t *testing.T) {
	for name, protocols := range wires {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, slots, failed := readAll(t, resiliencehttp.Server{BodyIdle: 2 * time.Second})
				base := serveMemory(t, h, protocols(), func(s *http.Server) { s.ReadTimeout = 5 * time.Second })
				go func() {
					body := pausingBody(t, time.Second, strings.Split(strings.Repeat("x", 20), "")...)
					if resp, err := (&http.Client{Transport: base}).Post("http://a/", "text/plain", body); err == nil {
						_ = resp.Body.Close()
					}
				}()
				time.Sleep(5*time.Second - time.Millisecond)
				require.Equal(t, 1, slots.Stats().InFlight)
				time.Sleep(2 * time.Millisecond)
				require.Zero(t, slots.Stats().InFlight)
				require.Error(t, *failed)
				_, ok := errors.AsType[*resilience.TimeoutError](*failed)
				require.False(t, ok, "the limit is the server's")
				time.Sleep(time.Minute)
			})
		})
	}
}

func TestBodyIdleDoesNotLimitAHijackedConn(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	s := resiliencehttp.Server{BodyIdle: 2 * time.Second}
	h := s.Bulkhead(slots)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.ReadAll(r.Body); err != nil {
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		line, _ := rw.ReadString('\n')
		_, _ = io.WriteString(conn, line)
	}))
	synctest.Test(t, func(t *testing.T) {
		base := serveMemory(t, h.ServeHTTP, nil)
		conn, err := base.DialContext(t.Context(), "tcp", "a:80")
		require.NoError(t, err)
		defer conn.Close()
		_, err = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: echo\r\n"+
			"Content-Length: 1\r\n\r\nx")
		require.NoError(t, err)
		r := bufio.NewReader(conn)
		resp, err := http.ReadResponse(r, nil)
		require.NoError(t, err)
		require.Equal(t, http.StatusSwitchingProtocols, resp.StatusCode)
		time.Sleep(time.Minute)
		_, err = io.WriteString(conn, "hello\n")
		require.NoError(t, err)
		line, err := r.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "hello\n", line)
	})
}

// The middleware restores the request: net/http and outer middleware read what the handler has set.
func TestBodyIdleKeepsTheFieldsOfTheRequest(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /{name}", func(w http.ResponseWriter, r *http.Request) {
		require.NoError(t, r.ParseForm())
	})
	h := resiliencehttp.Server{}.Bulkhead(bulkhead.New(bulkhead.Config{Limit: 1}))(mux)
	r := httptest.NewRequest("POST", "/x", strings.NewReader("a=b"))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	body := r.Body
	h.ServeHTTP(httptest.NewRecorder(), r)
	require.Equal(t, "POST /{name}", r.Pattern)
	require.Equal(t, "b", r.PostForm.Get("a"))
	require.Equal(t, body, r.Body)

	require.Panics(t, func() {
		resiliencehttp.Server{BodyIdle: -2}.Bulkhead(bulkhead.New(bulkhead.Config{Limit: 1}))
	})
}

func TestBodyIdleAppliesWithinReadTimeout(t *testing.T) {
	for name, protocols := range wires {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, slots, failed := readAll(t, resiliencehttp.Server{BodyIdle: 2 * time.Second})
				base := serveMemory(t, h, protocols(), func(s *http.Server) { s.ReadTimeout = time.Minute })
				go func() {
					body := pausingBody(t, 3*time.Second, "x", "y")
					if resp, err := (&http.Client{Transport: base}).Post("http://a/", "text/plain", body); err == nil {
						_ = resp.Body.Close()
					}
				}()
				time.Sleep(2*time.Second + time.Millisecond)
				require.Zero(t, slots.Stats().InFlight)
				_, ok := errors.AsType[*resilience.TimeoutError](*failed)
				require.True(t, ok)
				time.Sleep(time.Minute)
			})
		})
	}
}

// The body of a CONNECT request is a connection, which may pause for longer than a body.
func TestBodyIdleIgnoresConnect(t *testing.T) {
	some := io.NopCloser(strings.NewReader("x"))
	for name, c := range map[string]struct {
		method  string
		body    io.ReadCloser
		limited bool
	}{
		"body": {"POST", some, true}, "CONNECT": {"CONNECT", some, false},
		"no body": {"POST", http.NoBody, false}, "nil": {"POST", nil, false},
	} {
		r := httptest.NewRequest(c.method, "http://a/", nil)
		r.Body = c.body
		h := resiliencehttp.Server{}.Bulkhead(bulkhead.New(bulkhead.Config{Limit: 1}))
		h(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			require.Equal(t, c.limited, c.body != r.Body, name)
		})).ServeHTTP(httptest.NewRecorder(), r)
	}
}

// A deadlines writer records the read deadlines that it gets.
type deadlines struct {
	http.ResponseWriter
	all []time.Time
}

func (d *deadlines) SetReadDeadline(at time.Time) error {
	d.all = append(d.all, at)
	return nil
}

// The deadline of a Read ends with the Read, so that it does not cut off the response. Over HTTP/1.1, Close reads the
// rest of the body, so it has a deadline, too. After the end of the body, net/http has removed the server's deadline.
func TestReadDeadlines(t *testing.T) {
	const idle, readTimeout = time.Second, time.Minute
	for name, c := range map[string]struct {
		major int
		read  bool
		want  []time.Duration // after the start; 0 for no deadline
	}{
		"HTTP/1.1, read":   {1, true, []time.Duration{idle, readTimeout, idle, 0}},
		"HTTP/1.1, unread": {1, false, []time.Duration{idle, 0}},
		"HTTP/2, read":     {2, true, []time.Duration{idle, readTimeout, idle, readTimeout}},
		"HTTP/2, unread":   {2, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, start := &deadlines{ResponseWriter: httptest.NewRecorder()}, time.Now()
				ctx := context.WithValue(t.Context(), http.ServerContextKey, &http.Server{ReadTimeout: readTimeout})
				r := httptest.NewRequestWithContext(ctx, "POST", "http://a/", strings.NewReader("x"))
				r.ProtoMajor = c.major
				h := resiliencehttp.Server{BodyIdle: idle}.Bulkhead(bulkhead.New(bulkhead.Config{Limit: 1}))
				h(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
					if c.read {
						_, _ = io.ReadAll(r.Body)
					}
					require.NoError(t, r.Body.Close())
				})).ServeHTTP(w, r)
				var got []time.Duration
				for _, at := range w.all {
					if at.IsZero() {
						at = start
					}
					got = append(got, at.Sub(start))
				}
				require.Equal(t, c.want, got)
			})
		})
	}
}

// A body that outer middleware has read to its end has no deadline.
func TestBodyIdleAfterTheEndOfTheBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inner := resiliencehttp.Server{}.Bulkhead(bulkhead.New(bulkhead.Config{Limit: 1}))
		base := serveMemory(t, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.ReadAll(r.Body)
			body := r.Body
			inner(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				require.Same(t, body, r.Body)
				w.WriteHeader(http.StatusAccepted)
			})).ServeHTTP(w, r)
		}, nil)
		resp, err := (&http.Client{Transport: base}).Post("http://a/", "text/plain", strings.NewReader("x"))
		require.NoError(t, err)
		require.Equal(t, http.StatusAccepted, resp.StatusCode)
		require.NoError(t, resp.Body.Close())
	})
}
