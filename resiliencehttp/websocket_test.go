package resiliencehttp_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha1"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
)

// The opcodes of frames (RFC 6455, section 5.2).
const (
	textFrame  = 0x1
	closeFrame = 0x8
	pingFrame  = 0x9
	pongFrame  = 0xA
)

// A webSocket is one end of a connection. A client masks what it sends, a server
// must not (RFC 6455, section 5.1).
type webSocket struct {
	r      *bufio.Reader
	w      io.Writer
	client bool
}

// send writes one final frame.
func (s webSocket) send(opcode byte, payload []byte) error {
	frame := []byte{0x80 | opcode, 0}
	switch n := len(payload); {
	case n < 126:
		frame[1] = byte(n)
	case n < 1<<16:
		frame[1] = 126
		frame = binary.BigEndian.AppendUint16(frame, uint16(n))
	default:
		frame[1] = 127
		frame = binary.BigEndian.AppendUint64(frame, uint64(n))
	}
	if s.client {
		var key [4]byte
		_, _ = rand.Read(key[:])
		frame[1] |= 0x80
		frame = append(frame, key[:]...)
		payload = masked(payload, key)
	}
	_, err := s.w.Write(append(frame, payload...))
	return err
}

// receive reads one final frame.
func (s webSocket) receive() (opcode byte, payload []byte, err error) {
	var head [2]byte
	if _, err := io.ReadFull(s.r, head[:]); err != nil {
		return 0, nil, err
	}
	length := uint64(head[1] & 0x7F)
	switch length {
	case 126:
		var n uint16
		err = binary.Read(s.r, binary.BigEndian, &n)
		length = uint64(n)
	case 127:
		err = binary.Read(s.r, binary.BigEndian, &length)
	}
	isMasked := head[1]&0x80 != 0
	var key [4]byte
	if err == nil && isMasked {
		_, err = io.ReadFull(s.r, key[:])
	}
	switch {
	case err != nil:
		return 0, nil, err
	case head[0]&0xF0 != 0x80:
		return 0, nil, fmt.Errorf("a first byte of %#x: not final, or with reserved bits", head[0])
	case isMasked == s.client:
		return 0, nil, errors.New("a frame that is masked by the server, or not by the client")
	}
	payload = make([]byte, length)
	_, err = io.ReadFull(s.r, payload)
	return head[0] & 0xF, masked(payload, key), err
}

func masked(payload []byte, key [4]byte) []byte {
	payload = bytes.Clone(payload)
	for i := range payload {
		payload[i] ^= key[i%4]
	}
	return payload
}

// acceptKey answers the key of a client's handshake (RFC 6455, section 4.2.2).
func acceptKey(key string) string {
	sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	return base64.StdEncoding.EncodeToString(sum[:])
}

// echo is a WebSocket server that sends each text back. To a ping it answers with
// a pong; to the text "ping" with a ping, and a text when the pong has come.
func echo(w http.ResponseWriter, r *http.Request) {
	key := r.Header.Get("Sec-WebSocket-Key")
	nonce, err := base64.StdEncoding.DecodeString(key)
	if err != nil || len(nonce) != 16 || r.Header.Get("Sec-WebSocket-Version") != "13" ||
		!strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		http.Error(w, "not a WebSocket handshake", http.StatusBadRequest)
		return
	}
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer conn.Close()
	_, _ = fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
		"Sec-WebSocket-Accept: %s\r\n\r\n", acceptKey(key))
	s := webSocket{r: rw.Reader, w: conn}
	for {
		opcode, payload, err := s.receive()
		switch {
		case err != nil:
			return
		case opcode == textFrame && string(payload) == "ping":
			err = s.send(pingFrame, []byte("are you there?"))
		case opcode == textFrame:
			err = s.send(textFrame, payload)
		case opcode == pingFrame:
			err = s.send(pongFrame, payload)
		case opcode == pongFrame:
			err = s.send(textFrame, append([]byte("pong: "), payload...))
		case opcode == closeFrame:
			_ = s.send(closeFrame, payload)
			return
		}
		if err != nil {
			return
		}
	}
}

// dialWebSocket shakes hands with the server at url.
func dialWebSocket(t *testing.T, client *http.Client, url string) (webSocket, io.Closer) {
	var nonce [16]byte
	_, _ = rand.Read(nonce[:])
	key := base64.StdEncoding.EncodeToString(nonce[:])
	req := upgradeRequest(t, url)
	req.Header.Set("Sec-WebSocket-Version", "13")
	req.Header.Set("Sec-WebSocket-Key", key)
	resp, err := client.Do(req)
	require.NoError(t, err)
	require.Equal(t, http.StatusSwitchingProtocols, resp.StatusCode)
	require.Equal(t, acceptKey(key), resp.Header.Get("Sec-WebSocket-Accept"))
	conn, ok := resp.Body.(io.ReadWriteCloser)
	require.True(t, ok)
	return webSocket{r: bufio.NewReader(conn), w: conn, client: true}, conn
}

func requireFrame(t *testing.T, s webSocket, opcode byte, payload string) {
	t.Helper()
	gotCode, got, err := s.receive()
	require.NoError(t, err)
	require.Equal(t, opcode, gotCode)
	require.Equal(t, payload, string(got))
}

func TestAcceptKeyIsThatOfTheRFC(t *testing.T) {
	require.Equal(t, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", acceptKey("dGhlIHNhbXBsZSBub25jZQ=="))
}

// TestWebSocket talks through two Transports: one that a client has, and one of a
// reverse proxy, which repeats the handshakes that fail at first.
func TestWebSocket(t *testing.T) {
	var handshakes atomic.Int64
	backend := serve(t, false, func(w http.ResponseWriter, r *http.Request) {
		if handshakes.Add(1)%2 == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		echo(w, r)
	})
	inside, outside := bulkhead.New(bulkhead.Config{Limit: 2}), bulkhead.New(bulkhead.Config{Limit: 2})
	target, err := url.Parse(backend.URL)
	require.NoError(t, err)
	proxy := serve(t, false, (&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport: &resiliencehttp.Transport{
			Base:       backend.Base,
			Middleware: resilience.Chain(retries(2).Wrap, inside.Wrap, resilience.Timeout(time.Minute)),
		},
	}).ServeHTTP)
	client := proxy.client(retries(2).Wrap, outside.Wrap, resilience.Timeout(time.Minute))
	inFlight := func() [2]int { return [2]int{inside.Stats().InFlight, outside.Stats().InFlight} }

	one, closeOne := dialWebSocket(t, client, proxy.URL)
	two, closeTwo := dialWebSocket(t, client, proxy.URL)
	require.EqualValues(t, 4, handshakes.Load())
	require.Equal(t, [2]int{2, 2}, inFlight())

	for _, s := range []webSocket{one, two, one} {
		for _, text := range []string{"", "hello", strings.Repeat("middling ", 100), strings.Repeat("long ", 20_000)} {
			require.NoError(t, s.send(textFrame, []byte(text)))
			requireFrame(t, s, textFrame, text)
		}
		require.NoError(t, s.send(pingFrame, []byte("ping of the client")))
		requireFrame(t, s, pongFrame, "ping of the client")
		require.NoError(t, s.send(textFrame, []byte("ping")))
		requireFrame(t, s, pingFrame, "are you there?")
		require.NoError(t, s.send(pongFrame, []byte("I am")))
		requireFrame(t, s, textFrame, "pong: I am")
	}

	// Well ended: each side says so, and the server hangs up.
	normal := string(binary.BigEndian.AppendUint16(nil, 1000)) + "bye"
	require.NoError(t, one.send(closeFrame, []byte(normal)))
	requireFrame(t, one, closeFrame, normal)
	_, _, err = one.receive()
	require.ErrorIs(t, err, io.EOF)
	require.Equal(t, 2, outside.Stats().InFlight, "the end of one direction is not the end")
	require.NoError(t, closeOne.Close())
	require.Equal(t, 1, outside.Stats().InFlight)

	// Hung up upon.
	require.NoError(t, two.send(textFrame, []byte("hello?")))
	require.NoError(t, closeTwo.Close())
	require.Zero(t, outside.Stats().InFlight)
	require.Eventually(t, func() bool { return inside.Stats().InFlight == 0 }, time.Minute, time.Millisecond,
		"the proxy closes its side")
}

type connection struct{ io.ReadWriteCloser }

// The timeouts of a client end with the handshake.
func TestConnectionOutlivesTheTimeoutsOfAClient(t *testing.T) {
	for _, attempt := range []time.Duration{500 * time.Millisecond, -1} {
		testConnectionOutlives(t, attempt)
	}
}

func testConnectionOutlives(t *testing.T, attempt time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer far.Close()
		var sent context.Context
		client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{
			Timeout: time.Second, AttemptTimeout: attempt,
			Transport: &resiliencehttp.Transport{Judge: func(_ *http.Response, ahead *resiliencehttp.Ahead) error {
				_, err := ahead.Bytes(1)
				require.Equal(t, io.EOF, err, "a connection is no body")
				return nil
			}, Base: roundTripper(func(req *http.Request) (*http.Response, error) {
				sent = req.Context()
				return &http.Response{StatusCode: http.StatusSwitchingProtocols, Header: http.Header{}, Body: connection{near}}, nil
			})},
		})
		ctx, leave := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1", nil)
		require.NoError(t, err)
		resp, err := client.Do(req)
		require.NoError(t, err)
		time.Sleep(time.Hour)
		require.NoError(t, sent.Err())
		leave()
		synctest.Wait()
		select {
		case <-sent.Done():
		default:
			t.Error("the ctx of the connection goes on")
		}
		require.ErrorIs(t, sent.Err(), context.Canceled)
		require.NoError(t, resp.Body.Close())
	})
}
