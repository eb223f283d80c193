package resiliencesql

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/policy"
)

// Pool returns the connection pool of db as a policy of the kind "pool" for a registry. The metrics of the pool are
// values of db.Stats: the maximum number of connections, the number of connections in use, the number of idle
// connections, the number of waits for a connection, and the total duration of these waits.
//
// A db from pgx's stdlib.OpenDBFromPool has no limit, so waits happen in the pgx pool and are not counted. To count
// them, call db.SetMaxOpenConns with the limit of the pgx pool.
func Pool(name string, db *sql.DB) policy.Describer { return &pool{db, name} }

// A pool describes the connection pool of a database.
type pool struct {
	db   *sql.DB
	name string
}

// poolStats are the metrics of a pool.
type poolStats struct {
	Limit    int           `gauge:"limit"` // the maximum number of connections; 0 means no limit
	InUse    int           `gauge:"in_use"`
	Idle     int           `gauge:"idle"`
	Waits    int64         `counter:"waits"`
	WaitTime time.Duration `counter:"wait.time_seconds"`
}

func (p *pool) stats() poolStats {
	s := p.db.Stats()
	return poolStats{s.MaxOpenConnections, s.InUse, s.Idle, s.WaitCount, s.WaitDuration}
}

// Describe returns the description of the pool. The health of the pool is a warning while all connections are in use.
func (p *pool) Describe() policy.Description {
	return policy.Description{
		Kind:    "pool",
		Name:    p.name,
		Metrics: func() []policy.Metric { return policy.Metrics("pool", p.stats()) },
		Health:  p.health,
	}
}

func (p *pool) health(context.Context) policy.Health {
	if s := p.stats(); s.Limit > 0 && s.InUse >= s.Limit {
		return policy.Health{Status: policy.Warn, State: "full", Detail: fmt.Sprintf("all of %d in use", s.InUse)}
	}
	return policy.Health{}
}
