package console_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/store"
)

// A slow store takes its time to cancel a saga, or fails after that.
type slow struct {
	store.Store
	takes   time.Duration
	fails   atomic.Pointer[func(context.Context)] // nil: it does not
	closing chan struct{}
}

func (s *slow) Cancel(ctx context.Context, id, note string) (store.Record, error) {
	if fail := s.fails.Load(); fail != nil {
		(*fail)(ctx)
		return store.Record{}, errors.Join(ctx.Err(), errDown)
	}
	time.Sleep(s.takes)
	return s.Store.Cancel(context.WithoutCancel(ctx), id, note)
}

// A crew has many orders that nobody runs, and a console of them.
type crew struct {
	*shop
	store *slow
	audit chan string
	allow atomic.Pointer[error]
}

func newCrew(t *testing.T, n int) *crew {
	c := &crew{store: &slow{Store: saga.NewMemory(), takes: 20 * time.Millisecond, closing: make(chan struct{})}, audit: make(chan string, 10)}
	runner := saga.NewRunner(c.store, saga.RunnerConfig{Name: "worker"})
	orders := &saga.Saga[order]{Name: "order", Steps: []saga.Step[order]{{Name: "reserve", Do: ok, Undo: ok}}}
	saga.Register(runner, orders)
	for i := range n {
		_, err := saga.Start(t.Context(), runner, orders, fmt.Sprintf("order-%04d", i), order{})
		require.NoError(t, err)
	}
	reg := registry.New()
	reg.MustAdd(runner)
	c.shop = newPage(t, reg, console.Config{
		Allow: func(*http.Request, console.Operation) error {
			if err := c.allow.Load(); err != nil {
				return *err
			}
			return nil
		},
		Audit: func(ctx context.Context, op console.Operation, err error) {
			require.NoError(t, ctx.Err(), "the request has ended, its values are there")
			done := -1
			if op.Operated != nil {
				done = op.Operated.Done
			}
			c.audit <- fmt.Sprint(op.Action, " ", done, " ", err)
		},
	})
	return c
}

// cancelAll posts an action on all sagas, and returns the answer.
func (c *crew) cancelAll() int {
	return c.post("action", "cancel", "policy", "saga/worker", "status", "running", "note", "recalled").Code
}

// deaf makes the store deaf to ctx.
func (c *crew) deaf() {
	f := func(context.Context) { <-c.store.closing }
	c.store.fails.Store(&f)
}

type progress struct {
	Action, On, Note, Error string
	Done, Refused, Left     int
	Ended                   *time.Time
}

func (c *crew) progress() progress {
	var p struct{ Job progress }
	c.get("/sagas", &p)
	return p.Job
}

// An action on many goes on when its request has ended. The page tells how far it is, and one
// record tells how many it was.
func TestAnActionOnManyGoesOnWithoutItsRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrew(t, 2000)
		begun := time.Now()
		require.Equal(t, http.StatusSeeOther, c.cancelAll())
		require.Zero(t, time.Since(begun), "the answer does not wait for it")
		time.Sleep(time.Second + time.Millisecond)
		body := c.get("/sagas?order=id", nil).Body.String()
		require.Contains(t, body, "<b>cancel</b> all with status running: 350 done, 0 refused, 1650 left; for 1 s.")
		require.Contains(t, body, `<progress aria-label="Progress" max="2000" value="350">`)
		require.Contains(t, body, `data-refresh="1"`)
		require.Equal(t, http.StatusConflict, c.cancelAll(), "one at a time")
		require.Contains(t, <-c.audit, "another action on many sagas goes on: cancel with status running: 350 done, 0 refused, 1650 left")
		time.Sleep(10 * time.Second)
		p := c.progress()
		require.Equal(t, 2000, p.Done)
		require.Zero(t, p.Left)
		require.Equal(t, "hidden", p.Note, "as in the log of a saga")
		require.Empty(t, p.Error)
		require.NotNil(t, p.Ended)
		require.Contains(t, c.get("/sagas", nil).Body.String(), `data-refresh="5"`)
		require.Equal(t, "cancel 2000 <nil>", <-c.audit)
		require.Empty(t, c.audit)
		require.Contains(t, c.get("/sagas", nil).Body.String(), `data-refresh="5"`)
		time.Sleep(time.Until(p.Ended.Add(10 * time.Minute)))
		require.Equal(t, 2000, c.progress().Done)
		c.reg.MustAdd(saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "another"}))
		var other struct{ Job *progress }
		c.get("/sagas?runner=another", &other)
		require.Nil(t, other.Job)
		time.Sleep(time.Nanosecond)
		require.Zero(t, c.progress(), "it is told for ten minutes")
		require.Equal(t, http.StatusSeeOther, c.cancelAll(), "another one may begin")
	})
}

// What is left of an action that ends early is told, to the page and to Audit, in time.
func TestAnActionOnManyThatEndsEarly(t *testing.T) {
	honors, fails := func(ctx context.Context) { <-ctx.Done() }, func(context.Context) {}
	for name, test := range map[string]struct {
		meanwhile func(c *crew)
		ends      time.Duration // at most
		error     string
	}{
		"permission is lost": {func(c *crew) { signedOut := errors.New("signed out"); c.allow.Store(&signedOut) }, 200 * time.Millisecond, "signed out"},
		"the store hangs":    {func(c *crew) { c.store.fails.Store(&honors) }, 11 * time.Second, "the store does not answer"},
		"the store is deaf":  {func(c *crew) { c.deaf() }, 12 * time.Second, "the store does not answer"},
		"the store fails":    {func(c *crew) { c.store.fails.Store(&fails) }, time.Second, "the store failed: hidden"},
		"the console is closed": {func(c *crew) {
			require.NoError(c.t, c.page.Close())
		}, 200 * time.Millisecond, "the console is closed"},
		"the console is closed over a store that hangs": {func(c *crew) {
			c.store.fails.Store(&honors)
			require.NoError(c.t, c.page.Close())
		}, 6 * time.Second, "the store does not answer"},
		"the console is closed over a deaf store": {func(c *crew) {
			c.deaf()
			require.NoError(c.t, c.page.Close())
		}, 6 * time.Second, "the store does not answer"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCrew(t, 600)
				defer close(c.store.closing)
				require.Equal(t, http.StatusSeeOther, c.cancelAll())
				time.Sleep(time.Second + time.Millisecond)
				begun := time.Now()
				test.meanwhile(c)
				if strings.Contains(name, "closed") {
					require.Len(t, c.audit, 1, "Close waits for it")
				}
				told := <-c.audit
				require.LessOrEqual(t, time.Since(begun), test.ends)
				var done, left int
				_, err := fmt.Sscanf(told, "cancel %d %d of the sagas are left: ", &done, &left)
				require.NoError(t, err, told)
				require.Equal(t, 600, done+left)
				require.Less(t, done, 500)
				require.Empty(t, c.audit)
				if strings.Contains(name, "closed") {
					require.Contains(t, told, test.error)
					return
				}
				require.Equal(t, test.error, c.progress().Error)
				require.Equal(t, left, c.progress().Left)
			})
		})
	}
}

// Audit ends neither the program nor Close with a panic, and does not hold Close forever.
func TestAnAuditOfManyThatPanicsOrHangs(t *testing.T) {
	for name, audit := range map[string]func(chan struct{}){
		"panics":                 func(chan struct{}) { panic("nil map") },
		"ends its goroutine":     func(chan struct{}) { runtime.Goexit() },
		"does not return at all": func(released chan struct{}) { <-released },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, released := newCrew(t, 10), make(chan struct{})
				defer close(released)
				var logged strings.Builder
				defer slog.SetDefault(slog.Default())
				slog.SetDefault(slog.New(slog.NewTextHandler(&logged, nil)))
				c.shop = newPage(t, c.reg, console.Config{
					Allow: func(*http.Request, console.Operation) error { return nil },
					Audit: func(context.Context, console.Operation, error) { audit(released) },
				})
				require.Equal(t, http.StatusSeeOther, c.cancelAll())
				time.Sleep(time.Minute)
				require.Equal(t, 10, c.progress().Done)
				begun := time.Now()
				require.NoError(t, c.page.Close())
				require.LessOrEqual(t, time.Since(begun), 10*time.Second)
				require.Equal(t, name == "panics", strings.Contains(logged.String(), `Audit has panicked" panic="nil map"`))
			})
		})
	}
}

// An action on many asks for permission before each page, and not after the last. A panic of
// Allow ends the action, and not the program.
func TestAPanicOfAllowEndsTheActionAlone(t *testing.T) {
	for at, want := range map[int]progress{3: {Done: 100, Left: 100, Error: "it has broken off: hidden"}, 5: {Done: 200}} {
		synctest.Test(t, func(t *testing.T) {
			c := newCrew(t, 200)
			calls := 0
			c.shop = newPage(t, c.reg, console.Config{Allow: func(_ *http.Request, op console.Operation) error {
				if calls++; calls == at {
					panic("nil map")
				}
				require.Equal(t, "saga/worker", op.Policy)
				return nil
			}})
			require.Equal(t, http.StatusSeeOther, c.cancelAll())
			time.Sleep(time.Minute)
			p := c.progress()
			require.Equal(t, want, progress{Done: p.Done, Left: p.Left, Error: p.Error})
		})
	}
}

func TestAScriptIsToldOfAnActionOnMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrew(t, 30)
		w := c.postJSON("action=cancel&policy=saga/worker&status=running&note=recalled")
		require.Equal(t, http.StatusAccepted, w.Code)
		var answer struct {
			Done bool
			Job  progress
		}
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &answer))
		require.False(t, answer.Done)
		require.Equal(t, "status running", answer.Job.On)
		time.Sleep(time.Second)
		require.Equal(t, 30, c.progress().Done)
		text := fmt.Sprint(console.Operation{Action: console.Cancel, Policy: "saga/worker", Operated: &saga.Operated{Done: 3, NotAllowed: 4}}.LogValue())
		require.Equal(t, fmt.Sprint(slog.GroupValue(slog.String("action", "cancel"), slog.String("policy", "saga/worker"), slog.Int("done", 3), slog.Int("not_allowed", 4))), text)
	})
}

// A store that gets on is not given up, however long it takes, and one that is late has a second.
func TestAnActionOnManyWithASlowStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrew(t, 200)
		c.store.takes = 500 * time.Millisecond
		require.Equal(t, http.StatusSeeOther, c.cancelAll())
		time.Sleep(11 * time.Second)
		require.Nil(t, c.progress().Ended)
		time.Sleep(time.Minute)
		p := c.progress()
		require.Equal(t, progress{Done: 200}, progress{Done: p.Done, Left: p.Left, Error: p.Error})

		c = newCrew(t, 5)
		c.store.takes = 10500 * time.Millisecond
		require.Equal(t, http.StatusSeeOther, c.cancelAll())
		time.Sleep(time.Minute)
		p = c.progress()
		require.Equal(t, progress{Done: 5}, progress{Done: p.Done, Left: p.Left, Error: p.Error})
	})
}
