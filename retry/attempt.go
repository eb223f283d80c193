package retry

import (
	"context"

	"github.com/go-resilience/resilience/internal/attempt"
)

// AttemptFrom returns the number of the attempt that ctx belongs to, from 1. It returns 0
// and false if no [Retrier] retries the operation. If retriers are nested, it is the
// number of the innermost one that retries.
//
// Use it to tell a server or a trace: as a header, or as an attribute of a span.
func AttemptFrom(ctx context.Context) (n int, ok bool) { return attempt.From(ctx) }

// Fresh returns a ctx in which a new operation begins: a [Retrier] called with it retries,
// even within an attempt of another Retrier.
//
// Consider a consumer of a queue that runs under a Retrier, which begins it again when it
// fails. Each message is an operation of its own, not part of the attempt to run the
// consumer: handle it with Fresh(ctx). The same holds for work that continues after its
// caller has left (context.WithoutCancel).
//
// An error marked by [Permanent] ends the operation in which it is returned, and loses the
// mark there. Mark it again to end the retrying further up.
func Fresh(ctx context.Context) context.Context {
	if _, ok := attempt.From(ctx); !ok {
		return ctx
	}
	return attempt.With(ctx, 0)
}

var firstOfBackground = attempt.With(context.Background(), 1)

// firstAttempt marks ctx, which may be context.Background, as the ctx of a first attempt.
func firstAttempt(ctx context.Context, background bool) context.Context {
	if background {
		return firstOfBackground // spares an allocation: see docs/decisions/retry.md
	}
	return attempt.With(ctx, 1)
}
