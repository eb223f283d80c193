package sagatemporal_test

import (
	"compress/gzip"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	historypb "go.temporal.io/api/history/v1"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/sagatemporal"
)

func read(t *testing.T, file string) *historypb.History {
	t.Helper()
	f, err := os.Open(file)
	require.NoError(t, err)
	defer f.Close()
	zip, err := gzip.NewReader(f)
	require.NoError(t, err)
	h, err := client.HistoryFromJSON(zip, client.HistoryJSONOptions{})
	require.NoError(t, err)
	return h
}

// A changed program has another Codec, another Backoff and other steps: a replay must not call them.
func changed(name string) *saga.Saga[trip] {
	st := saga.Step[trip]{
		Name:    "changed",
		Do:      func(context.Context, *trip) error { panic("a replay has called a step") },
		Backoff: func(int) time.Duration { panic("a replay has called the Backoff") },
		Pivot:   true,
	}
	sg := define(st)
	sg.Name, sg.Codec = name, noCodec{}
	return sg
}

type noCodec struct{}

func (noCodec) Encode(*trip) ([]byte, error) { panic("a replay has called the Codec") }
func (noCodec) Decode([]byte, *trip) error   { panic("a replay has called the Codec") }

// A replayer is the part of a worker that replays histories.
type replayer struct {
	worker.Registry
	of worker.WorkflowReplayer
}

func (r replayer) RegisterWorkflowWithOptions(w any, o workflow.RegisterOptions) {
	r.of.RegisterWorkflowWithOptions(w, o)
}

func (replayer) RegisterActivityWithOptions(any, activity.RegisterOptions) {}

func replay(h *historypb.History) error {
	name := strings.TrimPrefix(h.Events[0].GetWorkflowExecutionStartedEventAttributes().WorkflowType.Name, "saga/")
	r := replayer{of: worker.NewWorkflowReplayer()}
	saga.Register(sagatemporal.New(newEnvironment(), r, "sagas"), changed(name))
	return r.of.ReplayWorkflowHistory(quiet, h)
}

// Histories that an earlier version of this module has recorded are replayed by a program whose Backoff, Codec and
// steps have changed. Decisions come from the history, so that it does not matter how package saga decides now.
func TestReplay(t *testing.T) {
	files, err := filepath.Glob("testdata/*.json.gz")
	require.NoError(t, err)
	require.Len(t, files, 5)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".json.gz"), func(t *testing.T) {
			require.NoError(t, replay(read(t, file)))
		})
	}
}

// A replay notices another order of commands.
func TestReplayNoticesChanges(t *testing.T) {
	h := read(t, "testdata/compensated.json.gz")
	for _, e := range h.Events {
		if a := e.GetActivityTaskScheduledEventAttributes(); a != nil {
			a.ActivityType.Name = "saga/other"
		}
	}
	require.ErrorContains(t, replay(h), "nondeterministic")
}
