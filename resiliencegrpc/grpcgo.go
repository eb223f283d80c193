package resiliencegrpc

import (
	"context"
	"slices"
	"strings"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// This file depends on texts of grpc-go's errors. grpc-go reports some facts only by text. If a text changes, the
// errors count as failures of the server. grpcgo_test.go fails if grpc-go no longer returns these texts.

// endedInWait reports whether st is the status of a call that ended while it waited for a stream of a connection, or
// for the addresses of the server. The call must certainly never have been sent. A call that ended while it waited for
// a connection has a longer message.
func endedInWait(st *status.Status) bool {
	return st.Message() == context.Canceled.Error() || st.Message() == context.DeadlineExceeded.Error()
}

// isOwnShortage reports whether st is the status of a call for which there was no connection, because this process has
// no file descriptor or local port left.
func isOwnShortage(st *status.Status) bool {
	return slices.ContainsFunc([]error{syscall.EMFILE, syscall.ENFILE, syscall.EADDRNOTAVAIL}, func(err error) bool {
		return st.Code() == codes.Unavailable && strings.HasSuffix(strings.TrimSuffix(st.Message(), `"`), err.Error())
	})
}

// closedAsAnnounced reports whether st is the status of a stream that ended with its connection, after the server had
// announced by GOAWAY, without an error code, that it would close the connection.
func closedAsAnnounced(st *status.Status) bool {
	return st.Code() == codes.Unavailable && strings.Contains(st.Message(), "received prior goaway: code: NO_ERROR")
}

// failedToEncode reports whether st is the status of a call whose message could not be encoded, by the client or by
// the server.
func failedToEncode(st *status.Status) bool {
	return strings.HasPrefix(st.Message(), "grpc: error while marshaling: ")
}
