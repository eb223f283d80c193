package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/fleet"
)

// TestLocalPartsOutliveOutages has ten short outages: the part of a quota is admitted once, and
// again when its window is
// over; a slot is taken until it is settled; and idle parts are removed from memory.
func TestLocalPartsOutliveOutages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		meters := of(fleet.Quota("a/hour", 10, throttle.Window{Every: time.Hour}, 1))
		l := fleet.New(fleet.Config{
			Name: "n", Eval: r.eval, OnOutage: fleet.Local, Instances: 2,
			Meters: func(ctx context.Context) []fleet.Meter { return meters(ctx) },
		})
		admitted := 0
		outages := func(n int, do func()) {
			for range n {
				r.set(func(r *redis) { r.err = errDown })
				do()
				time.Sleep(250 * time.Millisecond)
				r.set(func(r *redis) { r.err = nil })
				require.Eventually(t, func() bool { return !l.Stats().Down }, time.Minute, time.Second)
			}
		}
		calls := func() {
			for range 20 {
				if l.Do(t.Context(), ok) == nil {
					admitted++
				}
			}
		}
		outages(10, calls)
		require.Equal(t, 5, admitted, "half of ten in an hour")
		time.Sleep(time.Hour)
		outages(10, calls)
		require.Equal(t, 10, admitted)

		meters = of(fleet.Slots("a/slots", 2))
		var held *fleet.Reservation
		outages(1, func() {
			var err error
			held, err = l.Reserve(t.Context())
			require.NoError(t, err)
		})
		outages(3, func() {
			require.ErrorIs(t, l.Do(t.Context(), ok), throttle.ErrLimited, "one slot of two is this process's")
		})
		held.Settle(0)
		outages(1, func() { require.NoError(t, l.Do(t.Context(), ok)) })

		require.Equal(t, 1, fleet.LocalParts(l), "nothing is spent of the slots")
		time.Sleep(2 * time.Hour)
		require.Zero(t, fleet.LocalParts(l), "the hour is over")
	})
}

// TestLocalPartsAreScannedInSteps fills the room for local parts. A call for a further meter checks only some of them.
func TestLocalPartsAreScannedInSteps(t *testing.T) {
	if testing.Short() {
		t.Skip("100,000 parts")
	}
	synctest.Test(t, func(t *testing.T) {
		r := &redis{err: errDown}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, OnOutage: fleet.Local, Instances: 1,
			Meters: func(ctx context.Context) []fleet.Meter {
				return []fleet.Meter{fleet.Quota(fmt.Sprint(ctx.Value(account{})), 5, throttle.Window{Every: time.Hour}, 1)}
			}})
		call := func(i int) error { return l.Do(context.WithValue(t.Context(), account{}, i), ok) }
		for i := range 100_000 {
			require.NoError(t, call(i))
		}
		require.ErrorIs(t, call(-1), throttle.ErrLimited)
		time.Sleep(time.Hour)
		require.NoError(t, call(-1))
		require.Equal(t, 99_901, fleet.LocalParts(l))
		r.set(func(r *redis) { r.err = nil })
		require.Eventually(t, func() bool { return !l.Stats().Down }, time.Minute, time.Second)
		synctest.Wait()
		require.Equal(t, 1, fleet.LocalParts(l), "the end of the outage removes all idle parts")
	})
}

// TestPausesOfRedisAreShort measures how long calls are refused after a pause of Redis, by a call each 10 ms.
func TestPausesOfRedisAreShort(t *testing.T) {
	for pause, most := range map[time.Duration]time.Duration{
		80 * time.Millisecond: 120, 150 * time.Millisecond: 220, 300 * time.Millisecond: 420, 390 * time.Millisecond: 520,
		800 * time.Millisecond: 1720, time.Second: 1720, 10 * time.Second: 11100,
	} {
		t.Run(pause.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				var resumes time.Time
				r := &redis{}
				l := fleet.New(fleet.Config{
					Name: "n", Meters: of(fleet.Rate("a", 1000, 1)),
					Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
						select {
						case <-time.After(time.Until(resumes)):
						case <-ctx.Done():
							return nil, ctx.Err()
						}
						return r.eval(ctx, script, keys, args...)
					},
				})
				require.NoError(t, l.Do(t.Context(), ok))
				resumes = start.Add(pause)
				for {
					began := time.Now()
					err := l.Do(t.Context(), ok)
					if err == nil && began.After(resumes) || err == nil && pause < 100*time.Millisecond {
						break
					}
					time.Sleep(10 * time.Millisecond)
				}
				require.LessOrEqual(t, time.Since(start), most*time.Millisecond)
				t.Logf("a pause of %v: well after %v, %d pings", pause, time.Since(start), r.count("ping"))
			})
		})
	}
}

// TestTriesOfANode records when a node that stays down is tried, by a call each 10 ms.
func TestTriesOfANode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var tries []time.Duration
		l := fleet.New(fleet.Config{
			Name: "n", Meters: of(fleet.Rate("a/calls", 1000, 1)),
			Eval: func(_ context.Context, _ string, _ []string, args ...any) (any, error) {
				tries = append(tries, time.Since(start))
				return nil, errDown
			},
		})
		for range 500 {
			err := l.Do(t.Context(), ok)
			limited, _ := errors.AsType[*throttle.LimitedError](err)
			require.GreaterOrEqual(t, limited.RetryAfter(), 100*time.Millisecond)
			require.Equal(t, "a/calls", limited.Key)
			require.LessOrEqual(t, limited.RetryAfter(), time.Second)
			synctest.Wait()
			time.Sleep(10 * time.Millisecond)
		}
		const ms = time.Millisecond
		require.Equal(t, []time.Duration{0, 0, 100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 2600 * ms, 3600 * ms,
			4600 * ms}, tries)
	})
}

func TestOutagePolicies(t *testing.T) {
	for policyOf, want := range map[fleet.OutagePolicy]struct {
		admitted int
		status   policy.HealthStatus
	}{
		fleet.Refuse: {0, policy.Fail}, fleet.Local: {5, policy.Warn}, fleet.Admit: {20, policy.Warn},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := &redis{err: errDown}
			l := fleet.New(fleet.Config{
				Name: "n", Eval: r.eval, OnOutage: policyOf, Instances: 2,
				Meters: of(fleet.Quota("a/day", 10, throttle.Window{Per: throttle.Day}, 1).Estimated(),
					fleet.Slots("a/slots", 100)),
			})
			admitted := 0
			for range 20 {
				if reservation, err := l.Reserve(t.Context()); err == nil {
					admitted++
					require.Nil(t, reservation.Lost())
					reservation.Settle(1)
				}
			}
			require.Equal(t, want.admitted, admitted, policyOf)
			require.EqualValues(t, want.admitted, l.Stats().AdmittedLocal)
			require.Equal(t, want.status, l.Describe().Health(t.Context()).Status)
			synctest.Wait()
			require.Zero(t, r.count("settle"), "Redis does not learn of them")
		})
	}
}

// TestRejectedScriptIsNoOutage has Redis reject the script for good, and later not any more.
func TestRejectedScriptIsNoOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		noPerm := replyError("NOPERM User app has no permissions to run the 'eval' command")
		r := &redis{err: noPerm}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, OnOutage: fleet.Local, Instances: 1,
			Meters: of(fleet.Rate("a", 10, 1))})
		l.Observe(func(_ context.Context, e throttle.Event) { t.Error(e) })
		for range 3 {
			err := l.Do(t.Context(), ok)
			require.EqualError(t, err, "fleet: n: Redis rejects the script: "+string(noPerm))
			require.NotErrorIs(t, err, throttle.ErrOutage)
			require.NotErrorIs(t, err, throttle.ErrLimited)
		}
		health := l.Describe().Health(t.Context())
		require.Equal(t, policy.Health{Status: policy.Fail, State: "store_rejects", Err: noPerm}, health)
		require.False(t, l.Stats().Down)
		require.ErrorIs(t, l.Cooldown(t.Context(), "a", time.Hour), noPerm)
		r.set(func(r *redis) { r.err = nil })
		require.NoError(t, l.Do(t.Context(), ok))
		time.Sleep(time.Second)
		_ = l.Describe().Health(t.Context())
		synctest.Wait()
		require.Zero(t, l.Describe().Health(t.Context()))
	})
}

// TestPingNotifiesOfAnOutage has a ping, not a call, find that a node is down.
func TestPingNotifiesOfAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{err: replyError("NOPERM User app has no permissions to run the 'eval' command")}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Meters: of(fleet.Rate("a", 10, 1))})
		var events []throttle.Event
		l.Observe(func(_ context.Context, e throttle.Event) { events = append(events, e) })
		require.Error(t, l.Do(t.Context(), ok))
		r.set(func(r *redis) { r.err = errDown })
		time.Sleep(time.Second)
		require.False(t, l.Stats().Down)
		synctest.Wait()
		require.True(t, l.Stats().Down)
		require.Equal(t, []throttle.Event{{Kind: throttle.EventOutageBegan, Name: "n", Err: errDown}}, events)
	})
}

// TestTroubleChanges plays a node through the troubles that it can have, by pings.
func TestTroubleChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Meters: of(fleet.Rate("a", 10, 1))})
		var events []string
		l.Observe(func(_ context.Context, e throttle.Event) {
			if e.Kind != throttle.EventRefused {
				events = append(events, string(e.Kind))
			}
		})
		for _, step := range []struct {
			err   error
			state string
			event string
		}{
			{errDown, "store_down", "[outage_began]"},
			{replyError("OOM command not allowed"), "store_full", "[]"},
			{replyError("NOAUTH Authentication required."), "store_rejects", "[outage_ended]"},
			{errDown, "store_down", "[outage_began]"},
			{replyError("TRYAGAIN Multiple keys"), "", "[outage_ended]"},
			{nil, "", "[]"},
			{replyError("OOM command not allowed"), "store_full", "[outage_began]"},
			{nil, "", "[outage_ended]"},
		} {
			r.set(func(r *redis) { r.err = step.err })
			_ = l.Do(t.Context(), ok)
			time.Sleep(2 * time.Second)
			_ = l.Stats()
			synctest.Wait()
			require.Equal(t, step.state, l.Describe().Health(t.Context()).State, "%v", step.err)
			require.Equal(t, step.event, fmt.Sprint(events), "%v", step.err)
			events = nil
		}
	})
}
