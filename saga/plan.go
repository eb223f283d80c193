package saga

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-resilience/resilience/internal/invalid"
)

const (
	maxName = 100 // bytes in the name of a definition or a step
	maxID   = 200 // bytes in the id of a saga

	// Each step looks at all the others, and each commit of a Runner writes them all.
	maxSteps = 1000

	defaultAttempts     = 3
	defaultUndoAttempts = 20
	defaultTimeout      = time.Minute
)

// A plan is a checked definition without the type of its state.
type plan struct {
	name      string
	version   int
	deadline  time.Duration
	most      int    // sagas that a runner holds; 0: no bound
	units     []unit // every step and alternative, in the order of the definition
	nodes     []node // every step
	pivot     int    // the node that is the pivot; -1: none
	pivotName string
	chain     bool // at most one unit is at work at a time
	needsTx   bool
	gated     bool        // a unit waits before it begins
	awaits    bool        // a unit waits for a signal
	children  bool        // a unit has children
	idle      []StepState // the steps of a new saga
}

// A unit is one alternative of a step; the first is the step itself.
type unit struct {
	name         string
	node         int
	last         bool // no alternative follows
	doTx, undoTx bool
	hasUndo      bool
	readOnly     bool          // it is never undone
	light        bool          // it may be done again after a crash, and is recorded with a later step
	noDoubt      bool          // a Do that failed or was cut short has taken no effect
	timeout      time.Duration // 0: the default
	attempts     int           // negative: no limit
	undoAttempts int
	backoff      func(int) time.Duration
	settle       time.Duration

	delay    time.Duration
	await    string // the name of a signal; "" for none
	awaitFor time.Duration
	goOn     bool
	gateOnly bool // nothing is to be done once the wait is over
	child    bool // its work is sagas of their own
}

// A node is one step: units[first:first+n] are its alternatives.
type node struct {
	name      string
	first, n  int
	after     []int // nodes that must be done before
	undoAfter []int // nodes that must be undone before

	bestEffort bool
}

func (sg *Saga[S]) newPlan() (*plan, error) {
	f := invalid.Fields{Type: "saga.Saga"}
	f.Need(validName(sg.Name), "Name", quoted(sg.Name), fmt.Sprintf("1 to %d bytes of UTF-8", maxName))
	f.Need(sg.Version >= 0, "Version", sg.Version, "0 or more")
	f.Need(sg.Timeout >= 0, "Timeout", sg.Timeout, "0 (none) or more")
	f.Need(sg.Concurrency >= 0, "Concurrency", sg.Concurrency, "0 (no bound) or more")
	f.Need(len(sg.Steps) > 0, "Steps", "empty", "at least one step")
	p := &plan{name: sg.Name, version: sg.Version, deadline: sg.Timeout, most: sg.Concurrency, pivot: -1}
	errs := []error{f.Err()}
	names := make(map[string]int) // of nodes
	taken := make(map[string]bool)
	for i := range sg.Steps {
		st := &sg.Steps[i]
		n := node{name: st.Name, first: len(p.units), n: 1 + len(st.Or), bestEffort: st.BestEffort}
		for j := range n.n {
			alt := st
			if j > 0 {
				alt = &st.Or[j-1]
			}
			errs = append(errs, checkStep(alt, j > 0, n.n > 1, taken))
			taken[alt.Name] = true
			p.units = append(p.units, newUnit(alt, i, j == n.n-1))
		}
		if st.Pivot {
			if p.pivot >= 0 {
				errs = append(errs, stepError(st.Name, "Pivot is true: %q is the pivot already", sg.Steps[p.pivot].Name))
			}
			p.pivot, p.pivotName = i, st.Name
		}
		names[st.Name] = i
		p.nodes = append(p.nodes, n)
	}
	if len(p.units) > maxSteps {
		errs = append(errs, fmt.Errorf("saga.Saga.Steps has %d steps and alternatives: must have %d or fewer (see ChildrenOf)", len(p.units), maxSteps))
	}
	errs = append(errs, sg.link(p, names))
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	p.settleShape()
	return p, checkUndo(p)
}

func newUnit[S any](st *Step[S], n int, last bool) unit {
	u := unit{
		name: st.Name, node: n, last: last,
		doTx: st.DoTx != nil, undoTx: st.UndoTx != nil,
		hasUndo: st.Undo != nil || st.UndoTx != nil, readOnly: st.ReadOnly || st.Idempotent, noDoubt: st.DoTx != nil || st.ReadOnly || st.Idempotent,
		timeout: st.Timeout, settle: st.Settle, backoff: st.Backoff,
		attempts: st.Attempts, undoAttempts: st.UndoAttempts,
		delay: st.Delay, await: st.Await, awaitFor: st.AwaitFor, goOn: st.GoOn,
		gateOnly: st.Do == nil && st.DoTx == nil && st.Saga == nil, child: st.Saga != nil,
	}
	u.light = u.readOnly && st.Do != nil
	u.readOnly, u.noDoubt = u.readOnly || u.gateOnly, u.noDoubt || u.gateOnly
	if u.child && st.Saga.pivot != nil {
		u.hasUndo = !st.Saga.pivot() && !st.BestEffort // nothing after the pivot is undone
	}
	if u.attempts == 0 {
		u.attempts = defaultAttempts
	}
	if u.undoAttempts == 0 {
		u.undoAttempts = defaultUndoAttempts
	}
	if u.backoff == nil {
		u.backoff = defaultBackoff
	}
	return u
}

// checkStep returns what is wrong with one step by itself.
func checkStep[S any](st *Step[S], alternative, several bool, taken map[string]bool) error {
	f := invalid.Fields{Type: fmt.Sprintf("saga.Step %q", st.Name)}
	f.Need(validName(st.Name) && !strings.Contains(st.Name, "/"), "Name", quoted(st.Name),
		fmt.Sprintf(`1 to %d bytes of UTF-8 without "/"`, maxName))
	f.Need(!taken[st.Name], "Name", quoted(st.Name), "unique in the saga")
	work, gate := count(st.Do != nil, st.DoTx != nil, st.Saga != nil), st.Delay > 0 || st.Await != ""
	f.Need(work == 1 || work == 0 && gate, "Do", oneOrNone(st.Do != nil, work), "set, or DoTx, or Saga, but not several; nil in all with Delay or Await alone")
	f.Need(st.Saga == nil || st.Saga.begin != nil, "Saga", "without a Saga or a begin", "nil, or a ChildOf or ChildrenOf with both")
	f.Need(st.Saga == nil || st.Undo == nil && st.UndoTx == nil && !st.ReadOnly && st.Middleware == nil && st.UndoMiddleware == nil, "Saga", "set",
		"nil with Undo, UndoTx, ReadOnly, Middleware or UndoMiddleware")
	f.Need(work > 0 || st.Undo == nil && st.UndoTx == nil, "Undo", "set", "nil without a Do")
	f.Need(st.Delay >= 0, "Delay", st.Delay, "0 (none) or more")
	f.Need(st.Await == "" || validName(st.Await), "Await", quoted(st.Await), fmt.Sprintf(`"" (nothing), or 1 to %d bytes of UTF-8`, maxName))
	f.Need(st.AwaitFor >= 0 && (st.AwaitFor == 0 || st.Await != ""), "AwaitFor", st.AwaitFor, "0 (no limit), or more with Await")
	f.Need(!st.GoOn || st.AwaitFor > 0, "GoOn", true, "false without AwaitFor")
	f.Need(st.Undo == nil || st.UndoTx == nil, "Undo", bothOrNeither(true), "set, or UndoTx, but not both")
	f.Need(!several || st.Undo != nil || st.UndoTx != nil || st.ReadOnly || st.Idempotent || st.Do == nil && st.DoTx == nil, "Undo", "nil", "set, or UndoTx, in a step with alternatives")
	f.Need(!st.ReadOnly || st.Undo == nil && st.UndoTx == nil, "ReadOnly", true, "false, or Undo and UndoTx nil")
	f.Need(!st.Idempotent || st.Do != nil, "Idempotent", true, "false without Do")
	f.Need(!st.Idempotent || st.Undo == nil && st.UndoTx == nil, "Idempotent", true, "false with an Undo: that it has begun must be recorded, or it might not be undone")
	f.Need(!st.Idempotent || !st.Pivot, "Idempotent", true, "false in the pivot: that it is done must be recorded before a step that cannot be undone begins")
	f.Need(!st.BestEffort || !several, "BestEffort", true, "false in a step with alternatives")
	f.Need(st.DoTx == nil || st.Middleware == nil, "Middleware", "set", "nil with DoTx")
	f.Need(st.UndoTx == nil || st.UndoMiddleware == nil, "UndoMiddleware", "set", "nil with UndoTx")
	f.Need(st.Timeout >= 0, "Timeout", st.Timeout, "0 (for 1m) or more")
	f.Need(st.Settle >= 0, "Settle", st.Settle, "0 (at once) or more")
	if alternative {
		f.Need(!st.Pivot, "Pivot", true, "false in an alternative")
		f.Need(st.After == nil, "After", st.After, "nil in an alternative")
		f.Need(st.UndoAfter == nil, "UndoAfter", st.UndoAfter, "nil in an alternative")
		f.Need(len(st.Or) == 0, "Or", fmt.Sprintf("%d steps", len(st.Or)), "empty in an alternative")
	}
	return f.Err()
}

// link resolves After and UndoAfter and finds cycles.
func (sg *Saga[S]) link(p *plan, names map[string]int) error {
	var errs []error
	resolve := func(step, field string, list []string) []int {
		var out []int
		for _, name := range list {
			if n, ok := names[name]; ok {
				out = append(out, n)
			} else {
				errs = append(errs, stepError(step, "%s names %q: no such step", field, name))
			}
		}
		return out
	}
	for i := range sg.Steps {
		st := &sg.Steps[i]
		if st.After == nil && i > 0 {
			p.nodes[i].after = []int{i - 1}
		} else {
			p.nodes[i].after = resolve(st.Name, "After", st.After)
		}
	}
	for i := range sg.Steps {
		if st := &sg.Steps[i]; st.UndoAfter != nil {
			p.nodes[i].undoAfter = resolve(st.Name, "UndoAfter", st.UndoAfter)
		}
		for _, before := range p.nodes[i].after {
			if sg.Steps[before].UndoAfter == nil {
				p.nodes[before].undoAfter = append(p.nodes[before].undoAfter, i)
			}
		}
	}
	if at := p.cycle(func(n *node) []int { return n.after }); at >= 0 {
		errs = append(errs, stepError(p.nodes[at].name, "After makes it wait for itself"))
	} else if at := p.cycle(func(n *node) []int { return n.undoAfter }); at >= 0 {
		errs = append(errs, stepError(p.nodes[at].name, "UndoAfter makes it wait for itself"))
	}
	return errors.Join(errs...)
}

// cycle returns a node that waits for itself, or -1. before returns the nodes for which a
// node waits.
func (p *plan) cycle(before func(*node) []int) int {
	waits := make([]int, len(p.nodes)) // for how many nodes each waits
	next := make([][]int, len(p.nodes))
	var free []int
	for i := range p.nodes {
		waits[i] = len(before(&p.nodes[i]))
		for _, j := range before(&p.nodes[i]) {
			next[j] = append(next[j], i)
		}
		if waits[i] == 0 {
			free = append(free, i)
		}
	}
	for len(free) > 0 {
		n := free[0]
		free = free[1:]
		for _, j := range next[n] {
			if waits[j]--; waits[j] == 0 {
				free = append(free, j)
			}
		}
	}
	// The nodes that are left wait for a cycle or are on one. Walk back until it closes.
	at := -1
	for i := range waits {
		if waits[i] > 0 {
			at = i
			break
		}
	}
	for seen := make(map[int]bool); at >= 0 && !seen[at]; {
		seen[at] = true
		for _, j := range before(&p.nodes[at]) {
			if waits[j] > 0 {
				at = j
				break
			}
		}
	}
	return at
}

// settleShape computes the fields that depend on the whole graph.
func (p *plan) settleShape() {
	p.chain = true
	for i := range p.nodes {
		if i > 0 && !(len(p.nodes[i].after) == 1 && p.nodes[i].after[0] == i-1) {
			p.chain = false
		}
		if i < len(p.nodes)-1 && !(len(p.nodes[i].undoAfter) == 1 && p.nodes[i].undoAfter[0] == i+1) {
			p.chain = false
		}
	}
	for i := range p.units {
		u := &p.units[i]
		u.light = u.light && u.node != p.pivot // also an alternative of the pivot
		p.needsTx = p.needsTx || u.doTx || u.undoTx
		p.gated, p.awaits, p.children = p.gated || u.isGated(), p.awaits || u.await != "", p.children || u.child
		p.idle = append(p.idle, StepState{Name: u.name, Status: StepIdle, Step: p.nodes[u.node].name})
	}
}

// checkUndo returns the steps without Undo that may have to be undone, which are all but
// the pivot and the steps after it, and the BestEffort steps up to the pivot.
func checkUndo(p *plan) error {
	beyond := make([]bool, len(p.nodes))
	if p.pivot >= 0 {
		beyond[p.pivot] = true
		for grew := true; grew; {
			grew = false
			for i := range p.nodes {
				for _, j := range p.nodes[i].after {
					if beyond[j] && !beyond[i] {
						beyond[i], grew = true, true
					}
				}
			}
		}
	}
	f := make([]error, 0, len(p.units))
	for i := range p.units {
		u := &p.units[i]
		switch {
		case u.hasUndo || u.readOnly || beyond[u.node]:
		case u.child:
			f = append(f, stepError(u.name, "Saga has a pivot: must have none before the pivot of this saga"))
		default:
			f = append(f, stepError(u.name, "Undo is nil: must be set, or UndoTx, before the pivot"))
		}
		if p.nodes[u.node].bestEffort && (!beyond[u.node] || u.node == p.pivot) {
			f = append(f, stepError(u.name, "BestEffort is true: must be false up to the pivot"))
		}
	}
	return errors.Join(f...)
}

func validName(s string) bool {
	return s != "" && len(s) <= maxName && utf8.ValidString(s) && !strings.Contains(s, "\x00")
}

func quoted(s string) string {
	if len(s) > maxName {
		return fmt.Sprintf("%d bytes long", len(s))
	}
	return fmt.Sprintf("%q", s)
}

func count(conditions ...bool) int {
	n := 0
	for _, is := range conditions {
		if is {
			n++
		}
	}
	return n
}

func oneOrNone(do bool, work int) string {
	switch {
	case do && work > 1:
		return "set beside DoTx or Saga"
	case work > 1:
		return "nil beside DoTx and Saga"
	}
	return "nil"
}

func bothOrNeither(both bool) string {
	if both {
		return "set beside its Tx form"
	}
	return "nil"
}

func stepError(step, format string, args ...any) error {
	return fmt.Errorf("saga.Step %q: "+format, append([]any{step}, args...)...)
}

// checkID returns why id cannot be the id of a saga, or nil.
func checkID(id string) error {
	if id == "" || len(id) > maxID || !utf8.ValidString(id) || strings.Contains(id, "\x00") {
		return fmt.Errorf("saga: the id is %s: must be 1 to %d bytes of UTF-8 without NUL", quotedID(id), maxID)
	}
	return nil
}

func quotedID(id string) string {
	if len(id) > maxID {
		return fmt.Sprintf("%d bytes long", len(id))
	}
	return fmt.Sprintf("%q", id)
}
