package cacheaside_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// forbidden is an answer of a source that works.
type forbidden struct{}

func (forbidden) Error() string  { return "forbidden" }
func (forbidden) Answered() bool { return true }

// An answer other than ErrNotFound is given to the callers, though an old value could be
// served. It is not a failure, and the next call asks again.
func TestAnswerOfALoadIsNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		var answer error
		c := cacheaside.New(cacheaside.Config[int, int]{
			Name: "users", TTL: time.Minute, Jitter: -1, StaleOnError: time.Hour, ErrorPause: time.Minute,
			Load:    func(_ context.Context, key int) (int, error) { return key, answer },
			OnEvent: log.add,
		})
		defer c.Close()
		mustGet(t, c, 1)
		time.Sleep(time.Minute)

		answer = forbidden{}
		_, err := c.Get(t.Context(), 1)
		require.Equal(t, answer, err)
		require.Equal(t, int64(1), c.Stats().Answered)
		require.Zero(t, c.Stats().Failed)
		require.Equal(t, 1, log.count(cacheaside.LoadAnswered))

		answer = errors.Join(forbidden{}, errors.New("reset by peer"))
		require.Equal(t, 1, mustGet(t, c, 1), "a part has failed, and the old value is served")
		require.Equal(t, int64(1), c.Stats().Failed)
	})
}
