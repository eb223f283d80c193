// Package sagatest tries out the steps of a saga.
//
//	func TestTrip(t *testing.T) {
//		sagatest.Check(t, trip, func() *Trip { return &Trip{From: "LIS"} })
//	}
//
// Some failures between a saga and its participants are rare in production: a reply is
// lost, a request arrives twice, or arrives after it was undone. Check makes each of them
// happen to each step.
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

// A Case is one of Check's runs, and what must hold after it.
type Case[S any] struct {
	Scenario string   // such as "the reply of hotel is lost"
	State    *S       // of that run
	InEffect []string // the steps and alternatives that must be in effect now, without ReadOnly and Idempotent ones and children; none if compensated
}

// Check runs the saga in memory: once without a failure, and once for each of these
// failures of each step and alternative that has a Do and an Undo. The failures are those
// of the pivot and the steps that it waits for, or of all steps if there is no pivot:
//
//   - Do fails and takes no effect.
//   - Do takes effect and its reply is lost.
//   - Do takes no effect and its reply is lost: Undo is called without a Do, and then the
//     Do arrives late, and must be declined.
//   - A policy of this module refuses Do at first.
//
// In each run, each Do and each Undo that is called is called twice with the same command
// id.
//
// Every Do and Undo that must work has to return nil, the saga must end as expected, and
// the state must survive its Codec. verify compares the participants with the Case;
// they may be fresh for each run or not. Attempts, Backoff and Settle are ignored. A DoTx
// or UndoTx is applied exactly once, and is not called. Nor is a Saga: Check the children
// by themselves. Delay and Await are ignored: SignalFrom returns no signal.
func Check[S any](t testing.TB, sg *saga.Saga[S], newState func() *S, verify ...func(testing.TB, Case[S])) {
	t.Helper()
	if err := sg.Validate(); err != nil {
		t.Fatalf("sagatest: %v", err)
	}
	c := &checker[S]{t: t, sg: sg, newState: newState, verify: verify}
	c.run("nothing goes wrong", "", nothing)
	back := turnsBack(sg.Steps)
	for i := range sg.Steps {
		st := &sg.Steps[i]
		for _, name := range names(st) {
			if !back[i] || !undoable(st, name) {
				continue
			}
			c.run(name+" takes no effect", name, noEffect)
			c.run("the reply of "+name+" is lost", name, lostReply)
			c.run(name+" is undone and was never done", name, neverDone)
			c.run(name+" is refused by a policy at first", name, heldBack)
		}
	}
}

// turnsBack reports for each step whether the saga turns back if it fails: the pivot and
// the steps that it waits for, or all steps if there is no pivot.
func turnsBack[S any](steps []saga.Step[S]) []bool {
	index := make(map[string]int)
	for i := range steps {
		index[steps[i].Name] = i
	}
	back := make([]bool, len(steps))
	var mark func(i int)
	mark = func(i int) {
		if back[i] {
			return
		}
		back[i] = true
		if steps[i].After == nil && i > 0 {
			mark(i - 1)
		}
		for _, name := range steps[i].After {
			mark(index[name])
		}
	}
	pivot := slices.IndexFunc(steps, func(st saga.Step[S]) bool { return st.Pivot })
	for i := range steps {
		if pivot < 0 || i == pivot {
			mark(i)
		}
	}
	return back
}

// A trouble is a failure of one step.
type trouble int

const (
	nothing trouble = iota
	noEffect
	lostReply
	neverDone
	heldBack
)

// A refusal is the error of a policy that has not made the call.
type refusal struct{}

func (refusal) Error() string { return "sagatest: refused on purpose" }
func (refusal) Refused() bool { return true }

var errTrouble = errors.New("sagatest: it fails on purpose")

type checker[S any] struct {
	t        testing.TB
	sg       *saga.Saga[S]
	newState func() *S
	verify   []func(testing.TB, Case[S])
}

func names[S any](st *saga.Step[S]) []string {
	list := []string{st.Name}
	for i := range st.Or {
		list = append(list, st.Or[i].Name)
	}
	return list
}

// readOnly reports whether Check sees no effect of a step or alternative.
func readOnly[S any](st *saga.Step[S]) bool {
	return st.ReadOnly || st.Idempotent || st.Do == nil && st.DoTx == nil
}

// undoable reports whether a step or alternative has a Do and an Undo.
func undoable[S any](st *saga.Step[S], name string) bool {
	for i := range st.Or {
		if st.Or[i].Name == name {
			return undoable(&st.Or[i], name)
		}
	}
	return st.Do != nil && st.Undo != nil
}

// run runs the saga with trouble at one step or alternative. The alternatives before it
// fail without effect.
func (c *checker[S]) run(scenario, at string, what trouble) {
	c.t.Helper()
	tried := Case[S]{Scenario: scenario, State: c.newState()}
	sg := &saga.Saga[S]{Name: c.sg.Name, Version: c.sg.Version}
	last := false // no alternative follows the step in trouble
	for i := range c.sg.Steps {
		st := c.sg.Steps[i]
		all := names(&st)
		pos := slices.Index(all, at)
		last = last || pos == len(all)-1
		effect := max(pos, 0) // the alternative that takes effect
		if pos >= 0 && what != heldBack {
			effect++
		}
		if effect < len(all) && (effect > 0 || !readOnly(&st)) && (effect == 0 || !readOnly(&st.Or[effect-1])) {
			tried.InEffect = append(tried.InEffect, all[effect])
		}
		wrapped := make([]saga.Step[S], len(all))
		for j := range all {
			alt := st
			if j > 0 {
				alt = st.Or[j-1]
			}
			w := nothing
			switch {
			case j < pos:
				w = noEffect
			case j == pos:
				w = what
			}
			wrapped[j] = c.wrap(scenario, alt, w)
		}
		first := wrapped[0]
		first.After, first.Pivot, first.Or = st.After, st.Pivot, wrapped[1:]
		sg.Steps = append(sg.Steps, first)
	}
	err := saga.Run(c.t.Context(), sg, tried.State)
	switch {
	case what == nothing || what == heldBack || !last:
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

// wrap returns a step with trouble, each of whose calls happens twice.
func (c *checker[S]) wrap(scenario string, st saga.Step[S], what trouble) saga.Step[S] {
	out := saga.Step[S]{
		Name: st.Name, ReadOnly: readOnly(&st), Attempts: 1, UndoAttempts: 1, Timeout: st.Timeout,
		Middleware: st.Middleware,
	}
	do, undo := st.Do, st.Undo
	if do == nil {
		do = func(context.Context, *S) error { return nil }
	}
	twice := func(op string, fn func(context.Context, *S) error) func(context.Context, *S) error {
		return func(ctx context.Context, s *S) error {
			for _, which := range []string{"", " again"} {
				if err := fn(ctx, s); err != nil {
					c.t.Errorf("%s: %s of %s%s: %v", scenario, op, st.Name, which, err)
					return saga.InDoubt(saga.Abort(err)) // whatever err says, to end the run
				}
			}
			return nil
		}
	}
	switch what {
	case nothing:
		out.Do = twice("Do", do)
	case noEffect:
		out.Do = func(context.Context, *S) error { return saga.NoEffect(errTrouble) }
	case lostReply:
		out.Do = func(ctx context.Context, s *S) error {
			if err := twice("Do", do)(ctx, s); err != nil {
				return err
			}
			return saga.Abort(errTrouble)
		}
	case heldBack:
		calls := 0
		out.Backoff = func(int) time.Duration { return 0 }
		out.Do = func(ctx context.Context, s *S) error {
			if calls++; calls == 1 {
				return refusal{}
			}
			return twice("Do", do)(ctx, s)
		}
	case neverDone:
		out.Do = func(context.Context, *S) error { return saga.Abort(errTrouble) }
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
		if what != neverDone {
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

// codec checks that the state survives its Codec.
func (c *checker[S]) codec(scenario string, s *S) {
	encode, decode := func(s *S) ([]byte, error) { return json.Marshal(s) }, func(b []byte, s *S) error { return json.Unmarshal(b, s) }
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
	// An encoder may write the same map in any order.
	if err != nil || !slices.Equal(data, again) && !reflect.DeepEqual(s, back) {
		c.t.Errorf("%s: the state does not come back from its Codec as it was: %v, %s", scenario, err,
			fmt.Sprintf("%q and then %q", data, again))
	}
}
