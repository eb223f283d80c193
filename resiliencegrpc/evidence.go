package resiliencegrpc

import (
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
)

// evidence is what call options tell of an attempt.
type evidence struct {
	trailer  metadata.MD
	peer     peer.Peer
	finished atomic.Bool
}

// options returns opts with those that collect the evidence. gRPC calls finished with
// the end of the attempt.
func (e *evidence) options(opts []grpc.CallOption, finished func(error)) []grpc.CallOption {
	all := make([]grpc.CallOption, 0, len(opts)+3)
	all = append(all, opts...)
	return append(all, grpc.Trailer(&e.trailer), grpc.Peer(&e.peer), grpc.OnFinish(finished))
}

// never reports whether the call was certainly never sent: gRPC has finished it and knows
// of no connection that it was sent on. If an interceptor further in keeps the options
// from gRPC, it cannot be told.
func (e *evidence) never() bool { return e.finished.Load() && e.peer.Addr == nil }
