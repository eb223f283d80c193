package lease

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// NewMemory returns a Store that keeps leases in the process, for tests and for
// programs of one process. It is fair: the first to wait is the first to get a lease.
// It is a [Notifier] and not a [Fencer].
func NewMemory() Store { return &memory{leases: make(map[string]*memoryLease)} }

type memory struct {
	mu     sync.Mutex
	leases map[string]*memoryLease
}

type memoryLease struct {
	Record
	line    []string // tokens, the first first
	hearing map[*func()]struct{}
}

// lease returns the lease, as it is now. m.mu is held.
func (m *memory) lease(name string) *memoryLease {
	l := m.leases[name]
	if l == nil {
		l = &memoryLease{Record: Record{Name: name}, hearing: make(map[*func()]struct{})}
		m.leases[name] = l
	}
	l.Now = time.Now()
	return l
}

func (m *memory) Acquire(ctx context.Context, req Request) (Record, error) {
	if ctx.Err() != nil {
		return Record{}, ended.Error(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.lease(req.Name)
	place := slices.Index(l.line, req.Token)
	switch {
	case l.Held() && l.Token == req.Token:
		l.Until = l.Now.Add(req.TTL)
	case l.Held(), len(l.line) > 0 && place != 0 && l.Now.Sub(l.Until) < req.Grace:
		if place < 0 && !req.Once {
			l.line = append(l.line, req.Token)
			place = len(l.line) - 1
		}
		rec := l.Record
		rec.Ahead = len(l.line) > 0 && place != 0
		return rec, nil
	default:
		if place < 0 {
			place = len(l.line) - 1 // they have had their time
		}
		l.line = slices.Delete(l.line, 0, place+1)
		l.Token, l.Holder, l.Epoch = req.Token, req.Holder, max(l.Epoch+1, l.Now.UnixMicro())
		l.Since, l.Until = l.Now, l.Now.Add(req.TTL)
	}
	return l.Record, nil
}

func (m *memory) Renew(ctx context.Context, name, token string, ttl time.Duration) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.lease(name)
	if l.Token != token {
		return ErrLost
	}
	l.Until = l.Now.Add(ttl)
	return nil
}

func (m *memory) Release(ctx context.Context, name, token string) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	m.mu.Lock()
	l := m.lease(name)
	l.line = slices.DeleteFunc(l.line, func(t string) bool { return t == token })
	var told []*func()
	if l.Token == token {
		l.Token, l.Holder, l.Since, l.Until = "", "", l.Now, l.Now
		for hearing := range l.hearing {
			told = append(told, hearing)
		}
	}
	m.mu.Unlock()
	for _, hearing := range told {
		(*hearing)()
	}
	return nil
}

func (m *memory) Load(ctx context.Context, name string) (Record, error) {
	if ctx.Err() != nil {
		return Record{}, ended.Error(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lease(name).Record, nil
}

func (m *memory) Listen(ctx context.Context, name string, notify func()) error {
	m.mu.Lock()
	hearing := m.lease(name).hearing
	hearing[&notify] = struct{}{}
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(hearing, &notify)
	}()
	notify()
	<-ctx.Done()
	return ended.Error(ctx)
}
