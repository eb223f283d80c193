package saga

import (
	"bytes"
	"context"
	"crypto/rand"
	"sync"

	retrying "github.com/go-resilience/resilience/internal/attempt"
	"github.com/go-resilience/resilience/saga/internal/participant"
)

// A Command identifies an operation of a step to its participant.
type Command struct {
	ID      string // "<saga id>/<step>/do" or ".../undo", the same for all attempts
	Attempt int    // from 1; a crash can make it smaller
	Epoch   int64  // a fencing token, which grows with each claim; zero with [Run], on Temporal, and in a sagahttp.Handler
}

// commandKey is the key of an *attempt or an *explicitCommand in a ctx.
type commandKey struct{}

// An explicitCommand is the command from WithCommand, with the signals of the surrounding attempt.
type explicitCommand struct {
	command Command
	signals map[string][]byte
}

// CommandFrom returns the command of a step from its ctx, or the zero Command if ctx is not that of a step.
func CommandFrom(ctx context.Context) Command {
	switch c := ctx.Value(commandKey{}).(type) {
	case *explicitCommand:
		return c.command
	case *attempt:
		cmd := c.Command
		if cmd.ID == "" && c.r != nil {
			cmd.ID = participant.ID(c.r.id(), c.Step, c.Op)
		}
		return cmd
	}
	return Command{}
}

// WithCommand returns a ctx with cmd, for [Apply] in a participant that received the ID in a message.
func WithCommand(ctx context.Context, cmd Command) context.Context {
	return context.WithValue(ctx, commandKey{}, &explicitCommand{cmd, signalsFrom(ctx)})
}

// A runID is the ID of a Run. It is generated when a step first requests its command.
type runID struct {
	once sync.Once
	text string
}

func (r *runID) id() string {
	r.once.Do(func() { r.text = rand.Text() })
	return r.text
}

// DoID returns the ID of the Do that the command is or undoes, or "" if c.ID is not the id of a command.
func (c Command) DoID() string { return participant.Do(c.ID) }

// ChildID returns the id of the nth child, from 0, of a step: "<id>/<step>/<n>", or an id with a hash if that is too
// long. With 3 children, number 4 is child 1 after an [ActionRetry] has started it again, and number 7 is the next one.
func ChildID(id, step string, n int) string { return participant.Child(id, step, n) }

// withAttempt returns the ctx of an attempt. A step that the saga does not retry starts a new operation, even if the
// caller of Run is itself within an attempt.
func withAttempt(ctx context.Context, t *attempt) context.Context {
	st, n := &t.p.steps[t.n], t.Command.Attempt
	if t.Op == OpDo && st.attempts == 1 || t.Op == OpUndo && st.undoAttempts == 1 {
		n = 0
	}
	return retrying.With(context.WithValue(ctx, commandKey{}, t), n)
}

// SignalFrom returns the payload of a signal from the ctx of the step that awaited it, of later steps, and of an Undo.
// ok reports whether the signal has arrived.
func SignalFrom(ctx context.Context, name string) (payload []byte, ok bool) {
	payload, ok = signalsFrom(ctx)[name]
	return bytes.Clone(payload), ok
}

func signalsFrom(ctx context.Context) map[string][]byte {
	switch c := ctx.Value(commandKey{}).(type) {
	case *explicitCommand:
		return c.signals
	case *attempt:
		return c.Signals
	}
	return nil
}
