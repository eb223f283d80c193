package others_test

import (
	"bufio"
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"

	anthropic "github.com/anthropics/anthropic-sdk-go/v2/packages/ssestream"
	"github.com/coder/websocket"
	"github.com/go-resty/resty/v2"
	"github.com/google/go-github/github"
	vault "github.com/hashicorp/vault/api"
	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	openai "github.com/openai/openai-go/v3/packages/ssestream"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/resiliencehttp"
)

func TestResty(t *testing.T) {
	s := newServer(t, limit(t)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Path == "/upload" {
			file, _, err := r.FormFile("file")
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			_, _ = io.Copy(w, file)
			return
		}
		_, _ = fmt.Fprintf(w, `{"Method": %q, "Tenant": %q}`, r.Method, r.Header.Get("Tenant"))
	})), false)
	client, _ := s.newClient(t, &resiliencehttp.Transport{})
	c := resty.NewWithClient(client).SetBaseURL(s.URL).SetHeader("Tenant", "a")
	var answer struct{ Method, Tenant string }

	s.busyOnce("GET /thing")
	resp, err := c.R().SetResult(&answer).Get("/thing")
	require.NoError(t, err)
	require.True(t, resp.IsSuccess())
	require.Equal(t, "GET a", answer.Method+" "+answer.Tenant)
	require.NotEmpty(t, resp.Header().Get("RateLimit"))
	require.Equal(t, 2, s.count("GET /thing"))

	s.busyOnce("PUT /thing")
	_, err = c.R().SetBody(map[string]int{"n": 1}).SetResult(&answer).Put("/thing")
	require.NoError(t, err)
	require.Equal(t, "PUT", answer.Method)
	require.Equal(t, 2, s.count("PUT /thing"))

	s.busyOnce("POST /thing")
	resp, err = c.R().SetBody(map[string]int{"n": 1}).Post("/thing")
	require.NoError(t, err)
	require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode())
	require.Equal(t, "come back later", resp.String())
	require.Equal(t, 1, s.count("POST /thing"))

	content := strings.Repeat("a line of a file\n", 10_000)
	resp, err = c.R().SetFileReader("file", "lines", strings.NewReader(content)).Post("/upload")
	require.NoError(t, err)
	require.True(t, content == string(resp.Body()), "%d bytes", resp.Size())
}

func TestGoGitHub(t *testing.T) {
	var s *server
	s = newServer(t, limit(t)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-RateLimit-Limit", "60")
		w.Header().Set("X-RateLimit-Reset", "1800000000")
		if r.URL.Path == "/users/limited/repos" {
			w.Header().Set("X-RateLimit-Remaining", "0")
			w.WriteHeader(http.StatusForbidden)
			_, _ = io.WriteString(w, `{"message": "API rate limit exceeded for 127.0.0.1."}`)
			return
		}
		page := r.URL.Query().Get("page")
		w.Header().Set("X-RateLimit-Remaining", "5"+page)
		if page == "1" {
			w.Header().Set("Link", fmt.Sprintf(`<%s%s?page=2>; rel="next"`, s.URL, r.URL.Path))
		}
		_, _ = fmt.Fprintf(w, `[{"name": "repository %s"}]`, page)
	})), false)
	client, _ := s.newClient(t, &resiliencehttp.Transport{})
	c := github.NewClient(client)
	var err error
	c.BaseURL, err = url.Parse(s.URL + "/")
	require.NoError(t, err)

	s.busyOnce("GET /users/gopher/repos")
	var names []string
	for page := 1; page != 0; {
		list := &github.RepositoryListOptions{ListOptions: github.ListOptions{Page: page}}
		repositories, resp, err := c.Repositories.List(t.Context(), "gopher", list)
		require.NoError(t, err)
		require.Equal(t, 60, resp.Rate.Limit)
		require.Equal(t, 50+page, resp.Rate.Remaining)
		for _, r := range repositories {
			names = append(names, r.GetName())
		}
		page = resp.NextPage
	}
	require.Equal(t, []string{"repository 1", "repository 2"}, names)
	require.Equal(t, 3, s.count("GET /users/gopher/repos"))

	_, _, err = c.Repositories.List(t.Context(), "limited", nil)
	limited, ok := errors.AsType[*github.RateLimitError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, "API rate limit exceeded for 127.0.0.1.", limited.Message)
	require.Equal(t, 1, s.count("GET /users/limited/repos"))
}

func TestVault(t *testing.T) {
	t.Setenv("VAULT_TOKEN", "") // which its client would take from the environment
	s := newServer(t, limit(t)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Header.Get("X-Vault-Token") != "token" {
			http.Error(w, `{"errors": ["permission denied"]}`, http.StatusForbidden)
			return
		}
		_, _ = fmt.Fprintf(w, `{"data": {"password": "secret", "body": %q}}`, body)
	})), false)
	client, _ := s.newClient(t, &resiliencehttp.Transport{})
	c, err := vault.NewClient(&vault.Config{Address: s.URL, HttpClient: client})
	require.NoError(t, err)
	c.SetMaxRetries(0) // so that only the policies send a request again

	_, err = c.Logical().ReadWithContext(t.Context(), "secret/a")
	denied, ok := errors.AsType[*vault.ResponseError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, []string{"permission denied"}, denied.Errors)

	c.SetToken("token")
	s.busyOnce("GET /v1/secret/a")
	secret, err := c.Logical().ReadWithContext(t.Context(), "secret/a")
	require.NoError(t, err)
	require.Equal(t, "secret", secret.Data["password"])
	require.Equal(t, 2, s.count("GET /v1/secret/a"))

	s.busyOnce("PUT /v1/secret/a")
	secret, err = c.Logical().WriteBytesWithContext(t.Context(), "secret/a", []byte(`{"password":"b"}`))
	require.NoError(t, err)
	require.Equal(t, `{"password":"b"}`, secret.Data["body"])
	require.Equal(t, 2, s.count("PUT /v1/secret/a"))

	s.busyOnce("POST /v1/auth/token/create")
	_, err = c.Auth().Token().CreateWithContext(t.Context(), &vault.TokenCreateRequest{})
	busy, ok := errors.AsType[*vault.ResponseError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, http.StatusServiceUnavailable, busy.StatusCode)
	require.Equal(t, 1, s.count("POST /v1/auth/token/create"))
}

// TestMinIO uploads what has no known size, in parts from one buffer, which must not be read any
// more once a part has been sent.
func TestMinIO(t *testing.T) {
	const object, partSize = "/bucket/object", 5 << 20 // the least that S3 takes
	var parts [3][]byte                                // by number, from 1
	s := newServer(t, limit(t)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		signed := strings.HasPrefix(r.Header.Get("Authorization"), "AWS4-HMAC-SHA256 ")
		query := r.URL.Query()
		part := query.Get("partNumber")
		switch {
		case err != nil || !signed || r.URL.Path != object:
			w.WriteHeader(http.StatusBadRequest)
		case r.Method == http.MethodPost && query.Has("uploads"):
			_, _ = io.WriteString(w, `<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>`)
		case r.Method == http.MethodPut && (part == "1" || part == "2"):
			parts[part[0]-'0'] = body
			w.Header().Set("ETag", `"part `+part+`"`)
		case r.Method == http.MethodPost && query.Get("uploadId") == "1":
			var complete struct {
				Part []struct{ ETag string }
			}
			if err := xml.Unmarshal(body, &complete); err != nil || len(complete.Part) != 2 {
				w.WriteHeader(http.StatusBadRequest)
				return
			}
			const result = `<CompleteMultipartUploadResult><Bucket>bucket</Bucket><ETag>"%s, %s"</ETag>` +
				`</CompleteMultipartUploadResult>`
			_, _ = fmt.Fprintf(w, result, complete.Part[0].ETag, complete.Part[1].ETag)
		case r.Method == http.MethodGet:
			w.Header().Set("ETag", `"object"`)
			w.Header().Set("Last-Modified", "Fri, 27 Nov 2026 00:00:00 GMT")
			_, _ = w.Write(bytes.Join(parts[:], nil))
		default:
			w.WriteHeader(http.StatusNotImplemented)
		}
	})), false)
	client, _ := s.newClient(t, &resiliencehttp.Transport{MaxBuffer: partSize})
	c, err := minio.New(strings.TrimPrefix(s.URL, "http://"), &minio.Options{
		Creds:      credentials.NewStaticV4("id", "key", ""),
		Transport:  client.Transport,
		Region:     "us-east-1",
		MaxRetries: 1, // so that only the policies send a request again
	})
	require.NoError(t, err)
	content := bytes.Repeat([]byte("0123456789abcde\n"), partSize/16+1000)

	s.busyOnce("PUT " + object)
	info, err := c.PutObject(t.Context(), "bucket", "object", io.MultiReader(bytes.NewReader(content)), -1,
		minio.PutObjectOptions{PartSize: partSize, DisableContentSha256: true})
	require.NoError(t, err)
	require.EqualValues(t, len(content), info.Size)
	require.Equal(t, "part 1, part 2", info.ETag)
	require.Equal(t, 3, s.count("PUT "+object))
	require.Equal(t, 2, s.count("POST "+object))

	s.busyOnce("GET " + object)
	stored, err := c.GetObject(t.Context(), "bucket", "object", minio.GetObjectOptions{})
	require.NoError(t, err)
	got, err := io.ReadAll(stored)
	require.NoError(t, err)
	require.NoError(t, stored.Close())
	require.True(t, bytes.Equal(content, got), "%d bytes", len(got))
	require.Equal(t, 2, s.count("GET "+object))
}

// events serves a stream of events. Each but the first waits until the client has taken the one
// before it.
func events(list []string, taken <-chan struct{}) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i, event := range list {
			if i > 0 {
				select {
				case <-taken:
				case <-r.Context().Done():
					return
				}
			}
			_, _ = io.WriteString(w, event+"\n\n")
			w.(http.Flusher).Flush()
		}
	}
}

// TestOpenAI reads a stream with the decoder of openai-go.
func TestOpenAI(t *testing.T) {
	taken := make(chan struct{}, 10)
	s := newServer(t, limit(t)(events(
		[]string{`data: {"text": "a"}`, `data: {"text": "b"}`, `data: {"text": "c"}`, `data: [DONE]`}, taken,
	)), false)
	client, slots := s.newClient(t, &resiliencehttp.Transport{})

	resp, err := client.Post(s.URL+"/v1/responses", "application/json", strings.NewReader(`{"stream": true}`))
	require.NoError(t, err)
	stream := openai.NewStream[struct{ Text string }](openai.NewDecoder(resp), nil)
	defer func() { _ = stream.Close() }()
	for _, want := range []string{"a", "b", "c"} {
		require.True(t, stream.Next(), "%v", stream.Err())
		require.Equal(t, want, stream.Current().Text)
		require.Equal(t, 1, slots.Stats().InFlight)
		taken <- struct{}{}
	}
	require.False(t, stream.Next())
	require.NoError(t, stream.Err())
	require.NoError(t, stream.Close())
}

// TestAnthropic reads a stream with the decoder of anthropic-sdk-go. The first answer fails in its
// first event, although its status is 200, and its Judge says so before the caller has seen it.
func TestAnthropic(t *testing.T) {
	taken := make(chan struct{}, 10)
	overloaded := events([]string{"event: error\ndata: {\"type\": \"overloaded_error\"}"}, taken)
	message := events([]string{
		"event: message_start\ndata: {\"type\": \"message_start\"}",
		"event: ping\ndata: {\"type\": \"ping\"}",
		"event: content_block_delta\ndata: {\"type\": \"content_block_delta\"}",
		"event: message_stop\ndata: {\"type\": \"message_stop\"}",
	}, taken)
	var s *server
	s = newServer(t, limit(t)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.count("POST /v1/messages") == 1 {
			overloaded(w, r)
			return
		}
		message(w, r)
	})), false)
	client, slots := s.newClient(t, &resiliencehttp.Transport{
		Judge: func(resp *http.Response, ahead *resiliencehttp.Ahead) error {
			if name, data, err := ahead.Event(); err == nil && name == "error" {
				return resiliencehttp.Resend(errors.New(data))
			}
			return resiliencehttp.DefaultJudge(resp, ahead)
		},
	})

	resp, err := client.Post(s.URL+"/v1/messages", "application/json", strings.NewReader(`{"stream": true}`))
	require.NoError(t, err)
	stream := anthropic.NewStream[struct{ Type string }](anthropic.NewDecoder(resp), nil)
	defer func() { _ = stream.Close() }()
	require.True(t, stream.Next(), "%v", stream.Err())
	require.Equal(t, "message_start", stream.Current().Type)
	taken <- struct{}{} // and the stream skips the ping
	require.Equal(t, 1, slots.Stats().InFlight)
	for _, want := range []string{"content_block_delta", "message_stop"} {
		taken <- struct{}{}
		require.True(t, stream.Next(), "%v", stream.Err())
		require.Equal(t, want, stream.Current().Type)
	}
	require.False(t, stream.Next())
	require.NoError(t, stream.Err())
	require.NoError(t, stream.Close())
	require.Equal(t, 2, s.count("POST /v1/messages"))
}

// A connTransport sends a request over a connection of its own, which is the Body of its response.
type connTransport struct{}

func (connTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	conn, err := net.Dial("tcp", req.URL.Host)
	if err != nil {
		return nil, err
	}
	r := bufio.NewReader(conn)
	resp, err := new(http.Response), req.Write(conn)
	if err == nil {
		resp, err = http.ReadResponse(r, req)
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	resp.Body = bufferedConn{conn, r}
	return resp, nil
}

type bufferedConn struct {
	net.Conn
	r io.Reader
}

func (c bufferedConn) Read(p []byte) (int, error) { return c.r.Read(p) }

// TestWebSocket talks over a Base that hands out a connection, whose addresses are seen through the
// policies, and over that of net/http, which hides them.
func TestWebSocket(t *testing.T) {
	t.Run("conn", func(t *testing.T) { testWebSocket(t, connTransport{}) })
	t.Run("net/http", func(t *testing.T) { testWebSocket(t, nil) })
}

func testWebSocket(t *testing.T, base http.RoundTripper) {
	remote := make(chan string, 1) // the client's address
	s := newServer(t, limit(t)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		conn := websocket.NetConn(r.Context(), c, websocket.MessageText)
		remote <- conn.RemoteAddr().String()
		_, _ = io.Copy(conn, conn)
		_ = conn.Close()
	})), false)
	client, slots := s.newClient(t, &resiliencehttp.Transport{Base: base})

	requests := 1
	if base == nil { // the other cannot use its connection again
		s.busyOnce("GET /chat")
		requests = 2
	}
	c, resp, err := websocket.Dial(t.Context(), s.URL+"/chat", &websocket.DialOptions{HTTPClient: client})
	require.NoError(t, err)
	require.Equal(t, http.StatusSwitchingProtocols, resp.StatusCode)
	require.Equal(t, requests, s.count("GET /chat"))
	conn := websocket.NetConn(t.Context(), c, websocket.MessageText)
	defer func() { _ = conn.Close() }()
	if local := <-remote; base != nil {
		require.Equal(t, local, conn.LocalAddr().String())
		require.Equal(t, s.Listener.Addr().String(), conn.RemoteAddr().String())
	} else {
		require.Contains(t, local, "127.0.0.1:")
	}

	content := strings.Repeat("a message ", 1000)
	_, err = io.WriteString(conn, content)
	require.NoError(t, err)
	got := make([]byte, len(content))
	_, err = io.ReadFull(conn, got)
	require.NoError(t, err)
	require.Equal(t, content, string(got))
	require.Equal(t, 1, slots.Stats().InFlight)
	require.NoError(t, conn.Close())
}
