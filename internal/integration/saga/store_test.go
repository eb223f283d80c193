package saga_test

import (
	"testing"

	"github.com/go-resilience/resilience/saga"
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
			t.Parallel()
			storetest.Crashes(t, func(t *testing.T) saga.Store { return newDatabase(t, dialect).store(t) })
		})
	}
}
