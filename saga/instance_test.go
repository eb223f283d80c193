package saga_test

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A filed store contains one saga.
type filed struct {
	store.Store
	rec store.Record
}

func (f *filed) Load(context.Context, string) (store.Record, error) { return f.rec, nil }

// ordered is the definition of the records in the tests below.
func ordered() *saga.Saga[trip] {
	pay := step("pay")
	pay.Pivot = true
	return sequence(step("flight"), pay, step("mail"))
}

const flightDone = `{"n":"flight","s":"done","a":1}`

// get returns the saga from the Get of a runner that knows the definition.
func get(t *testing.T, rec store.Record) *saga.Instance {
	t.Helper()
	rec.Saga, rec.Version = "trip", 1
	r := saga.NewRunner(&filed{rec: rec}, saga.RunnerConfig{})
	saga.Register(r, ordered())
	return instance(t, r, "trip-1")
}

// TestActions has a row for each reason to allow an action or not.
func TestActions(t *testing.T) {
	const (
		cancel, retry, skip, compensate, abandon = saga.ActionCancel, saga.ActionRetry, saga.ActionSkip,
			saga.ActionCompensate, saga.ActionAbandon
		idle    = `,{"n":"pay","s":"idle"},{"n":"invoice","s":"idle"},{"n":"mail","s":"idle"}`
		paid    = `,{"n":"pay","s":"done"},{"n":"invoice","s":"idle"},{"n":"mail","s":"started"}`
		settled = `,{"n":"pay","s":"skipped"},{"n":"invoice","s":"idle"},{"n":"mail","s":"started"}`
		under   = `,{"n":"pay","s":"started"},{"n":"invoice","s":"idle"},{"n":"mail","s":"idle"}`
	)
	type actions = []saga.Action
	for name, c := range map[string]struct {
		rec   store.Record
		back  string
		steps string
		want  actions
	}{
		"before the pivot": {store.Record{Status: saga.Running}, "", idle,
			actions{cancel, retry, compensate, abandon}},
		"a step is in progress": {store.Record{Status: saga.Running}, "", under,
			actions{cancel, retry, skip, compensate, abandon}},
		"held": {store.Record{Status: saga.Running, Owner: "a"}, "", under, actions{cancel, abandon}},
		"held, canceled": {store.Record{Status: saga.Running, Owner: "a", CancelRequested: true}, "", under,
			actions{abandon}},
		"canceled": {store.Record{Status: saga.Running, CancelRequested: true}, "", idle,
			actions{retry, compensate, abandon}},
		"after the pivot":          {store.Record{Status: saga.Running}, "", paid, actions{retry, skip, abandon}},
		"after the pivot, held":    {store.Record{Status: saga.Running, Owner: "a"}, "", paid, actions{abandon}},
		"the pivot is skipped":     {store.Record{Status: saga.Running}, "", settled, actions{retry, skip, abandon}},
		"after another pivot":      {store.Record{Status: saga.Running}, `"pivot":"flight",`, idle, actions{retry, abandon}},
		"stuck":                    {store.Record{Status: saga.Stuck}, "", under, actions{retry, skip, compensate, abandon}},
		"stuck after the pivot":    {store.Record{Status: saga.Stuck}, "", paid, actions{retry, skip, abandon}},
		"stuck while compensating": {store.Record{Status: saga.Stuck}, `"turned_back":true,`, idle, actions{retry, abandon}},
		"while compensating": {store.Record{Status: saga.Compensating}, `"turned_back":true,`, idle,
			actions{retry, abandon}},
		"ended": {store.Record{Status: saga.Compensated}, `"turned_back":true,`, idle, nil},
		"of a shorter definition": {store.Record{Status: saga.Stuck}, "", idle + `,{"n":"new","s":"idle"}`,
			actions{retry, compensate, abandon}},
		"of a definition by names": {store.Record{Status: saga.Stuck}, "", `,{"n":"bill","s":"done"}`,
			actions{retry, compensate, abandon}},
	} {
		t.Run(name, func(t *testing.T) {
			c.rec.Progress = []byte(`{` + c.back + `"steps":[` + flightDone + c.steps + `]}`)
			require.Equal(t, c.want, get(t, c.rec).Actions)
		})
	}
}

func TestInstanceSteps(t *testing.T) {
	created := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	in := get(t, store.Record{Status: saga.Running, LastError: "declined", CreatedAt: created, Now: created.Add(time.Hour),
		Progress: []byte(`{"steps":[` + flightDone + `,{"n":"pay","s":"started"},{"n":"post","s":"idle"}]}`)})
	require.Equal(t, []saga.StepState{
		{Name: "flight", Status: saga.StepDone, Attempts: 1},
		{Name: "pay", Status: saga.StepStarted, Pivot: true},
		{Name: "post", Status: saga.StepIdle},
	}, in.Steps)
	require.Empty(t, in.Cause, "it is not stuck")
	require.Equal(t, time.Hour, in.IdleFor(), "without progress, since its start")

	in = get(t, store.Record{Status: saga.Stuck, LastError: "unreadable", CreatedAt: created, Now: created.Add(time.Hour),
		Progress: []byte("{")})
	require.Equal(t, "unreadable", in.Cause)
	require.Empty(t, in.Steps)
	in = get(t, store.Record{Status: saga.Stuck, LastError: "of another step",
		Progress: []byte(`{"cause":"declined","since":"2030-01-01T00:00:00Z","steps":[]}`), Now: created.Add(time.Minute)})
	require.Equal(t, "declined", in.Cause)
	require.Equal(t, time.Minute, in.IdleFor())

	in = get(t, store.Record{Status: saga.Running,
		Progress: []byte(`{"steps":[` + flightDone + `,{"n":"post","s":"idle"}]}`)})
	require.Equal(t, saga.StepState{Name: "post", Status: saga.StepIdle}, in.Steps[1], "pay is the pivot")

	t.Log("of a definition that is not known, and a record that does not say which step is the pivot")
	st := &filed{rec: store.Record{Status: saga.Running, Progress: []byte(`{"steps":[` + flightDone + `]}`)}}
	in, err := saga.NewRunner(st, saga.RunnerConfig{}).Get(t.Context(), "trip-1")
	require.NoError(t, err)
	require.Equal(t, []saga.Action{saga.ActionCancel, saga.ActionRetry, saga.ActionCompensate, saga.ActionAbandon},
		in.Actions)
}

// TestRecordedError: the error of a stuck saga lists each step that failed and was not undone.
func TestRecordedError(t *testing.T) {
	const failed = `,{"n":"pay","s":"failed","e":"declined"},{"n":"invoice","s":"idle"},` +
		`{"n":"mail","s":"undo_failed","e":"no mail"}]}`
	mail := saga.Failure{Step: "mail", Op: saga.OpUndo, Err: errors.New("no mail")}
	pay := saga.Failure{Step: "pay", Op: saga.OpDo, Err: errors.New("declined")}
	for name, c := range map[string]struct {
		status saga.Status
		back   string
		err    string
		failed []saga.Failure
	}{
		"stuck":                    {saga.Stuck, "", "broken", []saga.Failure{pay, mail}},
		"stuck while compensating": {saga.Stuck, `"turned_back":true,`, "broken", []saga.Failure{mail}},
		"compensated":              {saga.Compensated, "", "broken", []saga.Failure{mail}},
		"abandoned":                {saga.Abandoned, "", "by hand", []saga.Failure{mail}},
	} {
		t.Run(name, func(t *testing.T) {
			st := &filed{rec: store.Record{
				ID: "trip-1", Saga: "trip", Version: 1, Status: c.status, State: []byte("{}"), LastError: "by hand",
				Progress: []byte(`{` + c.back + `"step":"pay","cause":"broken","steps":[` + flightDone + failed),
			}}
			r := saga.NewRunner(st, saga.RunnerConfig{})
			sg := ordered()
			sagas := saga.Register(r, sg)
			_, err := sagas.Result(t.Context(), "trip-1")
			e := detail(t, err)
			require.EqualError(t, e.Err, c.err)
			require.Len(t, e.Failed, len(c.failed))
			for i, f := range c.failed {
				require.Equal(t, f.Step, e.Failed[i].Step)
				require.Equal(t, f.Op, e.Failed[i].Op)
				require.EqualError(t, e.Failed[i].Err, f.Err.Error())
			}
		})
	}
}

// TestInstanceSurvivesJSON: another engine may send an Instance as JSON.
func TestInstanceSurvivesJSON(t *testing.T) {
	in := get(t, store.Record{
		Status: saga.Running, CreatedAt: time.Unix(1e9, 0).UTC(), Now: time.Unix(1e9+60, 0).UTC(), State: []byte(`{}`),
		Progress: []byte(`{"since":"2001-09-09T01:47:00Z","answered":true,"pivot":"pay","steps":[` + flightDone +
			`,{"n":"pay","s":"idle"},{"n":"mail","s":"idle"}]}`),
	})
	back := copied(in)
	require.Equal(t, 40*time.Second, back.IdleFor())
	require.Equal(t, in.Steps, back.Steps)
	require.True(t, back.Steps[1].Pivot)
	data, err := json.Marshal(in)
	require.NoError(t, err)
	again, err := json.Marshal(*back)
	require.NoError(t, err)
	require.JSONEq(t, string(data), string(again))
	require.Contains(t, string(data), `"Answered":true`)
	require.Error(t, json.Unmarshal([]byte(`{"ID":1}`), back))
}
