package fleet

import "time"

// ReadAt returns when l has read the clock of Redis last.
func ReadAt(l *Limits) time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.readAt
}

// TroubleOf returns what an error of Eval means for other calls.
func TroubleOf(err error) string { return string(troubleOf(err)) }

// LocalParts returns how many parts of limits l has in memory.
func LocalParts(l *Limits) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.local)
}

// Waiting returns how many calls wait in the lines of l, and how many lines there are.
func Waiting(l *Limits) (calls, lines int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, q := range l.lines {
		calls += len(q.calls)
	}
	return calls, len(l.lines)
}
