package others_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/gin-gonic/gin"
	"github.com/go-chi/chi/v5"
	"github.com/go-chi/chi/v5/middleware"
	"github.com/labstack/echo/v4"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/go-resilience/resilience/resiliencehttp"
)

// A greeting is what a handler takes and answers.
type greeting struct {
	Name   string `json:"name"`
	Tenant string `json:"tenant"`
}

// twoLines writes a line, and another once the client has taken that.
func twoLines(ctx context.Context, w io.Writer, flush func(), taken <-chan struct{}) {
	_, _ = io.WriteString(w, "first\n")
	flush()
	select {
	case <-taken:
		_, _ = io.WriteString(w, "second\n")
	case <-ctx.Done():
	}
}

// upgrade switches to a protocol that repeats a line.
func upgrade(hijack func() (net.Conn, *bufio.ReadWriter, error)) {
	conn, rw, err := hijack()
	if err != nil {
		return // and the client sees a 200
	}
	defer func() { _ = conn.Close() }()
	_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: repeat\r\n\r\n")
	line, _ := rw.ReadString('\n')
	_, _ = io.WriteString(conn, line)
}

func TestEcho(t *testing.T) {
	testFramework(t, func(limit func(http.Handler) http.Handler, taken <-chan struct{}) http.Handler {
		e := echo.New()
		e.Use(echo.WrapMiddleware(limit))
		e.POST("/greet", func(c echo.Context) error {
			var g greeting
			if err := c.Bind(&g); err != nil {
				return err
			}
			g.Tenant = c.Request().Header.Get("Tenant")
			return c.JSON(http.StatusCreated, g)
		})
		e.GET("/flush", func(c echo.Context) error {
			twoLines(c.Request().Context(), c.Response(), c.Response().Flush, taken)
			return nil
		})
		e.GET("/hijack", func(c echo.Context) error {
			upgrade(c.Response().Hijack)
			return nil
		})
		return e
	})
}

func TestGin(t *testing.T) {
	gin.SetMode(gin.ReleaseMode)
	testFramework(t, func(limit func(http.Handler) http.Handler, taken <-chan struct{}) http.Handler {
		g := gin.New()
		g.POST("/greet", func(c *gin.Context) {
			var g greeting
			if err := c.BindJSON(&g); err != nil {
				return
			}
			g.Tenant = c.GetHeader("Tenant")
			c.JSON(http.StatusCreated, g)
		})
		g.GET("/flush", func(c *gin.Context) { twoLines(c.Request.Context(), c.Writer, c.Writer.Flush, taken) })
		g.GET("/hijack", func(c *gin.Context) { upgrade(c.Writer.Hijack) })
		return limit(g)
	})
}

func TestChi(t *testing.T) {
	testFramework(t, func(limit func(http.Handler) http.Handler, taken <-chan struct{}) http.Handler {
		r := chi.NewRouter()
		r.Use(limit, func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				// As each of chi's loggers does, by what w can do.
				next.ServeHTTP(middleware.NewWrapResponseWriter(w, r.ProtoMajor), r)
			})
		}, middleware.AllowContentType("application/json"))
		r.Post("/greet", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusCreated)
			var name string
			_, _ = fmt.Fscanf(r.Body, `{"name":%q}`, &name)
			_, _ = fmt.Fprintf(w, `{"name":%q,"tenant":%q}`, name, r.Header.Get("Tenant"))
		})
		r.Get("/flush", func(w http.ResponseWriter, r *http.Request) {
			twoLines(r.Context(), w, w.(http.Flusher).Flush, taken)
		})
		r.Get("/hijack", func(w http.ResponseWriter, r *http.Request) { upgrade(w.(http.Hijacker).Hijack) })
		return r
	})
}

// testFramework tests a handler that a framework has made.
func testFramework(
	t *testing.T, build func(limit func(http.Handler) http.Handler, taken <-chan struct{}) http.Handler,
) {
	taken := make(chan struct{}, 10)
	s := newServer(t, build(limit(t), taken), false)
	client, slots := s.newClient(t, &resiliencehttp.Transport{})
	greet := func() (*http.Response, string) {
		req, err := http.NewRequest(http.MethodPost, s.URL+"/greet", strings.NewReader(`{"name":"Ada"}`))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Tenant", "a")
		resp, err := client.Do(req)
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		return resp, string(body)
	}

	for i := range burst {
		resp, body := greet()
		require.Equal(t, http.StatusCreated, resp.StatusCode)
		require.JSONEq(t, `{"name":"Ada","tenant":"a"}`, body)
		require.Contains(t, resp.Header.Get("RateLimit"), fmt.Sprintf(`"default";r=%d`, burst-1-i))
	}
	resp, body := greet()
	require.Equal(t, http.StatusTooManyRequests, resp.StatusCode)
	require.Equal(t, "application/problem+json", resp.Header.Get("Content-Type"))
	require.NotEmpty(t, resp.Header.Get("Retry-After"))
	require.Contains(t, body, "quota-exceeded")
	require.Equal(t, burst+1, s.count("POST /greet")) // a POST is not sent again

	s.busyOnce("GET /flush")
	resp, err := client.Get(s.URL + "/flush")
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	lines := bufio.NewReader(resp.Body)
	line, err := lines.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "first\n", line)
	require.Equal(t, 1, slots.Stats().InFlight)
	taken <- struct{}{}
	rest, err := io.ReadAll(lines)
	require.NoError(t, err)
	require.Equal(t, "second\n", string(rest))
	require.Zero(t, slots.Stats().InFlight) // even before Close
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 2, s.count("GET /flush"))

	req, err := http.NewRequest(http.MethodGet, s.URL+"/hijack", nil)
	require.NoError(t, err)
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "repeat")
	resp, err = client.Do(req)
	require.NoError(t, err)
	require.Equal(t, http.StatusSwitchingProtocols, resp.StatusCode)
	_, err = io.WriteString(resp.Body.(io.Writer), "once more\n")
	require.NoError(t, err)
	rest, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, "once more\n", string(rest))
	require.NoError(t, resp.Body.Close())
}

// TestConnect makes calls of each of the three protocols of connect, over HTTP/2.
func TestConnect(t *testing.T) {
	for name, options := range map[string][]connect.ClientOption{
		"Connect":  {connect.WithHTTPGet()},
		"gRPC":     {connect.WithGRPC()},
		"gRPC-Web": {connect.WithGRPCWeb()},
	} {
		t.Run(name, func(t *testing.T) { testConnect(t, options) })
	}
}

func testConnect(t *testing.T, options []connect.ClientOption) {
	const say, count, chat = "/echo.Echo/Say", "/echo.Echo/Count", "/echo.Echo/Chat"
	type text = wrapperspb.StringValue
	taken := make(chan struct{}, 10)
	mux := http.NewServeMux()
	mux.Handle(say, connect.NewUnaryHandler(say,
		func(_ context.Context, req *connect.Request[text]) (*connect.Response[text], error) {
			if req.Msg.Value == "" {
				return nil, connect.NewError(connect.CodeInvalidArgument, io.ErrUnexpectedEOF)
			}
			resp := connect.NewResponse(req.Msg)
			resp.Header().Set("Tenant", req.Header().Get("Tenant"))
			resp.Trailer().Set("Words", "1")
			return resp, nil
		}, connect.WithIdempotency(connect.IdempotencyNoSideEffects)))
	mux.Handle(count, connect.NewServerStreamHandler(count,
		func(ctx context.Context, _ *connect.Request[text], stream *connect.ServerStream[text]) error {
			for _, word := range []string{"one", "two", "three"} {
				if err := stream.Send(wrapperspb.String(word)); err != nil {
					return err
				}
				select {
				case <-taken:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			return connect.NewError(connect.CodeOutOfRange, io.EOF)
		}))
	mux.Handle(chat, connect.NewBidiStreamHandler(chat,
		func(_ context.Context, stream *connect.BidiStream[text, text]) error {
			for {
				message, err := stream.Receive()
				if err != nil {
					return nil // the client has no more
				}
				if err := stream.Send(message); err != nil {
					return err
				}
			}
		}))
	s := newServer(t, limit(t)(mux), true)
	client, slots := s.newClient(t, &resiliencehttp.Transport{})

	once := connect.NewClient[text, text](client, s.URL+say, append(options,
		connect.WithIdempotency(connect.IdempotencyNoSideEffects))...)
	req := connect.NewRequest(wrapperspb.String("hello"))
	req.Header().Set("Tenant", "a")
	s.busyOnce("GET " + say)
	s.busyOnce("POST " + say)
	resp, err := once.CallUnary(t.Context(), req)
	if s.count("POST "+say) == 0 {
		require.Equal(t, 2, s.count("GET "+say)) // which was sent again
	} else {
		require.Equal(t, 1, s.count("POST "+say))
		require.Equal(t, connect.CodeUnavailable, connect.CodeOf(err))
		resp, err = once.CallUnary(t.Context(), req)
	}
	require.NoError(t, err)
	require.Equal(t, "hello", resp.Msg.Value)
	require.Equal(t, "a", resp.Header().Get("Tenant"))
	require.Equal(t, "1", resp.Trailer().Get("Words"))
	_, err = once.CallUnary(t.Context(), connect.NewRequest(&text{}))
	require.Equal(t, connect.CodeInvalidArgument, connect.CodeOf(err))

	numbers, err := connect.NewClient[text, text](client, s.URL+count, options...).
		CallServerStream(t.Context(), connect.NewRequest(&text{}))
	require.NoError(t, err)
	defer func() { _ = numbers.Close() }()
	for _, want := range []string{"one", "two", "three"} {
		require.True(t, numbers.Receive(), "%v", numbers.Err())
		require.Equal(t, want, numbers.Msg().Value)
		require.Equal(t, 1, slots.Stats().InFlight)
		taken <- struct{}{}
	}
	require.False(t, numbers.Receive())
	require.Equal(t, connect.CodeOutOfRange, connect.CodeOf(numbers.Err()))
	require.NoError(t, numbers.Close())

	both := connect.NewClient[text, text](client, s.URL+chat, options...).CallBidiStream(t.Context())
	defer func() { _ = both.CloseResponse() }()
	for _, want := range []string{"ping", "pong"} {
		require.NoError(t, both.Send(wrapperspb.String(want)))
		got, err := both.Receive()
		require.NoError(t, err)
		require.Equal(t, want, got.Value)
	}
	require.NoError(t, both.CloseRequest())
	_, err = both.Receive()
	require.ErrorIs(t, err, io.EOF)
	require.NoError(t, both.CloseResponse())
}
