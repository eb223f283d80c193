package console

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/throttle"
)

// A town is a program with all kinds of policies, under load. Its payments fail while outage is set.
type town struct {
	reg    *registry.Registry
	outage atomic.Bool
}

func newTown(t *testing.T) *town {
	w := &town{reg: registry.New()}
	for i, name := range []string{"users", "payments", "search"} {
		retries := retry.New(retry.Config{Name: name, Attempts: 3, Backoff: retry.Constant(20 * time.Millisecond)})
		circuit := breaker.New(breaker.Config{Name: name, FailureRate: 0.5, MinCalls: 20, Window: 5 * time.Second,
			OpenFor: 8 * time.Second})
		rate := throttle.New(throttle.Config{Name: name, Rate: 160, Burst: 40})
		slots := bulkhead.New(bulkhead.Config{Name: name, Limit: 16, Queue: 16, MaxWait: 50 * time.Millisecond})
		w.reg.MustAdd(retries, circuit, rate, slots)
		guarded := resilience.Chain(retries.Wrap, circuit.Wrap, rate.Wrap, slots.Wrap)(func(ctx context.Context) error {
			time.Sleep(time.Duration(5+rand.IntN(20)) * time.Millisecond)
			if rand.IntN(300) == 0 || i == 1 && w.outage.Load() && rand.IntN(10) < 9 {
				return errDown
			}
			return nil
		})
		begun := time.Now()
		load(t, 3, func(ctx context.Context) {
			at := time.Since(begun).Seconds()
			time.Sleep(time.Duration((30 + 20*math.Sin(at/37+float64(i)*2) + 15*rand.Float64()) * float64(time.Millisecond)))
			_ = guarded(ctx)
		})
	}
	users := cacheaside.New(cacheaside.Config[int, string]{Name: "users", TTL: 20 * time.Second,
		Load: func(_ context.Context, id int) (string, error) {
			time.Sleep(10 * time.Millisecond)
			return fmt.Sprint(id), nil
		}})
	t.Cleanup(func() { _ = users.Close() })
	shards := resilience.NewGroup(func(string) *breaker.Breaker {
		return breaker.New(breaker.Config{Name: "shards", ConsecutiveFailures: 5})
	}, resilience.GroupConfig{})
	load(t, 2, func(ctx context.Context) {
		_, _ = users.Get(ctx, int(math.Abs(rand.NormFloat64()*200)))
		shard := fmt.Sprintf("shard-%02d", rand.IntN(12))
		_ = shards.Do(ctx, shard, func(context.Context) error {
			if shard == "shard-07" {
				return errDown
			}
			return nil
		})
		time.Sleep(20 * time.Millisecond)
	})
	w.reg.MustAdd(users, shards, w.bookings(t))
	return w
}

type trip struct {
	From, To string
	Nights   int
}

// bookings returns a Runner with some sagas, one of them stuck: trip-1042.
func (w *town) bookings(t *testing.T) *saga.Runner {
	slow := func(err func(id string) error) func(context.Context, *trip) error {
		return func(ctx context.Context, _ *trip) error {
			time.Sleep(time.Duration(20+rand.IntN(120)) * time.Millisecond)
			return err(saga.CommandFrom(ctx).ID[:len("trip-1042")])
		}
	}
	fine := slow(func(string) error { return nil })
	step := func(name string) saga.Step[trip] {
		return saga.Step[trip]{Name: name, Do: fine, Undo: fine, Attempts: 3,
			Backoff: saga.Exponential(100*time.Millisecond, 300*time.Millisecond)}
	}
	flight, hotel, car, insurance := step("flight"), step("hotel"), step("car"), step("insurance")
	car.Parallel = true
	hotel.Do = slow(func(id string) error {
		if id == "trip-1042" {
			return errors.New("hotel: no answer within 2s")
		}
		return nil
	})
	car.UndoAttempts = 3
	car.Undo = slow(func(id string) error {
		if id == "trip-1042" {
			return errors.New("rental: 502 Bad Gateway")
		}
		return nil
	})
	charge := step("charge")
	charge.Pivot, charge.Undo = true, nil
	charge.Do = slow(func(id string) error {
		if id == "trip-1042" || id == "trip-1007" {
			return saga.Declined(errors.New("bank: card declined"))
		}
		return nil
	})
	tickets, mail := step("tickets"), step("mail")
	mail.Parallel = true
	tickets.Undo, mail.Undo = nil, nil
	sg := &saga.Saga[trip]{Name: "trip", Version: 3,
		Steps: []saga.Step[trip]{flight, hotel, car, insurance, charge, tickets, mail}}
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "bookings"})
	r.Observe(func(context.Context, saga.Event) {})
	sagas := saga.Register(r, sg)
	run(t, r)
	for i := range 12 {
		_, err := sagas.Start(t.Context(), fmt.Sprint("trip-", 1000+i), trip{From: "LIS", To: "OSL", Nights: 3 + i%4})
		require.NoError(t, err)
	}
	_, err := sagas.Start(t.Context(), "trip-1042", trip{From: "LIS", To: "KEF", Nights: 5})
	require.NoError(t, err)
	_, _ = sagas.Result(t.Context(), "trip-1042")
	return r
}

var show = console.Show{Errors: true, Keys: true, State: true}

// sights has the town's pages.
var sights = map[string]string{
	"overview": "",
	"breaker":  "policy?kind=breaker&name=payments",
	"group":    "policy?kind=breaker&name=shards",
	"cache":    "policy?kind=cache&name=users",
	"bulkhead": "policy?kind=bulkhead&name=users",
	"sagas":    "sagas?runner=bookings",
	"find":     "sagas?runner=bookings&status=stuck",
	"saga":     "saga?runner=bookings&id=trip-1042",
	"nothing":  "nothing",
}

// visit opens a page and waits until it has been drawn.
func (p tab) visit(at, name string) {
	p.t.Helper()
	p.open(at + sights[name])
	switch name {
	case "overview":
		p.live()
		p.until(`document.querySelectorAll(".spark .calls").length > 5`)
	case "breaker", "group", "cache", "bulkhead":
		p.live()
		p.until(`document.querySelectorAll(".chart path").length > 0`)
	case "saga":
		p.shows("trip-1042")
	}
}

// axe-core must find no violation of accessibility rules.
func TestPagesAreAccessible(t *testing.T) {
	axe, err := os.ReadFile(filepath.Join(services.NPM(t, "axe-core", "4.14.1",
		"sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="), "axe.min.js"))
	require.NoError(t, err)
	w := newTown(t)
	w.outage.Store(true)
	at := serve(t, w.reg, console.Config{Name: "town", Allow: allow, Show: show})
	p := newTab(t)
	for _, look := range []struct {
		name          string
		width, height int64
		dark          bool
	}{
		{"light", 1440, 900, false}, {"dark", 1440, 900, true},
		{"light phone", 390, 844, false}, {"dark phone", 390, 844, true},
	} {
		p.size(look.width, look.height, look.dark)
		check := func(page string) {
			p.isAccessible(string(axe), page+", "+look.name)
			if look.width < 600 {
				p.fitsPhone(page)
			}
		}
		for name := range sights {
			p.visit(at, name)
			check(name)
		}
		// Pages that only a form leads to: a confirmation, and a list with a refused action.
		p.open(at + sights["find"])
		p.live()
		p.click(`[data-pick=all]`)
		check("selection")
		p.fill(`#many input[name=note]`, "the customer has called")
		eval[bool](p, `document.querySelector("input[name=ids]").value = "trip-1042@1", true`)
		p.click(`button[value=retry]`)
		p.shows("Retry 1 saga?")
		check("confirmation")
		p.click(`button[name=sure]`)
		p.shows("One saga was left unchanged:")
		check("refusal")
		p.open(at + sights["saga"])
		p.click(`#edit summary`)
		check("form of the state")
		p.replaceState(`"KEF"`, `"RKV"`)
		p.fill(`#edit input[name=version]`, "9")
		p.fill(`#edit input[name=note]`, "the flight was diverted")
		p.click(`#edit button[value=retry]`)
		p.shows("Retry trip-1042 with a new state and version 9?")
		check("confirmation of the state")
		p.click(`button[value="1"]`)
		p.shows("not registered: trip version 9")
		check("refusal of the version")
	}
}

// isAccessible checks that axe-core finds no violation, and that the page fits the window.
func (p tab) isAccessible(axe, page string) {
	p.t.Helper()
	p.do("axe", chromedp.Evaluate[chromedp.Void](axe))
	found := eval[string](p, `axe.run(document, {resultTypes: ["violations"]}).then((r) =>
		JSON.stringify(r.violations.map((v) => ({
			id: v.id, help: v.help, nodes: v.nodes.map((n) => n.html + " " + n.failureSummary),
		}))))`)
	var violations []struct {
		ID, Help string
		Nodes    []string
	}
	require.NoError(p.t, json.Unmarshal([]byte(found), &violations))
	for _, v := range violations {
		p.t.Errorf("%s: %s: %s\n%v", page, v.ID, v.Help, v.Nodes[:min(3, len(v.Nodes))])
	}
	wide := eval[int](p, `document.documentElement.scrollWidth - document.documentElement.clientWidth`)
	require.LessOrEqual(p.t, wide, 0, "%s: the page is wider than the window", page)
}

// fitsPhone checks that controls are large enough for a thumb, and that cards need no horizontal scrolling.
func (p tab) fitsPhone(name string) {
	p.t.Helper()
	small := eval[[]string](p, `[...document.querySelectorAll("button, select, summary, input")].filter((e) => {
		const box = (e.closest(".check, td.pick") || e).getBoundingClientRect();
		return e.checkVisibility() && box.height < 44;
	}).map((e) => e.outerHTML)`)
	require.Empty(p.t, small, "%s: lower than 44 pixels", name)
	cut := eval[[]string](p, `[...document.querySelectorAll(".cardlike *, .list *, .members *")].filter((e) =>
		e.checkVisibility() && e.getBoundingClientRect().right > innerWidth).map((e) => e.outerHTML)`)
	require.Empty(p.t, cut, "%s: outside the screen", name)
}

var picturesFor = flag.Duration("pictures.for", 10*time.Minute,
	"time before pictures are taken")

// TestPictures takes the pictures of the documentation. It runs for pictures.for.
func TestPictures(t *testing.T) {
	if *pictures == "" {
		t.Skip("-pictures is empty")
	}
	w := newTown(t)
	at := serve(t, w.reg, console.Config{Name: "town", Allow: allow, Show: show})
	p := newTab(t)
	p.open(at)
	time.Sleep(*picturesFor * 6 / 10)
	w.outage.Store(true)
	time.Sleep(*picturesFor * 2 / 10)
	w.outage.Store(false)
	time.Sleep(*picturesFor / 10)
	w.outage.Store(true)
	time.Sleep(*picturesFor / 10)
	for _, dark := range []bool{false, true} {
		suffix := map[bool]string{true: "-dark"}[dark]
		for _, view := range []struct {
			name          string
			width, height int64
		}{{"overview", 1180, 800}, {"breaker", 1180, 1180}, {"saga", 1180, 1180}, {"sagas", 1180, 800},
			{"group", 1180, 1300}, {"overview", 390, 844}, {"breaker", 390, 844}} {
			p.size(view.width, view.height, dark)
			p.visit(at, view.name)
			name := view.name + suffix
			if view.width < 600 {
				name = view.name + "-phone" + suffix
			}
			p.picture(name)
		}
	}
}
