package saga_test

import (
	"testing"
	"testing/synctest"

	store "github.com/go-resilience/resilience/internal/sagastore"
	storetest "github.com/go-resilience/resilience/internal/sagastoretest"
	"github.com/go-resilience/resilience/saga"
)

func TestMemoryIsAStore(t *testing.T) {
	storetest.Run(t, func(*testing.T) store.Store { return saga.NewMemory() })
}

func TestCrashMatrix(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		storetest.Crashes(t, func(*testing.T) store.Store { return saga.NewMemory() })
	})
}
