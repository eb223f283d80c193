package benchmarks

import (
	"cmp"
	"context"
	"crypto/rand"
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

func BenchmarkSaga(b *testing.B) { benchmark(b, sagaCases) }

// One iteration is 500 sagas of five steps that do nothing, 32 at a time, on 16
// connections where there can be several.
const (
	sagasPerOp    = 500
	sagasInFlight = 32
	connections   = 16
)

// Beside ours: "bare" calls the store's fenced statements, one Start and five
// Commits a saga (which the store groups as it does ours), with nothing around
// them; "table" is what one writes by hand, a transaction for each step that
// inserts the step's row and updates the saga's, without leases, fences or a
// state. In memory, "bare" is five calls.
var sagaCases = []comparison{
	{"memory", []impl{
		{"resilience", func(b *testing.B) {
			trip := benchmarkSaga()
			eachSaga(b, 1, func(id string) {
				if err := saga.Run(context.Background(), trip, &benchmarkTrip{ID: id}); err != nil {
					b.Fatal(err)
				}
			})
		}},
		{"bare", func(b *testing.B) {
			trip := benchmarkSaga()
			eachSaga(b, 1, func(id string) {
				s := &benchmarkTrip{ID: id}
				for i := range trip.Steps {
					if err := trip.Steps[i].Do(context.Background(), s); err != nil {
						b.Fatal(err)
					}
				}
			})
		}},
	}},
	{"sqlite", databaseImpls(openSQLite)},
	{"postgres", databaseImpls(openPostgres)},
}

func databaseImpls(open func(b *testing.B) benchmarkDatabase) []impl {
	return []impl{
		{"resilience", func(b *testing.B) { benchmarkRunner(b, open(b)) }},
		{"bare", func(b *testing.B) { benchmarkBare(b, open(b)) }},
		{"table", func(b *testing.B) { benchmarkTable(b, open(b)) }},
	}
}

type benchmarkTrip struct {
	ID    string
	Done  int
	Notes string
}

func benchmarkSaga() *saga.Saga[benchmarkTrip] {
	sg := &saga.Saga[benchmarkTrip]{Name: "trip", Version: 1}
	do := func(_ context.Context, s *benchmarkTrip) error { s.Done++; return nil }
	undo := func(context.Context, *benchmarkTrip) error { return nil }
	for _, name := range []string{"outward", "hotel", "return", "charge", "tickets"} {
		sg.Steps = append(sg.Steps, saga.Step[benchmarkTrip]{Name: name, Do: do, Undo: undo})
	}
	return sg
}

// eachSaga calls work for each saga of each iteration, inFlight at a time. Before
// that it does so for a few more, which open the connections.
func eachSaga(b *testing.B, inFlight int, work func(id string)) {
	round := func(name string, sagas int64) {
		var next atomic.Int64
		var wg sync.WaitGroup
		for range inFlight {
			wg.Go(func() {
				for i := next.Add(1); i <= sagas; i = next.Add(1) {
					work(fmt.Sprintf("trip-%s-%d", name, i))
				}
			})
		}
		wg.Wait()
	}
	if inFlight > 1 {
		round("warm", 8*int64(inFlight))
	}
	b.ResetTimer()
	n := 0
	for b.Loop() {
		if inFlight > 1 {
			round(strconv.Itoa(n), sagasPerOp)
		} else {
			for range sagasPerOp {
				work("trip")
			}
		}
		n++
	}
	b.StopTimer()
	b.ReportMetric(float64(n*sagasPerOp)/b.Elapsed().Seconds(), "sagas/s")
}

// benchmarkRunner starts each saga when there is a place for it, as a server
// that works to capacity does, and waits for the end of all.
func benchmarkRunner(b *testing.B, d benchmarkDatabase) {
	store := &countedStore{Store: d.store(b)}
	run, stop := newRunner(b, store)
	defer stop()
	store.writes.Store(0)
	var sagas atomic.Int64
	eachSaga(b, sagasInFlight, func(id string) {
		if err := run(id); err != nil {
			b.Error(err)
			return
		}
		sagas.Add(1)
	})
	b.ReportMetric(float64(store.writes.Load())/float64(sagas.Load()), "store-writes/saga")
}

// newRunner returns what runs a saga to its end.
func newRunner(b *testing.B, store saga.Store) (run func(id string) error, stop func()) {
	var ended sync.Map
	runner := saga.NewRunner(store, saga.RunnerConfig{})
	runner.Observe(func(_ context.Context, e saga.Event) {
		if e.Kind == saga.EventCompleted {
			if done, ok := ended.Load(e.ID); ok {
				close(done.(chan struct{}))
			}
		}
	})
	trip := benchmarkSaga()
	trips := saga.Register(runner, trip)
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- runner.Run(ctx) }()
	for range 100 { // until it has begun to run, and holds what it starts
		if in, err := trips.Start(ctx, "first-"+rand.Text(), benchmarkTrip{}); err != nil {
			b.Fatal(err)
		} else if in.Owner != "" {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	run = func(id string) error {
		done := make(chan struct{})
		ended.Store(id, done)
		if _, err := trips.Start(ctx, id, benchmarkTrip{ID: id}); err != nil {
			return err
		}
		<-done
		ended.Delete(id)
		return nil
	}
	return run, func() { cancel(); <-stopped }
}

// countedStore counts the calls that write. The database may see fewer commits: the store
// makes one of several writes that wait for each other.
type countedStore struct {
	*sqlstore.Store
	writes atomic.Int64
}

func (s *countedStore) Start(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
	s.writes.Add(1)
	return s.Store.Start(ctx, req)
}

func (s *countedStore) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	s.writes.Add(1)
	return s.Store.Commit(ctx, req)
}

func (s *countedStore) Claim(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
	recs, err := s.Store.Claim(ctx, req)
	if len(recs) > 0 || err != nil {
		s.writes.Add(1)
	}
	return recs, err
}

func (s *countedStore) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	s.writes.Add(1)
	return s.Store.Heartbeat(ctx, req)
}

func benchmarkBare(b *testing.B, d benchmarkDatabase) {
	st := d.store(b)
	ctx := context.Background()
	// As large as what the runner writes.
	steps := []byte(`{"steps":[{"n":"outward","s":"done","a":1},{"n":"hotel","s":"done","a":1},` +
		`{"n":"return","s":"started"},{"n":"charge","s":"idle"},{"n":"tickets","s":"idle"}]}`)
	eachSaga(b, sagasInFlight, func(id string) {
		data := []byte(`{"ID":"` + id + `","Done":3,"Notes":""}`)
		_, _, err := st.Start(ctx, store.StartRequest{
			ID: id, Saga: "trip", Version: 1, Status: saga.Running, State: data, Progress: steps,
			Owner: "me", LeaseTTL: time.Minute, Log: []store.Entry{{Kind: saga.EventCreated}},
		})
		if err != nil {
			b.Error(err)
			return
		}
		req := store.CommitRequest{ID: id, Epoch: 1, Seq: 1, Status: saga.Running, State: data, Progress: steps}
		for i := range 5 {
			req.Log = []store.Entry{{Step: "outward", Op: saga.OpDo, Kind: saga.EventStepDone, Attempt: 1}}
			if i == 4 {
				req.Status, req.Release = saga.Completed, true
				req.Log = append(req.Log, store.Entry{Kind: saga.EventCompleted})
			}
			if _, err := st.Commit(ctx, req); err != nil {
				b.Error(err)
				return
			}
			req.Seq = req.After()
		}
	})
	b.ReportMetric(6, "store-writes/saga")
}

func benchmarkTable(b *testing.B, d benchmarkDatabase) {
	for _, statement := range []string{
		`CREATE TABLE trip (id text PRIMARY KEY, status text NOT NULL, data text NOT NULL)`,
		`CREATE TABLE trip_step (trip_id text NOT NULL, step text NOT NULL, status text NOT NULL,
			PRIMARY KEY (trip_id, step))`,
	} {
		if _, err := d.db.Exec(statement); err != nil {
			b.Fatal(err)
		}
	}
	ctx := context.Background()
	var gate sync.Mutex // one writer, where there can be only one
	inTx := func(fn func(tx *sql.Tx) error) error {
		if d.dialect == sqlstore.SQLite {
			gate.Lock()
			defer gate.Unlock()
		}
		tx, err := d.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := fn(tx); err != nil {
			return err
		}
		return tx.Commit()
	}
	trip := benchmarkSaga()
	eachSaga(b, sagasInFlight, func(id string) {
		data := `{"ID":"` + id + `","Done":3,"Notes":""}`
		err := inTx(func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `INSERT INTO trip VALUES ($1, 'running', $2)`, id, data)
			return err
		})
		for i := range trip.Steps {
			if err != nil {
				b.Error(err)
				return
			}
			status := "running"
			if i == len(trip.Steps)-1 {
				status = "completed"
			}
			err = inTx(func(tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, `INSERT INTO trip_step VALUES ($1, $2, 'done')`, id, trip.Steps[i].Name)
				if err == nil {
					_, err = tx.ExecContext(ctx, `UPDATE trip SET status = $2, data = $3 WHERE id = $1`, id, status, data)
				}
				return err
			})
		}
	})
	b.ReportMetric(6, "commits/saga")
}

type benchmarkDatabase struct {
	dialect sqlstore.Dialect
	db      *sql.DB
}

func (d benchmarkDatabase) store(b *testing.B) *sqlstore.Store {
	store := sqlstore.New(d.db, d.dialect, sqlstore.Config{})
	require.NoError(b, store.Migrate(context.Background()))
	return store
}

func openSQLite(b *testing.B) benchmarkDatabase {
	path := filepath.Join(b.TempDir(), "saga.db")
	db, err := sql.Open("sqlite", "file:"+path+
		"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate")
	require.NoError(b, err)
	b.Cleanup(func() { _ = db.Close() })
	return benchmarkDatabase{sqlstore.SQLite, db}
}

// openPostgres gives each benchmark a schema of its own. It is skipped where no
// PostgreSQL answers, unless REQUIRE_SERVICES says that there must be one.
func openPostgres(b *testing.B) benchmarkDatabase {
	dsn := postgresDSN()
	admin, err := sql.Open("pgx", dsn)
	require.NoError(b, err)
	schema := "bench_" + strings.ToLower(rand.Text()[:12])
	if _, err := admin.Exec("CREATE SCHEMA " + schema); err != nil {
		skipWithoutPostgres(b, err)
	}
	u, err := url.Parse(dsn)
	require.NoError(b, err)
	q := u.Query()
	q.Set("search_path", schema)
	u.RawQuery = q.Encode()
	db, err := sql.Open("pgx", u.String())
	require.NoError(b, err)
	db.SetMaxOpenConns(connections)
	db.SetMaxIdleConns(connections)
	b.Cleanup(func() {
		_ = db.Close()
		_, err := admin.Exec("DROP SCHEMA " + schema + " CASCADE")
		require.NoError(b, err)
		_ = admin.Close()
	})
	return benchmarkDatabase{sqlstore.PostgreSQL, db}
}

func postgresDSN() string {
	return cmp.Or(os.Getenv("POSTGRES_DSN"), "postgres://postgres@127.0.0.1:5432/postgres")
}

func skipWithoutPostgres(b *testing.B, err error) {
	if must, _ := strconv.ParseBool(os.Getenv("REQUIRE_SERVICES")); must {
		b.Fatal(err)
	}
	b.Skip("PostgreSQL at POSTGRES_DSN cannot be reached: ", err)
}
