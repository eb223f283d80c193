package lease

import (
	"context"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// NewMemory returns a Store that keeps leases in the process, for tests and for programs of one
// process. It is not a [Fencer].
func NewMemory() Store { return &memory{leases: make(map[string]*Record)} }

type memory struct {
	mu     sync.Mutex
	leases map[string]*Record
}

// with calls f with the lease as it is now.
func (m *memory) with(ctx context.Context, name string, f func(l *Record) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.leases[name]
	if l == nil {
		l = &Record{Name: name}
		m.leases[name] = l
	}
	l.Now = time.Now()
	return f(l)
}

func (m *memory) Acquire(ctx context.Context, req Request) (rec Record, err error) {
	err = m.with(ctx, req.Name, func(l *Record) error {
		if !l.Held() {
			l.Token, l.Holder, l.Epoch, l.Since = req.Token, req.Holder, max(l.Epoch+1, l.Now.UnixMicro()), l.Now
		}
		if l.Token == req.Token {
			l.Until = l.Now.Add(req.TTL)
		}
		rec = *l
		return nil
	})
	return rec, err
}

func (m *memory) Renew(ctx context.Context, req Request) error {
	return m.with(ctx, req.Name, func(l *Record) error {
		if l.Token != req.Token {
			return ErrLost
		}
		l.Until = l.Now.Add(req.TTL)
		if req.Run {
			l.Ran = l.Now
		}
		return nil
	})
}

func (m *memory) Release(ctx context.Context, name, token string) error {
	return m.with(ctx, name, func(l *Record) error {
		if l.Token == token {
			l.Token, l.Holder, l.Since, l.Until = "", "", l.Now, l.Now
		}
		return nil
	})
}

func (m *memory) Load(ctx context.Context, name string) (rec Record, err error) {
	err = m.with(ctx, name, func(l *Record) error { rec = *l; return nil })
	return rec, err
}
