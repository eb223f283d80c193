package lease_test

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/internal/integration/services/etcd"
	"github.com/go-resilience/resilience/internal/integration/services/kube"
)

// A ledger is what the leaders of a chaos have written, beside their lease.
type ledger interface {
	handovers() int                           // how many terms have written
	writes() int                              // how many writes there are
	forbidden() string                        // what must not be; empty: nothing
	setClock(forward time.Duration)           // of the store, for the lease: what is left of it changes
	endConns(ttl time.Duration) (what string) // ends connections on the side of the server
}

func newLedger(t *testing.T, d database) ledger {
	switch d.Driver {
	case "redis":
		return &redisLedger{t, redisClient(t, d.DSN), d.server}
	case "etcd":
		return &etcdLedger{t, etcd.Client(t, d.DSN), d.server}
	case "kubernetes":
		return &kubernetesLedger{t, kube.Leases(d.DSN), d.server}
	}
	l := &sqlLedger{t, d, d.open(t)}
	_, err := d.store(t.Context(), l.db)
	require.NoError(t, err)
	for _, statement := range []string{
		"CREATE TABLE chaos_counter (n bigint NOT NULL)", "INSERT INTO chaos_counter VALUES (0)",
		"CREATE TABLE chaos_write (n bigint PRIMARY KEY, epoch bigint NOT NULL)",
	} {
		_, err := l.db.Exec(statement)
		require.NoError(t, err)
	}
	return l
}

// A sqlLedger is a table, whose rows are in the order of the commits.
type sqlLedger struct {
	t  *testing.T
	d  database
	db *sql.DB
}

// count is a query of the test's own connections, which are ended too.
func (l *sqlLedger) count(query string) (n int) {
	var err error
	for range 20 {
		if err = l.db.QueryRow(query).Scan(&n); err == nil {
			return n
		}
		time.Sleep(20 * time.Millisecond)
	}
	require.NoError(l.t, err)
	return 0
}

func (l *sqlLedger) handovers() int { return l.count("SELECT count(DISTINCT epoch) FROM chaos_write") }
func (l *sqlLedger) writes() int    { return l.count("SELECT count(*) FROM chaos_write") }

func (l *sqlLedger) forbidden() string {
	n := l.count(`SELECT count(*) FROM (SELECT epoch, max(epoch) OVER (ORDER BY n) AS latest FROM chaos_write) AS w
		WHERE epoch < latest`)
	if n == 0 {
		return ""
	}
	return fmt.Sprint(n, " writes of a term after one of a later term")
}

func (l *sqlLedger) setClock(forward time.Duration) {
	_, _ = l.db.Exec(fmt.Sprintf("UPDATE lease SET expires = expires - (%d)", forward.Microseconds()))
}

func (l *sqlLedger) endConns(time.Duration) string {
	const what = "backends ended"
	if l.d.Driver == "pgx" {
		u, _ := url.Parse(l.d.DSN)
		_, _ = l.db.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE pid <> pg_backend_pid() AND random() < 0.5 AND application_name = $1`, u.Query().Get("application_name"))
		return what
	}
	rows, err := l.db.Query(`SELECT id FROM information_schema.processlist
		WHERE db = database() AND id <> connection_id() AND rand() < 0.5`)
	if err != nil {
		return what
	}
	defer rows.Close()
	var ids []int64
	for rows.Next() {
		var id int64
		if rows.Scan(&id) == nil {
			ids = append(ids, id)
		}
	}
	for _, id := range ids {
		_, _ = l.db.Exec(fmt.Sprint("KILL ", id))
	}
	return what
}

// newRedisDatabase starts a Redis for a test.
func newRedisDatabase(t *testing.T) database {
	server := services.NewRedis(t)
	return database{Driver: "redis", DSN: server.Addr, server: server}
}

// A redisLedger is a list of epochs, each with a text that is of one term.
type redisLedger struct {
	t      *testing.T
	client *redis.Client
	server server
}

// append appends to the list, as a resource that refuses lower epochs.
var appendEpoch = redis.NewScript(`
if tonumber(ARGV[1]) < tonumber(redis.call('GET', 'chaos_last') or 0) then return 0 end
redis.call('SET', 'chaos_last', ARGV[1])
redis.call('RPUSH', 'chaos_write', ARGV[1] .. ' ' .. ARGV[2])
return 1`)

func (l *redisLedger) list() []string {
	list, err := l.client.LRange(context.Background(), "chaos_write", 0, -1).Result()
	require.NoError(l.t, err)
	return list
}

func (l *redisLedger) handovers() int {
	epochs := make(map[string]bool)
	for _, write := range l.list() {
		epoch, _, _ := strings.Cut(write, " ")
		epochs[epoch] = true
	}
	return len(epochs)
}

func (l *redisLedger) writes() int { return len(l.list()) }

func (l *redisLedger) forbidden() string {
	terms := make(map[string]string)
	for _, write := range l.list() {
		epoch, term, _ := strings.Cut(write, " ")
		if other, ok := terms[epoch]; ok && other != term {
			return "epoch " + epoch + " is of two terms"
		}
		terms[epoch] = term
	}
	return ""
}

func (l *redisLedger) setClock(forward time.Duration) {
	l.client.HIncrBy(context.Background(), "lease:"+chaosName, "till", -forward.Microseconds())
}

func (l *redisLedger) endConns(ttl time.Duration) string {
	l.server.Pause()
	time.Sleep(rand.N(2 * ttl))
	l.server.Resume()
	return "Redis stopped"
}
