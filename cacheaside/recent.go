package cacheaside

import (
	"sync"
	"time"
)

// recent is what the Store was told last. A Store that fails over to a replica that
// lags forgets some of it, so it is told again when the connection has been lost.
type recent struct {
	mu    sync.Mutex
	tells [512]tell
	next  int
}

type tell struct {
	key string
	all bool // every key
	at  time.Duration
}

// recentFor is how much a replica may lag for what it lost to be told again.
const recentFor = 10 * time.Second

func (r *recent) note(t tell) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tells[r.next] = t
	r.next = (r.next + 1) % len(r.tells)
}

// since returns what was told at or after a time.
func (r *recent) since(at time.Duration) (tells []tell) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.tells {
		if (t.all || t.key != "") && t.at >= at {
			tells = append(tells, t)
		}
	}
	return tells
}

// doubtRecent keeps this process from using the Store for keys that it was told of a
// moment ago, until it has been told again.
func (s *shared[K, V]) doubtRecent() {
	tells := s.recent.since(s.c.now() - recentFor)
	for _, t := range tells {
		if t.all {
			s.doubted.addAll()
		} else {
			s.doubted.add(t.key, "")
		}
	}
	if len(tells) > 0 {
		s.catchUp()
	}
}
