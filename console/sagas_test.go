package console_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

type order struct{ Card string }

func ok(context.Context, *order) error { return nil }

// A depot runs orders. An order whose id starts with "stuck" gets stuck.
type depot struct {
	*shop
	runner *saga.Runner
	orders *saga.Saga[order]
	mended bool
}

func newDepot(t *testing.T, cfg console.Config) *depot {
	d := &depot{}
	d.orders = &saga.Saga[order]{Name: "order", Steps: []saga.Step[order]{
		{Name: "reserve", Do: ok, Undo: func(ctx context.Context, _ *order) error {
			if strings.HasPrefix(saga.CommandFrom(ctx).ID, "stuck") && !d.mended {
				return errors.New("warehouse: secret-host unreachable")
			}
			return nil
		}, UndoAttempts: 1},
		{Name: "pack", Do: ok, Undo: ok},
		{Name: "address", Parallel: true, Do: ok, Undo: ok},
		{Name: "charge", Pivot: true, Undo: ok, Do: func(ctx context.Context, o *order) error {
			if strings.HasPrefix(saga.CommandFrom(ctx).ID, "ok") {
				return nil
			}
			return saga.Declined(errors.New("card declined"))
		}},
		{Name: "ship", Do: ok},
	}}
	d.runner = saga.NewRunner(saga.NewMemory(),
		saga.RunnerConfig{Name: "worker"})
	d.runner.Observe(func(context.Context, saga.Event) {})
	saga.Register(d.runner, d.orders)
	d.shop = pageOf(t, cfg, d.runner)
	return d
}

// run runs the depot until all orders have ended or are stuck.
func (d *depot) run(ids ...string) {
	ctx, stop := context.WithCancel(d.t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = d.runner.Run(ctx) })
	for _, id := range ids {
		_, err := saga.Register(d.runner, d.orders).Start(ctx, id, order{Card: "4111"})
		require.NoError(d.t, err)
		_, _ = saga.Register(d.runner, d.orders).Result(ctx, id)
	}
	stop()
	running.Wait()
}

func TestStuckSagasAreListedFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDepot(t, console.Config{Show: console.Show{Errors: true}})
		d.run("ok-1", "stuck-1", "back-1", "ok-2")
		body := d.get("/sagas", nil).Body.String()
		require.Less(t, strings.Index(body, ">stuck-1<"), strings.Index(body, ">ok-1<"))
		require.Equal(t, 1, strings.Count(body, ">stuck-1<"))
		var p struct {
			Counts []struct{ Stuck int }
			Stuck  []struct{ ID, Error string }
			Sagas  []struct{ ID, Status string }
		}
		d.get("/sagas", &p)
		require.Equal(t, 1, p.Counts[0].Stuck)
		require.Equal(t, "stuck-1", p.Stuck[0].ID)
		require.Contains(t, p.Stuck[0].Error, "secret-host")
		require.Len(t, p.Sagas, 3)

		d.get("/sagas?status=completed", &p)
		require.Equal(t, "ok-1", p.Sagas[0].ID)
		require.Len(t, p.Sagas, 2)
		d.get("/sagas?text=back", &p)
		require.Len(t, p.Sagas, 1)
		for _, bad := range []string{"status=x", "age=x", "age=-1m"} {
			require.Equal(t, http.StatusBadRequest, d.get("/sagas?"+bad, nil).Code, bad)
			require.Equal(t, http.StatusBadRequest, d.get("/sagas?"+bad, &json.RawMessage{}).Code, bad)
		}
		require.Equal(t, http.StatusNotFound, d.get("/sagas?runner=x", nil).Code)
		var o overview
		d.get("/", &o)
		synctest.Wait()
		time.Sleep(1500 * time.Millisecond)
		d.get("/", &o)
		require.Equal(t, "The runner worker has stuck sagas.", o.Verdict)
		require.Equal(t, "1 saga", o.Policies[0].Detail)
	})
}

// A slow store is slow or down, and its clock may differ.
type slow struct {
	store.Store
	takes    time.Duration
	counting atomic.Int64  // duration of Counts
	ahead    time.Duration // difference of the store's clock
	down     error
	lists    []store.Filter // filters of all calls
}

func (s *slow) Counts(ctx context.Context) (store.Counts, error) {
	time.Sleep(time.Duration(s.counting.Load()))
	counts, err := s.Store.Counts(ctx)
	counts.Now = counts.Now.Add(s.ahead)
	return counts, err
}

func (s *slow) Load(ctx context.Context, id string) (store.Record, error) {
	if s.down != nil {
		return store.Record{}, s.down
	}
	return s.Store.Load(ctx, id)
}

func (s *slow) List(ctx context.Context, f store.Filter) ([]store.Record, string, error) {
	if s.lists = append(s.lists, f); s.down != nil {
		return nil, "", s.down
	}
	select {
	case <-time.After(s.takes):
	case <-ctx.Done():
		return nil, "", fmt.Errorf("driver: canceled on request: %w", ctx.Err())
	}
	return s.Store.List(ctx, f)
}

// found is the JSON of a list of sagas.
type found struct {
	Counts []struct {
		Stuck, Due int
		Late       float64
	}
	Groups []struct {
		Saga, Step, Error string
		Count             int
	}
	Stuck, Sagas []listed
	Next         string
}

// A listed saga is a saga of a list.
type listed struct {
	ID, Status, Error string
	Seq               int64
	Actions           []string
}

// target returns the value of the field ids of an action on the saga.
func (l listed) target() string { return fmt.Sprint(l.ID, "@", l.Seq) }

func newSlow(t *testing.T) (*shop, *slow) {
	store := &slow{Store: saga.NewMemory()}
	runner := saga.NewRunner(store, saga.RunnerConfig{Name: "worker"})
	orders := &saga.Saga[order]{Name: "order", Steps: []saga.Step[order]{{Name: "reserve", Do: ok, Undo: ok}}}
	orderss := saga.Register(runner, orders)
	for i := range 200 {
		_, err := orderss.Start(t.Context(), fmt.Sprint("order-", i), order{})
		require.NoError(t, err)
		time.Sleep(time.Second)
	}
	return pageOf(t, console.Config{Allow: allow}, runner), store
}

// The minimum age of a list is relative to the store's clock, as the ages on the page are.
func TestAgeFollowsStoreClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, store := newSlow(t)
		store.ahead = time.Hour
		require.Equal(t, http.StatusOK, s.get("/sagas?age=10m", nil).Code)
		require.NotEmpty(t, store.lists)
		for _, f := range store.lists {
			require.Equal(t, time.Now().Add(50*time.Minute), f.CreatedBefore)
		}
	})
}

// The Open button of a list opens the saga whose id was entered.
func TestIDOpensSaga(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, store := newSlow(t)
		require.Contains(t, s.get("/sagas", nil).Body.String(), `<button formaction="saga">Open</button>`)
		store.lists = nil
		var p struct{ ID string }
		s.get("/saga?runner=worker&saga=&status=&age=&text=+order-1%0A", &p)
		require.Equal(t, "order-1", p.ID)
		require.Empty(t, store.lists, "a list was queried")
	})
}

func TestSagaPageShowsSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDepot(t, console.Config{Show: console.Show{Errors: true, State: true}, Allow: allow})
		d.run("stuck-1")
		var p struct {
			ID, Status, State, Cause string
			Actions                  []string
			Units                    []struct {
				Name, Step, Status string
				After              []string
				Pivot              bool
			}
			Log []struct{ Kind, Step, Text string }
		}
		d.get("/saga?id=stuck-1", &p)
		require.Equal(t, "stuck", p.Status)
		require.JSONEq(t, `{"Card": "4111"}`, p.State)
		require.Equal(t, []string{"retry", "skip", "abandon"}, p.Actions)
		require.Len(t, p.Units, 5)
		require.Equal(t, []string{"pack", "address"}, p.Units[3].After)
		require.True(t, p.Units[3].Pivot)
		require.Equal(t, "created", p.Log[0].Kind)
		body := d.get("/saga?id=stuck-1", nil).Body.String()
		for _, text := range []string{"undo failed", "· pivot", "secret-host", "4111", `value="skip"`,
			`>step undo failed</td><td data-label="Step">reserve</td><td data-label="Attempt">undo 1</td>`,
			"2 of 3 undone", "{\n  &#34;Card&#34;: &#34;4111&#34;\n}", ">2000-01-01 00:00:00.000</time>",
			`<span class="state idle"><span class="mark" aria-hidden="true"></span>no effect</span>`} {
			require.Contains(t, body, text)
		}
		require.NotContains(t, body, `value="cancel"`)
		require.Equal(t, http.StatusNotFound, d.get("/saga?id=nobody", nil).Code)

		d.shop = newPage(t, d.reg, console.Config{})
		body = d.get("/saga?id=stuck-1", nil).Body.String() + d.get("/saga?id=stuck-1", &json.RawMessage{}).Body.String() +
			d.get("/sagas", nil).Body.String()
		require.NotContains(t, body, "secret-host")
		require.NotContains(t, body, "4111")
		require.NotContains(t, body, "card declined")
		require.NotContains(t, body, `<button name="action"`)
	})
}

// Cancel, Skip and Compensate of one saga need a confirmation. Retry needs none.
func TestSagaActionsNeedConfirmation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDepot(t, console.Config{Allow: allow})
		d.run("stuck-1")
		before, err := d.runner.Get(t.Context(), "stuck-1")
		require.NoError(t, err)
		for action, want := range map[string]string{
			"cancel": "Cancel stuck-1?", "compensate": "Compensate stuck-1?", "abandon": "Abandon stuck-1?",
			"skip": "Skip the step reserve of stuck-1?",
		} {
			w := d.post("action", action, "policy", "saga/worker", "id", "stuck-1", "step", "reserve", "note", "x", "sure", "")
			require.Equal(t, http.StatusOK, w.Code)
			require.Contains(t, w.Body.String(), "<h1>"+want+"</h1>")
		}
		after, err := d.runner.Get(t.Context(), "stuck-1")
		require.NoError(t, err)
		require.Equal(t, before.Seq, after.Seq)
		w := d.post("action", "retry", "policy", "saga/worker", "id", "stuck-1", "step", "reserve", "note", "x", "sure", "")
		require.Equal(t, http.StatusSeeOther, w.Code)
	})
}

// The page names the step whose Undo failed. It also names the step at which the saga turned back.
func TestStuckSagaNamesBlockingStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDepot(t, console.Config{Show: console.Show{Errors: true}})
		require.Contains(t, d.get("/sagas", nil).Body.String(), `<a href="sagas"`, "the link is there when no saga is")
		d.run("stuck-1")
		type one struct {
			Step, Error, Cause string
			Turned             string `json:"turned_back_at"`
		}
		want := one{Step: "reserve", Error: "warehouse: secret-host unreachable"}
		var list struct{ Stuck []one }
		d.get("/sagas", &list)
		require.Equal(t, []one{want}, list.Stuck)
		var p one
		d.get("/saga?id=stuck-1", &p)
		require.Equal(t, "charge", p.Turned)
		require.Contains(t, p.Cause, "card declined")
		require.Equal(t, []string{want.Step, want.Error}, []string{p.Step, p.Error})
		body := d.get("/saga?id=stuck-1", nil).Body.String()
		require.Contains(t, body, `<span class="label">Stuck at reserve</span> `+
			`<code>warehouse: secret-host unreachable</code>`)
		require.Contains(t, body, `<span class="label">Turned back at charge</span>`)
	})
}

// A double click skips only one step, because the saga has changed before the second click.
func TestActionIsRefusedAfterChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDepot(t, console.Config{Show: console.Show{Errors: true}, Allow: allow})
		d.run("stuck-1")
		in, err := d.runner.Get(t.Context(), "stuck-1")
		require.NoError(t, err)
		seq := fmt.Sprint(in.Seq)
		body := d.get("/saga?id=stuck-1", nil).Body.String()
		require.Contains(t, body, `<input type="hidden" name="seq" value="`+seq+`">`)
		require.Contains(t, body, `<option selected>reserve</option>`)
		require.NotContains(t, body, "what holds it up")
		skip := func() *httptest.ResponseRecorder {
			return d.post("action", "skip", "policy", "saga/worker", "id", "stuck-1", "seq", seq, "note", "by hand")
		}
		require.Equal(t, http.StatusSeeOther, skip().Code)
		in, err = d.runner.Get(t.Context(), "stuck-1")
		require.NoError(t, err)
		w := skip()
		require.Equal(t, http.StatusUnprocessableEntity, w.Code)
		after, err := d.runner.Get(t.Context(), "stuck-1")
		require.NoError(t, err)
		require.Equal(t, in.Seq, after.Seq)
		d.run("stuck-2")
		retry := func() *httptest.ResponseRecorder {
			return d.post("action", "retry", "policy", "saga/worker", "id", "stuck-2", "seq", "1", "note", "again")
		}
		w = retry()
		require.Equal(t, http.StatusUnprocessableEntity, w.Code)
		require.Contains(t, w.Body.String(), "not allowed")
	})
}

func TestActionOnManyNeedsConfirmation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDepot(t, console.Config{Allow: allow})
		d.run("stuck-1", "stuck-2", "ok-1")
		form := []string{"action", "abandon", "policy", "saga/worker", "list", "status=stuck",
			"ids", "stuck-1@0", "ids", "stuck-2@0", "note", "by hand"}
		w := d.post(append(form, "sure", "")...)
		require.Equal(t, http.StatusOK, w.Code)
		require.Contains(t, w.Body.String(), "Abandon 2 sagas?")
		require.Contains(t, w.Body.String(), `name="ids" value="stuck-2@0"`)
		require.Contains(t, w.Body.String(), `name="list" value="status=stuck"`)
		in, err := d.runner.Get(t.Context(), "stuck-1")
		require.NoError(t, err)
		require.Equal(t, saga.Stuck, in.Status)
		require.Contains(t, d.post("action", "abandon", "policy", "saga/worker", "id", "stuck-1", "note", "x", "sure",
			"").Body.String(), "Abandon stuck-1?")
		require.Equal(t, http.StatusSeeOther, d.post(form...).Code)
		synctest.Wait()
		in, err = d.runner.Get(t.Context(), "stuck-1")
		require.NoError(t, err)
		require.Equal(t, saga.Abandoned, in.Status)
	})
}

func TestOperatorsActOnSagas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var audit []string
		d := newDepot(t, console.Config{Allow: allow, Show: console.Show{Errors: true},
			Audit: func(_ context.Context, op console.Operation, err error) {
				audit = append(audit, fmt.Sprint(op.Action, " ", op.ID, " ", op.Note, " ", err))
			}})
		d.run("ok-1", "stuck-1", "stuck-2", "stuck-3")
		w := d.post("action", "retry", "policy", "saga/worker", "id", "stuck-1")
		require.Equal(t, http.StatusBadRequest, w.Code)
		require.Contains(t, w.Body.String(), "must have the reason")
		w = d.post("action", "cancel", "policy", "saga/worker", "id", "ok-1", "note", "no")
		require.Equal(t, http.StatusUnprocessableEntity, w.Code)
		require.Contains(t, w.Body.String(), "not allowed")

		d.mended = true
		w = d.post("action", "retry", "policy", "saga/worker", "id", "stuck-1", "note", "warehouse is back")
		require.Equal(t, http.StatusSeeOther, w.Code)
		require.Equal(t, "saga?done=retry&id=stuck-1&runner=worker", w.Header().Get("Location"))
		require.Contains(t, d.get("/saga?id=stuck-1", nil).Body.String(), "warehouse is back")
		require.Contains(t, d.get("/saga?id=stuck-1&done=retry", nil).Body.String(), "The saga is retried.")
		require.Contains(t, d.get("/saga?id=stuck-1", nil).Body.String(), `data-refresh="3"`)
		require.NotContains(t, d.get("/saga?id=ok-1", nil).Body.String(), "data-refresh", "it has ended")

		w = d.post("action", "retry", "policy", "saga/worker", "note", "all of them")
		require.Equal(t, http.StatusBadRequest, w.Code, "of which")
		w = d.post("action", "abandon", "policy", "saga/worker", "saga", "trip", "stauts", "stuck", "note",
			"a slip of the pen")
		require.Equal(t, http.StatusBadRequest, w.Code, "an unknown condition must not be ignored")
		require.Contains(t, w.Body.String(), ": is not a field of abandon")
		w = d.post("action", "retry", "policy", "saga/worker", "ids", "stuck-1@0", "ids", "stuck-2@0",
			"ids", "stuck-3@0", "ids", "ok-1@0", "list", "text=-", "note", "all that are stuck")
		require.Equal(t, http.StatusOK, w.Code)
		require.Contains(t, w.Body.String(), "Retry applied to 3 sagas.")
		require.Contains(t, w.Body.String(), "One saga was left unchanged:")
		require.Contains(t, w.Body.String(), `<li><a href="saga?id=ok-1&amp;runner=worker">ok-1</a>: saga: not allowed`)
		synctest.Wait()

		d.run("stuck-1", "stuck-2", "stuck-3") // which exist
		for _, id := range []string{"stuck-1", "stuck-2", "stuck-3"} {
			in, err := d.runner.Get(t.Context(), id)
			require.NoError(t, err)
			require.Equal(t, saga.Compensated, in.Status, id)
		}
		require.Len(t, audit, 6)
		require.Contains(t, audit[0], "cancel ok-1 no saga: not allowed")
		require.Equal(t, "retry stuck-1 warehouse is back <nil>", audit[1])
		require.Equal(t, "retry stuck-1 all that are stuck <nil>", audit[2])
		require.Contains(t, audit[5], "retry ok-1 all that are stuck saga: not allowed")
	})
}

// A leaky store is down, and its error holds a secret.
type leaky struct {
	store.Store
	down bool
}

func (l *leaky) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	if l.down {
		return store.Receipt{}, errDown
	}
	return l.Store.Commit(ctx, req)
}

// A leakyCache is a cache whose store is down.
type leakyCache struct{}

func (leakyCache) Describe() policy.Description {
	return policy.Description{Kind: "cache", Name: "prices"}
}
func (leakyCache) Invalidate(context.Context, ...string) error { return errDown }
func (leakyCache) Expire(context.Context, ...string) error     { return fmt.Errorf("expire: %w", errDown) }
func (leakyCache) InvalidateAll(context.Context) error         { return errDown }

// The text is shown with Show.Errors. Audit always receives the error.
func TestStoreErrorOfActionIsHidden(t *testing.T) {
	for _, shown := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			var audit []error
			store := &leaky{Store: saga.NewMemory()}
			runner := saga.NewRunner(store, saga.RunnerConfig{Name: "worker"})
			orders := &saga.Saga[order]{Name: "order", Steps: []saga.Step[order]{{Name: "reserve", Do: ok, Undo: ok}}}
			orderss := saga.Register(runner, orders)
			_, err := orderss.Start(t.Context(), "order-1", order{})
			require.NoError(t, err)
			store.down = true
			s := pageOf(t, console.Config{Allow: allow, Show: console.Show{Errors: shown},
				Audit: func(_ context.Context, _ console.Operation, err error) { audit = append(audit, err) },
			}, runner, leakyCache{})
			for i, form := range [][]string{
				{"action", "retry", "policy", "saga/worker", "id", "order-1", "note", "again"},
				{"action", "invalidate", "policy", "cache/prices", "key", "1"},
				{"action", "expire", "policy", "cache/prices", "key", "1"},
				{"action", "invalidate_all", "policy", "cache/prices"},
			} {
				w := s.post(form...)
				require.Equal(t, http.StatusUnprocessableEntity, w.Code, form)
				require.Contains(t, w.Body.String(), "store failed: ", form)
				require.Equal(t, shown, strings.Contains(w.Body.String(), "hunter2"), form)
				require.ErrorIs(t, audit[i], errDown)
				require.Equal(t, form[1] == "expire", strings.Contains(audit[i].Error(), "expire: "), form)
			}
			w := s.post("action", "abandon", "policy", "saga/worker", "ids", "order-1@0", "ids", "order-2@0", "note", "no more")
			require.Equal(t, http.StatusUnprocessableEntity, w.Code)
			body := w.Body.String()
			require.Contains(t, body, "0 done, 0 refused, 2 left: store failed: ")
			require.Equal(t, shown, strings.Contains(body, "hunter2"))
			require.ErrorIs(t, audit[len(audit)-1], errDown)
			w = s.post("action", "skip", "policy", "saga/worker", "id", "order-1", "step", "fly", "note", "no")
			require.Contains(t, w.Body.String(), "there is no such step", "this error has no secret")
		})
	}
}

// The page offers the steps that Runner.Operate can skip.
func TestStepWithoutEffectCanBeSkipped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDepot(t, console.Config{Allow: allow})
		d.run("stuck-1")
		body := d.get("/saga?id=stuck-1", nil).Body.String()
		for step, can := range map[string]bool{"charge": true, "reserve": true, "pack": false, "ship": false} {
			require.Equal(t, can, strings.Contains(body, "<option>"+step+"</option>") ||
				strings.Contains(body, "<option selected>"+step+"</option>"), step)
		}
		require.NoError(t, d.runner.Operate(t.Context(), "stuck-1",
			saga.Operation{Action: saga.ActionSkip, Step: "charge", Note: "by hand"}))
	})
}

func TestSagaPageShowsWaitsAndChildren(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		parcel := &saga.Saga[order]{Name: "parcel", Steps: []saga.Step[order]{{Name: "carry", Do: ok, Undo: ok}}}
		orders := &saga.Saga[order]{Name: "order", Steps: []saga.Step[order]{
			{Name: "parcels", Child: saga.ChildrenOf(parcel, func(*order) ([]order, error) { return make([]order, 2), nil },
				func(*order, []order) error { return nil })},
			{Name: "approve", Await: "approved"},
		}}
		r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "worker"})
		saga.Register(r, parcel)
		saga.Register(r, orders)
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { _ = r.Run(ctx) })
		_, err := saga.Register(r, orders).Start(ctx, "order-1", order{})
		require.NoError(t, err)
		time.Sleep(time.Minute)
		stop()
		running.Wait()
		s := pageOf(t, console.Config{}, r)
		var p struct {
			Step  string
			Units []struct {
				Name, Status string
				Children     []string
			}
		}
		s.get("/saga?id=order-1", &p)
		require.Equal(t, "approve", p.Step)
		require.Equal(t, "waiting", p.Units[1].Status)
		require.Equal(t, []string{"order-1/parcels/0", "order-1/parcels/1"}, p.Units[0].Children)
		body := s.get("/saga?id=order-1", nil).Body.String()
		require.Contains(t, body, `href="saga?id=order-1%2Fparcels%2F0&amp;runner=worker"`)
		require.Regexp(t, `<td data-label="Waiting since">2000-01-0\d \d\d:00:00 \w+</td>`, body, "it may wait for days")
		require.Equal(t, http.StatusOK, s.get("/saga?id=order-1%2Fparcels%2F0", nil).Code)
	})
}

// The page and the JSON report that the store failed, and hide the store's error.
func TestFailedStoreQuery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, store := newSlow(t)
		s.reg.MustAdd(kind("meter"))
		store.down = errDown
		for path, want := range map[string]string{
			"/sagas":                       "store failed: hidden",
			"/saga?id=order-1":             "store failed: hidden",
			"/saga?id=order-1&runner=none": "there is no runner none",
			"/sagas?runner=none":           "there is no runner none",
			"/sagas?age=x":                 "age: is \"x\": must be a duration such as 10m",
		} {
			var p struct{ Error string }
			code := http.StatusBadGateway
			switch {
			case strings.Contains(path, "none"):
				code = http.StatusNotFound
			case strings.Contains(path, "age"):
				code = http.StatusBadRequest
			}
			require.Equal(t, code, s.get(path, &p).Code, path)
			require.Equal(t, want, p.Error, path)
			w := s.get(path, nil)
			require.Equal(t, code, w.Code, path)
			require.Contains(t, html.UnescapeString(w.Body.String()), want, path)
		}
		require.Equal(t, http.StatusUnprocessableEntity,
			s.post("action", "cancel", "policy", "meter/users", "ids", "order-1@0", "note", "x").Code)
		w := s.post("action", "cancel", "policy", "meter/users", "id", "order-1", "note", "x")
		require.Equal(t, http.StatusUnprocessableEntity, w.Code)
		require.Contains(t, w.Body.String(), "meter/users has no sagas")

		store.down, store.takes = nil, time.Hour
		store.counting.Store(int64(4800 * time.Millisecond))
		require.Equal(t, http.StatusBadGateway, s.get("/sagas", nil).Code, "its time was used up before the search")
		s.page.Close()
		time.Sleep(10 * time.Second)
	})
}

// The links to the next page keep the conditions of the list.
func TestListHasLinksToAllPages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _ := newSlow(t)
		s.reg.MustAdd(saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "another"}),
			saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "zero"}))
		var pages []int
		seen := map[string]bool{}
		for path := "sagas?runner=worker&text=order-1"; path != ""; {
			body := s.get("/"+path, nil).Body.String()
			ids := regexp.MustCompile(`>(order-1[0-9]*)</a>`).FindAllStringSubmatch(body, -1)
			for _, id := range ids {
				seen[id[1]] = true
			}
			pages, path = append(pages, len(ids)), ""
			if m := regexp.MustCompile(`<a href="([^"]*)" rel="next">Next page<`).FindStringSubmatch(body); m != nil {
				path = html.UnescapeString(m[1])
			}
			require.Contains(t, body, `data-refresh="5"`)
		}
		require.Equal(t, []int{50, 50, 11}, pages)
		require.Len(t, seen, 111)
		body := s.get("/sagas", nil).Body.String()
		require.Contains(t, body, `<a href="sagas?runner=another" aria-current="page">another</a> `+
			`<a href="sagas?runner=worker">worker</a> <a href="sagas?runner=zero">zero</a>`)
		var p struct {
			Runner string
			Counts []struct {
				Due  int
				Late float64
			}
			Sagas []struct{ ID string }
		}
		s.get("/sagas", &p)
		require.Equal(t, "another", p.Runner, "the first")
		s.get("/sagas?runner=worker&age=0s", &p)
		require.Equal(t, []any{200, 200.0}, []any{p.Counts[0].Due, p.Counts[0].Late})
		require.Len(t, p.Sagas, 50)
	})
}

func TestFieldsOfSagaActions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var steps []string
		d := newDepot(t, console.Config{Allow: allow, Audit: func(_ context.Context, op console.Operation, err error) {
			steps = append(steps, fmt.Sprint(op.Action, " ", op.Step, " ", op.Seq))
		}})
		d.run("stuck-1")
		in, err := d.runner.Get(t.Context(), "stuck-1")
		require.NoError(t, err)
		do := func(action, id string, more ...string) string {
			form := url.Values{"action": {action}, "policy": {"saga/worker"}, "id": {id}, "note": {"x"}}
			for i := 0; i < len(more); i += 2 {
				form.Set(more[i], more[i+1])
			}
			var answer struct{ Error string }
			require.NoError(t, json.Unmarshal(d.postJSON(form.Encode()).Body.Bytes(), &answer))
			return answer.Error
		}
		require.Equal(t, `seq: is "-1": must be a number of log entries`, do("retry", "stuck-1", "seq", "-1"))
		require.Equal(t, `seq: is "x": must be a number of log entries`, do("retry", "stuck-1", "seq", "x"))
		require.Equal(t, `status: is not a field of retry`, do("retry", "stuck-1", "status", "stuck"))
		require.Contains(t, do("retry", "nobody"), "not found")
		require.NotContains(t, do("retry", "nobody"), "store failed")
		refused := do("cancel", "stuck-1", "seq", fmt.Sprint(in.Seq))
		require.Contains(t, refused, "not allowed")
		require.Empty(t, do("retry", "stuck-1", "seq", "0", "step", "charge", "status", ""),
			"the form of all buttons has a step")
		require.Empty(t, do("skip", "stuck-1", "step", "charge"))
		require.Equal(t, []string{"retry  0", "skip charge 0"}, steps[len(steps)-2:])

		store := saga.NewMemory()
		knows, does := saga.NewRunner(store, saga.RunnerConfig{Name: "knows"}),
			saga.NewRunner(store, saga.RunnerConfig{Name: "worker"})
		orders := saga.Register(knows, d.orders)
		_, err = orders.Start(t.Context(), "order-1", order{})
		require.NoError(t, err)
		d.reg.Remove(d.runner)
		d.reg.MustAdd(does)
		require.Contains(t, do("compensate", "order-1"), "not registered")
		require.NotContains(t, do("compensate", "order-1"), "store failed")
	})
}

// A failed Apply to a Runner responds with the page of the policy, not with a list of sagas.
func TestApplyToRunner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDepot(t, console.Config{Allow: allow})
		for _, preview := range [][]string{nil, {"preview", "1"}} {
			w := d.post(append([]string{"action", "apply", "policy", "saga/worker", "settings", `{"Nonsense": 1}`},
				preview...)...)
			require.GreaterOrEqual(t, w.Code, 400)
			require.Contains(t, w.Body.String(), "<h2>Metrics</h2>")
		}
	})
}
