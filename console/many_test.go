package console_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// manyResult is the JSON response to an action on many sagas.
type manyResult struct {
	Done                 bool
	Error                string
	Acted, Refused, Left int
	Refusals             []struct{ ID, Error string }
}

// hundred returns a Runner with the sagas order-00 to order-99, and the form that abandons them.
func hundred(t *testing.T, s store.Store) (*saga.Runner, url.Values) {
	runner := saga.NewRunner(s, saga.RunnerConfig{Name: "worker"})
	orders := &saga.Saga[order]{Name: "order", Steps: []saga.Step[order]{{Name: "reserve", Do: ok, Undo: ok}}}
	orderss := saga.Register(runner, orders)
	form := url.Values{"action": {"abandon"}, "policy": {"saga/worker"}, "note": {"by hand"}}
	for i := range 100 {
		id := fmt.Sprintf("order-%02d", i)
		_, err := orderss.Start(t.Context(), id, order{})
		require.NoError(t, err)
		form.Add("ids", id+"@0")
	}
	return runner, form
}

// actOn100 abandons 100 sagas in one request, and calls each after every saga. It returns the response, the audited
// operations, and the number of sagas that are still running.
func actOn100(t *testing.T, cfg console.Config, each func(n int64, page *console.Console)) (
	answer manyResult, audited []string, running int,
) {
	runner, form := hundred(t, saga.NewMemory())
	cfg.Audit = func(_ context.Context, op console.Operation, err error) {
		audited = append(audited, fmt.Sprint(op.ID, " ", err))
	}
	s := pageOf(t, cfg, runner)
	var n atomic.Int64
	defer runner.Observe(func(_ context.Context, e saga.Event) {
		if e.Kind == saga.EventAbandoned && each != nil {
			each(n.Add(1), s.page)
		}
	})()
	require.NoError(t, json.Unmarshal(s.postJSON(form.Encode()).Body.Bytes(), &answer))
	return answer, audited, runningSagas(t, runner)
}

// ids returns n ids with a prefix.
func ids(prefix string, n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprint(prefix, i))
	}
	return all
}

func runningSagas(t *testing.T, runner *saga.Runner) (n int) {
	counts, _, err := runner.Counts(t.Context())
	require.NoError(t, err)
	for _, c := range counts { // empty if all have ended
		n += c.Running
	}
	return n
}

func TestActOnMany(t *testing.T) {
	allowed := map[string]bool{}
	answer, audited, running := actOn100(t, console.Config{Allow: func(_ *http.Request, op console.Operation) error {
		allowed[op.ID] = true
		return nil
	}}, nil)
	require.True(t, answer.Done)
	require.Equal(t, 100, answer.Acted)
	require.Len(t, allowed, 100, "Allow is called for each saga")
	require.Len(t, audited, 100)
	require.Zero(t, running)
}

func TestActOnManyEndsWhenAllowRefuses(t *testing.T) {
	var revoked atomic.Bool
	answer, audited, running := actOn100(t, console.Config{Allow: func(*http.Request, console.Operation) error {
		if revoked.Load() {
			return errors.New("no longer allowed")
		}
		return nil
	}}, func(n int64, _ *console.Console) { revoked.Store(n == 40) })
	require.False(t, answer.Done)
	require.Equal(t, "40 done, 0 refused, 60 left: no longer allowed", answer.Error)
	require.Equal(t, []int{40, 0, 60}, []int{answer.Acted, answer.Refused, answer.Left})
	require.Equal(t, 60, running)
	require.Equal(t, "order-40 no longer allowed", audited[40])
	require.Len(t, audited, 41)
}

func TestActOnManyEndsAtClose(t *testing.T) {
	answer, _, running := actOn100(t, console.Config{Allow: allow}, func(n int64, page *console.Console) {
		if n == 40 {
			page.Close()
		}
	})
	require.Equal(t, "40 done, 0 refused, 60 left: console is closed", answer.Error)
	require.Equal(t, 60, running)
}

// An Allow whose error matches an error of package saga has still forbidden the action.
func TestActOnManyEndsWithSagaErrorOfAllow(t *testing.T) {
	answer, _, running := actOn100(t, console.Config{Allow: func(_ *http.Request, op console.Operation) error {
		if op.ID == "order-07" {
			return fmt.Errorf("not this one: %w", saga.ErrNotAllowed)
		}
		return nil
	}}, nil)
	require.Contains(t, answer.Error, "7 done, 0 refused, 93 left: not this one")
	require.Equal(t, 93, running)
}

// A pipeListener is a net.Listener whose connections are in memory, for a server in a synctest bubble.
type pipeListener struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error   { close(l.closed); return nil }
func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{} }

func (l *pipeListener) dial(context.Context, string, string) (net.Conn, error) {
	client, server := net.Pipe()
	l.conns <- server
	return client, nil
}

// A slowCommit is a store that takes a second for each commit.
type slowCommit struct{ store.Store }

func (s slowCommit) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	select {
	case <-time.After(time.Second):
		return s.Store.Commit(ctx, req)
	case <-ctx.Done():
		return store.Receipt{}, ctx.Err()
	}
}

// All sagas would take 100 seconds. The server would close the connection before the response.
func TestActOnManyRespondsInTime(t *testing.T) {
	passes := func(h http.Handler) http.Handler { return h }
	for name, c := range map[string]struct {
		timeout time.Duration
		around  func(http.Handler) http.Handler
	}{
		"WriteTimeout": {20 * time.Second, passes},
		"ctx": {0, func(h http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				ctx, cancel := context.WithTimeout(r.Context(), 20*time.Second)
				defer cancel()
				h.ServeHTTP(w, r.WithContext(ctx))
			})
		}},
		"TimeoutHandler": {time.Hour, func(h http.Handler) http.Handler {
			return http.TimeoutHandler(h, 20*time.Second, "cut off")
		}},
	} {
		for _, accept := range []string{"application/json", "text/html"} {
			t.Run(name+" "+accept, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					runner, form := hundred(t, slowCommit{saga.NewMemory()})
					form.Set("sure", "1")
					form.Set("list", "status=running")
					reg := registry.New()
					reg.MustAdd(runner)
					page := console.New(reg, console.Config{Allow: allow})
					defer page.Close()
					l := &pipeListener{make(chan net.Conn), make(chan struct{})}
					server := &http.Server{Handler: c.around(page), WriteTimeout: c.timeout}
					go func() { _ = server.Serve(l) }()
					defer server.Close()
					client := &http.Client{Transport: &http.Transport{DialContext: l.dial}}
					defer client.CloseIdleConnections()
					req, _ := http.NewRequest("POST", "http://console/act", strings.NewReader(form.Encode()))
					req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
					req.Header.Set("Accept", accept)
					started := time.Now()
					res, err := client.Do(req)
					require.NoError(t, err)
					body, err := io.ReadAll(res.Body)
					require.NoError(t, err)
					require.Equal(t, 12*time.Second, time.Since(started).Truncate(time.Second))
					require.Equal(t, http.StatusServiceUnavailable, res.StatusCode)
					require.Contains(t, string(body), "12 done, 0 refused, 88 left: time for this response is over")
					require.Equal(t, 88, runningSagas(t, runner))
				})
			})
		}
	}
}

// A saga that a colleague has retried since the list was shown must not be compensated.
func TestActOnManyRefusesChangedSagas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDepot(t, console.Config{Allow: allow, Show: console.Show{Errors: true}})
		d.run("stuck-1", "stuck-2", "stuck-3@home")
		form := []string{"action", "abandon", "policy", "saga/worker", "list", "status=stuck", "note", "old list"}
		body := d.get("/sagas?status=stuck", nil).Body.String()
		boxes := regexp.MustCompile(`<input type="checkbox" form="many" name="ids" value="([^"]*)"`)
		for _, m := range boxes.FindAllStringSubmatch(body, -1) {
			form = append(form, "ids", html.UnescapeString(m[1]))
		}
		require.Len(t, form, 14)
		require.NoError(t, d.runner.Operate(t.Context(), "stuck-2", saga.Operation{Action: saga.ActionRetry, Note: "fixed"}))
		w := d.post(form...)
		require.Equal(t, http.StatusOK, w.Code)
		require.Contains(t, w.Body.String(), "Abandon applied to 2 sagas.")
		require.Contains(t, html.UnescapeString(w.Body.String()), `">stuck-2</a>: saga: not allowed: abandon of "stuck-2": `)
		for id, want := range map[string]saga.Status{
			"stuck-1": saga.Abandoned, "stuck-2": saga.Compensating, "stuck-3@home": saga.Abandoned,
		} {
			in, err := d.runner.Get(t.Context(), id)
			require.NoError(t, err)
			require.Equal(t, want, in.Status, id)
		}
	})
}

func TestInvalidTargets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDepot(t, console.Config{Allow: allow})
		d.run("stuck-1")
		for _, c := range []struct {
			ids  []string
			want string
		}{
			{[]string{"stuck-1"}, `ids: is "stuck-1": must be id@seq`},
			{[]string{"@1"}, `ids: is "@1": must be id@seq`},
			{[]string{"stuck-1@x"}, `ids: is "x": must be a number of log entries`},
			{[]string{"stuck-1@0", "stuck-1@-1"}, `ids: is "-1": must be a number of log entries`},
			{[]string{"stuck-1@0", "seq=5"}, "seq: must be part of ids, as id@seq"},
			{nil, "select at least one saga"},
		} {
			form := []string{"action", "abandon", "policy", "saga/worker", "list", "status=stuck", "note", "keep me"}
			for _, id := range c.ids {
				key, value := "ids", id
				if seq, ok := strings.CutPrefix(id, "seq="); ok {
					key, value = "seq", seq
				}
				form = append(form, key, value)
			}
			w := d.post(form...)
			require.Equal(t, http.StatusBadRequest, w.Code, c.want)
			require.Contains(t, html.UnescapeString(w.Body.String()), c.want)
			require.Contains(t, w.Body.String(), `<h1>Sagas`, "the list is shown again")
			require.Contains(t, w.Body.String(), `value="keep me"`)
		}
		in, err := d.runner.Get(t.Context(), "stuck-1")
		require.NoError(t, err)
		require.Equal(t, saga.Stuck, in.Status)
	})
}

// A list offers an action if at least one of its sagas allows the action.
func TestListOffersAllowedActions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDepot(t, console.Config{Allow: allow})
		d.run("ok-1", "stuck-1")
		_, err := saga.Register(d.runner, d.orders).Start(t.Context(), "new-1", order{})
		require.NoError(t, err)
		for query, want := range map[string][]string{
			"":                  {"retry", "cancel", "compensate", "abandon"},
			"?status=stuck":     {"retry", "abandon"},
			"?status=running":   {"retry", "cancel", "compensate", "abandon"},
			"?status=completed": nil,
		} {
			body := d.get("/sagas"+query, nil).Body.String()
			var offered []string
			for _, m := range regexp.MustCompile(`name="action" value="(\w+)"`).FindAllStringSubmatch(body, -1) {
				offered = append(offered, m[1])
			}
			require.Equal(t, want, offered, query)
			require.Equal(t, want != nil, strings.Contains(body, `type="checkbox" form="many"`), query)
		}
		body := d.get("/sagas?status=stuck", nil).Body.String()
		require.Contains(t, body, `data-can="retry skip abandon "`)
		d.shop = newPage(t, d.reg, console.Config{})
		require.NotContains(t, d.get("/sagas", nil).Body.String(), "checkbox", "read-only")
	})
}

func TestStuckSagasAreGrouped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDepot(t, console.Config{Show: console.Show{Errors: true}, Allow: allow})
		d.run(ids("stuck-", 281)...)
		var p found
		d.get("/sagas", &p)
		require.Len(t, p.Stuck, 281, "on one page")
		require.Len(t, p.Groups, 1)
		require.Equal(t, 281, p.Groups[0].Count)
		require.Equal(t, "reserve", p.Groups[0].Step)
		require.Equal(t, "warehouse: secret-host unreachable", p.Groups[0].Error)
		p = found{}
		d.get("/sagas?status=stuck", &p)
		require.Len(t, p.Sagas, 281)
		require.Equal(t, 281, p.Groups[0].Count)
		body := d.get("/sagas", nil).Body.String()
		require.Equal(t, 1, strings.Count(body, "secret-host"), "the error is shown once for the group")
		form := []string{"action", "abandon", "policy", "saga/worker", "list", "", "note", "by hand"}
		for _, s := range p.Sagas {
			form = append(form, "ids", s.target())
		}
		require.Equal(t, "sagas?acted=281&done=abandon&runner=worker", d.post(form...).Header().Get("Location"))
		require.Contains(t, d.get("/sagas?acted=281&done=abandon", nil).Body.String(), "Abandon applied to 281 sagas.")
		p = found{}
		d.get("/sagas", &p)
		require.Empty(t, p.Groups)
	})
}

// The page shows up to 500 stuck sagas, and links to the others.
func TestMoreStuckSagasAreLinked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDepot(t, console.Config{})
		d.run(ids("stuck-", 510)...)
		var p found
		d.get("/sagas", &p)
		require.Len(t, p.Stuck, 500)
		more := regexp.MustCompile(`<a href="(sagas[^"]*)">More stuck sagas`).FindStringSubmatch(d.get("/sagas",
			nil).Body.String())
		require.NotNil(t, more)
		p = found{}
		d.get("/"+html.UnescapeString(more[1]), &p)
		require.Len(t, p.Sagas, 10)
		require.Empty(t, p.Next)
	})
}
