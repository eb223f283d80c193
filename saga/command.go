package saga

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/attempt"
)

// A Command is what an attempt of a step asks its participant to do.
type Command struct {
	// ID is "<saga>/<step>/<alternative>/do" or ".../undo", where saga is the id
	// of the saga and alternative is the step's own name or that of one of its
	// alternatives. Every attempt has the same: a participant that applies an ID
	// once is safe from repetition.
	ID string
	// Attempt is 1, 2 and so on, as far as is known: a crash can lose count.
	Attempt int
	// Epoch is the fencing token: it grows with each change of the saga's owner.
	// 0 under Run.
	Epoch int64
	// CompleteBy is when the attempt's ctx ends, by the clock of this process;
	// zero if it has no deadline.
	CompleteBy time.Time
}

type commandKey struct{}

// CommandFrom returns the command that a Do, Undo, DoTx or UndoTx carries out.
// Outside of one it returns the zero Command, whose ID is empty.
func CommandFrom(ctx context.Context) Command {
	switch c := ctx.Value(commandKey{}).(type) {
	case *attemptContext:
		cmd := Command{ID: c.saga.commandID(c.unit, c.op), Attempt: c.attempt, Epoch: c.saga.epoch}
		cmd.CompleteBy, _ = c.Deadline()
		return cmd
	case Command:
		return c
	}
	return Command{}
}

// WithCommand returns a ctx that carries cmd: for a participant in another
// process, which was sent a command's ID, to use [Barrier] with.
func WithCommand(ctx context.Context, cmd Command) context.Context {
	return context.WithValue(ctx, commandKey{}, cmd)
}

// identity is what the commands of one saga have in common.
type identity struct {
	p     *plan
	epoch int64
	name  sync.Once
	id    string // "": one is made up when somebody asks
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

// DoID returns the ID of the Do that the command is, or undoes: the id under which
// the participant knows what is to be undone. It is "" if ID is not that of a
// command.
func (c Command) DoID() string {
	if id, ok := strings.CutSuffix(c.ID, "/"+string(OpUndo)); ok {
		return id + "/" + string(OpDo)
	}
	if strings.HasSuffix(c.ID, "/"+string(OpDo)) {
		return c.ID
	}
	return ""
}

// attemptContext is the ctx of one attempt. The id of its command is put
// together only when it is asked for.
type attemptContext struct {
	context.Context
	saga    *identity
	unit    int
	attempt int
	op      Op
}

func (c *attemptContext) Value(key any) any {
	switch key.(type) {
	case commandKey:
		return c
	case attempt.Key:
		return c.mark()
	}
	return c.Context.Value(key)
}

// mark returns what package attempt marks the ctx with: the number of the attempt,
// or 0 for a step that the saga does not repeat. Zero begins a new operation, also
// if the caller of Run is itself an attempt of another one.
func (c *attemptContext) mark() int {
	u := &c.saga.p.units[c.unit]
	if c.op == OpDo && u.attempts == 1 || c.op == OpUndo && u.undoAttempts == 1 {
		return 0
	}
	return c.attempt
}

// splitCommand takes the id of a command apart.
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
	return saga, parts[n-3] + "/" + parts[n-2], Op(parts[n-1]), nil
}
