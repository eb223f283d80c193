package console

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// load calls f from n goroutines until the test ends.
func load(t *testing.T, n int, f func(context.Context)) {
	ctx, stop := context.WithCancel(context.Background())
	var calls sync.WaitGroup
	for range n {
		calls.Go(func() {
			for ctx.Err() == nil {
				f(ctx)
				time.Sleep(time.Millisecond)
			}
		})
	}
	t.Cleanup(func() { stop(); calls.Wait() })
}

func TestBreakerIsTrippedFromThePage(t *testing.T) {
	circuit := breaker.New(breaker.Config{Name: "users"})
	reg := registry.New()
	reg.MustAdd(circuit)
	var refused atomic.Int64
	load(t, 4, func(ctx context.Context) {
		if err := circuit.Do(ctx, func(context.Context) error { return nil }); errors.Is(err, breaker.ErrOpen) {
			refused.Add(1)
		}
	})
	at := serve(t, reg, console.Config{Allow: allow, Show: console.Show{Errors: true}})
	p := newTab(t)
	p.open(at)
	p.shows("The only policy is healthy.")
	p.click(`a.card`)
	p.until(`document.querySelectorAll(".chart path").length > 0`)
	p.fill(`.acts input[name=for]`, "1h")
	p.fill(`.acts input[name=note]`, "maintenance")
	p.click(`button[value=trip]`)
	p.shows("The breaker was tripped.")
	require.Equal(t, breaker.Open, circuit.State())
	p.shows("opened by an operator in the console: maintenance")
	require.Eventually(t, func() bool { return refused.Load() > 0 }, patience, time.Millisecond)
	p.until(`/% (failed or )?refused/.test(document.querySelector("[data-share]").textContent)`)
	p.click(`.brand`)
	p.shows("The breaker users is open.")
	p.click(`a.card`)
	p.click(`button[value=reset]`)
	p.shows("The breaker was reset.")
	require.Equal(t, breaker.Closed, circuit.State())
}

func TestLimitIsChangedFromThePage(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 8, MaxWait: -1, Queue: 100})
	reg := registry.New()
	reg.MustAdd(slots)
	var inFlight, most atomic.Int64
	load(t, 20, func(ctx context.Context) {
		_ = slots.Do(ctx, func(context.Context) error {
			n := inFlight.Add(1)
			for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
			}
			time.Sleep(5 * time.Millisecond)
			inFlight.Add(-1)
			return nil
		})
	})
	at := serve(t, reg, console.Config{Allow: allow})
	p := newTab(t)
	field := `textarea[name=settings]`
	p.open(at + "policy?kind=bulkhead&name=users")
	p.fill(field, `{"Limit": 2}`)
	p.click(`button[name=preview]`)
	p.shows("Apply would change:")
	p.shows("bulkhead/users.Limit")
	require.Equal(t, 8, slots.Config().Limit)
	p.click(`//button[text()="Apply"]`)
	p.shows("The settings were changed.")
	require.Equal(t, 2, slots.Config().Limit)
	require.Eventually(t, func() bool { return inFlight.Load() <= 2 }, patience, time.Millisecond)
	most.Store(0)
	before := slots.Stats().Admitted
	require.Eventually(t, func() bool { return slots.Stats().Admitted > before+20 }, patience, time.Millisecond)
	require.LessOrEqual(t, most.Load(), int64(2))

	p.fill(field, `{"Limit": -3}`)
	p.click(`//button[text()="Apply"]`)
	p.shows("Limit")
	p.until(`document.querySelector(".notice.fail")?.textContent.includes("Limit")`)
	require.Equal(t, 2, slots.Config().Limit)
}

type order struct{ Item string }

func fine(context.Context, *order) error { return nil }

// depot returns a Runner on a new schema of PostgreSQL.
func depot(t *testing.T, sagas ...*saga.Saga[order]) (*saga.Runner, *sql.DB) {
	t.Helper()
	dsn := services.Postgres(t)
	schema := fmt.Sprintf("console_%x", rand.Uint64())
	u, err := url.Parse(dsn)
	require.NoError(t, err)
	admin, err := sql.Open("pgx", dsn)
	require.NoError(t, err)
	_, err = admin.Exec("CREATE SCHEMA " + schema)
	require.NoError(t, err)
	q := u.Query()
	q.Set("search_path", schema)
	u.RawQuery = q.Encode()
	db, err := sql.Open("pgx", u.String())
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = db.Close()
		_, err := admin.Exec("DROP SCHEMA " + schema + " CASCADE")
		require.NoError(t, err)
		_ = admin.Close()
	})
	store := sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{})
	require.NoError(t, store.Migrate(t.Context()))
	r := saga.NewRunner(store, saga.RunnerConfig{Name: "orders", Poll: 50 * time.Millisecond})
	r.Observe(func(context.Context, saga.Event) {})
	for _, sg := range sagas {
		saga.Register(r, sg)
	}
	return r, db
}

// run runs a Runner until the test ends.
func run(t *testing.T, r *saga.Runner) {
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = r.Run(ctx) })
	t.Cleanup(func() { stop(); running.Wait() })
}

func TestCancelSaga(t *testing.T) {
	shipping := make(chan struct{})
	sg := &saga.Saga[order]{Name: "order", Steps: []saga.Step[order]{
		{Name: "reserve", Do: fine, Undo: fine},
		{Name: "ship", Undo: fine, Do: func(ctx context.Context, _ *order) error {
			close(shipping)
			<-ctx.Done() // the carrier does not answer
			return ctx.Err()
		}},
	}}
	r, _ := depot(t, sg)
	run(t, r)
	reg := registry.New()
	reg.MustAdd(r)
	at := serve(t, reg, console.Config{Allow: allow, Show: console.Show{Errors: true, State: true}})
	_, err := saga.Register(r, sg).Start(t.Context(), "order-17", order{Item: "lamp"})
	require.NoError(t, err)
	<-shipping
	p := newTab(t)
	p.open(at + "sagas")
	p.click(`//a[text()="order-17"]`)
	p.shows(`"lamp"`)
	p.fill(`input[name=note]`, "the customer has called")
	p.click(`button[value=cancel]`)
	p.shows("Cancel order-17?")
	p.click(`button[name=sure]`)
	p.shows("The cancellation was recorded.")
	p.shows("the customer has called")
	p.until(`document.querySelector(".title .state").textContent.includes("compensated")`) // without a reload
	p.until(`document.getElementById("live").hidden`)                                      // it is not followed any more
	in, err := r.Get(t.Context(), "order-17")
	require.NoError(t, err)
	require.Equal(t, saga.Compensated, in.Status)
}

// copies inserts n copies of the row s of a table. other has the expressions of columns that differ, which may use the
// number i of the copy.
func copies(t *testing.T, db *sql.DB, table, where string, n int, other map[string]string) {
	t.Helper()
	rows, err := db.Query(`SELECT column_name FROM information_schema.columns
		WHERE table_schema = current_schema() AND table_name = $1 AND is_generated = 'NEVER'`, table)
	require.NoError(t, err)
	defer rows.Close()
	var columns, values []string
	for rows.Next() {
		var column string
		require.NoError(t, rows.Scan(&column))
		columns, values = append(columns, column), append(values, cmp.Or(other[column], "s."+column))
	}
	require.NoError(t, rows.Err())
	_, err = db.Exec(`INSERT INTO `+table+` (`+strings.Join(columns, ", ")+`) SELECT `+strings.Join(values, ", ")+
		` FROM `+table+` s, generate_series(1, $1::int) i WHERE `+where, n)
	require.NoError(t, err)
}

// many fills the store with n sagas, of which one is stuck.
func many(t *testing.T, r *saga.Runner, db *sql.DB, sg *saga.Saga[order], n int) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = r.Run(ctx) })
	for _, id := range []string{"done", "stuck"} {
		_, err := saga.Register(r, sg).Start(ctx, id, order{Item: id})
		require.NoError(t, err)
		_, _ = saga.Register(r, sg).Result(ctx, id)
	}
	stop()
	running.Wait()
	_, err := db.Exec(`ALTER TABLE saga SET UNLOGGED`) // for speed
	require.NoError(t, err)
	copies(t, db, "saga", "s.id = 'done'", n, map[string]string{
		"id": "'order-' || i", "created_at": "s.created_at - i * 1000000::bigint",
		"status": "CASE WHEN i % 10 = 0 THEN 'compensated' ELSE 'completed' END",
	})
	_, err = db.Exec(`ANALYZE saga`)
	require.NoError(t, err)
	_, err = db.Exec(`INSERT INTO saga_log (saga_id, seq, step, op, event, attempt, epoch, error, at)
		SELECT 'order-98765', seq, step, op, event, attempt, epoch, error, at FROM saga_log WHERE saga_id = 'done'`)
	require.NoError(t, err)
}

// An operator finds a stuck saga among 100,000, opens a saga by its id, and finds it by its id's beginning.
func TestFindSagaAmong100000(t *testing.T) {
	sg := &saga.Saga[order]{Name: "order", Steps: []saga.Step[order]{
		{Name: "reserve", Do: fine, UndoAttempts: 1, Undo: func(ctx context.Context, o *order) error { return errDown }},
		{Name: "charge", Undo: fine, Do: func(_ context.Context, o *order) error {
			if o.Item == "stuck" {
				return saga.Declined(errors.New("card declined"))
			}
			return nil
		}},
	}}
	r, db := depot(t, sg)
	many(t, r, db, sg, 100_000)
	reg := registry.New()
	reg.MustAdd(r)
	at := serve(t, reg, console.Config{Show: console.Show{Errors: true}})
	p := newTab(t)
	p.open(at)
	p.shows("The runner orders has stuck sagas.")
	quickest := func(what string, open func()) time.Duration {
		least := time.Hour
		for range 3 {
			begun := time.Now()
			open()
			least = min(least, time.Since(begun))
		}
		t.Logf("%s in %v", what, least)
		return least
	}
	require.Less(t, quickest("stuck", func() {
		p.open(at + "sagas")
		p.do("wait", chromedp.WaitVisible(`//a[text()="stuck"]`))
	}), 5*time.Second) // takes 0.3 seconds on an idle machine
	p.fill(`input[name=text]`, "order-98765")
	p.click(`button[formaction=saga]`)
	p.shows("2 of 2 done")
	get := func(page string) func() {
		return func() {
			res, err := http.Get(at + page)
			require.NoError(t, err)
			_ = res.Body.Close()
			require.Equal(t, http.StatusOK, res.StatusCode, page)
		}
	}
	require.Less(t, quickest("an id", get("saga?id=order-98765")), time.Second)
	require.Less(t, quickest("an id's beginning", get("sagas?text=order-98765")), 4*time.Second)
	require.Less(t, quickest("no id", get("sagas?text=8765x")), 4*time.Second)
	p.open(at + "sagas?text=8765x")
	p.shows("None.")
}

// With HTTP/1.1, a browser opens six connections to a host. Eight tabs are live nevertheless. Hidden tabs send no
// requests.
func TestEightTabsAreLive(t *testing.T) {
	circuit := breaker.New(breaker.Config{Name: "users"})
	reg := registry.New()
	reg.MustAdd(circuit)
	page := console.New(reg, console.Config{})
	var asked sync.Map // number of requests by tab
	server := httptest.NewServer(http.StripPrefix(prefix, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Accept") == "text/html" { // a request of the script
			n, _ := asked.LoadOrStore(r.URL.Query().Get("tab"), new(atomic.Int64))
			n.(*atomic.Int64).Add(1)
		}
		page.ServeHTTP(w, r)
	})))
	t.Cleanup(func() {
		page.Close()
		server.Close()
	})
	times := func(i int) int64 {
		n, ok := asked.Load(fmt.Sprint(i))
		if !ok {
			return 0
		}
		return n.(*atomic.Int64).Load()
	}
	var tabs []tab
	for i := range 8 {
		p := newTab(t)
		p.open(fmt.Sprintf("%s%s/?tab=%d", server.URL, prefix, i))
		tabs = append(tabs, p)
	}
	var begun [8]int64
	for i, p := range tabs {
		p.live()
		begun[i] = times(i)
	}
	for i := range tabs {
		require.Eventually(t, func() bool { return times(i) > begun[i]+1 }, patience, 10*time.Millisecond,
			"tab %d is updated", i)
	}
	circuit.ForceOpen(errDown)
	for _, p := range tabs {
		p.shows("The breaker users is forced open.")
	}
	hide := func(hidden bool) {
		for _, p := range tabs[:7] {
			eval[bool](p, fmt.Sprintf(`Object.defineProperty(document, "hidden", { value: %t, configurable: true }),
				document.dispatchEvent(new Event("visibilitychange"))`, hidden))
		}
	}
	hide(true)
	for _, p := range tabs[:7] {
		p.until(`document.getElementById("live").textContent === "not live"`)
	}
	before, last := times(0), times(7)
	require.Eventually(t, func() bool { return times(7) > last+2 }, patience, 10*time.Millisecond,
		"the visible tab is updated")
	require.Equal(t, before, times(0), "a hidden tab sends no requests")
	circuit.Enable()
	hide(false)
	for _, p := range tabs {
		p.live()
		p.shows("The only policy is healthy.")
	}
}

func TestPostFromAnotherOriginIsRejected(t *testing.T) {
	circuit := breaker.New(breaker.Config{Name: "users"})
	reg := registry.New()
	reg.MustAdd(circuit)
	at := serve(t, reg, console.Config{Allow: allow})
	evil := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = fmt.Fprintf(w, `<form method=post action="%sact"><input name=action value=trip>
			<input name=policy value="breaker/users"><button>Win</button></form>
			<iframe src="%s"></iframe>`, at, at)
	}))
	defer evil.Close()
	p := newTab(t)
	p.complaints.allowed = true // about the frame that is blocked
	p.open(evil.URL)
	require.False(t, eval[bool](p, `(() => {
		try { return !!window.frames[0].document.querySelector("main") } catch { return false }
	})()`))
	eval[bool](p, `document.forms[0].requestSubmit(), true`)
	p.shows("cross-origin")
	require.Equal(t, http.StatusForbidden, eval[int](p, `performance.getEntriesByType("navigation")[0].responseStatus`))
	require.Equal(t, breaker.Closed, circuit.State())
	// The page itself can send the form.
	p.open(at + "policy?kind=breaker&name=users")
	p.click(`button[value=trip]`)
	p.shows("The breaker was tripped.")
	require.Equal(t, breaker.Open, circuit.State())
}

func TestTextsAreShownAsTexts(t *testing.T) {
	const evil = `<img src=x onerror="window.caught=1"><script>window.caught=1</script>'"</title>`
	circuit := breaker.New(breaker.Config{Name: evil, ConsecutiveFailures: 1})
	shards := resilience.NewGroup(func(string) *breaker.Breaker {
		return breaker.New(breaker.Config{Name: "shards", ConsecutiveFailures: 1})
	}, resilience.GroupConfig{})
	reg := registry.New()
	reg.MustAdd(circuit, shards)
	failing := func(context.Context) error { return errors.New(evil) }
	load(t, 1, func(ctx context.Context) {
		_ = circuit.Do(ctx, failing)
		_ = shards.Do(ctx, evil, failing)
	})
	at := serve(t, reg, console.Config{Name: evil, Allow: allow, Show: console.Show{Errors: true, Keys: true}})
	p := newTab(t)
	for _, page := range []string{"", "policy?" + url.Values{"kind": {"breaker"}, "name": {evil}}.Encode(),
		"policy?kind=breaker&name=shards", "nothing"} {
		p.open(at + page)
		p.shows(evil)
		if page != "nothing" {
			p.live()
		}
		require.False(t, eval[bool](p, `!!window.caught`), page)
		require.False(t, eval[bool](p, `!!document.querySelector("main script, img[src=x], [onerror]")`), page)
	}
}

// An open page shows a new error and a new unhealthy member, even if the state stays the same.
func TestOpenPageIsUpdated(t *testing.T) {
	circuit := breaker.New(breaker.Config{Name: "users"})
	shards := resilience.NewGroup(func(string) *breaker.Breaker {
		return breaker.New(breaker.Config{Name: "shards", ConsecutiveFailures: 1, OpenFor: time.Hour})
	}, resilience.GroupConfig{})
	reg := registry.New()
	reg.MustAdd(circuit, shards)
	fails := func(shard string) {
		_ = shards.Do(t.Context(), shard, func(context.Context) error { return errDown })
	}
	for _, shard := range []string{"a", "b", "c"} {
		_ = shards.Do(t.Context(), shard, func(context.Context) error { return nil })
	}
	circuit.Trip(errors.New("connection refused"), time.Hour)
	fails("shard-a")
	at := serve(t, reg, console.Config{Show: console.Show{Errors: true, Keys: true}})
	overview, policy, group := newTab(t), newTab(t), newTab(t)
	overview.open(at)
	overview.shows("connection refused")
	policy.open(at + "policy?kind=breaker&name=users")
	policy.shows("connection refused")
	group.open(at + "policy?kind=breaker&name=shards")
	group.shows("shard-a")
	circuit.Trip(errors.New("403 Forbidden"), time.Hour)
	fails("shard-b")
	overview.shows("403 Forbidden")
	policy.shows("403 Forbidden")
	group.shows("shard-b")
}

// The response to a refused action, or to a preview, is a live page.
func TestResponseToActionIsLive(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 8})
	reg := registry.New()
	reg.MustAdd(slots)
	load(t, 1, func(ctx context.Context) { _ = slots.Do(ctx, func(context.Context) error { return nil }) })
	at := serve(t, reg, console.Config{Allow: allow})
	p := newTab(t)
	for settings, shows := range map[string]string{`{"Limit": 2}`: "Apply would change:", `{"Limit": -3}`: "is -3"} {
		p.open(at + "policy?kind=bulkhead&name=users")
		p.fill(`textarea[name=settings]`, settings)
		p.click(`button[name=preview]`)
		p.shows(shows)
		p.live()
		p.until(`document.querySelectorAll(".chart path").length > 0`)
		p.shows(shows)
	}
}

// An update of the page keeps the note of a refused action.
func TestRefusedActionKeepsItsNote(t *testing.T) {
	sg := &saga.Saga[order]{Name: "order", Steps: []saga.Step[order]{{Name: "reserve", Do: fine, Undo: fine}}}
	r, _ := depot(t, sg)
	reg := registry.New()
	reg.MustAdd(r)
	never := func(*http.Request, console.Operation) error { return errors.New("not on a Sunday") }
	at := serve(t, reg, console.Config{Allow: never, Show: console.Show{Errors: true}})
	_, err := saga.Register(r, sg).Start(t.Context(), "order-17", order{Item: "lamp"})
	require.NoError(t, err)
	p := newTab(t)
	p.open(at + "saga?id=order-17")
	p.fill(`input[name=note]`, "the customer has called")
	p.click(`button[value=cancel]`)
	p.click(`button[name=sure]`)
	p.shows("not on a Sunday")
	p.click("h1") // the pointer is not over the form
	require.NoError(t, r.Operate(t.Context(), "order-17", saga.Operation{Action: saga.ActionCancel, Note: "on the phone"}))
	p.shows("Cancel requested\nyes")
	require.Equal(t, "the customer has called", eval[string](p, `document.querySelector("input[name=note]").value`))
}
