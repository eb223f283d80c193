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
	ID      string // "<id of the saga>/<step>/do" or ".../undo", in all attempts
	Attempt int    // from 1; a crash can make it smaller
	Epoch   int64  // the fencing token, which grows with each claim of the saga; zero under Run
}

type commandKey struct{}

// CommandFrom returns the command of a step's function by its ctx, else the zero Command.
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

// WithCommand returns a ctx with cmd, for [Apply] in a participant that got its ID by a message.
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

// DoID returns the ID of the Do that the command is or undoes, or "" if it is none.
func (c Command) DoID() string { return participant.Do(c.ID) }

// ChildID returns the id of the nth child, from 0, of a step: "<id>/<step>/<n>", or a hash at the end if that is
// too long. With 3 children, number 4 is child 1 started again by an [ActionRetry], and number 7 the next time.
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

// SignalFrom returns the payload of a signal by the ctx of the step that awaited it, of those after it, or of an
// Undo.
func SignalFrom(ctx context.Context, name string) (payload []byte, ok bool) {
	if c, _ := ctx.Value(commandKey{}).(*attempted); c != nil {
		payload, ok = c.signals[name]
	}
	return bytes.Clone(payload), ok
}
