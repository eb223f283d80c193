package console_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/saga"
)

// actOn100 abandons a hundred sagas in one request, and calls each after each of them. It returns
// the answer, what Audit was told of, and how many go on.
func actOn100(t *testing.T, cfg console.Config, each func(n int64, page *console.Console)) (answer struct {
	Done           bool
	Error          string
	Acted, Refused int
}, audited []string, left int) {
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "worker"})
	orders := &saga.Saga[order]{Name: "order", Steps: []saga.Step[order]{{Name: "reserve", Do: ok, Undo: ok}}}
	saga.Register(runner, orders)
	form := url.Values{"action": {"abandon"}, "policy": {"saga/worker"}, "note": {"by hand"}}
	for i := range 100 {
		id := fmt.Sprintf("order-%02d", i)
		_, err := saga.Start(t.Context(), runner, orders, id, order{})
		require.NoError(t, err)
		form.Add("ids", id)
	}
	reg := registry.New()
	reg.MustAdd(runner)
	cfg.Audit = func(_ context.Context, op console.Operation, err error) {
		audited = append(audited, fmt.Sprint(op.ID, " ", err))
	}
	s := newPage(t, reg, cfg)
	defer s.page.Close()
	var n atomic.Int64
	defer runner.Observe(func(_ context.Context, e saga.Event) {
		if e.Kind == saga.EventAbandoned && each != nil {
			each(n.Add(1), s.page)
		}
	})()
	require.NoError(t, json.Unmarshal(s.postJSON(form.Encode()).Body.Bytes(), &answer))
	counts, _, err := runner.Counts(t.Context())
	require.NoError(t, err)
	for _, c := range counts { // none, if all have ended
		left += c.Running
	}
	return answer, audited, left
}

func TestManyAreActedOnInTheRequest(t *testing.T) {
	asked := map[string]bool{}
	answer, audited, left := actOn100(t, console.Config{Allow: func(_ *http.Request, op console.Operation) error {
		asked[op.ID] = true
		return nil
	}}, nil)
	require.True(t, answer.Done)
	require.Equal(t, 100, answer.Acted)
	require.Len(t, asked, 100, "permission is asked for each")
	require.Len(t, audited, 100)
	require.Zero(t, left)
}

func TestManyAreActedOnUntilThePermissionIsTakenAway(t *testing.T) {
	var revoked atomic.Bool
	answer, audited, left := actOn100(t, console.Config{Allow: func(*http.Request, console.Operation) error {
		if revoked.Load() {
			return errors.New("no longer allowed")
		}
		return nil
	}}, func(n int64, _ *console.Console) { revoked.Store(n == 40) })
	require.False(t, answer.Done)
	require.Equal(t, "40 done, 0 refused, 60 left: no longer allowed", answer.Error)
	require.Equal(t, 60, left)
	require.Equal(t, "order-40 no longer allowed", audited[40])
	require.Len(t, audited, 41)
}

func TestManyAreActedOnUntilClose(t *testing.T) {
	answer, _, left := actOn100(t, console.Config{Allow: allow}, func(n int64, page *console.Console) {
		if n == 40 {
			page.Close()
		}
	})
	require.Equal(t, "40 done, 0 refused, 60 left: the console is closed", answer.Error)
	require.Equal(t, 60, left)
}

// An Allow whose error is one of package saga has not let the action through all the same.
func TestManyAreActedOnUntilAllowSaysNoInWordsOfSaga(t *testing.T) {
	answer, _, left := actOn100(t, console.Config{Allow: func(_ *http.Request, op console.Operation) error {
		if op.ID == "order-07" {
			return fmt.Errorf("not this one: %w", saga.ErrNotAllowed)
		}
		return nil
	}}, nil)
	require.Contains(t, answer.Error, "7 done, 0 refused, 93 left: not this one")
	require.Equal(t, 93, left)
}
