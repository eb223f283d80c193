package lease_test

import (
	"testing"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/storetest"
)

func TestMemory(t *testing.T) {
	storetest.Run(t, func(*testing.T) lease.Store { return lease.NewMemory() })
}
