package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
)

const pace = 10 * time.Millisecond

// A broker is a broker that a test can interrupt.
type broker struct {
	open      func(name string) func(context.Context) (queue, error)
	dead      string // the suffix of the dead-letter queue's name
	interrupt func()
}

func onEach(t *testing.T, test func(t *testing.T, b broker, name string)) {
	for kind, start := range map[string]func(*testing.T) broker{"NATS": startNATS, "RabbitMQ": findRabbit} {
		t.Run(kind, func(t *testing.T) { test(t, start(t), fmt.Sprintf("orders-%d", time.Now().UnixNano())) })
	}
}

// missing skips the test. In CI, where REQUIRE_SERVICES is set, it fails the test.
func missing(t *testing.T, what string) {
	if os.Getenv("REQUIRE_SERVICES") != "" {
		t.Fatal(what)
	}
	t.Skip(what)
}

// startNATS starts a server. An interruption kills the server and restarts it.
func startNATS(t *testing.T) broker {
	program, err := exec.LookPath("nats-server")
	if err != nil {
		missing(t, "nats-server is not in PATH")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	_, port, _ := net.SplitHostPort(l.Addr().String())
	require.NoError(t, l.Close())
	dir := t.TempDir()
	var cmd *exec.Cmd
	start := func() {
		cmd = exec.Command(program, "-js", "-a", "127.0.0.1", "-p", port, "-sd", dir)
		require.NoError(t, cmd.Start())
		for conn, err := net.Dial("tcp", l.Addr().String()); ; conn, err = net.Dial("tcp", l.Addr().String()) {
			if err == nil {
				_ = conn.Close()
				return
			}
			time.Sleep(pace)
		}
	}
	kill := func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
	start()
	t.Cleanup(func() { kill() })
	return broker{
		open: func(name string) func(context.Context) (queue, error) {
			return openNATS("nats://"+l.Addr().String(), name, time.Second)
		},
		dead:      "-dead",
		interrupt: func() { kill(); start() },
	}
}

// findRabbit uses the server at AMQP_URL. An interruption cuts the connections to it.
func findRabbit(t *testing.T) broker {
	url := cmp.Or(os.Getenv("AMQP_URL"), "amqp://guest:guest@127.0.0.1:5672/")
	var mu sync.Mutex
	var conns []net.Conn
	dial := func() (*amqp.Connection, error) {
		return amqp.DialConfig(url, amqp.Config{Dial: func(network, addr string) (net.Conn, error) {
			conn, err := amqp.DefaultDial(5*time.Second)(network, addr)
			mu.Lock()
			defer mu.Unlock()
			conns = append(conns, conn)
			return conn, err
		}})
	}
	conn, err := dial()
	if err != nil {
		missing(t, "RabbitMQ at AMQP_URL cannot be reached: "+err.Error())
	}
	channel, err := conn.Channel()
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	conns = nil
	return broker{
		open: func(name string) func(context.Context) (queue, error) {
			t.Cleanup(func() { _, _ = channel.QueueDelete(name, false, false, false) })
			return openRabbit(name, dial)
		},
		dead: ".dead",
		interrupt: func() {
			mu.Lock()
			defer mu.Unlock()
			for _, conn := range conns {
				_ = conn.Close()
			}
			conns = nil
		},
	}
}

const orders = 12 // including one that the bank declines

// start publishes the orders and returns a shop.
func start(t *testing.T, b broker, name string) *shop {
	require.NoError(t, publish(t.Context(), b.open(name), name, orders))
	s, err := newShop("file:"+filepath.Join(t.TempDir(), "db"), pace)
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.db.Close() })
	return s
}

// work runs a consumer until every order that the bank accepts is booked. It checks that each is
// booked once, and that the dead letters contain only the declined order, once.
func work(t *testing.T, b broker, name string, s *shop, open func(context.Context) (queue, error), during func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { consume(ctx, open, pace, s.handle) })
	during()
	dead, err := b.open(name + b.dead)(t.Context())
	require.NoError(t, err)
	defer dead.Close()
	m, err := dead.Next(t.Context())
	require.NoError(t, err)
	require.Equal(t, fmt.Sprintf("%s-%d", name, orders/2), m.ID())
	require.NoError(t, m.Ack())
	require.Eventually(t, func() bool {
		n, _, err := s.booked()
		return err == nil && n == orders-1
	}, time.Minute, pace)
	cancel()
	all.Wait()
	_, entries, err := s.booked()
	require.NoError(t, err)
	require.Equal(t, orders-1, entries, "each order is booked once")
	ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = dead.Next(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded, "another dead letter")
}

// While the bank is down, no message is lost and no message but the declined one is dead-lettered.
func TestConsumerSurvivesOutageOfBank(t *testing.T) {
	onEach(t, func(t *testing.T, b broker, name string) {
		s := start(t, b, name)
		s.away.Store(true)
		work(t, b, name, s, b.open(name), func() {
			require.Eventually(t, func() bool { return s.asked.Load() >= 20 && s.circuit.Stats().Refused >= 1 },
				time.Minute, pace)
			s.away.Store(false)
		})
	})
}

func TestConsumerSurvivesRestartOfBroker(t *testing.T) {
	onEach(t, func(t *testing.T, b broker, name string) {
		s := start(t, b, name)
		s.away.Store(true) // so that messages are in flight
		work(t, b, name, s, b.open(name), func() {
			for range 3 {
				asked := s.asked.Load()
				require.Eventually(t, func() bool { return s.asked.Load() > asked }, time.Minute, time.Millisecond)
				b.interrupt()
			}
			s.away.Store(false)
		})
	})
}

// The connection is lost between a message's effect and its acknowledgment. The message is
// delivered again, and its effect is not repeated.
func TestLostAckDoesNotRepeatEffect(t *testing.T) {
	onEach(t, func(t *testing.T, b broker, name string) {
		s := start(t, b, name)
		open, kills := b.open(name), new(atomic.Int64)
		mortal := func(ctx context.Context) (queue, error) {
			q, err := open(ctx)
			if err != nil {
				return nil, err
			}
			return mortalQueue{q, kills}, nil
		}
		work(t, b, name, s, mortal, func() { // until each of the three is delivered again
			require.Eventually(t, func() bool { return s.asked.Load() >= orders+3 }, time.Minute, pace)
		})
	})
}

type mortalQueue struct {
	queue
	kills *atomic.Int64
}

func (q mortalQueue) Next(ctx context.Context) (message, error) {
	m, err := q.queue.Next(ctx)
	return mortalMessage{m, q}, err
}

type mortalMessage struct {
	message
	queue mortalQueue
}

func (m mortalMessage) Ack() error {
	if n := m.queue.kills.Add(1); n%2 == 1 && n <= 6 {
		m.queue.Close()
	}
	return m.message.Ack()
}
