package console

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/saga"
)

// replaceState replaces a part of the state in the form.
func (p tab) replaceState(from, to string) {
	p.t.Helper()
	p.until(fmt.Sprintf(`(() => {
		const e = document.querySelector("textarea[name=state]");
		if (!e?.value.includes(%[1]q)) return false;
		e.focus(); e.value = e.value.replace(%[1]q, %[2]q);
		return true
	})()`, from, to))
}

// An operator enters the state that a skipped step would have left. While the operator types, a colleague retries the
// saga: the open form does not change, and is refused. The operator sends it again.
func TestEnterStateOfSkippedStep(t *testing.T) {
	type parcel struct{ Item, Label string }
	var shipped string
	sg := &saga.Saga[parcel]{Name: "parcel", Steps: []saga.Step[parcel]{
		{Name: "label", Pivot: true, Do: func(context.Context, *parcel) error {
			return saga.Permanent(errors.New("no such printer"))
		}},
		{Name: "ship", Do: func(_ context.Context, p *parcel) error { shipped = p.Item + " " + p.Label; return nil }},
	}}
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "parcels", Poll: 50 * time.Millisecond})
	r.Observe(func(context.Context, saga.Event) {})
	parcels := saga.Register(r, sg)
	run(t, r)
	_, err := parcels.Start(t.Context(), "parcel-1", parcel{Item: "lamp"})
	require.NoError(t, err)
	isStuckAt := func(entries int64) func() bool {
		return func() bool {
			in, err := r.Get(t.Context(), "parcel-1")
			return err == nil && in.Status == saga.Stuck && in.Seq >= entries
		}
	}
	require.Eventually(t, isStuckAt(1), patience, time.Millisecond)
	reg := registry.New()
	reg.MustAdd(r)
	p := newTab(t)
	p.open(serve(t, reg, console.Config{Allow: allow, Show: console.Show{Errors: true, State: true}}) + "saga?id=parcel-1")
	p.live()
	p.click(`#edit summary`)
	p.replaceState(`"Label": ""`, `"Label": "L-1"`)
	p.click("h1") // neither the pointer nor the focus is in the form

	seq := eval[string](p, `document.querySelector("#edit input[name=seq]").value`)
	in, err := r.Get(t.Context(), "parcel-1")
	require.NoError(t, err)
	require.NoError(t, r.Operate(t.Context(), "parcel-1",
		saga.Operation{Action: saga.ActionRetry, Note: "by a colleague"}))
	require.Eventually(t, isStuckAt(in.Seq+3), patience, time.Millisecond, "it is stuck again")
	p.shows("by a colleague") // the page is live
	require.Equal(t, seq, eval[string](p, `document.querySelector("#edit input[name=seq]").value`))
	require.Contains(t, eval[string](p, `document.querySelector("#edit textarea").value`), "L-1")

	p.fill(`#edit input[name=note]`, "printed by hand")
	p.click(`#edit button[value=skip]`)
	p.shows("The saga has changed since you saw it.")
	p.shows("by a colleague")
	p.live()
	p.click(`//a[text()="Back to your changes"]`)
	p.click(`#edit button[value=skip]`)
	p.shows("Skip the step label of parcel-1 with a new state?")
	p.do("see the change", chromedp.WaitVisible(`ins`))
	require.Equal(t, `  "Label": "L-1"`, eval[string](p, `document.querySelector("ins").textContent.trimEnd()`))
	p.click(`button[value="1"]`)
	p.shows("The step was skipped.")
	p.until(`document.querySelector(".title .state").textContent.includes("completed")`)
	require.Equal(t, "lamp L-1", shipped)
	p.shows("printed by hand (the state was replaced)")
}
