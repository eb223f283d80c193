package saga_test

import (
	"testing"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
	"github.com/go-resilience/resilience/saga/storetest"
)

func TestStore(t *testing.T) {
	for _, dialect := range databases {
		t.Run(dialect.String(), func(t *testing.T) {
			storetest.Run(t, func(t *testing.T) saga.Store { return newDatabase(t, dialect).store(t) })
		})
	}
}

func TestCrashMatrix(t *testing.T) {
	for _, dialect := range databases {
		t.Run(dialect.String(), func(t *testing.T) {
			if raced && dialect == sqlstore.SQLite {
				t.Skip("SQLite is too slow for its leases under the race detector")
			}
			t.Parallel()
			storetest.Crashes(t, func(t *testing.T) saga.Store { return newDatabase(t, dialect).store(t) })
		})
	}
}
