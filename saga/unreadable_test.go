package saga_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// stalls collects the EventStalled of a runner.
type stalls struct {
	mu   sync.Mutex
	list []string
}

func (s *stalls) observe(_ context.Context, e saga.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.Kind == saga.EventStalled {
		s.list = append(s.list, fmt.Sprintf("%s: %v", e.ID, e.Err))
	}
}

func (s *stalls) all() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.list
}

const otherSteps = "saga: steps of trip version 1 are not those of the record"

// TestUnreadableSagaIsLeftToAnotherBuild that has a step which this one lacks.
func TestUnreadableSagaIsLeftToAnotherBuild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, reported := saga.NewMemory(), new(stalls)
		second := sequence(step("flight"), step("hotel"))
		mustStart(t, idle(st, second), second)
		old, stop := observed(t, st, saga.RunnerConfig{}, reported.observe, sequence(step("flight")))
		time.Sleep(10 * time.Minute)
		require.Equal(t, []string{"trip-1: " + otherSteps}, reported.all(), "once")
		require.Equal(t, policy.Health{Status: policy.Warn, State: "unreadable", Detail: `saga "trip-1": ` + otherSteps},
			old.Describe().Health(t.Context()))
		in := instance(t, old, "trip-1")
		require.Equal(t, saga.Running, in.Status)
		require.Empty(t, in.Owner)
		require.Contains(t, in.LastError, "left to another build of the program")
		require.Less(t, old.Stats().Claimed, int64(30), "it is no hot loop")

		current, _ := observed(t, st, saga.RunnerConfig{}, silent, second)
		s, err := result[trip](t.Context(), current, "trip-1")
		require.NoError(t, err)
		require.Equal(t, []string{"do flight", "do hotel"}, s.Calls)
		time.Sleep(20 * time.Minute)
		require.Equal(t, policy.Health{}, old.Describe().Health(t.Context()))
		in = instance(t, old, "trip-1")
		require.Empty(t, in.LastError)
		stop()
	})
}

// TestUnreadableSagaIsStuckInTheEnd if no process reads it for a day.
func TestUnreadableSagaIsStuckInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := saga.NewMemory()
		second := sequence(step("flight"), step("hotel"))
		mustStart(t, idle(st, second), second)
		old, stop := observed(t, st, saga.RunnerConfig{}, silent, sequence(step("flight")))
		begun := time.Now()
		requireEnd(t, old, "trip-1", saga.ErrStuck)
		require.Greater(t, time.Since(begun), 23*time.Hour)
		require.Less(t, time.Since(begun), 25*time.Hour)
		require.Less(t, instance(t, old, "trip-1").Seq, int64(400), "entries in the log")
		require.Equal(t, policy.Health{Status: policy.Fail, State: "stuck", Detail: `1 saga; saga "trip-1": ` + otherSteps},
			old.Describe().Health(t.Context()))
		retry := saga.Operation{Action: saga.ActionRetry}
		require.ErrorIs(t, old.Operate(t.Context(), "trip-1", retry), saga.ErrNotRegistered)
		stop()
		current, _ := observed(t, st, saga.RunnerConfig{}, silent, second)
		require.NoError(t, current.Operate(t.Context(), "trip-1", retry))
		requireCompleted(t, current, "trip-1")
	})
}

// TestUnreadableRecordsAreLeftToOthers, unless they are no JSON: see TestUnreadableRecordIsStuckUnchanged.
func TestUnreadableRecordsAreLeftToOthers(t *testing.T) {
	const steps = `"steps":[{"n":"flight","s":"started"}]`
	for name, c := range map[string]struct{ progress, error string }{
		"a later version":   {`{"v":1,` + steps + `}`, "their version is 1, and this version of the package reads up to 0"},
		"another type":      {`{"steps":{}}`, "record's steps cannot be read"},
		"an unknown status": {strings.Replace(`{`+steps+`}`, "started", "paused", 1), `step flight has the status "paused"`},
		"another pivot":     {`{"pivot":"flight",` + steps + `}`, `pivot of trip version 1 is ""`},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st, reported := saga.NewMemory(), new(stalls)
				_, _, err := st.Start(t.Context(), store.StartRequest{
					ID: "trip-1", Saga: "trip", Version: 1, Status: saga.Running, State: []byte(`{}`),
					Progress: []byte(c.progress), Log: []store.Entry{{Kind: saga.EventCreated}},
				})
				require.NoError(t, err)
				observed(t, st, saga.RunnerConfig{}, reported.observe, sequence(step("flight")))
				time.Sleep(2 * time.Minute)
				require.Len(t, reported.all(), 1)
				require.Contains(t, reported.all()[0], c.error)
				rec, err := st.Load(t.Context(), "trip-1")
				require.NoError(t, err)
				require.Equal(t, saga.Running, rec.Status)
				require.Empty(t, rec.Owner)
				require.Contains(t, string(rec.Progress), strings.TrimSuffix(c.progress, "}"), "as it was")
				require.Equal(t, 1, strings.Count(string(rec.Progress), `"unread"`), "one mark after several claims")
			})
		})
	}
}

// TestAwaitStepThatADeploymentRemoves without a new version, while sagas wait in it.
func TestAwaitStepThatADeploymentRemoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, reported := saga.NewMemory(), new(stalls)
		wait := step("approval")
		wait.Await = "approved"
		sg := sequence(step("flight"), wait, step("hotel"))
		first, stop := observed(t, st, saga.RunnerConfig{}, silent, sg)
		for n := range 250 {
			_, err := saga.Register(first, sg).Start(t.Context(), fmt.Sprint("trip-", n), trip{})
			require.NoError(t, err)
		}
		time.Sleep(time.Minute)
		stop()
		r, stop := observed(t, st, saga.RunnerConfig{}, reported.observe, sequence(step("flight"), step("hotel")))
		time.Sleep(10 * time.Second)
		require.Len(t, reported.all(), 250)
		require.Contains(t, reported.all(), "trip-7: "+otherSteps)
		health := r.Describe().Health(t.Context())
		require.Equal(t, policy.Warn, health.Status)
		require.Equal(t, `250 sagas cannot be read, such as saga "trip-0": `+otherSteps, health.Detail)
		require.NoError(t, r.Signal(t.Context(), "trip-7", "approved", nil), "it need not be paid back")
		stop()

		back, _ := observed(t, st, saga.RunnerConfig{}, silent, sg)
		requireCompleted(t, back, "trip-7")
		require.Equal(t, saga.StepWaiting, instance(t, back, "trip-8").Steps[1].Status)
	})
}

// TestAwaitStepThatADeploymentRemovesIsSkipped by an operator, who makes the new steps those of the saga.
func TestAwaitStepThatADeploymentRemovesIsSkipped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := saga.NewMemory()
		wait := step("approval")
		wait.Await = "approved"
		sg, now := sequence(step("flight"), wait, step("hotel")), sequence(step("flight"), step("hotel"))
		first, stop := observed(t, st, saga.RunnerConfig{}, silent, sg)
		mustStart(t, first, sg)
		time.Sleep(time.Minute)
		stop()
		r, _ := observed(t, st, saga.RunnerConfig{}, silent, now)
		time.Sleep(time.Minute)
		operate(t, r, "trip-1", saga.Operation{Action: saga.ActionRetry, Note: "no approval needed", Version: 1})
		s, err := result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Equal(t, []string{"do flight", "do hotel"}, s.Calls)
	})
}
