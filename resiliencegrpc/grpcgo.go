package resiliencegrpc

import (
	"context"
	"slices"
	"strings"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The functions in this file recognize errors of grpc-go by their texts, because grpc-go reports some facts
// only in the text of an error. If a future grpc-go changes a text, the errors will count as failures of the
// server, and grpcgo_test.go will fail.

// endedInWait reports whether st is the status of a call that ended while it waited for a free HTTP/2 stream
// on a connection, or for the server's addresses. It must be called only for a call that was certainly never
// sent. The status of a call that ended while it waited for a connection has a longer message.
func endedInWait(st *status.Status) bool {
	return st.Message() == context.Canceled.Error() || st.Message() == context.DeadlineExceeded.Error()
}

// isOwnShortage reports whether st is the status of a call that got no connection because this process has no
// file descriptor or local port left.
func isOwnShortage(st *status.Status) bool {
	return slices.ContainsFunc([]error{syscall.EMFILE, syscall.ENFILE, syscall.EADDRNOTAVAIL}, func(err error) bool {
		return st.Code() == codes.Unavailable && strings.HasSuffix(strings.TrimSuffix(st.Message(), `"`), err.Error())
	})
}

// closedAsAnnounced reports whether st is the status of a stream that ended because the server closed the
// connection after it had announced this with a GOAWAY whose code is NO_ERROR.
func closedAsAnnounced(st *status.Status) bool {
	return st.Code() == codes.Unavailable && strings.Contains(st.Message(), "received prior goaway: code: NO_ERROR")
}

// failedToEncode reports whether st is the status of a call with a message that the client or the server
// could not encode.
func failedToEncode(st *status.Status) bool {
	return strings.HasPrefix(st.Message(), "grpc: error while marshaling: ")
}
