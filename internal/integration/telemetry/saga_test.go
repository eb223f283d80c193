package telemetry_test

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceotel"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// TestMain runs the tests or, where a test has started it again as one, a worker process.
func TestMain(m *testing.M) {
	if dsn := os.Getenv("TELEMETRY_WORKER"); dsn != "" {
		if err := work(dsn, os.Getenv("TELEMETRY_START")); err != nil {
			fmt.Fprintln(os.Stderr, "worker:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	slog.SetDefault(slog.New(slog.DiscardHandler)) // the failures are intended
	os.Exit(m.Run())
}

// A line is what a worker says: a span that it exports, or that it has begun a step.
type line struct {
	Process     int
	Begun       string
	Name        string
	Trace, Span string
	Parent      string
	Links       []string // trace and span
}

func say(l line) {
	l.Process = os.Getpid()
	text, _ := json.Marshal(l)
	fmt.Println(string(text))
}

// An exporter says each span.
type exporter struct{}

func (exporter) ExportSpans(_ context.Context, spans []sdktrace.ReadOnlySpan) error {
	for _, s := range spans {
		l := line{Name: s.Name(), Trace: s.SpanContext().TraceID().String(), Span: s.SpanContext().SpanID().String()}
		if s.Parent().IsValid() {
			l.Parent = s.Parent().SpanID().String()
		}
		for _, link := range s.Links() {
			l.Links = append(l.Links, link.SpanContext.TraceID().String()+" "+link.SpanContext.SpanID().String())
		}
		say(l)
	}
	return nil
}

func (exporter) Shutdown(context.Context) error { return nil }

// work is the life of a worker process: it starts the saga with an id, if there is one,
// and runs sagas until its standard input ends.
func work(dsn, start string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	db.SetMaxOpenConns(8)
	store := sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{})
	tracers := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter{}))
	tel := resilienceotel.New(resilienceotel.Config{TracerProvider: tracers})
	runner := saga.NewRunner(store, saga.RunnerConfig{
		LeaseTTL: time.Second, Poll: 50 * time.Millisecond, Inject: tel.Inject, Extract: tel.Extract,
	})
	undo := func(context.Context, *trip) error { return nil }
	sg := &saga.Saga[trip]{Name: "trip", Steps: resilienceotel.Steps(tel, []saga.Step[trip]{
		{Name: "flight", DoTx: func(context.Context, *sql.Tx, *trip) error { return nil }, Undo: undo},
		{Name: "hotel", Undo: undo, Do: func(ctx context.Context, _ *trip) error {
			say(line{Begun: "hotel"})
			if start != "" { // until the process is killed
				<-ctx.Done()
			}
			return ctx.Err()
		}},
		{Name: "card", Undo: undo, Do: func(context.Context, *trip) error { return saga.Permanent(errDown) }},
	})}
	sagas := saga.Register(runner, sg)
	if start != "" {
		ctx, span := tracers.Tracer("test").Start(ctx, "order")
		if _, err := sagas.Start(ctx, start, trip{}); err != nil {
			return err
		}
		span.End()
	}
	return runner.Run(ctx)
}

// TestStepsAreLinkedAcrossATakeover kills the process that has started a saga in the
// middle of a step. Another takes the saga over and undoes it. The spans of all steps, in
// both processes, are linked to the span that started the saga.
func TestStepsAreLinkedAcrossATakeover(t *testing.T) {
	dsn := newSchema(t)
	lines := make(chan line, 100)
	first := startWorker(t, dsn, "trip-17", lines)
	var spans []line
	until := func(last func(line) bool) {
		t.Helper()
		deadline := time.After(time.Minute)
		for {
			select {
			case l := <-lines:
				if l.Name != "" {
					spans = append(spans, l)
				}
				if last(l) {
					return
				}
			case <-deadline:
				t.Fatal("the workers do not come to an end", spans)
			}
		}
	}
	until(func(l line) bool { return l.Begun == "hotel" })
	require.NoError(t, first.Process.Kill())
	second := startWorker(t, dsn, "", lines)
	until(func(l line) bool { return l.Name == "flight undo" })

	byName := map[string]line{}
	for _, s := range spans {
		byName[s.Name] = s
	}
	order := byName["order"]
	require.NotEmpty(t, order.Trace)
	delete(byName, "order")
	for name, s := range byName {
		require.Equal(t, []string{order.Trace + " " + order.Span}, s.Links, name)
		require.Empty(t, s.Parent, name)
		require.NotEqual(t, order.Trace, s.Trace, name)
	}
	processes := func(names ...string) (all []int) {
		for _, name := range names {
			require.Contains(t, byName, name)
			all = append(all, byName[name].Process)
		}
		return all
	}
	one, two := first.Process.Pid, second.Process.Pid
	require.Equal(t, []int{one, two, two, two, two, two},
		processes("flight do", "hotel do", "card do", "card undo", "hotel undo", "flight undo"))
}

// newSchema returns the DSN of a schema of the test's own, migrated.
func newSchema(t *testing.T) string {
	t.Helper()
	dsn := services.Postgres(t)
	admin, err := sql.Open("pgx", dsn)
	require.NoError(t, err)
	schema := fmt.Sprintf("telemetry_%d", time.Now().UnixNano())
	_, err = admin.ExecContext(t.Context(), "CREATE SCHEMA "+schema)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, _ = admin.ExecContext(context.Background(), "DROP SCHEMA "+schema+" CASCADE")
		_ = admin.Close()
	})
	if u, err := url.Parse(dsn); err == nil && u.Scheme != "" {
		q := u.Query()
		q.Set("search_path", schema)
		u.RawQuery = q.Encode()
		dsn = u.String()
	} else {
		dsn += " search_path=" + schema
	}
	db, err := sql.Open("pgx", dsn)
	require.NoError(t, err)
	defer func() { _ = db.Close() }()
	store := sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{})
	require.NoError(t, store.Migrate(t.Context()))
	return dsn
}

// startWorker starts a worker process, and sends what it says to lines. The worker ends
// with the test.
func startWorker(t *testing.T, dsn, start string, lines chan<- line) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "TELEMETRY_WORKER="+dsn, "TELEMETRY_START="+start)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	said := make(chan struct{})
	go func() {
		defer close(said)
		for r := bufio.NewScanner(stdout); r.Scan(); {
			var l line
			if json.Unmarshal(r.Bytes(), &l) == nil {
				lines <- l
			}
		}
	}()
	t.Cleanup(func() {
		_ = stdin.Close()
		<-said
		_ = cmd.Wait()
	})
	return cmd
}
