package resiliencehttp

import "context"

// A lease is the ctx that a request is sent under where the attempt's own ends
// with it: it has that one's values, deadline and reason for ending, but can be
// extended beyond it. A failed response may have to outlive its attempt, since
// only the policies know whether it is the last one.
type lease struct {
	context.Context // the attempt's
	loose           context.Context
	cancel          context.CancelFunc // of loose
	leave           func() bool        // keeps loose from ending with the attempt's
	extended        bool
}

// newLease returns nil where the attempt's ctx will do.
func newLease(attempt context.Context, c *call) *lease {
	if attempt.Done() == c.Done() || !c.replayable {
		return nil
	}
	l := &lease{Context: attempt}
	l.loose, l.cancel = context.WithCancel(c)
	l.leave = context.AfterFunc(attempt, l.cancel)
	return l
}

// or returns the lease, or attempt if there is none.
func (l *lease) or(attempt context.Context) context.Context {
	if l == nil {
		return attempt
	}
	return l
}

// extend makes the lease last until the cancel that it returns is called, or the
// caller's ctx ends. Nil means that nothing needs to be called.
func (l *lease) extend() context.CancelFunc {
	if l == nil {
		return nil
	}
	l.leave()
	l.extended = true
	return l.cancel
}

// end is called when the attempt is over.
func (l *lease) end() {
	if l != nil && !l.extended {
		l.leave()
		l.cancel()
	}
}

func (l *lease) Done() <-chan struct{} { return l.loose.Done() }

func (l *lease) Err() error {
	end := l.loose.Err()
	if end != nil && l.Context.Err() != nil {
		return l.Context.Err()
	}
	return end
}

// AfterFunc spares a ctx that is derived from this one a goroutine: package
// context looks for it.
func (l *lease) AfterFunc(f func()) (stop func() bool) {
	return context.AfterFunc(l.loose, f)
}
