package registry

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// A pooled is a pool of database connections: that of resiliencesql.Pool.
type pooled interface {
	Policy
	Stats() sql.DBStats
}

// poolEntry returns the entry of a pool, which has neither events nor settings.
func poolEntry(p pooled) (Entry, bool) {
	return Entry{Kind: "pool", Name: p.Name(), Policy: p, source: &source{
		added:   time.Now(),
		figures: func(to emit) { poolFigures(p.Stats(), to) },
		observe: func(func(context.Context, Event)) func() { return func() {} },
	}}, true
}

func poolFigures(s sql.DBStats, to emit) {
	to.gauge("pool.limit", "{connection}", "Connections, at most; 0 is any number.", float64(s.MaxOpenConnections))
	to.gauge("pool.in_use", "{connection}", "Connections that a call has.", float64(s.InUse))
	to.gauge("pool.idle", "{connection}", "Connections that are open and that no call has.", float64(s.Idle))
	to.counter("pool.waits", "{call}", "Calls that have waited for a connection.", s.WaitCount)
	to.seconds(true, "pool.wait.time", "Time that calls have waited for a connection, together.", s.WaitDuration)
}

func poolHealth(s sql.DBStats) *HealthError {
	if s.MaxOpenConnections == 0 || s.InUse < s.MaxOpenConnections {
		return nil
	}
	return &HealthError{State: "full", Detail: fmt.Sprintf("%d of %d in use", s.InUse, s.MaxOpenConnections)}
}
