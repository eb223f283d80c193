package cacheaside_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/internal/behavior"
)

// forbidden is an answer of a healthy source.
type forbidden struct{}

func (forbidden) Error() string  { return "forbidden" }
func (forbidden) Answered() bool { return true }

// Callers get an answer other than ErrNotFound even if a stale value could be served. The answer is not a failure, and
// the next call loads again.
func TestAnswerOfALoadIsNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		var answer error
		c := newCache(t, cacheaside.Config[int, int]{
			Name: "users", TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour, ErrorPause: time.Minute,
			Load: func(_ context.Context, key int) (int, error) { return key, answer },
		})
		c.Observe(log.add)
		mustGet(t, c, 1)
		time.Sleep(time.Minute)

		answer = forbidden{}
		_, err := c.Get(t.Context(), 1)
		require.Equal(t, answer, err)
		require.Equal(t, int64(1), c.Stats().Answered)
		require.Zero(t, c.Stats().Failed)
		require.Equal(t, 1, log.count(cacheaside.EventLoadAnswered))

		answer = errors.New("reset by peer")
		require.Equal(t, 1, mustGet(t, c, 1), "the load has failed, and the stale value is served")
		require.Equal(t, int64(1), c.Stats().Failed)
	})
}

// A panic is neither an answer nor a refusal, whatever error it has as its value.
func TestPanicWithAnErrorIsAPanic(t *testing.T) {
	for name, value := range map[string]error{
		"not found": fmt.Errorf("user: %w", cacheaside.ErrNotFound),
		"answer":    forbidden{},
		"refusal":   refusal{},
	} {
		bubble(t, name, func(t *testing.T) {
			loads := 0
			c := newCache(t, cacheaside.Config[int, int]{
				NotFoundTTL: time.Hour,
				Load:        func(context.Context, int) (int, error) { loads++; panic(value) },
				LoadMany:    func(context.Context, []int) (map[int]int, error) { loads++; panic(value) },
			})
			check := func(err error) {
				require.ErrorAs(t, err, new(interface{ Stack() []byte }))
				require.ErrorIs(t, err, value)
				end := behavior.Read(err)
				require.Equal(t, behavior.Failed, end.Kind)
				require.False(t, end.Retryable)
			}
			for range 2 {
				_, err := c.Get(t.Context(), 1)
				check(err)
				_, err = c.GetMany(t.Context(), []int{2, 3})
				check(err)
			}
			require.Equal(t, 4, loads, "nothing is cached")
			s := c.Stats()
			require.Equal(t, int64(6), s.Panicked)
			require.Zero(t, s.NotFound+s.Answered+s.Refused+s.Hits)
		})
	}
}

// refusal is the error of an open breaker.
type refusal struct{}

func (refusal) Error() string { return "open" }
func (refusal) Refused() bool { return true }

func TestRefusedLoadHasOwnEvent(t *testing.T) {
	var log eventLog
	open := true
	c := newCache(t, cacheaside.Config[int, int]{
		StaleIfError: time.Hour, ErrorPause: cacheaside.None,
		Load: func(context.Context, int) (int, error) { return 1, nil },
		Middleware: func(next func(context.Context) error) func(context.Context) error {
			return func(ctx context.Context) error {
				if open {
					return refusal{}
				}
				return next(ctx)
			}
		},
	})
	c.Observe(log.add)
	_, err := c.Get(t.Context(), 1)
	require.Equal(t, refusal{}, err)
	open = false
	mustGet(t, c, 1)
	require.NoError(t, c.Expire(t.Context(), 1))
	open = true
	require.Equal(t, 1, mustGet(t, c, 1), "the load was refused, and the stale value is served")
	require.Equal(t, int64(2), c.Stats().Refused)
	require.Zero(t, c.Stats().Failed)
	require.Equal(t, 2, log.count(cacheaside.EventLoadRefused))
	require.Zero(t, log.count(cacheaside.EventLoadFailed))
}

// A policy that answers without a call to Load has taken no time. Its answer is cached from then on, however old the
// Cache is.
func TestPolicyAnswersForLoad(t *testing.T) {
	for name, answer := range map[string]error{"refused": refusal{}, "not found": cacheaside.ErrNotFound} {
		bubble(t, name, func(t *testing.T) {
			var log eventLog
			c := newCache(t, cacheaside.Config[int, int]{
				NotFoundTTL: time.Minute,
				Load:        func(context.Context, int) (int, error) { return 1, nil },
				Middleware: func(func(context.Context) error) func(context.Context) error {
					return func(context.Context) error { return answer }
				},
			})
			c.Observe(log.add)
			time.Sleep(time.Hour)
			_, err := c.Get(t.Context(), 1)
			require.Equal(t, answer, err)
			require.Len(t, log.events, 1)
			require.Zero(t, log.events[0].Took)
			_, _ = c.Get(t.Context(), 1)
			require.Equal(t, c.Stats().NotFound, c.Stats().Hits, "remembered")
		})
	}
}

// If a function of the application panics in GetMany, no other call waits for the keys.
func TestPanicInGetManyHoldsUpNoKey(t *testing.T) {
	for name, batched := range map[string]bool{"Load": false, "LoadMany": true} {
		for _, tier := range []string{"memory", "both", "store"} {
			for _, who := range []string{"Clone", "Key", "observer"} {
				if who == "Key" && tier == "memory" {
					continue
				}
				bubble(t, name+"/"+tier+"/"+who, func(t *testing.T) {
					var panics atomic.Bool
					cfg := cacheaside.Config[int, int]{
						TTL: time.Minute, Jitter: cacheaside.None, StaleWhileRevalidate: time.Hour,
						Load: func(ctx context.Context, k int) (int, error) {
							time.Sleep(time.Second)
							return k, ctx.Err()
						},
						Clone: func(v int) int {
							if who == "Clone" && v == 1 && panics.Load() {
								panic("clone")
							}
							return v
						},
						Key: func(k int) string {
							if who == "Key" && k == 3 && panics.Load() {
								panic("key")
							}
							return string(rune('a' + k))
						},
					}
					if batched {
						cfg.LoadMany = func(ctx context.Context, keys []int) (map[int]int, error) {
							time.Sleep(time.Second)
							values := map[int]int{}
							for _, k := range keys {
								values[k] = k
							}
							return values, ctx.Err()
						}
					}
					cfg.Store = newFakeStore().tier(tier)
					c := cacheaside.New(cfg)
					c.Observe(func(context.Context, cacheaside.Event) {
						if who == "observer" && panics.Load() {
							panic("observer")
						}
					})
					synctest.Wait()
					mustGet(t, c, 1)
					time.Sleep(2 * time.Minute) // the entry is stale
					panics.Store(true)
					func() {
						defer func() { _ = recover() }()
						_, _ = c.GetMany(t.Context(), []int{2, 1, 3, 4})
					}()
					panics.Store(false)
					start := time.Now()
					for _, k := range []int{2, 1, 3, 4} {
						require.Equal(t, k, mustGet(t, c, k))
					}
					// each process loads once, and queries once a lease that another load still has
					require.Less(t, time.Since(start), 5*time.Second)
					require.NoError(t, c.Close())
					synctest.Wait()
					require.Zero(t, c.Tracked())
				})
			}
		}
	}
}

// erring matches ErrNotFound by an Is method. By itself it would not be read as an
// answer.
type erring struct{}

func (erring) Error() string        { return "no rows" }
func (erring) Is(target error) bool { return target == cacheaside.ErrNotFound }

// Policies in Middleware read not found as an answer.
func TestNotFoundIsAnAnswerToPolicies(t *testing.T) {
	for name, test := range map[string]struct {
		err    error
		answer bool
	}{
		"itself":               {cacheaside.ErrNotFound, true},
		"wrapped":              {errors.Join(cacheaside.ErrNotFound), true},
		"Is method":            {erring{}, true},
		"a failure":            {errLoad, false},
		"with a failure":       {errors.Join(errLoad, cacheaside.ErrNotFound), true},
		"after a failed query": {errors.Join(cacheaside.ErrNotFound, errLoad), true},
	} {
		t.Run(name, func(t *testing.T) {
			var seen error
			c := newCache(t, cacheaside.Config[int, int]{
				Load: func(context.Context, int) (int, error) { return 0, test.err },
				Middleware: func(next func(context.Context) error) func(context.Context) error {
					return func(ctx context.Context) error {
						seen = next(ctx)
						return seen
					}
				},
			})
			_, err := c.Get(t.Context(), 1)
			require.ErrorIs(t, err, test.err)
			if name != "Is method" {
				require.Equal(t, test.err, err, "unchanged")
			}
			answer, ok := errors.AsType[interface {
				error
				Answered() bool
			}](seen)
			if test.answer {
				require.True(t, ok && answer.Answered())
				require.Equal(t, int64(1), c.Stats().NotFound)
			} else {
				require.Equal(t, int64(1), c.Stats().Failed)
			}
		})
	}
}

// A caller that cancels its load does not start the pause that follows a failed load.
func TestCanceledCallerStartsNoPause(t *testing.T) {
	for _, capacity := range []int{0, -1} {
		synctest.Test(t, func(t *testing.T) {
			slow := false
			c := newCache(t, cacheaside.Config[int, int]{
				TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour, ErrorPause: time.Hour,
				Store: watchedIf(capacity == 0, newFakeStore().connect()),
				Load: func(ctx context.Context, _ int) (int, error) {
					if slow {
						<-ctx.Done()
						return 0, ctx.Err()
					}
					return 1, nil
				},
			})
			synctest.Wait()
			mustGet(t, c, 1)
			time.Sleep(2 * time.Minute)
			slow = true
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := c.Get(ctx, 1)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			synctest.Wait()
			slow = false
			loaded := c.Stats().Loaded
			mustGet(t, c, 1)
			require.Equal(t, loaded+1, c.Stats().Loaded)
			require.Zero(t, c.Tracked())
		})
	}
}

// The SetTTL of an attempt does not apply to the next attempt's result.
func TestOnlyTheLastAttemptSetsTerms(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		attempts := 0
		c := newCache(t, cacheaside.Config[int, int]{
			TTL: time.Minute,
			Load: func(ctx context.Context, _ int) (int, error) {
				if attempts++; attempts == 1 {
					cacheaside.SetTTL(ctx, time.Hour)
					return 0, errLoad
				}
				return attempts, nil
			},
			Middleware: func(next func(context.Context) error) func(context.Context) error {
				return func(ctx context.Context) error {
					if err := next(ctx); err == nil {
						return nil
					}
					return next(ctx)
				}
			},
		})
		require.Equal(t, 2, mustGet(t, c, 1))
		time.Sleep(2 * time.Minute)
		require.Equal(t, 3, mustGet(t, c, 1))
	})
}

// A panic is reported even if no caller waits for the load.
func TestPanicWithoutCallersIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		c := newCache(t, cacheaside.Config[int, int]{Load: func(context.Context, int) (int, error) {
			time.Sleep(2 * time.Second)
			panic("late")
		}})
		c.Observe(log.add)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.Get(ctx, 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Equal(t, 1, log.count(cacheaside.EventLoadFailed))
		require.EqualValues(t, 1, c.Stats().Panicked)
	})
}

// If a key no longer exists, its stale value is not served when a later load fails.
func TestNotFoundRemovesTheOldValueFromMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var err error
		c := newCache(t, cacheaside.Config[int, int]{TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour,
			Load: func(context.Context, int) (int, error) { return 1, err }})
		mustGet(t, c, 1)
		time.Sleep(2 * time.Minute)
		for _, err = range []error{erring{}, errLoad} {
			_, got := c.Get(t.Context(), 1)
			require.ErrorIs(t, got, err)
		}
	})
}

func TestErrorsNameWhatTheyKnow(t *testing.T) {
	require.EqualError(t, &cacheaside.TimeoutError{Name: "users", Operation: "load", After: time.Second, Err: errLoad},
		"cacheaside: users: load timed out after 1s: "+errLoad.Error())
	keys := []string{"1", "2", "3", "4", "5", "6", "7", "8", "9", "10"}
	require.NotContains(t, (&cacheaside.InvalidateError{Keys: keys, Err: errLoad}).Error(), "...")
	require.Contains(t, (&cacheaside.InvalidateError{Keys: append(keys, "11"), Err: errLoad}).Error(),
		`"10" ...] (11 keys)`)
}

// A load that InvalidateAll has invalidated caches nothing, and the Cache does not refer to it.
func TestInvalidatedLoadCachesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, cacheaside.Config[int, int]{Load: func(_ context.Context, key int) (int, error) {
			time.Sleep(time.Second)
			return key, nil
		}})
		go mustGet(t, c, 1)
		synctest.Wait()
		require.NoError(t, c.InvalidateAll(t.Context()))
		time.Sleep(2 * time.Second)
		require.Zero(t, c.Tracked())
	})
}

// A value that arrives after LoadTimeout, when its callers have their error, is still stored in the Store.
func TestLateValueIsStored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, cacheaside.Config[int, int]{
			LoadTimeout: time.Second, Store: unwatched{newFakeStore().connect()},
			Load: func(_ context.Context, key int) (int, error) {
				time.Sleep(2 * time.Second)
				return key, nil
			},
		})
		_, err := c.Get(t.Context(), 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		time.Sleep(2 * time.Second)
		begun := time.Now()
		require.Equal(t, 1, mustGet(t, c, 1))
		require.Zero(t, time.Since(begun))
		require.Zero(t, c.Tracked())
	})
}

// If the caller cancels while the Store's stale value is decoded, the load does not start either.
func TestLoadWithoutCallersTakesNoLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := 0
		shared := newFakeStore()
		c := newCache(t, cacheaside.Config[int, int]{
			TTL: time.Minute, StaleIfError: time.Hour, Load: identity, Store: unwatched{shared.connect()},
			Codec: &pensive{func([]byte) { time.Sleep(2 * time.Second) }},
			Middleware: func(next func(context.Context) error) func(context.Context) error {
				turns++
				return next
			},
		})
		mustGet(t, c, 1)
		time.Sleep(2 * time.Minute)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.Get(ctx, 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		time.Sleep(time.Minute)
		require.Equal(t, 1, turns)
		require.Zero(t, c.Tracked())
		require.Equal(t, 1, shared.called("Release"))
	})
}

func TestCloseWaitsForUncancelableLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := cacheaside.New(cacheaside.Config[int, int]{Load: func(context.Context, int) (int, error) {
			time.Sleep(time.Second)
			return 1, nil
		}})
		mustGet(t, c, 2)
		go func() { _, _ = c.Get(t.Context(), 1) }()
		synctest.Wait()
		begun := time.Now()
		var closing sync.WaitGroup
		for range 2 {
			closing.Go(func() {
				require.NoError(t, c.Close())
				require.Equal(t, time.Second, time.Since(begun))
			})
		}
		synctest.Wait()
		_, err := c.Get(t.Context(), 2)
		require.ErrorIs(t, err, cacheaside.ErrClosed, "nothing is served that a change could no longer reach")
		closing.Wait()
		require.EqualValues(t, 1, c.Stats().Canceled)
	})
}
