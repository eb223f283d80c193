package data_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resiliencepgx"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/resiliencesql"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle/fleet"
)

// A plan is what one process of the service does.
type plan struct {
	Process, Transfers int
	DSN, Redis, Prefix string
}

func TestMain(m *testing.M) {
	if text, ok := os.LookupEnv("DATA_SERVICE"); ok {
		var p plan
		if err := json.Unmarshal([]byte(text), &p); err != nil {
			panic(err)
		}
		if err := serve(context.Background(), p); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

const (
	addTransfer = "INSERT INTO transfer VALUES ($1, $2, $3, $4)"
	moveCents   = "UPDATE account SET cents = cents + $1 WHERE id = $2"
	accounts    = 4
)

// serve makes the transfers of a process, each until it knows that it was made, half of them
// through database/sql and half through pgx. Each is admitted by a limit on Redis.
func serve(ctx context.Context, p plan) error {
	db, err := sql.Open("pgx", p.DSN)
	if err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, p.DSN)
	if err != nil {
		return err
	}
	rdb := redis.NewClient(&redis.Options{Addr: p.Redis, ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1})
	cached := breaker.New(breaker.Config{ConsecutiveFailures: 3, OpenFor: 20 * time.Millisecond})
	resilienceredis.Hook(rdb, resilienceredis.Config{Node: func(string) resilience.Middleware { return cached.Wrap }})
	limit := fleet.New(fleet.Config{
		Name: p.Prefix + "transfers", Instances: 2, OnOutage: fleet.Local, Eval: resilienceredis.Eval(rdb),
		Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Rate("all", 1e6, 1)} },
	})
	heard := make(chan struct{}, 1)
	go func() {
		for {
			_ = resiliencepgx.Listen(pool)(ctx, p.Prefix, func() {
				select {
				case heard <- struct{}{}:
				default:
				}
			})
			time.Sleep(10 * time.Millisecond)
		}
	}()

	policies := resilience.Chain(
		retry.New(retry.Config{Attempts: 4, Backoff: retry.Constant(time.Millisecond)}).Wrap,
		breaker.New(breaker.Config{ConsecutiveFailures: 5, OpenFor: 20 * time.Millisecond}).Wrap,
		bulkhead.New(bulkhead.Config{Limit: 4}).Wrap,
		resilience.Timeout(500*time.Millisecond),
	)
	for i := range p.Transfers {
		id, from, to, cents := fmt.Sprintf("%d-%d", p.Process, i), rand.N(accounts), rand.N(accounts), 1+rand.N(100)
		transfer := func(exec func(statement string, args ...any) error) error {
			return errors.Join(exec(addTransfer, id, from, to, cents), exec(moveCents, -cents, from),
				exec(moveCents, cents, to), exec("SELECT pg_notify($1, '')", p.Prefix))
		}
		for tries := 0; ; tries++ {
			err := limit.Do(ctx, func(ctx context.Context) error {
				if i%2 == 0 {
					return resiliencesql.InTx(ctx, db,
						resiliencesql.Config{Retry: policies, Check: func(ctx context.Context, tx *sql.Tx) (bool, error) {
							_, err := tx.ExecContext(ctx, addTransfer, id, 0, 0, 0) // waits for the other one
							return isDuplicate(err), ifNot(isDuplicate(err), err)
						}}, func(ctx context.Context, tx *sql.Tx) error {
							return transfer(func(statement string, args ...any) error {
								_, err := tx.ExecContext(ctx, statement, args...)
								return err
							})
						})
				}
				return resiliencepgx.InTx(ctx, pool, resiliencepgx.Config{Retry: policies},
					func(ctx context.Context, tx pgx.Tx) error {
						return transfer(func(statement string, args ...any) error {
							_, err := tx.Exec(ctx, statement, args...)
							return err
						})
					})
			})
			if err == nil || tries > 0 && isDuplicate(err) { // it is there already
				break
			}
			if resilience.Answered(err) && !resilience.Retryable(err) || tries == 10_000 {
				return fmt.Errorf("transfer %s: %w", id, err)
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	select {
	case <-heard:
		return nil
	case <-time.After(30 * time.Second):
		return errors.New("it has heard of no transfer")
	}
}

func isDuplicate(err error) bool {
	state, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err)
	return ok && state.SQLState() == "23505"
}

func ifNot(skip bool, err error) error {
	if skip {
		return nil
	}
	return err
}

// TestServiceOfTwoProcesses makes transfers while connections to PostgreSQL and Redis are
// reset, held back and killed. Each is made once, and no cent is lost.
func TestServiceOfTwoProcesses(t *testing.T) {
	const transfers = 300
	d := postgres(t)
	db := d.open(t, d.addr)
	execute(t, db, "CREATE TABLE account (id integer PRIMARY KEY, cents integer)")
	execute(t, db, "CREATE TABLE transfer (id text PRIMARY KEY, source integer, target integer, cents integer)")
	execute(t, db, "INSERT INTO account SELECT n, 0 FROM generate_series(0, $1) n", accounts-1)
	far, cache := faultproxy.New(t, d.addr), faultproxy.New(t, services.Redis(t))
	prefix := fmt.Sprintf("data-%d", time.Now().UnixNano())
	ended := make(chan error, 2)
	for i := range 2 {
		text, err := json.Marshal(plan{i, transfers, fmt.Sprintf(d.dsn, far.Addr()) + "&application_name=" + prefix,
			cache.Addr(), prefix})
		require.NoError(t, err)
		cmd := process(t, string(text))
		go func() {
			out, err := cmd.CombinedOutput()
			if err != nil {
				err = fmt.Errorf("%w: %s", err, out)
			}
			ended <- err
		}()
	}
	made := func() (n int) {
		require.NoError(t, db.QueryRow("SELECT count(*) FROM transfer").Scan(&n))
		return n
	}
	faults := []func(){
		far.Reset, cache.Reset, cache.Hang, far.Heal, cache.Heal, cache.Refuse,
		func() { far.Hold(faultproxy.ToClient) },
		func() { far.Hold(faultproxy.ToServer) },
		func() {
			_, _ = db.Exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1", prefix)
		},
		func() { far.Hold(faultproxy.ToClient); time.Sleep(5 * time.Millisecond); far.Reset(); far.Heal() },
	}
	for left, n := 2, 0; left > 0; n++ {
		select {
		case err := <-ended:
			require.NoError(t, err)
			left--
		case <-time.After(20 * time.Millisecond):
			if n%3 != 2 {
				faults[rand.N(len(faults))]()
				continue
			}
			far.Heal()
			cache.Heal()
			// On a slow machine, no transfer would be made between two faults, and the processes would dial for ever.
			for before := made(); made() == before && len(ended) == 0; {
				time.Sleep(10 * time.Millisecond)
			}
		}
	}
	var wrong, sum int
	require.Equal(t, 2*transfers, made())
	require.NoError(t, db.QueryRow(`SELECT sum(cents), count(*) FILTER (WHERE cents <>
		(SELECT coalesce(sum(t.cents), 0) FROM transfer t WHERE t.target = a.id) -
		(SELECT coalesce(sum(t.cents), 0) FROM transfer t WHERE t.source = a.id)) FROM account a`).Scan(&sum, &wrong))
	require.Equal(t, []int{0, 0}, []int{sum, wrong}, "the money")
}

func process(t *testing.T, plan string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "DATA_SERVICE="+plan)
	return cmd
}
