// Package sagatest tests the steps of a saga.
//
//	func TestTrip(t *testing.T) {
//		sagatest.Check(t, trip, func() *Trip { return &Trip{From: "LIS"} })
//	}
//
// In production, replies are rarely lost, and requests rarely arrive twice or after their Undo. [Check] causes lost
// replies, repeated requests and late requests in the steps of a saga.
package sagatest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/go-resilience/resilience/saga"
)

// A Case describes one of Check's runs and its expected result.
type Case[S any] struct {
	Scenario string   // the failure in the run, such as "the reply of hotel is lost"
	State    *S       // the final state of the run
	InEffect []string // the steps that must be in effect, including steps with DoTx; none if the saga was compensated
}

// Check runs the saga in memory: once without a failure, and once for each of the failures below in each step. Check
// causes no failures in the following steps: steps without Do, read-only steps, steps with UndoTx, and steps after the
// pivot (the point of no return).
//
//   - The participant declines Do, so Do has no effect.
//   - Do takes effect, but its reply is lost. If the step is a pivot without Undo, Do is called again until the reply
//     arrives.
//   - Do has no effect, and its reply is lost. Undo is called although Do has had no effect. After the Undo, the Do
//     arrives late and must be declined. Check does not cause this failure in a step without Undo.
//   - A policy refuses the first call to Do.
//
// Each Do and each Undo is called twice with the same command ID. Check reports an error if the definition is invalid,
// if a call that must succeed fails, if the saga ends in another status than expected, or if encoding and decoding
// change the state.
//
// Check calls the functions in verify after each run, to compare the state of the participants with the Case. Each run
// may have new participants, or all runs may share the same participants.
//
// Check ignores Saga.Timeout, and the steps' Attempts, UndoAttempts, Backoff, Delay, Await and AwaitFor. SignalFrom
// returns no signal. If a Do needs a signal's payload, test the Do separately, and leave its step out of the saga that
// Check runs. Check calls no DoTx and no UndoTx, and starts no children. Call Check separately for the definition of
// each child.
func Check[S any](t testing.TB, sg *saga.Saga[S], newState func() *S, verify ...func(testing.TB, Case[S])) {
	t.Helper()
	if err := sg.Validate(); err != nil {
		t.Fatalf("sagatest: %v", err)
	}
	c := &checker[S]{t: t, sg: sg, newState: newState, verify: verify}
	c.run("nothing goes wrong", "", fine)
	for i := range sg.Steps {
		if st := &sg.Steps[i]; st.Do != nil && st.Undo != nil {
			for _, what := range troubles {
				c.run(fmt.Sprintf(what.scenario, st.Name), st.Name, what)
			}
		} else if st.Do != nil && st.Pivot && !st.ReadOnly {
			for _, what := range pivotTroubles {
				c.run(fmt.Sprintf(what.scenario, st.Name), st.Name, what)
			}
		}
		if sg.Steps[i].Pivot {
			break
		}
	}
}

// A trouble is a failure of one step.
type trouble struct {
	scenario string
	does     bool  // whether Do takes effect
	err      error // the error of every attempt of Do
	once     error // the error of only the first attempt; overrides err
	late     bool  // whether Do is called again after the Undo
}

var (
	fine     = trouble{does: true}
	troubles = []trouble{
		{scenario: "%s takes no effect", err: saga.Declined(errTrouble)},
		{scenario: "the reply of %s is lost", does: true, err: saga.Permanent(errTrouble)},
		{scenario: "%s is undone and was never done", err: saga.Permanent(errTrouble), late: true},
		{scenario: "%s is refused by a policy at first", does: true, once: refusal{}},
	}
	// pivotTroubles are the troubles of a pivot without Undo. Only a nil error or a Declined determines the outcome of
	// such a pivot.
	pivotTroubles = []trouble{
		{scenario: "%s takes no effect", err: saga.Declined(errTrouble)},
		{scenario: "the reply of %s is lost", does: true, once: errTrouble},
		{scenario: "%s is refused by a policy at first", does: true, once: refusal{}},
	}
)

// A refusal is the error of a policy that has refused the call.
type refusal struct{}

func (refusal) Error() string { return "sagatest: refused on purpose" }
func (refusal) Refused() bool { return true }

var errTrouble = errors.New("sagatest: failed on purpose")

type checker[S any] struct {
	t        testing.TB
	sg       *saga.Saga[S]
	newState func() *S
	verify   []func(testing.TB, Case[S])
}

// readOnly reports whether Check expects st to have no effect.
func readOnly[S any](st *saga.Step[S]) bool { return st.ReadOnly || st.Do == nil && st.DoTx == nil }

// run runs the saga with a trouble in the step at.
func (c *checker[S]) run(scenario, at string, what trouble) {
	c.t.Helper()
	tried := Case[S]{Scenario: scenario, State: c.newState()}
	sg := &saga.Saga[S]{Name: c.sg.Name, Version: c.sg.Version}
	for i := range c.sg.Steps {
		st := &c.sg.Steps[i]
		if !readOnly(st) {
			tried.InEffect = append(tried.InEffect, st.Name)
		}
		w := fine
		if st.Name == at {
			w = what
		}
		sg.Steps = append(sg.Steps, c.wrap(scenario, st, w))
	}
	err := saga.Run(c.t.Context(), sg, tried.State)
	switch {
	case what.err == nil:
		if err != nil {
			c.t.Errorf("%s: the saga must complete: %v", scenario, err)
		}
	case !errors.Is(err, saga.ErrCompensated):
		c.t.Errorf("%s: the saga must be compensated: %v", scenario, err)
	default:
		tried.InEffect = nil
	}
	c.codec(scenario, tried.State)
	for _, verify := range c.verify {
		verify(c.t, tried)
	}
}

// wrap returns st with a trouble. The step's functions are called twice in each attempt.
func (c *checker[S]) wrap(scenario string, st *saga.Step[S], what trouble) saga.Step[S] {
	out := saga.Step[S]{
		Name: st.Name, Parallel: st.Parallel, Pivot: st.Pivot, ReadOnly: readOnly(st), Attempts: 1, UndoAttempts: 1,
		Timeout: st.Timeout, Middleware: st.Middleware,
	}
	do, undo := st.Do, st.Undo
	if do == nil {
		do = func(context.Context, *S) error { return nil }
	}
	twice := func(op string, fn func(context.Context, *S) error) func(context.Context, *S) error {
		return func(ctx context.Context, s *S) error {
			for _, which := range []string{"", " again"} {
				err := fn(ctx, s)
				if err != nil && ctx.Err() != nil {
					return err // a parallel step has failed; this step may have taken effect
				}
				if err != nil {
					c.t.Errorf("%s: %s of %s%s: %v", scenario, op, st.Name, which, err)
					return saga.MaybeApplied(saga.Permanent(err)) // ends the run, regardless of the class of err
				}
			}
			return nil
		}
	}
	out.Backoff = func(int) time.Duration { return 0 }
	calls := 0
	out.Do = func(ctx context.Context, s *S) error {
		calls++
		refused := calls == 1 && what.once == error(refusal{})
		if what.does && !refused {
			if err := twice("Do", do)(ctx, s); err != nil {
				return err
			}
		}
		if calls == 1 && what.once != nil {
			return what.once
		}
		return what.err
	}
	if undo == nil {
		if st.UndoTx != nil {
			out.Undo = func(context.Context, *S) error { return nil }
		}
		return out
	}
	out.Undo = func(ctx context.Context, s *S) error {
		if err := twice("Undo", undo)(ctx, s); err != nil {
			return err
		}
		if !what.late {
			return nil
		}
		cmd := saga.CommandFrom(ctx)
		cmd.ID = cmd.DoID()
		if do(saga.WithCommand(ctx, cmd), s) == nil {
			c.t.Errorf("%s: the Do of %s that comes after its Undo must be declined", scenario, st.Name)
		}
		return nil
	}
	return out
}

// codec checks that encoding and decoding with the Codec do not change the state.
func (c *checker[S]) codec(scenario string, s *S) {
	encode := func(s *S) ([]byte, error) { return json.Marshal(s) }
	decode := func(data []byte, s *S) error { return json.Unmarshal(data, s) }
	if c.sg.Codec != nil {
		encode, decode = c.sg.Codec.Encode, c.sg.Codec.Decode
	}
	back := new(S)
	data, err := encode(s)
	if err == nil {
		err = decode(data, back)
	}
	if err != nil {
		c.t.Errorf("%s: the state does not survive its Codec: %v", scenario, err)
		return
	}
	again, err := encode(back)
	// Compare also the values, because a Codec may encode the same map in any order.
	if err != nil || !slices.Equal(data, again) && !reflect.DeepEqual(s, back) {
		c.t.Errorf("%s: the state does not come back from its Codec as it was: %v, %s", scenario, err,
			fmt.Sprintf("%q and then %q", data, again))
	}
}
