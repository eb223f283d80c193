package resiliencehttp

import "context"

// A lease is the ctx that a request is sent under: the attempt's, except that it
// can be extended beyond that. A failed response may have to outlive its attempt,
// since only the policies know whether it is the last one.
type lease struct {
	ctx     context.Context
	attempt context.Context
	cancel  context.CancelFunc // nil where no policy gave the attempt an end of its own
	unlink  func() bool        // from the attempt's ctx
}

func newLease(attempt context.Context, c *call) lease {
	if attempt.Done() == c.Done() || !c.replayable {
		return lease{ctx: attempt, attempt: attempt}
	}
	loose, cancel := context.WithCancel(c)
	return lease{
		ctx:     &leaseCtx{Context: attempt, loose: loose},
		attempt: attempt,
		cancel:  cancel,
		unlink:  context.AfterFunc(attempt, cancel),
	}
}

// extend makes the lease last until the cancel that it returns is called, or the
// caller's ctx ends. Nil means that nothing needs to be called.
func (l *lease) extend() context.CancelFunc {
	cancel := l.cancel
	if cancel != nil {
		l.unlink()
		l.cancel = nil
	}
	return cancel
}

// end is called when the attempt is over.
func (l *lease) end() {
	if l.cancel != nil {
		l.unlink()
		l.cancel()
	}
}

// leaseCtx has the values and the deadline of the attempt's ctx, and its reason
// for ending, but it ends with loose.
type leaseCtx struct {
	context.Context
	loose context.Context
}

func (c *leaseCtx) Done() <-chan struct{} { return c.loose.Done() }

func (c *leaseCtx) Err() error {
	end := c.loose.Err()
	if end != nil && c.Context.Err() != nil {
		return c.Context.Err()
	}
	return end
}

// AfterFunc spares a ctx that is derived from this one a goroutine: package
// context looks for it.
func (c *leaseCtx) AfterFunc(f func()) (stop func() bool) {
	return context.AfterFunc(c.loose, f)
}
