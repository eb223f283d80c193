package harm_test

import (
	"context"
	"log/slog"
	"os"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"

	"github.com/go-resilience/resilience/internal/integration/harm"
)

// TestMain runs the tests or, if a test has started the program again as a worker, the worker.
func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler)) // the failures are intended
	if config := os.Getenv("HARM_WORKER"); config != "" {
		work(config)
		return
	}
	redis.SetLogger(silent{})
	os.Exit(m.Run())
}

// silent is a logger of go-redis.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

func tables() []*harm.Table {
	return []*harm.Table{grpcTable(), cacheTable(), fleetTable(), leaseTable(), sagaTable()}
}

func TestHarm(t *testing.T) {
	rows := make(map[string]bool)
	for _, table := range tables() {
		for _, row := range table.Rows {
			rows[table.Name+"/"+row.Name] = true
		}
		t.Run(table.Name, func(t *testing.T) {
			t.Parallel()
			table.Run(t)
		})
	}
	for name := range harm.Lost {
		assert.Contains(t, rows, name, "lost.go lists a row that does not exist")
	}
}
