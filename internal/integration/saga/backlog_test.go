package saga_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

var backlogSagas = flag.Int("backlog.sagas", 0, "how many sagas wait in TestBacklog; 0: skip it")

// waiting fills the database with sagas of one definition that wait to be
// claimed, of five steps that do nothing.
func waiting(t *testing.T, db *sql.DB, n int) *saga.Saga[nothing] {
	t.Helper()
	sg, steps := fiveSteps(), ""
	for i := range 5 {
		name := fmt.Sprint("s", i)
		steps += fmt.Sprintf(`,{"n":%q,"s":%q}`, name,
			map[bool]saga.StepStatus{true: saga.StepStarted, false: saga.StepIdle}[i == 0])
	}
	_, err := db.Exec(`INSERT INTO saga (id, name, version, status, data, steps, seq, nonce, owner, epoch, wake_at, created_at, updated_at)
		SELECT 'trip-' || i, 'trip', 0, 'running', '{}', '{"steps":[' || $1 || ']}', 1, 1, '', 0, 1, 1, 1 FROM generate_series(1, $2::int) i`, steps[1:], n)
	require.NoError(t, err)
	_, err = db.Exec(`INSERT INTO saga_log (saga_id, seq, step, op, event, attempt, epoch, error, at)
		SELECT 'trip-' || i, 1, '', '', 'created', 0, 0, '', 1 FROM generate_series(1, $1::int) i`, n)
	require.NoError(t, err)
	_, err = db.Exec(`ANALYZE saga`)
	require.NoError(t, err)
	return sg
}

func fiveSteps() *saga.Saga[nothing] {
	sg := &saga.Saga[nothing]{Name: "trip"}
	for i := range 5 {
		sg.Steps = append(sg.Steps, saga.Step[nothing]{Name: fmt.Sprint("s", i), Do: done, Undo: done})
	}
	return sg
}

// drain returns how many sagas a second a runner completes, of n that wait.
func drain(t *testing.T, n int) float64 {
	d := newDatabase(t, sqlstore.PostgreSQL)
	db := d.open(t)
	sg := waiting(t, db, n)
	left := make(chan struct{})
	ended := 0
	events := make(chan struct{}, 1000)
	r := saga.NewRunner(d.store(t), saga.RunnerConfig{})
	r.Observe(func(_ context.Context, e saga.Event) {
		if e.Kind == saga.EventCompleted {
			events <- struct{}{}
		}
	})
	saga.Register(r, sg)
	go func() {
		for range events {
			if ended++; ended == n {
				close(left)
			}
		}
	}()
	begun := time.Now()
	run(t, r)
	<-left
	return float64(n) / time.Since(begun).Seconds()
}

// TestBacklog compares the drain of many sagas that wait with that of few. It is
// for a machine that does nothing else.
func TestBacklog(t *testing.T) {
	if *backlogSagas == 0 {
		t.Skip("-backlog.sagas is 0")
	}
	few := drain(t, 1000)
	many := drain(t, *backlogSagas)
	t.Logf("%.0f sagas a second of 1000 that wait, %.0f of %d", few, many, *backlogSagas)
	require.Greater(t, many, 0.9*few)
}

// TestBacklogOfProcesses logs how many sagas a second one, two and four processes
// complete. It is for a machine that does nothing else.
func TestBacklogOfProcesses(t *testing.T) {
	if *backlogSagas == 0 {
		t.Skip("-backlog.sagas is 0")
	}
	for _, processes := range []int{1, 2, 4} {
		d := newDatabase(t, sqlstore.PostgreSQL)
		db := d.open(t)
		waiting(t, db, *backlogSagas)
		config, err := json.Marshal(d)
		require.NoError(t, err)
		begun := time.Now()
		for range processes {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), "SAGA_DRAIN="+string(config))
			cmd.Stderr = os.Stderr
			require.NoError(t, cmd.Start())
			t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
		}
		for left := 1; left > 0; time.Sleep(20 * time.Millisecond) {
			require.NoError(t, db.QueryRow(`SELECT count(*) FROM saga WHERE status = 'running'`).Scan(&left))
		}
		t.Logf("%d processes: %.0f sagas a second", processes, float64(*backlogSagas)/time.Since(begun).Seconds())
	}
}

// drainAway completes the sagas that wait, until the process is killed.
func drainAway(config string) error {
	var d database
	if err := json.Unmarshal([]byte(config), &d); err != nil {
		return err
	}
	db, err := d.connect()
	if err != nil {
		return err
	}
	r := saga.NewRunner(sqlstore.New(db, d.Dialect, sqlstore.Config{}), saga.RunnerConfig{})
	saga.Register(r, fiveSteps())
	return r.Run(context.Background())
}
