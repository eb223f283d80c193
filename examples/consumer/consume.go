package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/resiliencesql"
)

// A message is a message from a queue. The broker assigns it to this process until the process acknowledges, returns or
// rejects it.
type message interface {
	ID() string
	Body() string
	Deliveries() int                 // the number of deliveries, including this one; refused calls do not count
	Ack() error                      // removes the message from the queue
	Again(after time.Duration) error // makes the broker deliver the message again later
	Reject(why error) error          // moves the message to the dead letters
	Hold(ctx context.Context) error  // keeps the message assigned until ctx is done; an error if that fails
}

const maxDeliveries = 8

// settle calls handle with m and reports the result to the broker. The delays before a retry are multiples of pace.
func settle(ctx context.Context, m message, pace time.Duration, handle func(context.Context, message) error) error {
	for {
		lost, err := handleHeld(ctx, m, handle)
		if lost != nil {
			return lost // m is no longer assigned; the broker delivers it again
		}
		// The message may have been applied if the answer to a COMMIT was lost. A retry is safe, because handle applies m
		// only once.
		retryable := resilience.Retryable(err) || errors.Is(err, resiliencesql.ErrOutcomeUnknown)
		switch {
		case err == nil:
			return m.Ack()
		case ctx.Err() != nil:
			return context.Cause(ctx) // this process stops, and the broker assigns m to another consumer
		case resilience.Refused(err):
			// A policy refused the call, so the order was not tried, and the attempt does not count as a delivery. Wait with m,
			// and fetch no other message.
			wait, cancel := context.WithTimeout(ctx, max(pace, resilience.RetryAfter(err)))
			err := m.Hold(wait)
			cancel()
			if err != nil {
				return err
			}
		case !retryable, m.Deliveries() >= maxDeliveries:
			return m.Reject(err)
		default:
			// The delay is random. Its maximum doubles with each delivery.
			d := pace << m.Deliveries()
			return m.Again(max(d/2+rand.N(d/2), resilience.RetryAfter(err)))
		}
	}
}

// handleHeld calls handle, and keeps m assigned to this process until handle returns. Otherwise, a broker with a time
// limit for acknowledgments could deliver m to a second consumer while handle still runs. If the assignment of m is
// lost, handleHeld cancels handle's ctx and returns the reason as lost.
func handleHeld(
	ctx context.Context, m message, handle func(context.Context, message) error,
) (lost, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	held := make(chan error, 1)
	go func() {
		err := m.Hold(ctx)
		cancel(err)
		held <- err
	}()
	err = handle(ctx, m)
	cancel(nil)
	return <-held, err
}

// A queue delivers messages from a broker.
type queue interface {
	Next(ctx context.Context) (message, error)
	Close()
}

// consume settles one message after the other until ctx is done. If the connection to the broker is lost, it opens the
// queue again.
func consume(
	ctx context.Context, open func(context.Context) (queue, error), pace time.Duration,
	handle func(context.Context, message) error,
) {
	for ctx.Err() == nil {
		q, err := open(ctx)
		for err == nil {
			var m message
			if m, err = q.Next(ctx); err == nil {
				err = settle(ctx, m, pace, handle)
			}
		}
		if q != nil {
			q.Close()
		}
		select {
		case <-time.After(pace):
		case <-ctx.Done():
		}
	}
}
