package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/resiliencesql"
)

// A message is assigned to this process until the process acknowledges, returns or rejects it.
type message interface {
	ID() string
	Body() string
	Deliveries() int                 // including this one; refused calls do not count
	Ack() error                      // removes the message from the queue
	Again(after time.Duration) error // delivers the message later
	Reject(why error) error          // moves the message to the dead letters
	Hold(ctx context.Context) error  // keeps the message assigned until ctx is done; an error if it is lost
}

const maxDeliveries = 8

// settle handles m and reports the result to the broker. Pace is the unit of its delays.
func settle(ctx context.Context, m message, pace time.Duration, handle func(context.Context, message) error) error {
	for {
		lost, err := handleHeld(ctx, m, handle)
		if lost != nil {
			return lost // the broker delivers m again
		}
		// If a COMMIT has no answer, m may have been applied: handle applies it at most once.
		retryable := resilience.Retryable(err) || errors.Is(err, resiliencesql.ErrOutcomeUnknown)
		switch {
		case err == nil:
			return m.Ack()
		case ctx.Err() != nil:
			return context.Cause(ctx) // this process stops: another consumer gets m
		case resilience.Refused(err):
			// Nothing was tried, so this is not a delivery. Wait, and fetch no other message.
			wait, cancel := context.WithTimeout(ctx, max(pace, resilience.RetryAfter(err)))
			err := m.Hold(wait)
			cancel()
			if err != nil {
				return err
			}
		case !retryable, m.Deliveries() >= maxDeliveries:
			return m.Reject(err)
		default:
			// The delay doubles with each delivery and has jitter.
			d := pace << m.Deliveries()
			return m.Again(max(d/2+rand.N(d/2), resilience.RetryAfter(err)))
		}
	}
}

// handleHeld calls handle, and holds m until handle returns. Without this, a broker with a time
// limit for acknowledgments delivers m to a second consumer while handle still runs. If m is lost,
// handleHeld cancels handle's ctx and returns the reason as lost.
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

// A queue delivers messages.
type queue interface {
	Next(ctx context.Context) (message, error)
	Close()
}

// consume settles one message after the other until ctx is done. If the connection is lost, it
// opens the queue again.
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
