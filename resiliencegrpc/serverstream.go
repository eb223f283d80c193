package resiliencegrpc

import (
	"context"
	"sync"

	"google.golang.org/grpc"
)

// A guardedStream is the stream of a handler, under the ctx of the policies.
type guardedStream struct {
	grpc.ServerStream
	ctx   context.Context
	limit Admitter // of messages; nil if there is none
	key   string

	mu      sync.Mutex
	refused error // by limit; ends the stream
}

func (s *guardedStream) Context() context.Context { return s.ctx }

// RecvMsg receives a message, and takes what it costs of the limit.
func (s *guardedStream) RecvMsg(m any) error {
	if err := s.refusal(); err != nil {
		return err
	}
	if err := s.ServerStream.RecvMsg(m); err != nil || s.limit == nil {
		return err
	}
	_, err := s.limit.Admit(s.ctx, s.key)
	if err == nil {
		return nil
	}
	err = withStatus(s.ctx, err, true)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused = err
	return err
}

func (s *guardedStream) refusal() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refused
}
