package saga_test

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// An outage is a time in which a store fails.
type outage struct {
	from, until time.Time
	methods     []string // the methods that fail
	how         string   // "error", "hang" until ctx is done, "slow", or "lost": it takes effect, but returns an error
}

// store returns a store with the outage.
func (o *outage) store() saga.Store { return &hooked{saga.NewMemory(), o.meddle} }

func (o *outage) meddle(ctx context.Context, method, _ string, call func(context.Context) error) error {
	if time.Now().Before(o.from) || !time.Now().Before(o.until) || !slices.Contains(o.methods, method) {
		return call(ctx)
	}
	switch o.how {
	case "hang":
		<-ctx.Done()
		return ctx.Err()
	case "slow":
		select {
		case <-time.After(6 * time.Second):
			return call(ctx)
		case <-ctx.Done():
			return ctx.Err()
		}
	case "lost":
		_ = call(ctx)
	}
	return errDown
}

// until calls fn, each time with a timeout, until fn returns nil.
func until(fn func(context.Context) error) {
	for {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		err := fn(ctx)
		cancel()
		if err == nil {
			return
		}
		time.Sleep(5 * time.Second)
	}
}

// outlasting returns a step whose Do and Undo take longer than a lease.
func outlasting(name string) saga.Step[trip] {
	st := taking(20*time.Second, step(name))
	st.Undo = st.Do
	return st
}

// TestSagasOutlastOutage: while all methods of the store or only some fail for 15 minutes, a saga neither becomes stuck
// nor turns back. When the store works again, the saga and a call to Wait end within a bounded time.
func TestSagasOutlastOutage(t *testing.T) {
	writes := []string{"Start", "Claim", "Commit", "Signal", "Cancel", "Wake"}
	rest := append([]string{"Load", "Messages", "Children"}, writes...)
	child := sequence(outlasting("room"))
	child.Name = "hotel"
	parent := saga.Step[trip]{
		Name: "hotel", Child: saga.ChildOf(child, func(*trip) (trip, error) { return trip{}, nil }, nil),
	}
	retried := func() saga.Step[trip] {
		st, calls := step("flight"), 0
		st.Backoff = constant(18 * time.Second)
		st.Do = func(context.Context, *trip) error {
			if calls++; calls < 3 {
				return errDown
			}
			return nil
		}
		return st
	}
	signaled := step("paid")
	signaled.Await = "paid"
	for _, sg := range []struct {
		name  string
		steps func() []saga.Step[trip]
		want  error
	}{
		{"just started", func() []saga.Step[trip] { return []saga.Step[trip]{step("flight"), step("car")} }, nil},
		{"in a step", func() []saga.Step[trip] { return []saga.Step[trip]{outlasting("flight"), outlasting("car")} }, nil},
		{"between retries", func() []saga.Step[trip] { return []saga.Step[trip]{retried(), step("car")} }, nil},
		{"awaiting a signal", func() []saga.Step[trip] { return []saga.Step[trip]{step("flight"), signaled} }, nil},
		{"compensating", func() []saga.Step[trip] {
			return []saga.Step[trip]{outlasting("flight"), failing("car", saga.Declined(errDeclined))}
		}, saga.ErrCompensated},
		{"starting a child", func() []saga.Step[trip] { return []saga.Step[trip]{outlasting("flight"), parent} }, nil},
		{"waiting for a child", func() []saga.Step[trip] { return []saga.Step[trip]{parent} }, nil},
		{"undoing a child", func() []saga.Step[trip] {
			return []saga.Step[trip]{parent, failing("car", saga.Declined(errDeclined))}
		}, saga.ErrCompensated},
	} {
		for _, fails := range []struct {
			name    string
			methods []string
			how     []string
		}{
			{"all methods", append([]string{"Heartbeat"}, rest...), []string{"error", "hang", "lost"}},
			{"all methods except Heartbeat", rest, []string{"error", "hang"}},
			{"reads", []string{"Load", "Messages", "Children"}, []string{"error", "hang"}},
			{"Commit", []string{"Commit"}, []string{"error", "hang"}},
			{"Commit and Heartbeat", []string{"Commit", "Heartbeat"}, []string{"error"}},
			{"Heartbeat", []string{"Heartbeat"}, []string{"error"}},
			{"Start", []string{"Start"}, []string{"hang"}},
		} {
			for _, how := range fails.how {
				for runners := 1; runners <= 2; runners++ {
					t.Run(fmt.Sprintf("%s/%s/%s/%d", sg.name, fails.name, how, runners), func(t *testing.T) {
						synctest.Test(t, func(t *testing.T) {
							definition := sequence(sg.steps()...)
							definition.Timeout = time.Hour
							o := &outage{methods: fails.methods, how: how}
							o.from = time.Now()
							if sg.name != "just started" {
								o.from = o.from.Add(15 * time.Second)
							}
							o.until = o.from.Add(15 * time.Minute)
							st := o.store()
							r, _ := observed(t, st, saga.RunnerConfig{}, silent, child, definition)
							for range runners - 1 {
								observed(t, st, saga.RunnerConfig{}, silent, child, definition)
							}
							h := saga.Register(r, definition)
							until(func(ctx context.Context) error { _, err := h.Start(ctx, "trip-1", trip{}); return err })
							time.Sleep(time.Minute)
							if sg.name == "awaiting a signal" {
								until(func(ctx context.Context) error { return h.Signal(ctx, "trip-1", "paid", nil) })
							}
							ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
							defer cancel()
							_, err := h.Result(ctx, "trip-1")
							require.ErrorIs(t, err, sg.want)
							require.NotContains(t, events(t, r, "trip-1"), "stuck")
							require.Less(t, time.Since(o.until), 100*time.Second, "two steps of 20s, and four leases")
						})
					})
				}
			}
		}
	}
}

// TestNewRunnerCountsNoTakeoversOfAnOutage: heartbeats fail, so that two runners take the saga over from each other.
// Further runners start meanwhile, and have not seen the store fail.
func TestNewRunnerCountsNoTakeoversOfAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := sequence(taking(20*time.Second, step("flight")))
		o := &outage{methods: []string{"Heartbeat"}, how: "error"}
		o.from, o.until = time.Now(), time.Now().Add(15*time.Minute)
		st := o.store()
		r, _ := observed(t, st, saga.RunnerConfig{}, silent, sg)
		observed(t, st, saga.RunnerConfig{}, silent, sg)
		mustStart(t, r, sg)
		for range 14 {
			time.Sleep(time.Minute)
			_, stop := observed(t, st, saga.RunnerConfig{Drain: saga.None}, silent, sg)
			defer stop()
		}
		requireEnd(t, r, "trip-1", nil)
	})
}

// TestHungStartKeepsNoPlace: while the store does not answer a Start, the Start keeps a place of the runner only for a
// LeaseTTL.
func TestHungStartKeepsNoPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := sequence(step("flight"))
		o := &outage{methods: []string{"Start"}, how: "hang", until: time.Now().Add(time.Second)}
		st := o.store()
		r, _ := observed(t, st, saga.RunnerConfig{Concurrency: 1}, silent, sg)
		failed := make(chan error)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		go func() {
			_, err := saga.Register(r, sg).Start(ctx, "trip-2", trip{})
			failed <- err
		}()
		time.Sleep(2 * time.Second)
		_, err := saga.Register(idle(st, sg), sg).Start(t.Context(), "trip-1", trip{})
		require.NoError(t, err)
		requireEnd(t, r, "trip-1", nil)
		require.ErrorIs(t, <-failed, context.DeadlineExceeded)
		require.Less(t, time.Since(o.until), 20*time.Second)
	})
}

// TestSlowStoreTurnsNoParentBack: within the Timeout of the parent's step, a slow store does not read the states of all
// children.
func TestSlowStoreTurnsNoParentBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		child := sequence(step("room"))
		child.Name = "hotel"
		begin := func(*trip) ([]trip, error) { return make([]trip, 15), nil }
		sg := sequence(saga.Step[trip]{Name: "hotels", Child: saga.ChildrenOf(child, begin, nil)})
		o := &outage{methods: []string{"Load"}, how: "slow", until: time.Now().Add(time.Hour)}
		var told atomic.Pointer[error]
		r, _ := observed(t, o.store(), saga.RunnerConfig{},
			on(saga.EventStoreFailed, func(e saga.Event) { told.Store(&e.Err) }), child, sg)
		mustStart(t, r, sg)
		requireEnd(t, r, "trip-1", nil)
		require.Less(t, time.Since(o.until), 2*time.Minute)
		require.ErrorContains(t, *told.Load(), `children of "trip-1": not done within the Timeout of step hotels (1m0s)`)
	})
}

// TestEndOfChildOutlastsOutage: a child ends while the store does not wake the parent, or while the runner does not
// learn that the child has ended. When the store works again, the parent does not wait for half of the time that it has
// waited already.
func TestEndOfChildOutlastsOutage(t *testing.T) {
	room := taking(10*time.Hour, step("room"))
	room.Timeout = saga.Unlimited
	child := sequence(room)
	child.Name = "hotel"
	sg := sequence(saga.Step[trip]{
		Name: "hotel", Child: saga.ChildOf(child, func(*trip) (trip, error) { return trip{}, nil }, nil),
	})
	for name, o := range map[string]outage{
		"no wake":          {methods: []string{"Wake"}, how: "error"},
		"replies are lost": {methods: []string{"Commit", "Load"}, how: "lost"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := o
				o.from = time.Now().Add(10*time.Hour - time.Minute)
				o.until = o.from.Add(15 * time.Minute)
				r, _ := observed(t, o.store(), saga.RunnerConfig{}, silent, child, sg)
				mustStart(t, r, sg)
				requireEnd(t, r, "trip-1", nil)
				require.Less(t, time.Since(o.until), time.Minute)
			})
		})
	}
}
