package notify

import (
	"context"
	"log"
	"runtime/debug"
	"sync/atomic"
)

// Panics counts the panics of hooks that run on a goroutine of this library, where there is
// no caller to pass them on to. The zero value is ready to use.
type Panics struct{ n atomic.Int64 }

// Count returns their number.
func (p *Panics) Count() int64 { return p.n.Load() }

// Survive is deferred around such a hook, which what names: "lease: a hook". It counts its
// panic and hands it to the OnPanic of the package.
func (p *Panics) Survive(ctx context.Context, what string, onPanic func(context.Context, any, []byte)) {
	if v := recover(); v != nil {
		p.Tell(ctx, what, onPanic, v, debug.Stack())
	}
}

// Tell is Survive for a panic that was recovered. Without an OnPanic, and if that panics as
// well, package log prints it: log/slog would make every program that imports a pattern a
// third of a megabyte larger.
func (p *Panics) Tell(ctx context.Context, what string, onPanic func(context.Context, any, []byte), v any, stack []byte) {
	p.n.Add(1)
	if onPanic == nil {
		log.Printf("%s panicked: %v\n\n%s", what, v, stack)
		return
	}
	defer p.Survive(ctx, what, nil)
	onPanic(ctx, v, stack)
}
