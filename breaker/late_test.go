package breaker_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/linger"
)

// A result counts only if its call began in the same generation.
func TestEarlierCallsChangeNothing(t *testing.T) {
	late := map[string]error{"success": nil, "failure": errDown, "retry after": throttled(time.Hour)}
	for name, between := range map[string]func(b *breaker.Breaker){
		"reset":  func(b *breaker.Breaker) { b.Reset() },
		"trip":   func(b *breaker.Breaker) { b.Trip(errDown, time.Second) },
		"force":  func(b *breaker.Breaker) { b.ForceOpen(nil) },
		"forced": func(b *breaker.Breaker) { b.ForceOpen(nil); b.Enable() },
		"enable": func(b *breaker.Breaker) { b.Disable(); b.Enable() },
		"open":   func(b *breaker.Breaker) { do(b, down) },
		"half-open": func(b *breaker.Breaker) {
			do(b, down)
			time.Sleep(time.Second)
			b.State()
		},
		"tripped, half-open": func(b *breaker.Breaker) {
			b.Trip(errDown, time.Second)
			time.Sleep(time.Second)
			b.State()
		},
		"close": func(b *breaker.Breaker) {
			do(b, down)
			time.Sleep(time.Second)
			do(b, ok)
			do(b, ok)
		},
		"reopened": func(b *breaker.Breaker) {
			do(b, down)
			time.Sleep(time.Second)
			do(b, down)
			time.Sleep(time.Second)
			b.State()
		},
	} {
		for result, err := range late {
			t.Run(name+", then "+result, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := breaker.New(breaker.Config{ConsecutiveFailures: 1, Probes: 2, OpenFor: time.Second})
					hanging := make(chan struct{})
					go do(b, func(context.Context) error { <-hanging; return err })
					done, refused := b.Begin(t.Context())
					require.NoError(t, refused)
					synctest.Wait()
					between(b)
					before := untotaled(b)
					close(hanging)
					synctest.Wait()
					require.Equal(t, before, untotaled(b))
					done(err)
					require.Equal(t, before, untotaled(b))
				})
			})
		}
	}
}

// A probe that began before a trip or a reset returns its permit and changes nothing else.
func TestEarlierProbesChangeNothing(t *testing.T) {
	for name, between := range map[string]func(b *breaker.Breaker){
		"trip":  func(b *breaker.Breaker) { b.Trip(errDown, time.Second) },
		"reset": func(b *breaker.Breaker) { b.Reset() },
		"failed probe": func(b *breaker.Breaker) {
			require.Equal(t, errDown, do(b, down))
		},
	} {
		for _, late := range []error{nil, errDown} {
			t.Run(fmt.Sprint(name, late), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := breaker.New(breaker.Config{ConsecutiveFailures: 1, Probes: 2, OpenFor: time.Second})
					open(t, b)
					time.Sleep(time.Second)
					hanging := make(chan struct{})
					go do(b, func(context.Context) error { <-hanging; return late })
					synctest.Wait()
					require.Equal(t, breaker.HalfOpen, b.State())
					between(b)
					before := untotaled(b)
					close(hanging)
					synctest.Wait()
					require.Equal(t, before, untotaled(b))

					b.Trip(nil, time.Second)
					time.Sleep(time.Second)
					for range 2 {
						require.NoError(t, do(b, ok))
					}
					require.Equal(t, breaker.Closed, b.State())
				})
			})
		}
	}
}

// A probe that takes ProbeTimeout opens the breaker. If it succeeds all the same, the breaker closes.
func TestOverdueProbe(t *testing.T) {
	for _, late := range []error{nil, answered(true), errDown, throttled(time.Hour), refused(true)} {
		synctest.Test(t, func(t *testing.T) {
			var seen changes
			b := watched(&seen, breaker.Config{
				ConsecutiveFailures: 1, OpenFor: 10 * time.Second, ProbeTimeout: 3 * time.Second, MaxOpenFor: time.Minute,
			})
			open(t, b)
			time.Sleep(10 * time.Second)
			over := make(chan error)
			go func() { over <- do(b, taking(4*time.Second, late)) }()
			synctest.Wait()
			time.Sleep(3*time.Second - 1)
			require.Equal(t, breaker.HalfOpen, b.State())
			time.Sleep(time.Nanosecond)
			require.Equal(t, breaker.Open, b.State())
			require.Equal(t, 20*time.Second, b.Stats().OpenLeft)
			require.EqualError(t, b.Stats().LastErr, "breaker: probe did not return within ProbeTimeout")
			require.EqualValues(t, 2, b.Stats().Window.ConsecutiveFailures)
			before := untotaled(b)
			require.Equal(t, late, <-over)
			if breaker.DefaultClassify(late) == breaker.Success {
				require.Equal(t, breaker.Closed, b.State())
				require.Equal(t, breaker.Counts{}, b.Stats().Window)
				require.Equal(t, 2, b.Stats().ConsecutiveOpens)
				seen.requireChain(t, breaker.Closed)
				return
			}
			before.OpenLeft -= time.Second
			require.Equal(t, before, untotaled(b), "a late failure changes nothing")
		})
	}
}

// An overdue probe counts while its outage lasts, in whatever state the breaker is by then.
func TestOverdueProbeCountsInItsOutage(t *testing.T) {
	cfg := breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second, ProbeTimeout: 500 * time.Millisecond, Probes: 2}
	for name, test := range map[string]struct {
		between func(t *testing.T, b *breaker.Breaker)
		counts  bool
	}{
		"open":      {func(*testing.T, *breaker.Breaker) {}, true},
		"half-open": {func(*testing.T, *breaker.Breaker) { time.Sleep(time.Second) }, true},
		"beside another probe": {func(t *testing.T, b *breaker.Breaker) {
			time.Sleep(time.Second)
			_, err := b.Begin(t.Context())
			require.NoError(t, err)
		}, true},
		"after another overdue probe": {func(t *testing.T, b *breaker.Breaker) {
			time.Sleep(time.Second)
			_, err := b.Begin(t.Context())
			require.NoError(t, err)
			time.Sleep(500 * time.Millisecond)
			require.Equal(t, breaker.Open, b.State())
		}, true},
		"after an ignored probe": {func(t *testing.T, b *breaker.Breaker) {
			time.Sleep(time.Second)
			require.Equal(t, refused(true), do(b, returning(refused(true))))
		}, true},
		"after one of two probes": {func(t *testing.T, b *breaker.Breaker) {
			time.Sleep(time.Second)
			require.NoError(t, do(b, ok))
		}, true},
		"after a failed probe": {func(t *testing.T, b *breaker.Breaker) {
			time.Sleep(time.Second)
			require.Equal(t, errDown, do(b, down))
		}, false},
		"half-open after a failed probe": {func(t *testing.T, b *breaker.Breaker) {
			time.Sleep(time.Second)
			require.Equal(t, errDown, do(b, down))
			time.Sleep(time.Second)
		}, false},
		"after Trip":   {func(t *testing.T, b *breaker.Breaker) { b.Trip(nil, time.Hour) }, false},
		"after Reset":  {func(t *testing.T, b *breaker.Breaker) { b.Reset(); open(t, b) }, false},
		"forced open":  {func(t *testing.T, b *breaker.Breaker) { b.ForceOpen(nil) }, false},
		"after Enable": {func(t *testing.T, b *breaker.Breaker) { b.ForceOpen(nil); b.Enable(); open(t, b) }, false},
		"disabled":     {func(t *testing.T, b *breaker.Breaker) { b.Disable() }, false},
		"closed":       {func(t *testing.T, b *breaker.Breaker) { time.Sleep(time.Second); do(b, ok); do(b, ok) }, false},
		"a later outage": {func(t *testing.T, b *breaker.Breaker) {
			time.Sleep(time.Second)
			do(b, ok)
			do(b,
				ok)
			open(t, b)
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(cfg)
				open(t, b)
				time.Sleep(time.Second)
				done, err := b.Begin(t.Context())
				require.NoError(t, err)
				time.Sleep(500 * time.Millisecond)
				require.Equal(t, breaker.Open, b.State())
				test.between(t, b)
				before := untotaled(b)
				done(nil)
				if test.counts {
					require.Equal(t, breaker.Closed, b.State())
					require.Zero(t, b.Stats().Window)
				} else {
					require.Equal(t, before, untotaled(b))
				}
			})
		})
	}
}

// If one of two probes is overdue, the breaker opens. The success of the other one closes it, and then the
// overdue one changes nothing.
func TestProbeBesideAnOverdueOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second, Probes: 2})
		open(t, b)
		time.Sleep(time.Second)
		var done [2]func(error)
		for i := range done {
			var err error
			done[i], err = b.Begin(t.Context())
			require.NoError(t, err)
			time.Sleep(600 * time.Millisecond)
		}
		require.Equal(t, breaker.Open, b.State(), "the first is overdue, the second is not")
		done[1](nil)
		require.Equal(t, breaker.Closed, b.State())
		open(t, b)
		done[0](nil)
		require.Equal(t, breaker.Open, b.State())
	})
}

// A probe whose stream continues when another one is overdue counts for nothing.
func TestOverdueProbeBesideAStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 3, OpenFor: time.Second, Probes: 2})
		for range 3 {
			beginStream(t, b, t.Context()).End(errDown)
		}
		time.Sleep(time.Second)
		_, err := b.Begin(t.Context())
		require.NoError(t, err)
		work := beginStream(t, b, t.Context())
		time.Sleep(time.Second) // the first is overdue, and the stream has lasted
		require.Equal(t, breaker.Open, b.State())
		require.EqualValues(t, 3, b.Stats().Window.ConsecutiveFailures)
		work.End(nil)
		require.EqualValues(t, 3, b.Stats().Window.ConsecutiveFailures)
	})
}

// A late probe closes the breaker when its function succeeds, even if its stream continues.
func TestOverdueProbeWithAStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second})
		open(t, b)
		time.Sleep(time.Second)
		ctx, work := linger.Begin(t.Context())
		require.NoError(t, b.Do(ctx, func(context.Context) error {
			time.Sleep(1500 * time.Millisecond)
			work.Continue()
			return nil
		}))
		require.Equal(t, breaker.Closed, b.State())
		work.End(errDown)
		require.Equal(t, breaker.Closed, b.State(), "it belongs to the time before")
	})
}

// A host whose answers take longer than ProbeTimeout is closed again, however few probes there are at once.
func TestSlowHostIsClosedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{OpenFor: 900 * time.Millisecond, Probes: 1})
		for range 5 {
			_ = do(b, down)
		}
		began := time.Now()
		for b.State() != breaker.Closed && time.Since(began) < 3*time.Second {
			go do(b, taking(2*time.Second, nil))
			time.Sleep(50 * time.Millisecond)
		}
		require.Equal(t, breaker.Closed, b.State())
		time.Sleep(time.Minute)
	})
}
