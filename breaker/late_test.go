package breaker_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
)

// A result counts for the period in which its call began.
func TestBreakerIgnoresResultsFromBefore(t *testing.T) {
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
					b := breaker.New(breaker.Config{Failures: 1, Probes: 2, OpenFor: time.Second})
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
func TestBreakerIgnoresProbesFromBefore(t *testing.T) {
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
					b := breaker.New(breaker.Config{Failures: 1, Probes: 2, OpenFor: time.Second})
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

// A probe that takes too long has failed, whatever it returns.
func TestBreakerOpensForAProbeThatTookTooLong(t *testing.T) {
	for _, late := range []error{nil, errDown, throttled(time.Hour)} {
		synctest.Test(t, func(t *testing.T) {
			b := breaker.New(breaker.Config{Failures: 1, OpenFor: 10 * time.Second})
			open(t, b)
			time.Sleep(10 * time.Second)
			require.Equal(t, late, do(b, taking(10*time.Second, late)))
			require.Equal(t, breaker.Open, b.State())
			require.Equal(t, 10*time.Second, b.Stats().OpenLeft)
			require.EqualError(t, b.Stats().LastErr, "breaker: a probe has not returned within OpenFor")
			require.EqualValues(t, 2, b.Stats().Window.FailedInARow)
			time.Sleep(10 * time.Second)
			require.Equal(t, late, do(b, taking(10*time.Second-1, late)))
			if late == nil {
				require.Equal(t, breaker.Closed, b.State(), "in time")
			} else {
				require.Equal(t, late, b.Stats().LastErr, "in time")
			}
		})
	}
}
