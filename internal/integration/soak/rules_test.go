package soak_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/cacheaside"
)

// rules are those of the protocol between the patterns that a mutant switches off, as
// a program without them would have it.
type rules struct {
	refusalIsAnAttempt       bool // of a saga's step
	notFoundIsAFailure       bool // of a load
	declinedIsAFailure       bool // of a request
	retryAfterIsForever      bool // a breaker stays open for as long as it is asked
	badRequestIsAFailure     bool // a request that no transport can send
	hangUpIsAFailure         bool // a client that left, of the server's handler
	callersDeadlineIsNobodys bool // Patience is off
}

// mutants are the rules that are switched off one by one, with the phase that needs
// the rule and the finding that must then show.
var mutants = map[string]struct {
	rules
	in    phase
	finds string
}{
	"a refusal is an attempt":         {rules{refusalIsAnAttempt: true}, forced, stuckSagas},
	"not found is a failure":          {rules{notFoundIsAFailure: true}, well, openedByAnAnswer},
	"declined is a failure":           {rules{declinedIsAFailure: true}, well, openedByAnAnswer},
	"Retry-After has no bound":        {rules{retryAfterIsForever: true}, asked, openedForTooLong},
	"a bad request is a failure":      {rules{badRequestIsAFailure: true}, well, openedByAnAnswer},
	"a client that left is a failure": {rules{hangUpIsAFailure: true}, well, openedByAnAnswer},
	"a caller's deadline is ignored":  {rules{callersDeadlineIsNobodys: true}, hung, neverOpened},
}

// deaf returns middleware that hides what the errors below it say, if it is on.
func deaf(on bool) resilience.Middleware {
	return func(next resilience.Func) resilience.Func {
		if !on {
			return next
		}
		return func(ctx context.Context) error {
			if err := next(ctx); err != nil {
				return mute{err}
			}
			return nil
		}
	}
}

type mute struct{ error }

func (m mute) Unwrap() error           { return m.error }
func (mute) RetryAfter() time.Duration { return 0 }
func (mute) Refused() bool             { return false }
func (mute) Answered() bool            { return false }
func (mute) Retryable() bool           { return true }

var errBadRequest = errors.New("a request that cannot be sent")

// saysNothingOfTheDependency reports whether err, for which a breaker has opened, is an
// answer, or no call at all.
func saysNothingOfTheDependency(err error) bool {
	for _, answer := range []error{cacheaside.ErrNotFound, errDeclined, errBadRequest, context.Canceled} {
		if errors.Is(err, answer) {
			return true
		}
	}
	return resilience.Answered(err) || resilience.Refused(err)
}

// naive is a transport of one's own around policies: whatever http.Transport returns
// is the dependency's doing.
type naive struct{ middleware resilience.Middleware }

func (n naive) RoundTrip(req *http.Request) (resp *http.Response, err error) {
	err = n.middleware(func(ctx context.Context) error {
		resp, err = http.DefaultTransport.RoundTrip(req.WithContext(ctx))
		if err != nil && strings.Contains(req.Header.Get("Trace"), "\n") {
			err = errors.Join(errBadRequest, err)
		}
		return err
	})(req.Context())
	return resp, err
}

// blind returns middleware that hides from mw that the caller has left, if it is on.
func blind(on bool, mw resilience.Middleware) resilience.Middleware {
	if !on {
		return mw
	}
	return func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			return mw(func(context.Context) error {
				return errors.Join(next(ctx), ctx.Err())
			})(context.WithoutCancel(ctx))
		}
	}
}
