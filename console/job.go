package console

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-resilience/resilience/saga"
)

// A job is an action on many sagas. It outlives its request. A console has one at a time.
type job struct {
	op    Operation
	began time.Time
	moved chan struct{} // sent to when it gets on
	over  chan struct{} // closed when it has ended

	mu    sync.Mutex
	found int  // sagas, before the first was acted on
	all   bool // there were no more than found
	done  saga.Operated
	err   error     // why some are left
	ended time.Time // zero while it goes on
}

var (
	errClosed = errors.New("the console is closed")
	errDeaf   = errors.New("the store does not answer")
)

// begin starts a job, unless there is one that goes on.
func (c *Console) begin(r *http.Request, op Operation, runner *saga.Runner) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.closed:
		return errClosed
	default:
	}
	if c.job != nil {
		if v := c.job.view(c); v.Ended == nil {
			return fmt.Errorf("another action on many sagas goes on: %s", v)
		}
	}
	c.job = &job{op: op, began: time.Now(), moved: make(chan struct{}, 1), over: make(chan struct{})}
	go c.watch(r.Clone(context.WithoutCancel(r.Context())), c.job, runner)
	return nil
}

// watch carries out a job, and gives it up if the store does not answer for long.
func (c *Console) watch(r *http.Request, j *job, runner *saga.Runner) {
	defer close(j.over)
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	ended := make(chan error, 1)
	go func() { ended <- c.carryOut(ctx, r, j, runner) }()
	closed := c.closed
	for patience := time.NewTimer(asking); ; {
		select {
		case err := <-ended:
			c.end(r, j, err)
			return
		case <-j.moved:
			patience.Reset(asking)
		case <-closed:
			closed = nil
			patience.Reset(storeTime)
		case <-patience.C:
			if ctx.Err() != nil { // to which the store is deaf
				c.end(r, j, errDeaf)
				return
			}
			cancel(errDeaf)
			patience.Reset(second)
		}
	}
}

// carryOut acts on the sagas of a job. It asks before each further page of them whether that
// is still allowed.
func (c *Console) carryOut(ctx context.Context, r *http.Request, j *job, runner *saga.Runner) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = secretError{"it has broken off", fmt.Errorf("panic: %v", v)}
		}
	}()
	n, all, err := found(ctx, runner, *j.op.Filter)
	j.set(func() { j.found, j.all = n, all })
	if err == nil {
		for done, wrong := range runner.OperateAll(ctx, *j.op.Filter, j.op.ofSaga()) {
			j.set(func() { j.done = done })
			if err = wrong; err != nil || j.view(c).Left == 0 {
				continue
			}
			select {
			case <-c.closed:
				return errClosed
			default:
			}
			if err := c.cfg.Allow(r, j.op); err != nil {
				return err
			}
		}
	}
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return ofStore(err)
}

// set changes a job that goes on.
func (j *job) set(change func()) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ended.IsZero() {
		change()
	}
	select {
	case j.moved <- struct{}{}:
	default:
	}
}

// end notes why a job has ended, and tells Audit.
func (c *Console) end(r *http.Request, j *job, err error) {
	op := j.op
	j.set(func() {
		done := j.done
		op.Operated = &done
		j.err, j.ended = err, time.Now()
	})
	if err != nil {
		err = fmt.Errorf("%d of the sagas are left: %w", j.view(c).Left, err)
	}
	defer func() {
		if v := recover(); v != nil { // there is no request that it could end
			slog.ErrorContext(r.Context(), "console: Audit has panicked", "panic", v, "stack", string(debug.Stack()))
		}
	}()
	c.audit(r, op, err)
}

// A jobView tells how far an action on many sagas is.
type jobView struct {
	Action  Action     `json:"action"`
	On      string     `json:"on"`   // its conditions
	Note    string     `json:"note"` // "hidden" unless Show.Errors, as in the logs of the sagas
	Began   time.Time  `json:"began"`
	Ended   *time.Time `json:"ended,omitempty"`
	Done    int        `json:"done"`
	Refused int        `json:"refused"` // by sagas, as they are
	Left    int        `json:"left"`
	More    bool       `json:"more,omitempty"`  // more than Left may be left
	Error   string     `json:"error,omitempty"` // why they are
}

func (j *job) view(c *Console) jobView {
	j.mu.Lock()
	defer j.mu.Unlock()
	return jobView{
		Action: j.op.Action, On: j.op.form.String(), Note: c.text(j.op.Note), Began: j.began, Ended: some(j.ended),
		Done: j.done.Done, Refused: j.done.NotAllowed, Left: max(j.found-j.done.Done-j.done.NotAllowed, 0),
		More: !j.all && (j.ended.IsZero() || j.err != nil), Error: c.told(j.err),
	}
}

// String says how far it is: "abandon with status stuck: 340 done, 2 refused, 1658 left".
func (v jobView) String() string {
	more := ""
	if v.More {
		more = " or more"
	}
	return fmt.Sprintf("%s with %s: %d done, %d refused, %d%s left", v.Action, v.On, v.Done, v.Refused, v.Left, more)
}

// Tone returns how a job goes.
func (v jobView) Tone() tone {
	switch {
	case v.Error != "":
		return fail
	case v.Ended != nil:
		return well
	}
	return "blue"
}

// Took returns for how long it has gone on.
func (v jobView) Took() string {
	if v.Ended != nil {
		return ago(v.Ended.Sub(v.Began))
	}
	return ago(time.Since(v.Began))
}

// jobOn returns the job on the sagas of a Runner, until ten minutes after its end.
func (c *Console) jobOn(path string) *jobView {
	c.mu.Lock()
	j := c.job
	c.mu.Unlock()
	if j == nil || j.op.Policy != path {
		return nil
	}
	v := j.view(c)
	if v.Ended != nil && time.Since(*v.Ended) > lingers {
		return nil
	}
	return &v
}

// String returns the conditions of a form in words.
func (f sagaForm) String() string {
	var all []string
	for _, c := range [...]struct{ name, value string }{{"definition", f.Saga}, {"status", f.Status}, {"text", strconv.Quote(f.Text)}, {"age", f.Age}} {
		if c.value != "" && c.value != `""` {
			all = append(all, c.name+" "+c.value)
		}
	}
	if f.Failing {
		all = append(all, "failing")
	}
	return strings.Join(all, ", ")
}
