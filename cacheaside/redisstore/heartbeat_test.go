package redisstore_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside/redisstore"
)

// If a master of a cluster is down, a subscription at another master does not end: the next heartbeat is published
// through another master.
func TestSubscriptionSurvivesAnotherMaster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBus()
		var dead string          // the bucket of the first heartbeat
		var message atomic.Value // func(string)
		s := redisstore.New(redisstore.Config{
			Prefix: "users", Subscribe: b.subscribe,
			Eval: func(_ context.Context, _ string, keys []string, args ...any) (any, error) {
				if dead == "" {
					dead = keys[0]
				}
				if keys[0] == dead {
					return nil, errors.New("connection refused")
				}
				go message.Load().(func(string))(args[1].(string))
				return int64(0), nil
			},
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- s.Watch(ctx, func() {}, func(string) { t.Error("heard") }) }()
		message.Store(<-b.subscribed)
		require.ErrorIs(t, <-done, context.DeadlineExceeded, "after an hour")
	})
}
