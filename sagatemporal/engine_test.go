package sagatemporal_test

import (
	"testing"

	"github.com/go-resilience/resilience/saga/enginetest"
	"github.com/go-resilience/resilience/sagatemporal"
)

func TestEngine(t *testing.T) {
	enginetest.Run(t, func(*testing.T) enginetest.Environment {
		env := newEnvironment()
		return enginetest.Environment{Engine: sagatemporal.New(env, env, "sagas")}
	})
}
