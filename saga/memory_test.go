package saga_test

import (
	"testing"
	"testing/synctest"

	"github.com/go-resilience/resilience/internal/sagacrash"
	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
	"github.com/go-resilience/resilience/saga/storetest"
)

func TestMemoryStore(t *testing.T) {
	storetest.Run(t, func(*testing.T) store.Store { return saga.NewMemory() })
}

func TestCrashMatrix(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sagacrash.Crashes(t, func(*testing.T) store.Store { return saga.NewMemory() })
	})
}
