package console

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/saga"
)

// stuck returns a Runner with n stuck sagas: order-000 and so on.
func stuck(t *testing.T, n int) *saga.Runner {
	sg := &saga.Saga[order]{Name: "order", Steps: []saga.Step[order]{
		{Name: "charge", Pivot: true, Attempts: 1, Undo: func(context.Context, *order) error { return errDown },
			UndoAttempts: 1, Do: func(context.Context, *order) error { return errors.New("bank: 503") }},
	}}
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "orders"})
	r.Observe(func(context.Context, saga.Event) {})
	sagas := saga.Register(r, sg)
	run(t, r)
	for i := range n {
		_, err := sagas.Start(t.Context(), fmt.Sprintf("order-%03d", i), order{})
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		counts, _, err := r.Counts(t.Context())
		return err == nil && counts[0].Stuck == n
	}, patience, 10*time.Millisecond)
	return r
}

// An operator abandons a group of 281 stuck sagas. A colleague has retried one of them since the page was shown.
func TestActOnGroupOfStuckSagas(t *testing.T) {
	r := stuck(t, 281)
	reg := registry.New()
	reg.MustAdd(r)
	at := serve(t, reg, console.Config{Allow: allow, Show: console.Show{Errors: true}})
	p := newTab(t)
	p.open(at + "sagas")
	p.live()
	p.until(`document.querySelector("button[value=abandon]").disabled`)
	require.Equal(t, 1, eval[int](p, `document.querySelectorAll(".stuck > li").length`))
	p.click(`.stuck summary`)
	p.click(`input[value^="order-001@"]`)
	p.shows("1 selected")
	p.until(`document.querySelector("[data-pick=group]").indeterminate`)
	p.click(`[data-pick=group]`)
	p.shows("281 selected")
	p.shows("paused by the selection")
	require.False(t, eval[bool](p, `document.querySelector("button[value=abandon]").disabled`))

	shown, err := r.Get(t.Context(), "order-001")
	require.NoError(t, err)
	require.NoError(t, r.Operate(t.Context(), "order-001",
		saga.Operation{Action: saga.ActionRetry, Note: "by a colleague"}))
	require.Eventually(t, func() bool {
		in, err := r.Get(t.Context(), "order-001")
		return err == nil && in.Status == saga.Stuck && in.Seq > shown.Seq+1
	}, patience, 10*time.Millisecond, "it is stuck again")
	p.fill(`#many input[name=note]`, "paid by hand")
	p.click(`button[value=abandon]`)
	p.shows("Abandon 281 sagas?")
	p.click(`button[name=sure]`)
	p.shows("Abandon applied to 280 sagas.")
	p.shows("One saga was left unchanged:")
	p.shows("order-001: saga: not allowed")
	in, err := r.Get(t.Context(), "order-001")
	require.NoError(t, err)
	require.Equal(t, saga.Stuck, in.Status)
	p.live()
	require.Equal(t, 1, eval[int](p, `document.querySelectorAll("input[name=ids]").length`))
}

func TestVerdictLinksToPolicies(t *testing.T) {
	reg := registry.New()
	for i := range 30 {
		b := breaker.New(breaker.Config{Name: fmt.Sprintf("dependency %02d", i)})
		if i > 2 {
			b.ForceOpen(errDown)
		}
		reg.MustAdd(b)
	}
	at := serve(t, reg, console.Config{})
	p := newTab(t)
	p.size(390, 844, false)
	p.open(at)
	p.live()
	p.click(`//a[text()="25 more policies"]`)
	p.until(`(() => { const c = document.querySelector(".card:target"); if (!c) return false;
		const box = c.getBoundingClientRect();
		return c.href.endsWith("dependency+05") && box.top >= 0 && box.bottom <= innerHeight })()`)
	p.click(`//a[text()="breaker dependency 03"]`)
	p.shows("breaker dependency 03")
	p.until(`location.href.includes("policy?kind=breaker")`)
}

// A chart shows the time since the first sample, and not the whole ten minutes.
func TestChartsShowElapsedTime(t *testing.T) {
	b := breaker.New(breaker.Config{Name: "users"})
	reg := registry.New()
	reg.MustAdd(b)
	load(t, 1, func(ctx context.Context) { _ = b.Do(ctx, func(context.Context) error { return nil }) })
	at := serve(t, reg, console.Config{})
	p := newTab(t)
	p.open(at + "policy?kind=breaker&name=users")
	p.until(`document.querySelector(".chart path")?.getAttribute("d").split("L").length > 2`)
	require.Regexp(t, `^M0\.0 `, eval[string](p, `document.querySelector(".chart path").getAttribute("d")`))
	texts := func(selector string) string {
		return eval[string](p, fmt.Sprintf(
			`[...document.querySelectorAll(%q)].map((e) => e.textContent).join(" ")`, selector))
	}
	require.Regexp(t, `^\d+ s ago \d+ s ago now`, texts(".chart .axis span"))
	require.Regexp(t, `^\d+ s ago now$`, texts(".strip .axis span"))
	require.Equal(t, "0", eval[string](p, `document.querySelector("#strip rect").getAttribute("x")`))
}
