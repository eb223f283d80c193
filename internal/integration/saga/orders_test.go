package saga_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

var chaosOrders = flag.Int("chaos.orders", 150, "how many orders TestChaosOfOrders places")

// TestChaosOfOrders places orders in three processes that are killed and stopped at
// random. The bank says by a webhook, several times, that an order was paid, or does so too
// late, or never; customers cancel at any moment; parcels, each a saga of its own, cannot be
// delivered. In the end the books of each order are exact: all or nothing.
func TestChaosOfOrders(t *testing.T) {
	d := newDatabase(t, sqlstore.PostgreSQL)
	db, ctx := d.open(t), t.Context()
	_, err := db.Exec(`CREATE TABLE book (account text, id text, amount integer)`)
	require.NoError(t, err)
	store := sqlstore.New(db, d.Dialect, sqlstore.Config{})
	shop := saga.NewRunner(store, saga.RunnerConfig{}) // it runs nothing
	orders := orderSaga(db)
	orderss := saga.Register(shop, orders)

	var workers []*orderWorker
	for range 3 {
		w := &orderWorker{t: t, d: d}
		w.start()
		workers = append(workers, w)
	}
	var customers sync.WaitGroup
	for i := range *chaosOrders {
		o := order{ID: fmt.Sprint("order-", i), Cents: 100 + rand.IntN(900), Parcels: 1 + rand.IntN(3)}
		customers.Go(func() {
			time.Sleep(rand.N(time.Duration(*chaosOrders) * 20 * time.Millisecond))
			_, err := orderss.Start(ctx, o.ID, o)
			if err != nil {
				t.Error(err)
				return
			}
			var both sync.WaitGroup
			if rand.IntN(100) < 85 {
				both.Go(func() { time.Sleep(rand.N(2500 * time.Millisecond)); pay(t, db, shop, o) })
			}
			if rand.IntN(100) < 40 {
				time.Sleep(rand.N(4 * time.Second))
				if err := shop.Operate(ctx, o.ID,
					saga.Operation{Action: saga.ActionCancel, Note: "found it cheaper"}); err != nil &&
					!errors.Is(err, saga.ErrNotAllowed) {
					t.Error(err)
				}
			}
			both.Wait()
		})
	}
	served := make(chan struct{})
	go func() { customers.Wait(); close(served) }()
	for troubled := true; troubled; {
		w := workers[rand.IntN(len(workers))]
		if rand.IntN(2) == 0 {
			w.kill()
			w.start()
		} else {
			w.pause(time.Second + rand.N(time.Second))
		}
		select {
		case <-served:
			troubled = false
		case <-time.After(rand.N(400 * time.Millisecond)):
		}
	}
	live := func() (n int) {
		require.NoError(t, db.QueryRow(`SELECT count(*) FROM saga WHERE status IN ('running', 'compensating')`).Scan(&n))
		return n
	}
	require.Eventually(t, func() bool { return live() == 0 }, 2*time.Minute, 100*time.Millisecond)

	ends := make(map[saga.Status]int)
	for i := range *chaosOrders {
		in, err := shop.Get(ctx, fmt.Sprint("order-", i))
		require.NoError(t, err)
		ends[in.Status]++
		var o order
		require.NoError(t, json.Unmarshal(in.State, &o))
		want := map[string]int{"bank": o.Cents, "goods": -o.Parcels, "carrier": o.Parcels}
		if in.Status != saga.Completed {
			require.Equal(t, saga.Compensated, in.Status, "%+v", in)
			want = map[string]int{"bank": 0, "goods": 0, "carrier": 0}
		}
		for account, want := range want {
			var sum int
			require.NoError(t, db.QueryRow(`SELECT coalesce(sum(amount), 0) FROM book WHERE account = $1 AND id = $2`,
				account, o.ID).Scan(&sum))
			require.Equal(t, want, sum, "%s of %s, which is %s", account, o.ID, in.Status)
		}
		for n := range in.Steps[3].Children {
			child, err := shop.Get(ctx, saga.ChildID(o.ID, "parcels", n))
			require.NoError(t, err)
			require.Equal(t, in.Status, child.Status)
		}
	}
	var takenOver int
	require.NoError(t, db.QueryRow(`SELECT count(*) FROM saga_log WHERE event = 'taken_over'`).Scan(&takenOver))
	t.Logf("%v, %d taken over", ends, takenOver)
	require.NotZero(t, ends[saga.Completed])
	require.NotZero(t, ends[saga.Compensated])
}

// pay is the bank: it says several times that an order was paid, and gives back what the
// shop does not take. Who has no invoice yet pays nothing: [saga.Apply] would not give it
// back, because it does not undo an invoice that was never written.
func pay(t *testing.T, db *sql.DB, shop *saga.Runner, o order) {
	enter := func(cents int) {
		if _, err := db.Exec(`INSERT INTO book VALUES ('bank', $1, $2)`, o.ID, cents); err != nil {
			t.Error(err)
		}
	}
	var invoiced bool
	if err := db.QueryRow(`SELECT EXISTS (SELECT FROM book WHERE account = 'bank' AND id = $1)`,
		o.ID).Scan(&invoiced); err != nil {
		t.Error(err)
	}
	if !invoiced {
		return
	}
	enter(o.Cents)
	for range 1 + rand.IntN(3) {
		err := shop.Signal(t.Context(), o.ID, "paid", nil)
		if errors.Is(err, saga.ErrNotAllowed) {
			enter(-o.Cents)
			return
		}
		if err != nil {
			t.Error(err)
		}
	}
}

type order struct {
	ID             string
	Cents, Parcels int
}

type parcel struct{ Order string }

// orderSaga returns the definition with participants that fail and lose their replies, and
// that keep their books in db.
func orderSaga(db *sql.DB) *saga.Saga[order] {
	book := func(ctx context.Context, account, order string, amount int) error {
		if rand.IntN(100) < 5 {
			return errors.New("unavailable")
		}
		err := saga.Apply(ctx, db, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `INSERT INTO book VALUES ($1, $2, $3)`, account, order, amount)
			return err
		})
		if rand.IntN(100) < 5 {
			return errors.New("the reply is lost")
		}
		return err
	}
	step := func(name string) saga.Step[order] {
		return saga.Step[order]{Name: name, UndoAttempts: saga.Unlimited,
			Backoff: saga.Exponential(10*time.Millisecond, time.Second)}
	}
	reserve, invoice, payment, parcels := step("reserve"), step("invoice"), step("payment"), step("parcels")
	reserve.Do = func(ctx context.Context, o *order) error { return book(ctx, "goods", o.ID, -o.Parcels) }
	reserve.Undo = func(ctx context.Context, o *order) error { return book(ctx, "goods", o.ID, o.Parcels) }
	invoice.Do = func(ctx context.Context, o *order) error { return book(ctx, "bank", o.ID, 0) }
	invoice.Undo = func(ctx context.Context, o *order) error {
		if _, paid := saga.SignalFrom(ctx, "paid"); paid {
			return book(ctx, "bank", o.ID, -o.Cents)
		}
		return nil
	}
	payment.Await, payment.AwaitFor = "paid", 2*time.Second
	parcels.Delay = 200 * time.Millisecond

	travel := saga.Step[parcel]{
		Name: "hand over", UndoAttempts: saga.Unlimited, Backoff: saga.Exponential(10*time.Millisecond, time.Second),
		Do:   func(ctx context.Context, p *parcel) error { return book(ctx, "carrier", p.Order, 1) },
		Undo: func(ctx context.Context, p *parcel) error { return book(ctx, "carrier", p.Order, -1) },
	}
	deliver := saga.Step[parcel]{Name: "deliver", ReadOnly: true, Delay: 100 * time.Millisecond,
		Do: func(context.Context, *parcel) error {
			if rand.IntN(100) < 5 {
				return saga.Declined(errors.New("no such street"))
			}
			return nil
		}}
	parcels.Child = saga.ChildrenOf(&saga.Saga[parcel]{Name: "parcel", Steps: []saga.Step[parcel]{travel, deliver}},
		func(o *order) ([]parcel, error) {
			list := make([]parcel, o.Parcels)
			for i := range list {
				list[i].Order = o.ID
			}
			return list, nil
		}, nil)
	return &saga.Saga[order]{Name: "order", Steps: []saga.Step[order]{reserve, invoice, payment, parcels}}
}

// workOnOrders is the life of a process of TestChaosOfOrders.
func workOnOrders(config string) error {
	var d database
	if err := json.Unmarshal([]byte(config), &d); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	db, err := d.connect()
	if err != nil {
		return err
	}
	defer db.Close()
	db.SetMaxOpenConns(8)
	store := sqlstore.New(db, d.Dialect, sqlstore.Config{})
	runner := saga.NewRunner(store, saga.RunnerConfig{
		LeaseTTL: time.Second, Poll: 50 * time.Millisecond, Drain: time.Second, MaxTakeovers: saga.Unlimited,
	})
	saga.Register(runner, orderSaga(db))
	return runner.Run(ctx)
}

// An orderWorker is a process of TestChaosOfOrders.
type orderWorker struct {
	t   *testing.T
	d   database
	cmd *exec.Cmd
}

func (w *orderWorker) start() {
	config, err := json.Marshal(w.d)
	require.NoError(w.t, err)
	w.cmd = exec.Command(os.Args[0])
	w.cmd.Env = append(os.Environ(), "SAGA_ORDERS="+string(config))
	stdin, err := w.cmd.StdinPipe()
	require.NoError(w.t, err)
	require.NoError(w.t, w.cmd.Start())
	cmd := w.cmd
	w.t.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Process.Signal(syscall.SIGCONT)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
}

func (w *orderWorker) kill() {
	_ = w.cmd.Process.Kill()
	_ = w.cmd.Wait()
}

func (w *orderWorker) pause(d time.Duration) {
	_ = w.cmd.Process.Signal(syscall.SIGSTOP)
	time.Sleep(d)
	_ = w.cmd.Process.Signal(syscall.SIGCONT)
}
