package main

import (
	"context"
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// A rabbitQueue is a quorum queue of RabbitMQ, and one of its dead letters. A message that is
// to come later waits in a queue of its own delay, whose dead letters go to the first.
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
			err = q.channel.Qos(1, 0, false) // one message at a time: the others wait at the broker
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

// publish returns when the broker has the message.
func (q *rabbitQueue) publish(to string, m amqp.Publishing) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	m.DeliveryMode = amqp.Persistent
	confirmed, err := q.channel.PublishWithDeferredConfirmWithContext(ctx, "", to, false, false, m)
	if err != nil {
		return err
	}
	if ok, err := confirmed.WaitContext(ctx); err != nil || !ok {
		return fmt.Errorf("the broker has not taken %s: %w", m.MessageId, err)
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

// Deliveries are those that Again has counted, and those of consumers that were lost.
func (m rabbitMessage) Deliveries() int {
	counted, _ := m.d.Headers["deliveries"].(int64)
	lost, _ := m.d.Headers["x-delivery-count"].(int64)
	return int(counted+lost) + 1
}

// Again puts a copy into the queue of a delay, the next power of two, for after.
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

func (m rabbitMessage) Keep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-m.queue.closed:
		return amqp.ErrClosed
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (m rabbitMessage) Reject(why error) error {
	if err := m.queue.Publish(context.Background(), m.queue.name+".dead", m.ID(), m.Body(), why.Error()); err != nil {
		return err
	}
	return m.Ack()
}
