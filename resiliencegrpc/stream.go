package resiliencegrpc

import (
	"context"
	"io"

	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

// A stream is the [grpc.ClientStream] of the caller: the latest try of a streamCall.
type stream struct{ call *streamCall }

func (s *stream) latest() *try {
	s.call.mu.Lock()
	defer s.call.mu.Unlock()
	return s.call.try
}

func (s *stream) Context() context.Context { return s.latest().Context() }
func (s *stream) Trailer() metadata.MD     { return s.latest().Trailer() }

// RecvMsg receives a message. The first one is there when the policies have judged it.
func (s *stream) RecvMsg(m any) error {
	c, t := s.call, s.latest()
	for !c.going.Load() {
		if err := c.lost(); err != nil {
			return err
		}
		err := t.receive(m, func(err error) { t.tell(outcome{err: err}) })
		next, lost := c.await(t)
		switch {
		case next != t:
			t = next
			continue
		case lost != nil:
			return lost
		}
		t.endIfFinished()
		return err
	}
	err := t.receive(m, func(err error) {
		if err != nil {
			t.end(err)
		}
	})
	t.endIfFinished()
	return err
}

// lost returns the error of a stream that the policies have given up.
func (c *streamCall) lost() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// receive calls RecvMsg, and then with its error before gRPC may do anything on its own.
func (t *try) receive(m any, then func(error)) error {
	t.receiving.Store(true)
	defer t.receiving.Store(false)
	err := t.ClientStream.RecvMsg(m)
	then(err)
	return err
}

// Header waits for the header. A caller that has seen one must not get the messages of
// another try.
func (s *stream) Header() (metadata.MD, error) {
	t := s.latest()
	t.heading.Store(true)
	md, err := t.ClientStream.Header()
	if md != nil {
		t.heading.Store(false)
		s.call.mu.Lock()
		s.call.header = true
		s.call.mu.Unlock()
	}
	return md, err
}

// SendMsg sends a message. It keeps a copy of the only message of a stream that may be
// opened again. An error other than io.EOF has ended the stream, on this side: what is held
// for it is given back when SendMsg returns.
func (s *stream) SendMsg(m any) error {
	c, t := s.call, s.latest()
	var request any
	if !c.desc.ClientStreams && c.client.replayable(c.ctx, c.method) {
		request = copyOf(m)
	}
	err := t.send(m)
	switch {
	case err == nil:
		c.mu.Lock()
		c.request = request
		c.mu.Unlock()
	case err != io.EOF:
		t.tell(outcome{err: err, unasked: true}) // an interceptor further in may not have ended it
		if latest, _ := c.await(t); latest == t {
			t.end(nil)
		}
	}
	return err
}

func copyOf(m any) any {
	if p, ok := m.(proto.Message); ok {
		return proto.Clone(p)
	}
	return m
}

func (t *try) send(m any) error {
	t.sending.Store(true)
	err := t.ClientStream.SendMsg(m)
	if err != io.EOF {
		t.sending.Store(false)
	}
	return err
}

// CloseSend says that the caller sends no more. gRPC does so itself after the only message
// of a stream.
func (s *stream) CloseSend() error { return s.latest().CloseSend() }
