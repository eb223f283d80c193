package main

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"
)

// A natsServer delivers its message to another consumer if it receives neither a progress report
// nor an acknowledgment for ackWait.
type natsServer struct {
	jetstream.Msg
	timer  *time.Timer
	lostAt time.Time // when the connection is lost; zero means never
	acked  bool
}

func (s *natsServer) InProgress() error {
	if !s.lostAt.IsZero() && time.Now().After(s.lostAt) {
		return nats.ErrConnectionClosed
	}
	s.timer.Reset(ackWait)
	return nil
}

func (s *natsServer) DoubleAck(context.Context) error {
	s.acked = true
	s.timer.Stop()
	return nil
}

const ackWait = 30 * time.Second

// deliver returns the first delivery of a message, and its server.
func deliver(t *testing.T) (*natsServer, message) {
	s := &natsServer{timer: time.AfterFunc(ackWait, func() { t.Error("a second consumer gets the message") })}
	q := &natsQueue{ackWait: ackWait}
	return s, natsMessage{q, s, &jetstream.MsgMetadata{NumDelivered: 1}}
}

// A handler may take longer than AckWait, and a refusal may be longer than AckWait.
func TestSlowHandlerKeepsItsMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server, m := deliver(t)
		calls := 0
		err := settle(t.Context(), m, time.Second, func(context.Context, message) error {
			if calls++; calls <= 60 {
				return refusal{}
			}
			time.Sleep(10 * ackWait)
			return nil
		})
		require.NoError(t, err)
		require.True(t, server.acked)
		require.Equal(t, 61, calls)
	})
}

type refusal struct{}

func (refusal) Error() string { return "refused" }
func (refusal) Refused() bool { return true }

// If the connection is lost, the handler's ctx is canceled and the message is not acknowledged.
func TestLostMessageCancelsItsHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server, m := deliver(t)
		server.lostAt = time.Now().Add(2 * ackWait)
		err := settle(t.Context(), m, time.Second, func(ctx context.Context, _ message) error {
			<-ctx.Done()
			server.timer.Stop()
			return nil
		})
		require.ErrorIs(t, err, nats.ErrConnectionClosed)
		require.False(t, server.acked)
	})
}
