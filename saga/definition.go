package saga

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-resilience/resilience/internal/invalid"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

const (
	maxName  = 100  // maximum bytes in the name of a definition, a step or a signal
	maxSteps = 1000 // limited because each commit writes the progress of all steps

	defaultAttempts     = 3
	defaultUndoAttempts = 20
	defaultTimeout      = time.Minute // the maximum duration of an attempt
)

// A program is a valid Saga[S] without its type parameter. Functions of a program receive the state as an any that
// contains a *S.
type program struct {
	name    string
	version int
	timeout time.Duration

	steps     []step
	groups    []group
	pivot     int // the index of the pivot, or -1
	pivotName string
	chain     bool // no steps run in parallel
	needsTx   bool
	gated     bool // a step has a Delay or an Await
	awaits    bool // a step waits for a signal
	children  bool // a step has children

	state  reflect.Type
	isJSON bool // Saga.Codec is nil
	encode func(s any) ([]byte, error)
	decode func(data []byte) (any, error)
	tenant func(s any) string // nil if Saga.Tenant is nil
}

// A step is a [Step] without its type parameter. It has the default values, and properties that follow from other
// fields.
type step struct {
	name          string
	do, undo      func(ctx context.Context, s any) error
	doTx, undoTx  func(ctx context.Context, tx *sql.Tx, s any) error
	child         *child
	pivot         bool
	parallel      bool
	middleware    bool
	delay         time.Duration
	await         string
	awaitFor      time.Duration
	timeout       time.Duration
	attempts      int
	undoAttempts  int
	backoff       func(attempt int) time.Duration
	readOnly      bool // the step is never undone
	hasUndo       bool
	failsClean    bool // a Do that failed or was interrupted has no effect
	onlyWaits     bool // the step has no Do, DoTx or Child, and is done when its wait ends
	readOnlyAsked bool
	group         int
}

// A group is the range steps[first:end] of a program. The steps of a group run in parallel, and are undone in parallel.
type group struct{ first, end int }

// gated reports whether the step waits before its Do starts.
func (st *step) gated() bool { return st.delay > 0 || st.await != "" }

// calls returns the function that an attempt calls: fn or, if the function needs a transaction, tx. The other one is
// nil.
func (st *step) calls(op Op) (fn func(context.Context, any) error, tx func(context.Context, *sql.Tx, any) error) {
	if op == OpUndo {
		return st.undo, st.undoTx
	}
	return st.do, st.doTx
}

func (p *program) definition() store.Definition {
	return store.Definition{Saga: p.name, Version: p.version}
}

// A cachedProgram is the program of a definition. A copy of a Saga also copies the cached program, but the copy may
// have other steps. So the field definition identifies the Saga to which the program belongs.
type cachedProgram[S any] struct {
	definition *Saga[S]
	*program
}

// program returns the program of the definition. The first call checks the definition.
func (sg *Saga[S]) program() (*program, error) {
	cached := sg.cached.Load()
	if c, _ := cached.(cachedProgram[S]); c.definition == sg {
		return c.program, nil
	}
	p, err := sg.check()
	if err != nil {
		return nil, err
	}
	if !sg.cached.CompareAndSwap(cached, cachedProgram[S]{sg, p}) {
		return sg.program() // a concurrent call was first; Register needs the same *program
	}
	return p, nil
}

// Validate returns an error that lists all problems of the definition, or nil if there are none.
func (sg *Saga[S]) Validate() error {
	_, err := sg.check()
	return err
}

// check returns the program of the definition, or an error that lists all problems.
func (sg *Saga[S]) check() (*program, error) {
	p := &program{
		name: sg.Name, version: sg.Version, timeout: sg.Timeout, pivot: -1, chain: true,
		state: reflect.TypeFor[S](), isJSON: sg.Codec == nil,
	}
	p.encode, p.decode = coders(sg)
	if sg.Tenant != nil {
		p.tenant = func(s any) string { return sg.Tenant(*s.(*S)) }
	}
	f := invalid.Fields{Type: "saga.Saga"}
	f.Need(validName(sg.Name), "Name", quoted(sg.Name, maxName), fmt.Sprintf("1 to %d bytes of UTF-8", maxName))
	f.Need(sg.Version >= 0, "Version", sg.Version, "0 or more")
	f.Need(sg.Timeout >= 0, "Timeout", sg.Timeout, "0 (none) or more")
	f.Need(len(sg.Steps) > 0, "Steps", "empty", "at least one step")
	errs := []error{f.Err()}
	for i := range sg.Steps {
		p.steps = append(p.steps, bind(&sg.Steps[i]))
	}
	for i := range p.steps {
		p.addToGroup(i)
	}
	for i := range p.steps {
		errs = append(errs, p.checkStep(i))
	}
	if len(p.steps) > maxSteps {
		errs = append(errs, fmt.Errorf("saga.Saga.Steps has %d steps: must have %d or fewer (see ChildrenOf)",
			len(p.steps), maxSteps))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return p, nil
}

// bind returns a step without the type of the state.
func bind[S any](st *Step[S]) step {
	b := step{
		name: st.Name, pivot: st.Pivot, parallel: st.Parallel, middleware: st.Middleware != nil, readOnlyAsked: st.ReadOnly,
		delay: st.Delay, await: st.Await, awaitFor: st.AwaitFor,
		timeout:  min(cmp.Or(st.Timeout, defaultTimeout), longestTry),
		attempts: cmp.Or(st.Attempts, defaultAttempts), undoAttempts: cmp.Or(st.UndoAttempts, defaultUndoAttempts),
		backoff: st.Backoff, do: wrap(st, st.Do), undo: wrap(st, st.Undo), doTx: wrapTx(st.DoTx), undoTx: wrapTx(st.UndoTx),
	}
	if b.backoff == nil {
		b.backoff = defaultBackoff
	}
	if st.Child != nil {
		b.child = &st.Child.child
	}
	b.onlyWaits = b.do == nil && b.doTx == nil && b.child == nil
	b.readOnly = b.readOnlyAsked || b.onlyWaits
	b.failsClean = b.readOnly || b.doTx != nil
	b.hasUndo = b.undo != nil || b.undoTx != nil || b.child != nil && (b.child.pivots == nil || !b.child.pivots())
	return b
}

func wrap[S any](st *Step[S], fn func(context.Context, *S) error) func(context.Context, any) error {
	switch {
	case fn == nil:
		return nil
	case st.Middleware == nil:
		return func(ctx context.Context, s any) error { return fn(ctx, s.(*S)) }
	}
	return func(ctx context.Context, s any) error {
		return st.Middleware(func(ctx context.Context) error { return fn(ctx, s.(*S)) })(ctx)
	}
}

func wrapTx[S any](fn func(context.Context, *sql.Tx, *S) error) func(context.Context, *sql.Tx, any) error {
	if fn == nil {
		return nil
	}
	return func(ctx context.Context, tx *sql.Tx, s any) error { return fn(ctx, tx, s.(*S)) }
}

// addToGroup adds a step to its group.
func (p *program) addToGroup(i int) {
	st := &p.steps[i]
	if st.pivot && p.pivot < 0 {
		p.pivot, p.pivotName = i, st.name
	}
	if st.parallel && i > 0 {
		p.chain = false
		p.groups[len(p.groups)-1].end++
	} else {
		p.groups = append(p.groups, group{i, i + 1})
	}
	st.group = len(p.groups) - 1
	p.needsTx = p.needsTx || st.doTx != nil || st.undoTx != nil
	p.gated, p.awaits, p.children = p.gated || st.gated(), p.awaits || st.await != "", p.children || st.child != nil
}

// checkStep returns an error that lists all problems of a step, including its position among the others.
func (p *program) checkStep(i int) error {
	st := &p.steps[i]
	taken := slices.ContainsFunc(p.steps[:i], func(before step) bool { return before.name == st.name })
	undo, tx, work := st.undo != nil, st.undoTx != nil, 0
	for _, is := range []bool{st.do != nil, st.doTx != nil, st.child != nil} {
		if is {
			work++
		}
	}
	does := "nil"
	switch {
	case st.do != nil:
		does = "set beside DoTx or Child"
	case work > 0:
		does = "nil beside DoTx and Child"
	}
	f := invalid.Fields{Type: fmt.Sprintf("saga.Step %q", st.name)}
	f.Need(validName(st.name) && !strings.Contains(st.name, "/"), "Name", quoted(st.name, maxName),
		fmt.Sprintf(`1 to %d bytes of UTF-8 without "/"`, maxName))
	f.Need(!taken, "Name", quoted(st.name, maxName), "unique in the saga")
	f.Need(work == 1 || work == 0 && st.gated(), "Do", does,
		"set, or DoTx, or Child, but not several; nil in all with Delay or Await alone")
	f.Need(st.child == nil || st.child.begin != nil, "Child",
		"without a Saga or a begin", "nil, or a ChildOf or ChildrenOf with both")
	f.Need(st.child == nil || !undo && !tx && !st.readOnlyAsked && !st.middleware, "Child", "set",
		"nil with Undo, UndoTx, ReadOnly or Middleware")
	f.Need(work > 0 || !undo && !tx, "Undo", "set", "nil without a Do")
	f.Need(st.delay >= 0, "Delay", st.delay, "0 (none) or more")
	f.Need(st.await == "" || validName(st.await), "Await", quoted(st.await, maxName),
		fmt.Sprintf(`"" (nothing), or 1 to %d bytes of UTF-8`, maxName))
	f.Need(st.awaitFor >= 0 && (st.awaitFor == 0 || st.await != ""), "AwaitFor", st.awaitFor,
		"0 (no limit), or more with Await")
	f.Need(!undo || !tx, "Undo", "set beside its Tx form", "set, or UndoTx, but not both")
	f.Need(!st.readOnlyAsked || !undo && !tx, "ReadOnly", true, "false, or Undo and UndoTx nil")
	f.Need(st.doTx == nil && !tx || !st.middleware, "Middleware", "set", "nil with DoTx and with UndoTx")
	f.Need(st.timeout >= 0 || st.timeout == Unlimited, "Timeout", st.timeout, "0 (for 1m), more, or Unlimited")
	f.Need(st.attempts >= 0 || st.attempts == Unlimited, "Attempts", st.attempts, "0 (for 3), more, or Unlimited")
	f.Need(st.undoAttempts >= 0 || st.undoAttempts == Unlimited, "UndoAttempts", st.undoAttempts,
		"0 (for 20), more, or Unlimited")
	f.Need(!st.parallel || i > 0, "Parallel", true, "false in the first step, which has none before it")
	beside := st.parallel || i+1 < len(p.steps) && p.steps[i+1].parallel
	f.Need(!beside || !st.pivot, "Pivot", true, "false in a step that runs beside another")
	f.Need(!beside || st.await == "", "Await", quoted(st.await, maxName), `"" in a step that runs beside another`)
	f.Need(!st.pivot || i == p.pivot, "Pivot", true, fmt.Sprintf("false, as %q is the pivot", p.pivotName))
	before := "before the pivot" // the position of steps that may have to be undone
	if p.pivot < 0 {
		before += ", and there is none"
	}
	forGood := p.pivot >= 0 && i >= p.pivot || st.hasUndo || st.readOnly
	f.Need(forGood || st.child != nil, "Undo", "nil", "set, or UndoTx, "+before)
	f.Need(forGood || st.child == nil, "Child", "one with a pivot", "one without "+before)
	return f.Err()
}

func validName(s string) bool {
	return s != "" && len(s) <= maxName && utf8.ValidString(s) && !strings.Contains(s, "\x00")
}

// quoted returns s in quotes for an error text, or the length of s if it is longer than most bytes.
func quoted(s string, most int) string {
	if len(s) > most {
		return fmt.Sprintf("%d bytes long", len(s))
	}
	return fmt.Sprintf("%q", s)
}

// coders returns the functions that encode and decode the state of a definition. They copy the encoded bytes, because a
// Codec may share memory between the bytes and the state, and a step changes the state.
func coders[S any](sg *Saga[S]) (encode func(any) ([]byte, error), decode func([]byte) (any, error)) {
	write := func(s *S) ([]byte, error) { return json.Marshal(s) }
	read := func(data []byte, s *S) error { return json.Unmarshal(data, s) }
	if sg.Codec != nil {
		write, read = sg.Codec.Encode, sg.Codec.Decode
	}
	encode = func(s any) ([]byte, error) {
		data, err := write(s.(*S))
		if err != nil {
			return nil, fmt.Errorf("saga: %s: state does not encode: %w", sg.Name, err)
		}
		return append([]byte{}, data...), nil
	}
	decode = func(data []byte) (any, error) {
		s := new(S)
		if err := read(bytes.Clone(data), s); err != nil {
			return nil, fmt.Errorf("saga: %s: state does not decode: %w", sg.Name, err)
		}
		return s, nil
	}
	return encode, decode
}

// encodeNew encodes the state of a new saga. It returns an error if decoding does not restore the state, because a
// process that takes the saga over would then be stuck or continue with another state. If there is a Codec, encodeNew
// does not compare the states, because a Codec may encode the same state in different ways.
func (p *program) encodeNew(s any) ([]byte, error) {
	data, err := p.encode(s)
	if err != nil {
		return nil, err
	}
	back, err := p.decode(data)
	if err != nil {
		return nil, err
	}
	again, err := p.encode(back)
	if err != nil || !p.isJSON || bytes.Equal(data, again) || reflect.DeepEqual(s, back) {
		return data, err
	}
	return nil, fmt.Errorf("saga: %s: state does not come back as it was: %.200q and then %.200q", p.name, data, again)
}

// encodeFrom encodes the state s, which was decoded from the bytes in was. Another build of the program may have
// written them. With the default Codec, fields of was that this program does not know are preserved.
func (p *program) encodeFrom(s any, was []byte) ([]byte, error) {
	data, err := p.encode(s)
	if err != nil {
		return nil, err
	}
	return p.keepUnknown(data, was), nil
}

// keepUnknown returns data, an encoded state, and adds those fields of was that this program does not know.
func (p *program) keepUnknown(data, was []byte) []byte {
	if !p.isJSON || bytes.Equal(data, was) {
		return data
	}
	known := json.NewDecoder(bytes.NewReader(was))
	known.DisallowUnknownFields()
	if known.Decode(reflect.New(p.state).Interface()) == nil {
		return data
	}
	return keepUnknown(p.state, data, was)
}

// hasAwait reports whether any step of the saga awaits the signal.
func (p *program) hasAwait(signal string) bool {
	return slices.ContainsFunc(p.steps, func(st step) bool { return st.await == signal })
}

// index returns the index of a step, or -1.
func (p *program) index(name string) int {
	return slices.IndexFunc(p.steps, func(st step) bool { return st.name == name })
}

// merge returns state with the changes that an attempt made. base is the state with which the attempt started, and
// changed is the state that it returned.
func (p *program) merge(state, base, changed []byte) ([]byte, error) {
	// All three states are decoded, so they can be compared. A state in memory would differ even if the step did not
	// change it: for example, encoding removes a time's monotonic clock reading.
	var states [3]any
	for i, data := range [][]byte{state, base, changed} {
		var err error
		if states[i], err = p.decode(data); err != nil {
			return nil, err // the outcome of the attempt is unknown
		}
	}
	if err := mergeState(states[0], states[1], states[2]); err != nil {
		return nil, err
	}
	data, err := p.encode(states[0])
	if err != nil {
		return nil, Permanent(err)
	}
	// The attempt may have run in a process that knows more fields than this one.
	ours, was, theirs := p.keepUnknown(data, state), p.keepUnknown(data, base), p.keepUnknown(data, changed)
	switch {
	case bytes.Equal(was, theirs):
		return ours, nil
	case bytes.Equal(was, ours), bytes.Equal(theirs, ours):
		return theirs, nil
	}
	return nil, errors.New("saga: two steps that run in parallel have both changed fields that this program does not know")
}

// tenantOf returns the tenant of a new saga whose encoded state is data.
func (p *program) tenantOf(data []byte) (string, error) {
	if p.tenant == nil {
		return "", nil
	}
	s, err := p.decode(data)
	if err != nil {
		return "", err
	}
	tenant := p.tenant(s)
	if tenant != "" && !validName(tenant) {
		return "", fmt.Errorf("saga: %s: tenant is %s: must be up to %d bytes of UTF-8 without NUL",
			p.name, quoted(tenant, maxName), maxName)
	}
	return tenant, nil
}

// kept returns an error if the definition has no Codec and JSON would lose a part of the state.
func (p *program) kept() error {
	if !p.isJSON {
		return nil
	}
	field := unkept(p.state, "", make(map[reflect.Type]bool))
	if field == "" {
		return nil
	}
	return fmt.Errorf("saga: %s: s%s is not kept by JSON and would be lost when a saga is taken over: "+
		"export it without the tag \"-\" and with a name of its own in JSON, or set Codec", p.name, field)
}
