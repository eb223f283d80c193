package fleet

import "time"

// ReadAt returns when l has read the clock of Redis last.
func ReadAt(l *Limits) time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.readAt
}
