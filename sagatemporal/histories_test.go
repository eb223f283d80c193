package sagatemporal_test

import (
	"compress/gzip"
	"context"
	"flag"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	historypb "go.temporal.io/api/history/v1"
	"go.temporal.io/api/temporalproto"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/sagatemporal"
)

var record = flag.Bool("record", false, "write the histories of tests on a server to testdata")

// A retry waits for a timer, steps run in parallel, and Undos follow.
func compensated() *saga.Saga[trip] {
	var tries atomic.Int32
	car, hotel := step("car"), step("hotel")
	car.Parallel = true
	car.Do = func(_ context.Context, s *trip) error {
		s.Note = "car"
		if tries.Add(1) == 1 {
			return errBroken
		}
		return nil
	}
	hotel.Do = note("do hotel", saga.Declined(errBroken))
	return define(step("flight"), car, hotel)
}

// A signal arrives before its step, an operator retries a stuck saga, and another signal is refused.
func operated() *saga.Saga[trip] {
	var tries atomic.Int32
	charge, mail := step("charge"), step("mail")
	charge.Pivot, charge.Undo, charge.Await = true, nil, "paid"
	mail.Undo = nil
	mail.Do = func(context.Context, *trip) error {
		if tries.Add(1) == 1 {
			return saga.Permanent(errBroken)
		}
		return nil
	}
	return define(step("flight"), charge, mail)
}

// The decisions are enough for a second run.
func continued() *saga.Saga[trip] {
	var tries atomic.Int32
	flight := step("flight")
	flight.Attempts = saga.Unlimited
	flight.Do = func(context.Context, *trip) error {
		if tries.Add(1) < 40 {
			return errBroken
		}
		return nil
	}
	flight.Backoff = func(int) time.Duration { return time.Millisecond }
	return define(flight)
}

// TestServerHistories runs the sagas whose histories TestReplay reads. With -record, it replaces the histories:
// do so before a change of the workflow, never with one.
func TestServerHistories(t *testing.T) {
	c := server(t)
	run := func(name string, sg *saga.Saga[trip], until saga.Status) (*saga.Handle[trip], saga.Engine, string) {
		sg.Name = name
		id := unique(name)
		w := worker.New(c, id, worker.Options{})
		engine := sagatemporal.New(c, w, id)
		h := saga.Register(engine, sg)
		require.NoError(t, w.Start())
		t.Cleanup(w.Stop)
		_, err := h.Start(t.Context(), id, trip{})
		require.NoError(t, err)
		if name == "operated" {
			require.NoError(t, h.Signal(t.Context(), id, "paid", []byte("by card")))
		}
		in, err := engine.Wait(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, until, in.Status)
		return h, engine, id
	}
	_, _, id := run("compensated", compensated(), saga.Compensated)
	save(t, c, id, "compensated")
	h, engine, id := run("operated", operated(), saga.Stuck)
	require.ErrorIs(t, h.Signal(t.Context(), id, "other", nil), saga.ErrNotAllowed)
	require.NoError(t, engine.Operate(t.Context(), id, saga.Operation{Action: saga.ActionRetry, Note: "mended"}))
	_, err := h.Result(t.Context(), id)
	require.NoError(t, err)
	save(t, c, id, "operated")
	_, _, id = run("continued", continued(), saga.Completed)
	save(t, c, id, "continued")
}

// save writes the history of each run of a workflow, if the test records.
func save(t *testing.T, c client.Client, id, name string) {
	t.Helper()
	for run := ""; *record; name += "-before" {
		events, _ := history(t, c, id, run)
		file, err := os.Create(filepath.Join("testdata", name+".json.gz"))
		require.NoError(t, err)
		data, err := temporalproto.CustomJSONMarshalOptions{}.Marshal(&historypb.History{Events: events})
		require.NoError(t, err)
		zip := gzip.NewWriter(file)
		_, err = zip.Write(data)
		require.NoError(t, err)
		require.NoError(t, zip.Close())
		require.NoError(t, file.Close())
		if run = events[0].GetWorkflowExecutionStartedEventAttributes().ContinuedExecutionRunId; run == "" {
			return
		}
	}
}
