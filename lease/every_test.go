package lease_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/lease"
)

// each calls Every in another process for as long as it leads, and returns when fn was called.
func each(t *testing.T, store lease.Store, s lease.Schedule, leads time.Duration) (at []time.Time) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), leads)
	defer cancel()
	cfg := billing
	cfg.TTL = 10 * time.Minute // few renewals
	err := quiet(store, cfg).Every(ctx, s, func(_ context.Context, term lease.Term) error {
		require.NoError(t, term.Err())
		at = append(at, time.Now())
		return nil
	})
	require.NoError(t, err)
	return at
}

// runUntil calls Every until fn has been called n times.
func runUntil(
	t *testing.T, c *lease.Candidate, s lease.Schedule, n int, fn func(context.Context, lease.Term) error,
) (at []time.Time) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	require.NoError(t, c.Every(ctx, s, func(ctx context.Context, term lease.Term) error {
		if at = append(at, time.Now()); len(at) == n {
			defer cancel()
		}
		return fn(ctx, term)
	}))
	return at
}

func TestEveryRunsAtInstantsOfSchedule(t *testing.T) {
	exactly(t, func(t *testing.T) {
		time.Sleep(20 * time.Minute)
		store, hour := lease.NewMemory(), time.Now().Truncate(time.Hour)
		got := each(t, store, lease.Interval(time.Hour), 3*time.Hour)
		require.Equal(t, []time.Time{hour.Add(time.Hour), hour.Add(2 * time.Hour), hour.Add(3 * time.Hour)}, got)
		require.Empty(t, look(t, store).Holder, "not released")
		require.Equal(t, got[2].UnixMilli(), look(t, store).LastRun)
	})
}

// A run that takes long, or longer at each run, does not move the others.
func TestEveryDoesNotDrift(t *testing.T) {
	exactly(t, func(t *testing.T) {
		c, began := lease.New(lease.NewMemory(), billing), time.Now()
		at := runUntil(t, c, lease.Interval(time.Minute), 1000, func(context.Context, lease.Term) error {
			time.Sleep(rand.N(59 * time.Second))
			return nil
		})
		drift := at[999].Sub(began) - 1000*time.Minute
		t.Logf("1000 runs, drift %v", drift)
		require.Zero(t, drift)
		for i, run := range at {
			require.Equal(t, began.Add(time.Duration(i+1)*time.Minute), run)
		}
	})
}

func TestEveryReportsErrorsAndContinues(t *testing.T) {
	exactly(t, func(t *testing.T) {
		failed := errors.New("failed")
		var reported []error
		cfg := billing
		cfg.OnError = func(_ context.Context, err error) { reported = append(reported, err) }
		began, n := time.Now(), 0
		at := runUntil(t, lease.New(lease.NewMemory(), cfg), lease.Interval(time.Hour), 3,
			func(ctx context.Context, _ lease.Term) error {
				if n++; n < 3 {
					return failed
				}
				return nil
			})
		require.Equal(t, []time.Time{began.Add(time.Hour), began.Add(2 * time.Hour), began.Add(3 * time.Hour)}, at)
		require.Equal(t, []error{failed, failed}, reported)
	})
}

func TestLoopReportsErrorsAndContinues(t *testing.T) {
	exactly(t, func(t *testing.T) {
		failed, began := errors.New("failed"), time.Now()
		var reported []error
		var at []time.Duration
		cfg := billing
		cfg.Poll = time.Minute
		cfg.OnError = func(_ context.Context, err error) { reported = append(reported, err) }
		ctx, cancel := context.WithCancel(t.Context())
		store := lease.NewMemory()
		require.NoError(t, lease.New(store, cfg).Loop(ctx, func(ctx context.Context, term lease.Term) error {
			require.NoError(t, term.Err())
			switch at = append(at, time.Since(began)); len(at) {
			case 1:
				return failed
			case 2:
				return nil
			case 3:
				return term.Resign(ctx)
			}
			cancel()
			return fmt.Errorf("the work ends: %w", context.Cause(ctx))
		}))
		require.Equal(t, []time.Duration{0, time.Minute, 2 * time.Minute, 3 * time.Minute}, at)
		require.Equal(t, []error{failed}, reported, "the end of the ctx is no error")
		require.Empty(t, look(t, store).Holder, "not released")
		require.NoError(t, lease.New(store, cfg).Loop(ctx, nil))
	})
}

// A run that is cut short is not repeated, so OnError must be told.
func TestEveryReportsRunThatIsCutShort(t *testing.T) {
	exactly(t, func(t *testing.T) {
		var reported []error
		cfg := billing
		cfg.OnError = func(_ context.Context, err error) { reported = append(reported, err) }
		runUntil(t, lease.New(lease.NewMemory(), cfg), lease.Interval(time.Hour), 1,
			func(ctx context.Context, term lease.Term) error {
				require.NoError(t, term.Resign(context.WithoutCancel(ctx)))
				return context.Cause(ctx)
			})
		require.Len(t, reported, 1)
		require.ErrorIs(t, reported[0], lease.ErrLost)
	})
}

// A term that was lost is reported by its event.
func TestLoopReportsNoLoss(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := &faulty{Store: lease.NewMemory(), renew: down}
		cfg := billing
		cfg.OnError = func(_ context.Context, err error) { t.Errorf("reported: %v", err) }
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		terms := 0
		require.NoError(t, quiet(store, cfg).Loop(ctx, func(ctx context.Context, _ lease.Term) error {
			terms++
			<-ctx.Done()
			if terms%2 == 0 {
				return fmt.Errorf("the work ends: %w", ctx.Err())
			}
			return context.Cause(ctx)
		}))
		require.Greater(t, terms, 100)
	})
}

// TestOnErrorGetsJoinedErrors has functions return errors when their ctx is done.
func TestOnErrorGetsJoinedErrors(t *testing.T) {
	failed, cause := errors.New("not recorded"), errors.New("shutting down")
	for name, c := range map[string]struct {
		err  func(ctx context.Context) error
		want bool
	}{
		"end":            {context.Context.Err, false},
		"cause":          {context.Cause, false},
		"wrapped end":    {func(ctx context.Context) error { return fmt.Errorf("query: %w", ctx.Err()) }, false},
		"end and cause":  {func(ctx context.Context) error { return errors.Join(ctx.Err(), context.Cause(ctx)) }, false},
		"error":          {func(context.Context) error { return failed }, true},
		"error and end":  {func(ctx context.Context) error { return errors.Join(failed, ctx.Err()) }, true},
		"end with error": {func(ctx context.Context) error { return fmt.Errorf("%w: %w", ctx.Err(), failed) }, true},
		"wrapped error and end": {func(ctx context.Context) error {
			return fmt.Errorf("query: %w", errors.Join(failed, ctx.Err()))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			exactly(t, func(t *testing.T) {
				for _, cause := range []error{nil, cause, errors.Join(cause, failed)} {
					reported := 0
					candidate := lease.New(lease.NewMemory(), lease.Config{Name: "x",
						OnError: func(context.Context, error) { reported++ }})
					ctx, cancel := context.WithCancelCause(t.Context())
					_ = candidate.Loop(ctx, func(ctx context.Context, _ lease.Term) error {
						cancel(cause)
						return c.err(ctx)
					})
					require.Equal(t, c.want, reported == 1, cause)
				}
			})
		})
	}
}

// several is an error that == cannot compare.
type several []error

func (s several) Error() string { return errors.Join(s...).Error() }

func TestOnErrorGetsCauseThatCannotBeCompared(t *testing.T) {
	exactly(t, func(t *testing.T) {
		cause, reported := several{errDown}, 0
		c := lease.New(lease.NewMemory(), lease.Config{Name: "x", OnError: func(_ context.Context, err error) {
			require.Equal(t, cause, err)
			reported++
		}})
		ctx, cancel := context.WithCancelCause(t.Context())
		_ = c.Loop(ctx, func(ctx context.Context, _ lease.Term) error {
			cancel(cause)
			return context.Cause(ctx)
		})
		require.Equal(t, 1, reported)
	})
}

func TestErrorsAreLoggedWithoutOnError(t *testing.T) {
	var logged bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&logged, nil)))
	defer slog.SetDefault(before)
	exactly(t, func(t *testing.T) {
		runUntil(t, lease.New(lease.NewMemory(), billing), lease.Interval(time.Hour), 1,
			func(context.Context, lease.Term) error { return errors.New("no data") })
	})
	require.Contains(t, logged.String(), `level=WARN msg="lease: function failed" lease=billing err="no data"`)
}

// Changes of the leader add no run and lose none.
func TestEveryRunsOnceWhoeverLeads(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store, begun := lease.NewMemory(), time.Now()
		var at, want []time.Time
		for range 50 { // leaders, each for five hours
			at = append(at, each(t, store, lease.Interval(24*time.Hour), 5*time.Hour)...)
		}
		for run := begun.Add(24 * time.Hour); run.Before(begun.Add(250 * time.Hour)); run = run.Add(24 * time.Hour) {
			want = append(want, run)
		}
		require.Equal(t, want, at)
	})
}

func TestDeployRunsNothing(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store := lease.NewMemory()
		for range 23 {
			require.Empty(t, each(t, store, lease.Interval(24*time.Hour), time.Hour))
		}
		require.Len(t, each(t, store, lease.Interval(24*time.Hour), 2*time.Hour), 1)
		require.Empty(t, each(t, store, lease.Interval(24*time.Hour), time.Hour))
	})
}

// No process leads for days: one run is made for all of them, and the next when it is due.
func TestEveryMakesMissedRunsOnce(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store, day := lease.NewMemory(), lease.Interval(24*time.Hour)
		require.Empty(t, each(t, store, day, time.Hour))
		time.Sleep(100 * time.Hour) // the first of all runs is missed
		back := time.Now()
		require.Equal(t, []time.Time{back}, each(t, store, day, time.Hour))
		time.Sleep(100 * time.Hour)
		back = time.Now()
		want := []time.Time{back, back.Truncate(24 * time.Hour).Add(24 * time.Hour)}
		require.Equal(t, want, each(t, store, day, 24*time.Hour))
	})
}

// A run that takes longer than the interval delays the next one, which is made once for all instants that passed.
func TestEveryAfterRunThatTakesLong(t *testing.T) {
	exactly(t, func(t *testing.T) {
		began, n := time.Now(), 0
		at := runUntil(t, lease.New(lease.NewMemory(), billing), lease.Interval(time.Hour), 3,
			func(context.Context, lease.Term) error {
				if n++; n == 1 {
					time.Sleep(150 * time.Minute)
				}
				return nil
			})
		require.Equal(t, []time.Time{began.Add(time.Hour), began.Add(210 * time.Minute), began.Add(4 * time.Hour)}, at)
	})
}

func TestEveryContinuesAfterResign(t *testing.T) {
	exactly(t, func(t *testing.T) {
		began := time.Now()
		at := runUntil(t, lease.New(lease.NewMemory(), billing), lease.Interval(time.Hour), 3,
			func(ctx context.Context, term lease.Term) error { return term.Resign(context.WithoutCancel(ctx)) })
		require.Equal(t, began.Add(3*time.Hour), at[2])
	})
}

// A call that takes longer than the interval returns when the next one is due, and the term may have ended by then.
func TestEveryMakesNoRunAfterTerm(t *testing.T) {
	for range 20 {
		exactly(t, func(t *testing.T) {
			at := runUntil(t, lease.New(lease.NewMemory(), billing), lease.Interval(time.Second), 1,
				func(context.Context, lease.Term) error { time.Sleep(2 * time.Second); return nil })
			require.Len(t, at, 1)
		})
		exactly(t, func(t *testing.T) {
			store := &faulty{Store: lease.NewMemory(), renew: down}
			ctx, cancel := context.WithTimeout(t.Context(), 2*ttl)
			defer cancel()
			_ = quiet(store, billing).Every(ctx, lease.Interval(ttl-ttl/10), func(_ context.Context, term lease.Term) error {
				require.NoError(t, term.Err())
				return nil
			})
		})
	}
}

// A run waits for a store that does not answer. A leader that dies during a run has made it.
func TestEveryRecordsRunBeforeItStarts(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store, began := &faulty{Store: lease.NewMemory()}, time.Now()
		time.AfterFunc(time.Hour-time.Nanosecond, func() { store.set(&store.renew, down) })
		time.AfterFunc(time.Hour+ttl/5, func() { store.set(&store.renew, nil) })
		at := runUntil(t, quiet(store, billing), lease.Interval(time.Hour), 1, func(context.Context, lease.Term) error {
			require.Equal(t, began.Add(time.Hour).UnixMilli(), look(t, store).LastRun, "the scheduled instant")
			return nil
		})
		require.InDelta(t, ttl/5, at[0].Sub(began.Add(time.Hour)), float64(ttl/30))
		require.Equal(t, began.Add(2*time.Hour), each(t, store, lease.Interval(time.Hour), 2*time.Hour)[0])
	})
}

// The record of a run has succeeded, and its answer was lost.
func TestEveryMakesRunWhoseAnswerIsLost(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store, began := &faulty{Store: lease.NewMemory()}, time.Now()
		var n atomic.Int64
		store.set(&store.renew, func(_ context.Context, do func() error) error {
			if n.Add(1)%2 == 0 {
				return do()
			}
			return errors.Join(do(), errDown)
		})
		at := runUntil(t, quiet(store, billing), lease.Interval(time.Minute), 50,
			func(context.Context, lease.Term) error { return nil })
		for i, run := range at {
			require.WithinDuration(t, began.Add(time.Duration(i+1)*time.Minute), run, ttl/10)
		}
	})
}

// A taken store has recorded each second run already.
type taken struct{ lease.Store }

func (s taken) Renew(ctx context.Context, req lease.Request) error {
	if hours := req.Run / time.Hour.Milliseconds(); req.Run != 0 && hours%2 == 0 {
		return lease.ErrRunTaken
	}
	return s.Store.Renew(ctx, req)
}

func TestEverySkipsRunThatIsTaken(t *testing.T) {
	exactly(t, func(t *testing.T) {
		time.Sleep(time.Minute)
		c := lease.New(taken{lease.NewMemory()}, billing)
		c.Observe(func(_ context.Context, e lease.Event) { require.NotEqual(t, lease.EventStoreFailed, e.Kind) })
		at := runUntil(t, c, lease.Interval(time.Hour), 5, func(context.Context, lease.Term) error { return nil })
		for i := range at[1:] {
			require.Equal(t, 2*time.Hour, at[i+1].Sub(at[i]))
		}
	})
}

// The program stops while a run is recorded. No other process would make the run.
func TestEveryMakesRunThatIsRecordedAsItStops(t *testing.T) {
	exactly(t, func(t *testing.T) {
		time.Sleep(time.Second) // no renewal is due on the hour
		ctx, cancel := context.WithCancel(t.Context())
		store := &faulty{Store: lease.NewMemory()}
		time.AfterFunc(time.Hour-2*time.Second, func() {
			store.set(&store.renew, func(ctx context.Context, do func() error) error {
				err := do()
				cancel()
				return errors.Join(err, ctx.Err())
			})
		})
		c := lease.New(store, billing)
		c.Observe(func(_ context.Context, e lease.Event) { require.NotEqual(t, lease.EventStoreFailed, e.Kind) })
		runs := 0
		require.NoError(t, c.Every(ctx, lease.Interval(time.Hour), func(ctx context.Context, term lease.Term) error {
			runs++
			require.NoError(t, term.Err())
			require.Error(t, ctx.Err())
			return nil
		}))
		require.Equal(t, time.Now().UnixMilli(), look(t, store).LastRun)
		require.Equal(t, 1, runs)
	})
}

// The term has ended before the store has answered.
func TestEveryMakesNoRunRecordedTooLate(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store, began := &faulty{Store: lease.NewMemory()}, time.Now()
		time.AfterFunc(time.Hour-time.Nanosecond, func() {
			store.set(&store.renew, func(_ context.Context, do func() error) error {
				defer time.Sleep(ttl)
				return do()
			})
		})
		time.AfterFunc(time.Hour+ttl, func() { store.set(&store.renew, nil) })
		at := runUntil(t, quiet(store, billing), lease.Interval(time.Hour), 1,
			func(_ context.Context, term lease.Term) error {
				require.NoError(t, term.Err())
				return nil
			})
		require.Equal(t, began.Add(2*time.Hour), at[0])
	})
}

// The record of a run renews the lease while another renewal hangs.
func TestRunExtendsTermWhileRenewalHangs(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store, hangs := &faulty{Store: lease.NewMemory()}, atomic.Bool{}
		time.AfterFunc(time.Hour-ttl/2, func() { hangs.Store(true) })
		store.set(&store.renew, func(ctx context.Context, do func() error) error {
			if hangs.Load() && time.Now().UnixNano()%int64(time.Hour) != 0 { // a run is due on the hour
				time.Sleep(3 * ttl) // it ignores its ctx
				return errDown
			}
			return do()
		})
		runUntil(t, quiet(store, billing), lease.Interval(time.Hour), 1, func(ctx context.Context, term lease.Term) error {
			began := time.Now()
			<-ctx.Done()
			require.Equal(t, ttl-ttl/10, time.Since(began))
			return nil
		})
		time.Sleep(3 * ttl)
	})
}

// A volatile store may lose its data.
type volatile struct {
	mu     sync.Mutex
	leases lease.Store
}

func (s *volatile) lose() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leases = lease.NewMemory()
}

func (s *volatile) now() lease.Store {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leases
}

func (s *volatile) Acquire(ctx context.Context, req lease.Request) (lease.Record, error) {
	return s.now().Acquire(ctx, req)
}

func (s *volatile) Renew(ctx context.Context, req lease.Request) error {
	return s.now().Renew(ctx, req)
}

func (s *volatile) Release(ctx context.Context, name, token string) error {
	return s.now().Release(ctx, name, token)
}

func (s *volatile) Load(ctx context.Context, name string) (lease.Record, error) {
	return s.now().Load(ctx, name)
}

// The store loses the record of the last run. The processes still know it.
func TestEveryRepeatsNoRunAfterLossOfRecord(t *testing.T) {
	for processes := range 3 {
		exactly(t, func(t *testing.T) {
			store, began := new(volatile), time.Now()
			store.lose()
			ctx, cancel := context.WithTimeout(t.Context(), 270*time.Minute)
			defer cancel()
			var mu sync.Mutex
			var at []time.Duration
			var all sync.WaitGroup
			for range processes + 1 {
				all.Go(func() {
					_ = quiet(store, billing).Every(ctx, lease.Interval(time.Hour), func(context.Context, lease.Term) error {
						mu.Lock()
						defer mu.Unlock()
						at = append(at, time.Since(began))
						return nil
					})
				})
			}
			for range 4 {
				time.Sleep(time.Hour)
				time.Sleep(time.Minute)
				store.lose()
			}
			all.Wait()
			require.Equal(t, []time.Duration{time.Hour, 2 * time.Hour, 3 * time.Hour, 4 * time.Hour}, at)
		})
	}
}

// A process whose clock was far ahead has recorded a run of the future, and an operator has reset the record.
func TestEveryDoesNotRestoreRunInFuture(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store, began := new(volatile), time.Now()
		store.lose()
		_, err := store.Acquire(t.Context(), lease.Request{Name: "billing", Token: "x", TTL: ttl})
		require.NoError(t, err)
		run := lease.Request{Name: "billing", Token: "x", TTL: ttl, Run: began.Add(24 * time.Hour).UnixMilli()}
		require.NoError(t, store.Renew(t.Context(), run))
		c := quiet(store, billing)
		_, err = c.TryCampaign(t.Context())
		require.ErrorIs(t, err, lease.ErrHeld)
		store.lose()
		at := runUntil(t, c, lease.Interval(time.Hour), 1, func(context.Context, lease.Term) error { return nil })
		require.Equal(t, began.Add(time.Hour), at[0])
	})
}

// A process whose clock was far ahead has recorded a run of the future.
func TestEveryReportsLastRunInFuture(t *testing.T) {
	exactly(t, func(t *testing.T) {
		store, ahead := lease.NewMemory(), time.Now().Add(2*time.Hour)
		_, err := store.Acquire(t.Context(), lease.Request{Name: "billing", Token: "x", TTL: ttl})
		require.NoError(t, err)
		run := lease.Request{Name: "billing", Token: "x", TTL: ttl, Run: ahead.UnixMilli()}
		require.NoError(t, store.Renew(t.Context(), run))
		require.NoError(t, store.Release(t.Context(), "billing", "x"))
		var reported []error
		cfg := billing
		cfg.OnError = func(_ context.Context, err error) { reported = append(reported, err) }
		at := runUntil(t, lease.New(store, cfg), lease.Interval(time.Hour), 1,
			func(context.Context, lease.Term) error { return nil })
		require.Equal(t, ahead.Add(time.Hour), at[0])
		require.Len(t, reported, 1)
		require.ErrorContains(t, reported[0], "lease: billing: last run is in the future: no run is due until after ")
	})
}

func TestEveryReturnsErrorOfSchedule(t *testing.T) {
	exactly(t, func(t *testing.T) {
		c := lease.New(lease.NewMemory(), billing)
		require.EqualError(t, c.Every(t.Context(), nil, nil), "lease: billing: Schedule is nil: must be set")
		err := c.Every(t.Context(), next(func(t time.Time) time.Time { return t }), nil)
		require.ErrorContains(t, err, "lease: billing: the Schedule's Next must return a later instant: it returned ")

		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Hour)
		defer cancel()
		require.NoError(t, c.Every(ctx, next(func(time.Time) time.Time { return time.Time{} }), nil), "never due")
		require.Error(t, ctx.Err())
	})
}

// A machine is a process of a simulation, whose clock differs from the others. Its time is real time plus offset.
type machine struct {
	store  lease.Store
	offset time.Duration
	dead   atomic.Bool
	lost   *atomic.Int64 // runs that were recorded for a process that was killed before they began
}

var errKilled = errors.New("killed")

// network takes a while. The answer to a process that was killed meanwhile is lost.
func (m *machine) network() error {
	time.Sleep(rand.N(100 * time.Millisecond))
	if m.dead.Load() {
		return errKilled
	}
	return nil
}

func (m *machine) Acquire(ctx context.Context, req lease.Request) (lease.Record, error) {
	if err := m.network(); err != nil {
		return lease.Record{}, err
	}
	rec, err := m.store.Acquire(ctx, req)
	if rec.LastRun != 0 {
		rec.LastRun -= m.offset.Milliseconds()
	}
	return rec, errors.Join(err, m.network())
}

func (m *machine) Renew(ctx context.Context, req lease.Request) error {
	if err := m.network(); err != nil {
		return err
	}
	run := req.Run != 0
	if run {
		req.Run += m.offset.Milliseconds()
	}
	if err := m.store.Renew(ctx, req); err != nil {
		return err
	}
	err := m.network()
	if run && err != nil {
		m.lost.Add(1)
	}
	return err
}

func (m *machine) Release(ctx context.Context, name, token string) error {
	if err := m.network(); err != nil {
		return err
	}
	return m.store.Release(ctx, name, token)
}

func (m *machine) Load(ctx context.Context, name string) (lease.Record, error) {
	return m.store.Load(ctx, name)
}

// A nightly job in Berlin in spring and in autumn, when clocks are set, with five processes that are killed at random,
// also while a run is due, and whose clocks differ by up to 200 ms.
func TestNightlyJobOfFiveProcesses(t *testing.T) {
	exactly(t, func(t *testing.T) {
		for _, change := range []time.Time{
			time.Date(2000, time.March, 26, 1, 0, 0, 0, time.UTC), time.Date(2000, time.October, 29, 1, 0, 0, 0, time.UTC),
		} {
			days := 7
			if testing.Short() {
				days = 2
			}
			time.Sleep(time.Until(change.AddDate(0, 0, -days)))
			nightlyJob(t, time.Duration(2*days)*24*time.Hour)
		}
	})
}

func nightlyJob(t *testing.T, lasts time.Duration) {
	const skew = 200 * time.Millisecond
	s, store, began := daily(t, 2, 30, "Europe/Berlin"), lease.NewMemory(), time.Now()
	var mu sync.Mutex
	var made []time.Time
	var lost atomic.Int64
	kills := 0
	cfg := lease.Config{Name: "nightly", TTL: 5 * time.Minute, Poll: 2 * time.Minute}
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	start := func() (kill func()) {
		m := &machine{store: store, offset: rand.N(skew), lost: &lost}
		ctx, cancel := context.WithCancel(ctx)
		local := next(func(t time.Time) time.Time { return s.Next(t.Add(m.offset)).Add(-m.offset) })
		all.Go(func() {
			_ = quiet(m, cfg).Every(ctx, local, func(context.Context, lease.Term) error {
				mu.Lock()
				defer mu.Unlock()
				made = append(made, time.Now().Add(m.offset))
				return nil
			})
		})
		return func() { m.dead.Store(true); cancel() }
	}
	kill := make([]func(), 5)
	for i := range kill {
		kill[i] = start()
	}
	for time.Since(began) < lasts {
		pause := rand.N(8 * time.Hour)
		if due := time.Until(s.Next(time.Now())); rand.IntN(2) == 0 {
			pause = due - skew + rand.N(2*skew) // while the run is due
		}
		time.Sleep(max(pause, 0))
		for _, i := range rand.Perm(5)[:1+rand.IntN(5)] {
			kill[i]()
			kills++
			if rand.IntN(2) == 0 {
				time.Sleep(rand.N(time.Second))
			}
			kill[i] = start()
		}
	}
	time.Sleep(time.Hour)
	cancel()
	all.Wait()
	var due []time.Time
	for at := s.Next(began); at.Before(time.Now()); at = s.Next(at) {
		due = append(due, at)
	}
	for _, run := range made {
		n := 0
		for _, at := range due {
			if !run.Before(at) && run.Before(at.Add(time.Hour)) {
				n++
			}
		}
		require.Equal(t, 1, n, "a run at %v", run)
	}
	t.Logf("%d runs due, %d made, %d lost with a process that was killed as it was recorded; %d kills",
		len(due), len(made), lost.Load(), kills)
	require.EqualValues(t, len(due), int64(len(made))+lost.Load())
	for i := range made[1:] {
		require.Greater(t, made[i+1].Sub(made[i]), 20*time.Hour, "repeated")
	}
}
