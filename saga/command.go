package saga

import (
	"bytes"
	"context"
	"crypto/rand"
	"sync"

	retrying "github.com/go-resilience/resilience/internal/attempt"
	"github.com/go-resilience/resilience/saga/internal/participant"
)

// A Command identifies an operation of a step, Do or Undo, to its participant.
type Command struct {
	ID      string // "<saga id>/<step>/do" or "<saga id>/<step>/undo", the same for all attempts
	Attempt int    // the number of the attempt, from 1; attempts before a crash may be missing
	// Epoch is a fencing token: it grows each time that a runner claims the saga. Epoch is zero if the saga runs in [Run]
	// or on Temporal. Epoch is also zero in a sagahttp.Handler.
	Epoch int64
}

// commandKey is the key of an *attempt or an *explicitCommand in a ctx.
type commandKey struct{}

// An explicitCommand is the command that was passed to WithCommand, with the signals of the ctx.
type explicitCommand struct {
	command Command
	signals map[string][]byte
}

// CommandFrom returns the command of a step from its ctx, or the zero Command if ctx is not the ctx of a step.
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

// WithCommand returns a ctx with cmd. If a participant received the command ID in a message, the participant calls
// [Apply] with this ctx.
func WithCommand(ctx context.Context, cmd Command) context.Context {
	return context.WithValue(ctx, commandKey{}, &explicitCommand{cmd, signalsFrom(ctx)})
}

// A runID is the saga ID of a call to Run. It is generated when a step first requests its command.
type runID struct {
	once sync.Once
	text string
}

func (r *runID) id() string {
	r.once.Do(func() { r.text = rand.Text() })
	return r.text
}

// DoID returns the ID of the step's Do. For the command of a Do, the result is c.ID. For the command of an Undo, the
// result is the ID of the Do that the Undo undoes. DoID returns "" if c.ID is not the id of a command.
func (c Command) DoID() string { return participant.Do(c.ID) }

// ChildID returns the id of the nth child of a step, counted from 0: "<id>/<step>/<n>". If the id would be too long, it
// ends with a hash. If [ActionRetry] starts a child again, the child's n increases by the number of the step's
// children. For example, if a step has 3 children, child 1 is started again as number 4, and then as number 7.
func ChildID(id, step string, n int) string { return participant.Child(id, step, n) }

// withAttempt returns the ctx of an attempt. It marks ctx as an attempt that the saga retries, so a Retrier in the step
// does not retry as well. If the step has only one attempt, ctx is marked as a new operation, which a Retrier may
// retry, even if the caller of Run is itself within an attempt.
func withAttempt(ctx context.Context, t *attempt) context.Context {
	st, n := &t.p.steps[t.n], t.Command.Attempt
	if t.Op == OpDo && st.attempts == 1 || t.Op == OpUndo && st.undoAttempts == 1 {
		n = 0
	}
	return retrying.With(context.WithValue(ctx, commandKey{}, t), n)
}

// SignalFrom returns the payload of a signal. ctx is the ctx of the step that awaited the signal, of a later step, or
// of an Undo. ok reports whether the signal has arrived.
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
