package retry

import (
	"context"

	"github.com/go-resilience/resilience/internal/attempt"
)

// AttemptFrom returns the number of the attempt that ctx belongs to, from 1. It
// returns 0 and false if no [Retrier] repeats the operation. Of nested retriers it is
// the number of the innermost one that retries.
//
// Use it for what a server or a trace should know: a header, an attribute of a span.
func AttemptFrom(ctx context.Context) (n int, ok bool) { return attempt.From(ctx) }

// Fresh returns a ctx in which a new operation begins: a [Retrier] that is called
// with it retries, though another one further up is at work.
//
// A loop that lives long, such as a queue's consumer, is often run under a Retrier
// that begins it again when it fails. Each message is then an operation of its own,
// and not a part of the attempt to run the loop: handle it with Fresh(ctx). The same
// holds for work that goes on after its caller has left (context.WithoutCancel).
//
// A mark of [Permanent] ends the operation that it is returned in, and is taken off
// there. Mark the error again to end the retrying further up.
func Fresh(ctx context.Context) context.Context {
	if _, ok := attempt.From(ctx); !ok {
		return ctx
	}
	return attempt.With(ctx, 0)
}

var firstOfBackground = attempt.With(context.Background(), 1)

// firstAttempt marks ctx as that of a first attempt.
func firstAttempt(ctx context.Context) context.Context {
	if ctx == context.Background() {
		return firstOfBackground // without an allocation
	}
	return attempt.With(ctx, 1)
}
