package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/resiliencesql"
)

// A message is one that a broker has lent to this process, until it is told what became of it.
type message interface {
	ID() string
	Body() string
	Deliveries() int // this one included; one that was only refused does not count
	Ack() error
	Again(after time.Duration) error
	Keep(ctx context.Context, d time.Duration) error // waits, and remains the owner
	Reject(why error) error                          // to the dead letters
}

const mostDeliveries = 8

// settle handles m and tells the broker what became of it, by the error. Pace is the unit of
// its delays.
func settle(ctx context.Context, m message, pace time.Duration, handle func(context.Context, message) error) error {
	for {
		err := handle(ctx, m)
		again := resilience.Retryable(err) || errors.Is(err, resiliencesql.ErrOutcomeUnknown) // handle applies m once
		switch {
		case err == nil:
			return m.Ack()
		case ctx.Err() != nil:
			return context.Cause(ctx) // this process stops: another one gets m
		case resilience.Refused(err):
			// Pause: nothing was tried, so it is no delivery, and no other message is fetched.
			if err := m.Keep(ctx, max(pace, resilience.RetryAfter(err))); err != nil {
				return err
			}
		case !again, m.Deliveries() >= mostDeliveries:
			return m.Reject(err) // no, for good; or tried often enough
		default:
			// It has failed: later, each time twice as late, and not all at once.
			d := pace << m.Deliveries()
			return m.Again(max(d/2+rand.N(d/2), resilience.RetryAfter(err)))
		}
	}
}

// A queue lends messages.
type queue interface {
	Next(ctx context.Context) (message, error)
	Close()
}

// consume settles messages one after the other, until ctx ends. It opens the queue again when
// its connection is lost.
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
