package saga_test

import (
	"testing"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/storetest"
)

func TestMemoryIsAStore(t *testing.T) {
	storetest.Run(t, func(*testing.T) saga.Store { return saga.NewMemory() })
}
