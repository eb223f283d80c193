package adapter

import (
	"context"
	"errors"
	"io"
	"net"

	"github.com/go-resilience/resilience"
)

// A Dialer dials connections under policies. If a policy holds a resource for each call, such as a slot of a bulkhead,
// it holds the resource until the connection is closed.
type Dialer struct {
	Policies resilience.Middleware
	net.Dialer
}

func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, work := resilience.BeginWork(ctx)
	c := &conn{work: work}
	err := d.Policies(func(ctx context.Context) (err error) {
		if c.Conn, err = d.Dialer.DialContext(ctx, network, address); err != nil {
			var dns *net.DNSError
			if errors.As(err, &dns) && dns.IsNotFound {
				return resilience.Answer(err) // the resolver works, and has answered that there is no such host
			}
			return err
		}
		work.Continue()
		return nil
	})(ctx)
	if err != nil {
		if c.Conn != nil { // an outer policy refused the call after the dial
			_ = c.Conn.Close()
		}
		work.End(nil)
		return nil, err
	}
	return c, nil
}

// A conn is a connection whose work, in which the policies see the whole life of the connection, ends when the
// connection is closed or when reading fails.
type conn struct {
	net.Conn
	work *resilience.Work
}

func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	switch {
	case err == io.EOF:
		c.work.End(nil)
	case err != nil && !resilience.IsTimeout(err) && !errors.Is(err, net.ErrClosed):
		c.work.End(err)
	}
	return n, err
}

func (c *conn) Close() error {
	defer c.work.End(nil)
	return c.Conn.Close()
}
