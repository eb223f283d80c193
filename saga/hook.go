package saga

import (
	"context"
	"log/slog"
)

// hook calls a hook of the user. A panic goes no further than the log: it would end
// the process, and then the next one that takes the saga over.
func hook[T any](ctx context.Context, name string, fn func(context.Context, T), arg T) {
	if fn == nil {
		return
	}
	var err error
	func() {
		defer caught(&err)
		fn(ctx, arg)
	}()
	if err != nil {
		slog.ErrorContext(ctx, "saga: "+name+" panicked", "panic", err.(*PanicError).Value, "stack", string(err.(*PanicError).Stack))
	}
}
