package saga

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/attempt"
)

// An Op is an operation of a step.
type Op string

// The operations of a step.
const (
	OpDo   Op = "do"
	OpUndo Op = "undo"
)

// A Command is the request of an attempt to its participant.
type Command struct {
	// ID is "<saga>/<step>/<alternative>/do" or ".../undo". Here saga is the saga's id,
	// and alternative the name of the step itself or of one of its alternatives. All
	// attempts have the same ID: a participant that applies each ID once is safe from
	// repetition.
	ID string
	// Attempt is the number of the attempt, from 1. A crash can make it smaller.
	Attempt int
	// Epoch is the fencing token, which grows each time that a runner claims the saga.
	// Zero under Run.
	Epoch int64
	// Deadline is when the attempt's ctx ends, by the clock of this process. Zero
	// means that it has no deadline.
	Deadline time.Time
}

type commandKey struct{}

// CommandFrom returns the command of the Do, Undo, DoTx or UndoTx whose ctx it is given.
// Outside of one it returns the zero Command, whose ID is empty.
func CommandFrom(ctx context.Context) Command {
	switch c := ctx.Value(commandKey{}).(type) {
	case *attemptContext:
		cmd := Command{ID: c.saga.commandID(c.unit, c.op), Attempt: c.attempt, Epoch: c.saga.epoch}
		cmd.Deadline, _ = c.Deadline()
		return cmd
	case Command:
		return c
	}
	return Command{}
}

// WithCommand returns a ctx that carries cmd. A participant in another process uses it to
// call [Apply] for a command whose ID came with a message.
func WithCommand(ctx context.Context, cmd Command) context.Context {
	return context.WithValue(ctx, commandKey{}, cmd)
}

// An identity is the common part of the commands of one saga.
type identity struct {
	p     *plan
	epoch int64
	name  sync.Once
	id    string // "" until commandID makes one up

	signals atomic.Pointer[map[string][]byte] // by name; never changed
}

func (s *identity) commandID(unit int, op Op) string {
	s.name.Do(func() {
		if s.id == "" {
			s.id = rand.Text()
		}
	})
	u := &s.p.units[unit]
	return s.id + "/" + s.p.nodes[u.node].name + "/" + u.name + "/" + string(op)
}

// DoID returns the ID of the Do that the command is or undoes. The participant of an Undo
// knows the effect by it. DoID is "" if ID is not the id of a command.
func (c Command) DoID() string {
	if id, ok := strings.CutSuffix(c.ID, "/"+string(OpUndo)); ok {
		return id + "/" + string(OpDo)
	}
	if strings.HasSuffix(c.ID, "/"+string(OpDo)) {
		return c.ID
	}
	return ""
}

// An attemptContext is the ctx of one attempt. It composes the command's id only when it
// is asked for.
type attemptContext struct {
	context.Context
	saga    *identity
	unit    int
	attempt int
	op      Op
}

func (c *attemptContext) Value(key any) any {
	switch key.(type) {
	case commandKey, signalsKey:
		return c
	case attempt.Key:
		return c.mark()
	}
	return c.Context.Value(key)
}

// mark returns the value of package attempt: the number of the attempt, or 0 for a step
// that the saga does not repeat. Zero begins a new operation, even if the caller of Run
// is itself within an attempt.
func (c *attemptContext) mark() int {
	u := &c.saga.p.units[c.unit]
	if c.op == OpDo && u.attempts == 1 || c.op == OpUndo && u.undoAttempts == 1 {
		return 0
	}
	return c.attempt
}

// splitCommand returns the parts of a command's id.
func splitCommand(id string) (saga, step string, op Op, err error) {
	parts := strings.Split(id, "/")
	n := len(parts)
	if n < 4 || (parts[n-1] != string(OpDo) && parts[n-1] != string(OpUndo)) {
		if id == "" {
			return "", "", "", errors.New("saga: the ctx carries no command")
		}
		return "", "", "", fmt.Errorf("saga: %q is not the id of a command", id)
	}
	saga = strings.Join(parts[:n-3], "/")
	if len(saga) > maxID || len(parts[n-3]) > maxName || len(parts[n-2]) > maxName {
		// MySQL would cut it off, and take two commands for one.
		return "", "", "", fmt.Errorf("saga: %.40q... is not the id of a command: it is too long", id)
	}
	return saga, parts[n-3] + "/" + parts[n-2], Op(parts[n-1]), nil
}
