package resiliencegrpc

import (
	"context"

	"google.golang.org/grpc"
)

// MethodOf returns the full method, such as "/users.v1.Users/Get", of the call that a
// policy, a hook of one or a handler runs for, on the client and on the server. It
// returns "" if ctx belongs to no call. It is a key for groups: circuits for each method
// of a service, say.
func MethodOf(ctx context.Context) string {
	if a, ok := ctx.Value(callKey{}).(attempter); ok {
		return a.about().method
	}
	method, _ := grpc.Method(ctx)
	return method
}
