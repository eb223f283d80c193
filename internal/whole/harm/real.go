package harm

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// realCalls is the number of calls in a row on real addresses.
const realCalls = 5

// realDialTimeout is the dial timeout in a row on real addresses. If a host has two addresses, net.Dialer
// tries the first one for half of this time, but for at least 2 seconds.
const realDialTimeout = 4 * time.Second

// runReal runs a row on real addresses. The server listens on 127.0.0.1, but its host name resolves first to
// 127.0.0.2, where dials hang or are refused, and then to 127.0.0.1. Each call dials. All timeouts are long,
// so a slow machine does not change the result.
func (w *World) runReal(t *testing.T, c Client) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	bad := &syscall.SockaddrInet4{Port: l.Addr().(*net.TCPAddr).Port, Addr: [4]byte{127, 0, 0, 2}}
	if strings.HasSuffix(w.row.ID, "/hole") {
		closeHole, err := openHole(bad)
		if err != nil {
			t.Fatal(err)
		}
		defer closeHole()
	}
	server := &http.Server{Handler: http.HandlerFunc(w.serve)}
	go func() { _ = server.Serve(l) }()
	defer func() { _ = server.Close() }()
	var tried atomic.Int64 // number of dials of 127.0.0.2
	dialer := &net.Dialer{
		Timeout:  realDialTimeout,
		Resolver: &net.Resolver{PreferGo: true, Dial: dialNameServer},
		Control: func(_, addr string, _ syscall.RawConn) error {
			if strings.HasPrefix(addr, "127.0.0.2:") {
				tried.Add(1)
			}
			return nil
		},
	}
	base := w.base()
	base.DisableKeepAlives = true
	base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		host, _, _ := net.SplitHostPort(addr)
		return dialer.DialContext(ctx, network, net.JoinHostPort(host, l.Addr().String()[len("127.0.0.1:"):]))
	}
	w.client = c.New(base, w.row.Config)
	w.start = time.Now()
	for range realCalls {
		w.call(Call{})
	}
	w.calls.Wait()
	if tried.Load() == 0 {
		t.Error("no dial tried the bad address")
	}
}

// openHole makes dials of addr hang. It opens a listener on addr that accepts no connections and whose
// backlog is full, so Linux drops each further SYN.
func openHole(addr *syscall.SockaddrInet4) (closeHole func(), err error) {
	const connections = 8 // more than the smallest backlog holds
	var fds []int
	closeHole = func() {
		for _, fd := range fds {
			_ = syscall.Close(fd)
		}
	}
	for i := range 1 + connections {
		fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
		if err != nil {
			closeHole()
			return nil, os.NewSyscallError("socket", err)
		}
		fds = append(fds, fd)
		if i > 0 {
			err = syscall.Connect(fd, addr)
		} else if err = syscall.Bind(fd, addr); err == nil {
			err = syscall.Listen(fd, 0)
		}
		if err != nil && !errors.Is(err, syscall.EINPROGRESS) {
			closeHole()
			return nil, os.NewSyscallError("hole", err)
		}
	}
	return closeHole, nil
}

// dialNameServer connects to a name server for which every name has the addresses 127.0.0.2 and 127.0.0.1.
func dialNameServer(context.Context, string, string) (net.Conn, error) {
	client, server := net.Pipe()
	go func() {
		defer func() { _ = server.Close() }()
		query := make([]byte, 2+512) // over a stream connection, each DNS message follows its 2-byte length
		for {
			n, err := server.Read(query)
			if err != nil || n < 2+12 {
				return
			}
			if _, err := server.Write(answerName(query[2:n])); err != nil {
				return
			}
		}
	}()
	return client, nil
}

// answerName returns the DNS reply to a query of one name, with its length in front.
func answerName(query []byte) []byte {
	end := 12 // end of the question
	for query[end] != 0 {
		end += 1 + int(query[end])
	}
	end += 5 // the root label, the type and the class
	question := query[12:end]
	var records []byte
	count := byte(0)
	if kind := binary.BigEndian.Uint16(question[len(question)-4:]); kind == 1 { // A
		for _, last := range []byte{2, 1} {
			records = append(records, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 127, 0, 0, last)
			count++
		}
	}
	reply := []byte{query[0], query[1], 0x81, 0x80, 0, 1, 0, count, 0, 0, 0, 0}
	reply = append(append(reply, question...), records...)
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...)
}
