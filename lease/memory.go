package lease

import (
	"context"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// NewMemory returns a Store in the process's memory, for tests and for programs that run as a single process. The
// Store is not a [Fencer].
func NewMemory() Store { return &memory{leases: make(map[string]*memoryLease)} }

type memory struct {
	mu     sync.Mutex
	leases map[string]*memoryLease
}

type memoryLease struct {
	Record
	until time.Time // the end of the term
}

// with locks m and calls f with the lease of this name.
func (m *memory) with(ctx context.Context, name string, f func(l *memoryLease) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.leases[name]
	if l == nil {
		l = &memoryLease{Record: Record{Name: name}}
		m.leases[name] = l
	}
	l.Left = max(time.Until(l.until), 0)
	return f(l)
}

func (l *memoryLease) extend(ttl time.Duration) { l.until, l.Left = time.Now().Add(ttl), ttl }

// Acquire implements [Store].
func (m *memory) Acquire(ctx context.Context, req Request) (rec Record, err error) {
	err = m.with(ctx, req.Name, func(l *memoryLease) error {
		if !l.Held() {
			// The epoch is based on the time. Therefore it grows even if the process was restarted.
			l.Token, l.Holder, l.Epoch = req.Token, req.Holder, max(l.Epoch+1, time.Now().UnixMicro())
		}
		if l.Token == req.Token {
			l.extend(req.TTL)
		}
		rec = l.Record
		return nil
	})
	return rec, err
}

// Renew implements [Store].
func (m *memory) Renew(ctx context.Context, req Request) error {
	return m.with(ctx, req.Name, func(l *memoryLease) error {
		switch {
		case l.Token != req.Token:
			return ErrLost
		case req.Run != 0 && req.Run <= l.LastRun:
			return ErrRunTaken
		case req.Run != 0:
			l.LastRun = req.Run
		}
		l.extend(req.TTL)
		return nil
	})
}

// Release implements [Store].
func (m *memory) Release(ctx context.Context, name, token string) error {
	return m.with(ctx, name, func(l *memoryLease) error {
		if l.Token == token {
			l.Token, l.Holder, l.until = "", "", time.Time{}
		}
		return nil
	})
}

// Load implements [Store].
func (m *memory) Load(ctx context.Context, name string) (rec Record, err error) {
	err = m.with(ctx, name, func(l *memoryLease) error { rec = l.Record; return nil })
	return rec, err
}
