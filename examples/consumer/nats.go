package main

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A natsQueue is a stream of NATS JetStream with one durable consumer, and a second stream for its dead letters. The
// consumer's MaxDeliver is unlimited, because settle limits the deliveries.
type natsQueue struct {
	conn     *nats.Conn
	js       jetstream.JetStream
	consumer jetstream.Consumer
	name     string
	ackWait  time.Duration
}

func openNATS(url, name string, ackWait time.Duration) func(context.Context) (queue, error) {
	return func(ctx context.Context) (queue, error) {
		conn, err := nats.Connect(url, nats.NoReconnect())
		if err != nil {
			return nil, err
		}
		q := &natsQueue{conn: conn, name: name, ackWait: ackWait}
		if q.js, err = jetstream.New(conn); err == nil {
			for _, stream := range []string{name, name + "-dead"} {
				cfg := jetstream.StreamConfig{Name: stream, Subjects: []string{stream}}
				if _, err = q.js.CreateOrUpdateStream(ctx, cfg); err != nil {
					break
				}
			}
		}
		if err == nil {
			q.consumer, err = q.js.CreateOrUpdateConsumer(ctx, name, jetstream.ConsumerConfig{
				Durable: "shop", AckPolicy: jetstream.AckExplicitPolicy, AckWait: ackWait, MaxDeliver: -1,
			})
		}
		if err != nil {
			conn.Close()
			return nil, err
		}
		return q, nil
	}
}

func (q *natsQueue) Publish(ctx context.Context, to string, id, body, why string) error {
	m := &nats.Msg{Subject: to, Data: []byte(body), Header: nats.Header{"Why": {why}}}
	_, err := q.js.PublishMsg(ctx, m, jetstream.WithMsgID(id)) // the server drops duplicates
	return err
}

func (q *natsQueue) Next(ctx context.Context) (message, error) {
	for {
		m, err := q.consumer.Next(jetstream.FetchMaxWait(time.Second))
		switch {
		case err == nil:
			meta, err := m.Metadata()
			return natsMessage{q, m, meta}, err
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case !errors.Is(err, nats.ErrTimeout) || !q.conn.IsConnected():
			return nil, err
		}
	}
}

func (q *natsQueue) Close() { q.conn.Close() }

type natsMessage struct {
	queue *natsQueue
	jetstream.Msg
	meta *jetstream.MsgMetadata
}

func (m natsMessage) ID() string      { return m.Headers().Get(nats.MsgIdHdr) }
func (m natsMessage) Body() string    { return string(m.Data()) }
func (m natsMessage) Deliveries() int { return int(m.meta.NumDelivered) }

func (m natsMessage) Again(after time.Duration) error { return m.NakWithDelay(after) }

// Ack acknowledges m, and waits until the server has confirmed the acknowledgment.
func (m natsMessage) Ack() error {
	ctx, cancel := context.WithTimeout(context.Background(), m.queue.ackWait)
	defer cancel()
	return m.DoubleAck(ctx)
}

// Hold reports to the server that m is in progress: immediately, and then three times per AckWait. Each report restarts
// AckWait, the time after which the server delivers m again. A report does not count as a delivery.
func (m natsMessage) Hold(ctx context.Context) error {
	for tick := time.Tick(m.queue.ackWait / 3); ; {
		if err := m.InProgress(); err != nil {
			return err
		}
		select {
		case <-tick:
		case <-ctx.Done():
			return nil
		}
	}
}

func (m natsMessage) Reject(why error) error {
	ctx, cancel := context.WithTimeout(context.Background(), m.queue.ackWait)
	defer cancel()
	if err := m.queue.Publish(ctx, m.queue.name+"-dead", m.ID(), m.Body(), why.Error()); err != nil {
		return err
	}
	return m.Term()
}
