package faultproxy_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
)

const (
	soon  = 5 * time.Second        // by when what must happen has happened
	never = 100 * time.Millisecond // in which what must not happen would
)

// A server keeps what it hears and answers each piece with itself.
type server struct {
	net.Listener
	mu    sync.Mutex
	heard bytes.Buffer
	ends  int // connections that it has seen end
	conns []net.Conn
}

func newServer(t *testing.T) *server {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := &server{Listener: l}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, c)
			s.mu.Unlock()
			wg.Go(func() { s.serve(c) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		s.mu.Lock()
		for _, c := range s.conns {
			_ = c.Close()
		}
		s.mu.Unlock()
		wg.Wait()
	})
	return s
}

func (s *server) serve(c net.Conn) {
	defer c.Close()
	buf := make([]byte, 1024)
	for {
		n, err := c.Read(buf)
		s.mu.Lock()
		s.heard.Write(buf[:n])
		if err != nil {
			s.ends++
		}
		s.mu.Unlock()
		if err != nil {
			return
		}
		_, _ = c.Write(buf[:n])
	}
}

func (s *server) has(text string) func() bool {
	return func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.heard.String() == text
	}
}

func (s *server) ended(n int) func() bool {
	return func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.ends == n
	}
}

func setUp(t *testing.T) (*server, *faultproxy.Proxy) {
	s := newServer(t)
	return s, faultproxy.New(t, s.Addr().String())
}

func dial(t *testing.T, p *faultproxy.Proxy) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", p.Addr())
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c.(*net.TCPConn)
}

func send(t *testing.T, c net.Conn, text string) {
	t.Helper()
	_, err := c.Write([]byte(text))
	require.NoError(t, err)
}

// hears reads as many bytes as text has.
func hears(t *testing.T, c net.Conn, text string) {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(soon)))
	buf := make([]byte, len(text))
	_, err := io.ReadFull(c, buf)
	require.NoError(t, err)
	require.Equal(t, text, string(buf))
}

func hearsNothing(t *testing.T, c net.Conn) {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(never)))
	_, err := c.Read(make([]byte, 1))
	var timeout net.Error
	require.True(t, errors.As(err, &timeout) && timeout.Timeout(), "%v", err)
}

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, soon, time.Millisecond)
}

func TestHealthyProxyForwardsDataAndItsEnd(t *testing.T) {
	s, p := setUp(t)
	c := dial(t, p)
	send(t, c, "hello")
	hears(t, c, "hello")
	require.Equal(t, 1, p.Conns())
	require.NoError(t, c.CloseWrite())
	eventually(t, s.ended(1))
	require.NoError(t, c.SetReadDeadline(time.Now().Add(soon)))
	_, err := c.Read(make([]byte, 1))
	require.Equal(t, io.EOF, err)
	eventually(t, func() bool { return p.Conns() == 0 })
}

func TestHoldDeliversAfterTheClientHasGone(t *testing.T) {
	s, p := setUp(t)
	c := dial(t, p)
	send(t, c, "begin ")
	hears(t, c, "begin ")
	p.Hold(faultproxy.ToServer)
	send(t, c, "commit")
	require.NoError(t, c.SetLinger(0)) // a reset, the rudest end
	require.NoError(t, c.Close())
	require.Never(t, func() bool { return !s.has("begin ")() || s.ended(1)() }, never, time.Millisecond)
	p.Heal()
	eventually(t, s.has("begin commit"))
	eventually(t, s.ended(1))
}

func TestHoldOneDirectionOnly(t *testing.T) {
	s, p := setUp(t)
	c := dial(t, p)
	p.Hold(faultproxy.ToClient)
	send(t, c, "hello")
	eventually(t, s.has("hello"))
	hearsNothing(t, c)
	p.Heal()
	hears(t, c, "hello")
}

func TestDelayIsByPieceAndKeepsTheOrder(t *testing.T) {
	s, p := setUp(t)
	c := dial(t, p)
	p.Delay(faultproxy.ToServer, func(data []byte) time.Duration {
		if bytes.Contains(data, []byte("late")) {
			return never
		}
		return 0
	})
	begun := time.Now()
	send(t, c, "prompt ")
	hears(t, c, "prompt ")
	send(t, c, "late ")
	require.NoError(t, c.CloseWrite())
	eventually(t, s.has("prompt late "))
	require.GreaterOrEqual(t, time.Since(begun), never)
	eventually(t, s.ended(1))

	c = dial(t, p)
	p.Delay(faultproxy.ToServer, func([]byte) time.Duration { return time.Hour })
	send(t, c, "healed")
	hearsNothing(t, c)
	p.Heal()
	hears(t, c, "healed")
}

func TestHangBlocksASenderAndHeals(t *testing.T) {
	_, p := setUp(t)
	c := dial(t, p)
	send(t, c, "before")
	hears(t, c, "before")
	p.Hang()
	other := dial(t, p) // it can connect
	send(t, other, "other")
	hearsNothing(t, other)
	require.NoError(t, c.SetWriteDeadline(time.Now().Add(soon)))
	big := make([]byte, 64<<20)
	require.NoError(t, c.SetWriteDeadline(time.Now().Add(never)))
	_, err := c.Write(big)
	require.Error(t, err, "more than the buffers hold")
	p.Heal()
	hears(t, other, "other")
}

func TestCutLosesOneDirectionOfOpenConnections(t *testing.T) {
	for name, c := range map[string]struct {
		cut   faultproxy.Direction
		heard string
	}{"to the server": {faultproxy.ToServer, ""}, "to the client": {faultproxy.ToClient, "hello"}} {
		t.Run(name, func(t *testing.T) {
			s, p := setUp(t)
			client := dial(t, p)
			eventually(t, func() bool { return p.Conns() == 1 })
			end := p.Cut(c.cut)
			send(t, client, "hello")
			hearsNothing(t, client)
			require.True(t, s.has(c.heard)())
			p.Heal()
			send(t, client, "")
			hearsNothing(t, client)
			other := dial(t, p)
			send(t, other, "!")
			hears(t, other, "!")
			if c.cut == faultproxy.ToServer {
				require.NoError(t, client.Close())
				require.Never(t, s.ended(1), never, time.Millisecond, "the end is lost too")
				end()
				eventually(t, s.ended(1))
				send(t, other, "?")
				hears(t, other, "?")
			}
		})
	}
}

func TestResetEndsEveryConnection(t *testing.T) {
	s, p := setUp(t)
	for range 3 {
		c := dial(t, p)
		send(t, c, "x")
		hears(t, c, "x")
		defer func() {
			require.NoError(t, c.SetReadDeadline(time.Now().Add(soon)))
			_, err := c.Read(make([]byte, 1))
			require.ErrorIs(t, err, syscall.ECONNRESET)
		}()
	}
	p.Hold(faultproxy.Both)
	p.Reset()
	eventually(t, s.ended(3))
	eventually(t, func() bool { return p.Conns() == 0 })
}

func TestRefuseAndHeal(t *testing.T) {
	_, p := setUp(t)
	c := dial(t, p)
	send(t, c, "a")
	hears(t, c, "a")
	p.Refuse()
	_, err := net.Dial("tcp", p.Addr())
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	send(t, c, "b")
	hears(t, c, "b")
	p.Heal()
	d := dial(t, p)
	send(t, d, "c")
	hears(t, d, "c")
}

func TestServerThatIsDownResetsTheClient(t *testing.T) {
	s, p := setUp(t)
	require.NoError(t, s.Close())
	c, err := net.Dial("tcp", p.Addr())
	if err == nil {
		defer c.Close()
		require.NoError(t, c.SetReadDeadline(time.Now().Add(soon)))
		_, err = c.Read(make([]byte, 1))
	}
	require.ErrorIs(t, err, syscall.ECONNRESET)
}

func TestSlowLetsSoManyBytesThrough(t *testing.T) {
	_, p := setUp(t)
	p.Slow(faultproxy.ToServer, 1000)
	c := dial(t, p)
	begun := time.Now()
	text := string(bytes.Repeat([]byte("x"), 200))
	send(t, c, text)
	hears(t, c, text)
	require.GreaterOrEqual(t, time.Since(begun), 180*time.Millisecond)
}
