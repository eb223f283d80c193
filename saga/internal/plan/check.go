package plan

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/go-resilience/resilience/internal/invalid"
)

// checkStep returns what is wrong with one step by itself.
func checkStep(st *Step, alternative, several bool, taken map[string]bool) error {
	f := invalid.Fields{Type: fmt.Sprintf("saga.Step %q", st.Name)}
	f.Need(ValidName(st.Name) && !strings.Contains(st.Name, "/"), "Name", Quoted(st.Name, MaxName),
		fmt.Sprintf(`1 to %d bytes of UTF-8 without "/"`, MaxName))
	f.Need(!taken[st.Name], "Name", Quoted(st.Name, MaxName), "unique in the saga")
	work, gate := count(st.Do, st.DoTx, st.Child), st.Delay > 0 || st.Await != ""
	f.Need(work == 1 || work == 0 && gate, "Do", oneOrNone(st.Do, work), "set, or DoTx, or Saga, but not several; nil in all with Delay or Await alone")
	f.Need(!st.Child || st.ChildOf, "Saga", "without a Saga or a begin", "nil, or a ChildOf or ChildrenOf with both")
	f.Need(!st.Child || !st.Undo && !st.UndoTx && !st.ReadOnly && !st.Middleware, "Saga", "set",
		"nil with Undo, UndoTx, ReadOnly or Middleware")
	f.Need(work > 0 || !st.Undo && !st.UndoTx, "Undo", "set", "nil without a Do")
	f.Need(st.Delay >= 0, "Delay", st.Delay, "0 (none) or more")
	f.Need(st.Await == "" || ValidName(st.Await), "Await", Quoted(st.Await, MaxName), fmt.Sprintf(`"" (nothing), or 1 to %d bytes of UTF-8`, MaxName))
	f.Need(st.AwaitFor >= 0 && (st.AwaitFor == 0 || st.Await != ""), "AwaitFor", st.AwaitFor, "0 (no limit), or more with Await")
	f.Need(!st.Undo || !st.UndoTx, "Undo", "set beside its Tx form", "set, or UndoTx, but not both")
	f.Need(!several || st.Undo || st.UndoTx || st.ReadOnly || st.Idempotent || !st.Do && !st.DoTx, "Undo", "nil", "set, or UndoTx, in a step with alternatives")
	f.Need(!st.ReadOnly || !st.Undo && !st.UndoTx, "ReadOnly", true, "false, or Undo and UndoTx nil")
	f.Need(!st.Idempotent || st.Do, "Idempotent", true, "false without Do")
	f.Need(!st.Idempotent || !st.Undo && !st.UndoTx, "Idempotent", true, "false with an Undo: that it has begun must be recorded, or it might not be undone")
	f.Need(!st.Idempotent || !st.Pivot, "Idempotent", true, "false in the pivot: that it is done must be recorded before a step that cannot be undone begins")
	f.Need(!st.BestEffort || !several, "BestEffort", true, "false in a step with alternatives")
	f.Need(!st.DoTx && !st.UndoTx || !st.Middleware, "Middleware", "set", "nil with DoTx and with UndoTx")
	f.Need(st.Timeout >= 0, "Timeout", st.Timeout, "0 (for 1m) or more")
	f.Need(st.Settle >= 0, "Settle", st.Settle, "0 (at once) or more")
	if alternative {
		f.Need(!st.Pivot, "Pivot", true, "false in an alternative")
		f.Need(st.After == nil, "After", st.After, "nil in an alternative")
		f.Need(len(st.Or) == 0, "Or", fmt.Sprintf("%d steps", len(st.Or)), "empty in an alternative")
	}
	return f.Err()
}

// cycle returns a node that waits for itself, or -1.
func (p *Plan) cycle() int {
	waits := make([]int, len(p.Nodes)) // for how many nodes each waits
	next := make([][]int, len(p.Nodes))
	var free []int
	for i := range p.Nodes {
		waits[i] = len(p.Nodes[i].After)
		for _, j := range p.Nodes[i].After {
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
		for _, j := range p.Nodes[at].After {
			if waits[j] > 0 {
				at = j
				break
			}
		}
	}
	return at
}

// checkUndo returns the steps without Undo that may have to be undone, which are all but
// the pivot and the steps after it, and the BestEffort steps up to the pivot.
func checkUndo(p *Plan) error {
	beyond := make([]bool, len(p.Nodes))
	if p.Pivot >= 0 {
		beyond[p.Pivot] = true
		for grew := true; grew; {
			grew = false
			for i := range p.Nodes {
				for _, j := range p.Nodes[i].After {
					if beyond[j] && !beyond[i] {
						beyond[i], grew = true, true
					}
				}
			}
		}
	}
	none := ""
	if p.Pivot < 0 {
		none = ", and there is none"
	}
	var errs []error
	for i := range p.Units {
		u := &p.Units[i]
		several := p.Nodes[u.Node].N > 1 && !u.Child // checkStep has told of it
		switch {
		case u.HasUndo || u.ReadOnly || beyond[u.Node] || several:
		case u.Child:
			errs = append(errs, stepError(u.Name, "Saga has a pivot: must have none before the pivot of this saga%s", none))
		default:
			errs = append(errs, stepError(u.Name, "Undo is nil: must be set, or UndoTx, before the pivot%s", none))
		}
		if p.Nodes[u.Node].BestEffort && (!beyond[u.Node] || u.Node == p.Pivot) {
			errs = append(errs, stepError(u.Name, "BestEffort is true: must be false up to the pivot%s", none))
		}
	}
	return errors.Join(errs...)
}

func ValidName(s string) bool {
	return s != "" && len(s) <= MaxName && utf8.ValidString(s) && !strings.Contains(s, "\x00")
}

// Quoted returns s for an error, or its length if it is longer than most.
func Quoted(s string, most int) string {
	if len(s) > most {
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
	case do:
		return "set beside DoTx or Saga"
	case work > 1:
		return "nil beside DoTx and Saga"
	}
	return "nil"
}

func stepError(step, format string, args ...any) error {
	return fmt.Errorf("saga.Step %q: "+format, append([]any{step}, args...)...)
}
