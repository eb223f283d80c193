package saga

import (
	"bytes"
	"context"
	"crypto/rand"
	"sync"

	"github.com/go-resilience/resilience/internal/attempt"
	"github.com/go-resilience/resilience/saga/internal/participant"
)

// A Command is the request of an attempt to its participant.
type Command struct {
	// ID is "<saga>/<step>/do" or ".../undo", with the saga's id, in all attempts: a participant that
	// applies each ID once is safe from repetition.
	ID string
	// Attempt is the number of the attempt, from 1. A crash can make it smaller.
	Attempt int
	// Epoch is the fencing token, which grows each time that a runner claims the saga. Zero under Run.
	Epoch int64
}

type commandKey struct{}

// CommandFrom returns the command of the step's function whose ctx it is given, else the zero Command.
func CommandFrom(ctx context.Context) Command {
	switch c, _ := ctx.Value(commandKey{}).(*attempted); {
	case c == nil:
		return Command{}
	case c.given != nil:
		return *c.given
	default:
		return Command{ID: c.saga.commandID(c.step, c.op), Attempt: c.attempt, Epoch: c.saga.epoch}
	}
}

// WithCommand returns a ctx that carries cmd, for [Apply] in a participant that got its ID by a message.
func WithCommand(ctx context.Context, cmd Command) context.Context {
	c := &attempted{given: &cmd}
	if outer, _ := ctx.Value(commandKey{}).(*attempted); outer != nil {
		c.signals = outer.signals
	}
	return context.WithValue(ctx, commandKey{}, c)
}

// An identity is the common part of the commands of one saga.
type identity struct {
	p     *program
	epoch int64
	name  sync.Once
	id    string // "" until commandID makes one up
}

func (s *identity) commandID(step int, op Op) string {
	s.name.Do(func() {
		if s.id == "" {
			s.id = rand.Text()
		}
	})
	return participant.ID(s.id, s.p.steps[step].name, op)
}

// DoID returns the ID of the Do that the command is or undoes, by which the participant of an Undo knows
// the effect. It is "" if ID is not the id of a command.
func (c Command) DoID() string { return participant.Do(c.ID) }

// ChildID returns the id of the nth child, from 0, of a step of the saga id: "<id>/<step>/<n>". If that is
// too long, its end is a hash of it. Of a step with 3 children, number 4 is child 1 started again by an
// [ActionRetry], and number 7 the next time.
func ChildID(id, step string, n int) string { return participant.Child(id, step, n) }

// attempted is what the ctx of an attempt carries. It composes the command's id only when it is
// asked for.
type attempted struct {
	given   *Command          // of WithCommand; nil in an attempt
	signals map[string][]byte // of the saga, by name; never changed
	saga    *identity
	step    int
	attempt int
	op      Op
}

// withAttempt returns the ctx of an attempt. A step that the saga does not repeat begins a new
// operation, even if the caller of Run is itself within an attempt.
func withAttempt(ctx context.Context, c *attempted) context.Context {
	st, n := &c.saga.p.steps[c.step], c.attempt
	if c.op == OpDo && st.attempts == 1 || c.op == OpUndo && st.undoAttempts == 1 {
		n = 0
	}
	return attempt.With(context.WithValue(ctx, commandKey{}, c), n)
}

// SignalFrom returns the payload of a signal in the ctx of a step's function. A step that awaited it, those
// after it and each Undo see it. The payload is the caller's own.
func SignalFrom(ctx context.Context, name string) (payload []byte, ok bool) {
	if c, _ := ctx.Value(commandKey{}).(*attempted); c != nil {
		payload, ok = c.signals[name]
	}
	return bytes.Clone(payload), ok
}
