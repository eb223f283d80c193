package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// A rabbitQueue is a quorum queue of RabbitMQ, and a second queue for its dead letters. For each delay before a retry
// there is another queue, in which messages wait. When a message expires there, RabbitMQ moves it back to the first
// queue.
type rabbitQueue struct {
	conn       *amqp.Connection
	channel    *amqp.Channel
	deliveries <-chan amqp.Delivery
	closed     <-chan *amqp.Error
	name       string
}

func openRabbit(name string, dial func() (*amqp.Connection, error)) func(context.Context) (queue, error) {
	return func(context.Context) (queue, error) {
		conn, err := dial()
		if err != nil {
			return nil, err
		}
		q := &rabbitQueue{conn: conn, name: name}
		if q.channel, err = conn.Channel(); err == nil {
			q.closed = q.channel.NotifyClose(make(chan *amqp.Error, 1))
			err = q.channel.Confirm(false)
		}
		for _, queue := range []string{name, name + ".dead"} {
			if err == nil {
				_, err = q.channel.QueueDeclare(queue, true, false, false, false, amqp.Table{"x-queue-type": "quorum"})
			}
		}
		if err == nil {
			err = q.channel.Qos(1, 0, false) // one message at a time; the other messages stay at the broker
		}
		if err == nil {
			q.deliveries, err = q.channel.Consume(name, "", false, false, false, false, nil)
		}
		if err != nil {
			_ = conn.Close()
			return nil, err
		}
		return q, nil
	}
}

// publish waits until the broker confirms the message.
func (q *rabbitQueue) publish(to string, m amqp.Publishing) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	m.DeliveryMode = amqp.Persistent
	confirmed, err := q.channel.PublishWithDeferredConfirmWithContext(ctx, "", to, false, false, m)
	if err != nil {
		return err
	}
	ok, err := confirmed.WaitContext(ctx)
	if err == nil && !ok {
		err = errors.New("rejected by the broker")
	}
	if err != nil {
		return fmt.Errorf("publish %s: %w", m.MessageId, err)
	}
	return nil
}

func (q *rabbitQueue) Publish(_ context.Context, to string, id, body, why string) error {
	return q.publish(to, amqp.Publishing{MessageId: id, Body: []byte(body), Headers: amqp.Table{"why": why}})
}

func (q *rabbitQueue) Next(ctx context.Context) (message, error) {
	select {
	case d, ok := <-q.deliveries:
		if !ok {
			return nil, amqp.ErrClosed
		}
		return rabbitMessage{q, d}, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (q *rabbitQueue) Close() { _ = q.conn.Close() }

type rabbitMessage struct {
	queue *rabbitQueue
	d     amqp.Delivery
}

func (m rabbitMessage) ID() string   { return m.d.MessageId }
func (m rabbitMessage) Body() string { return string(m.d.Body) }
func (m rabbitMessage) Ack() error   { return m.d.Ack(false) }

// Deliveries returns the number of deliveries of m. RabbitMQ counts only the deliveries to consumers that were lost.
// Again counts the others, in a header.
func (m rabbitMessage) Deliveries() int {
	counted, _ := m.d.Headers["deliveries"].(int64)
	lost, _ := m.d.Headers["x-delivery-count"].(int64)
	return int(counted+lost) + 1
}

// Again publishes a copy of m to a queue in which it waits for the delay, and then acknowledges m. There are only a few
// such queues, because there is one for each power of two, in milliseconds, to which delays are rounded up.
func (m rabbitMessage) Again(after time.Duration) error {
	delay := time.Millisecond
	for delay < after {
		delay *= 2
	}
	later := fmt.Sprintf("%s.again.%v", m.queue.name, delay)
	_, err := m.queue.channel.QueueDeclare(later, true, false, false, false, amqp.Table{
		"x-dead-letter-exchange": "", "x-dead-letter-routing-key": m.queue.name,
		"x-expires": (delay + time.Hour).Milliseconds(),
	})
	if err == nil {
		err = m.queue.publish(later, amqp.Publishing{MessageId: m.ID(), Body: m.d.Body,
			Expiration: fmt.Sprint(after.Milliseconds()), Headers: amqp.Table{"deliveries": int64(m.Deliveries())}})
	}
	if err != nil {
		return err
	}
	return m.Ack()
}

// Hold sends nothing to RabbitMQ, and waits until ctx is done or the connection is lost. RabbitMQ assigns a message to
// another consumer only if the connection is lost, or after the server's consumer_timeout of 30 minutes. A consumer
// cannot extend the consumer_timeout.
func (m rabbitMessage) Hold(ctx context.Context) error {
	select {
	case <-m.queue.closed:
		return amqp.ErrClosed
	case <-ctx.Done():
		return nil
	}
}

func (m rabbitMessage) Reject(why error) error {
	if err := m.queue.Publish(context.Background(), m.queue.name+".dead", m.ID(), m.Body(), why.Error()); err != nil {
		return err
	}
	return m.Ack()
}
