package main

import (
	"bytes"
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strings"
)

// A mutant is one small fault of a source file.
type mutant struct {
	Number int    // the number of its switch, from 1
	Name   string // file, function and fault; does not change when other lines change
	Pos    string // position, as file:line
	Locks  bool   // whether it removes a lock, so that it must run under the race detector
}

// mutate returns src with all of its mutants, each behind a switch. Mutants are numbered from first. Those
// that change a line in skip are omitted. mutate only inserts text and adds no lines, so line numbers do not
// change.
func mutate(name string, src []byte, first int, skip map[string]bool) ([]byte, []mutant, error) {
	m := &mutator{name: name, src: src, next: first, skip: skip, fset: token.NewFileSet(), seen: map[string]int{}}
	file, err := parser.ParseFile(m.fset, name, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, nil, err
	}
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Body != nil {
			m.fn = functionName(f)
			m.locks(f.Body)
			ast.Inspect(f.Body, m.visit)
		}
	}
	return m.apply(), m.found, nil
}

type mutator struct {
	name  string
	src   []byte
	fset  *token.FileSet
	fn    string
	next  int
	found []mutant
	edits []edit
	seen  map[string]int
	skip  map[string]bool   // by file:line, whether to omit the mutants of the line
	held  map[ast.Stmt]bool // the statements that lock or unlock
}

// An edit inserts text at an offset. At the same offset, edits that close an inserted block come before edits
// that open one. Of the closing edits, the innermost comes first. Of the opening edits, the outermost comes
// first.
type edit struct {
	at    int
	order [2]int
	text  string
}

func (m *mutator) offset(p token.Pos) int { return m.fset.Position(p).Offset }

func (m *mutator) text(n ast.Node) string { return string(m.src[m.offset(n.Pos()):m.offset(n.End())]) }

// around inserts text before and after n.
func (m *mutator) around(n ast.Node, before, after string) {
	from, to := m.offset(n.Pos()), m.offset(n.End())
	size, nth := to-from, len(m.edits)
	m.edits = append(m.edits,
		edit{at: from, order: [2]int{2*len(m.src) - size, nth}, text: before},
		edit{at: to, order: [2]int{size, -nth}, text: after})
}

// add adds a mutant of n. It calls mutated with the source text of the condition that reports whether the
// mutant is switched on.
func (m *mutator) add(n ast.Node, fault string, locks bool, mutated func(on string)) {
	name := m.name + " " + m.fn + ": " + fault
	if m.seen[name]++; m.seen[name] > 1 {
		name = fmt.Sprintf("%s #%d", name, m.seen[name])
	}
	for line := m.fset.Position(n.Pos()).Line; line <= m.fset.Position(n.End()).Line; line++ {
		if m.skip[fmt.Sprintf("%s:%d", m.name, line)] {
			return
		}
	}
	mutated(fmt.Sprintf("mutantAt(%d)", m.next))
	m.found = append(m.found, mutant{
		Number: m.next,
		Name:   name,
		Pos:    fmt.Sprintf("%s:%d", m.name, m.fset.Position(n.Pos()).Line),
		Locks:  locks,
	})
	m.next++
}

// locks adds mutants that remove a lock of a function together with its unlocks.
func (m *mutator) locks(body *ast.BlockStmt) {
	m.held = map[ast.Stmt]bool{}
	byLock := map[string][]ast.Stmt{}
	var order []string
	ast.Inspect(body, func(n ast.Node) bool {
		stmt, ok := n.(ast.Stmt)
		if !ok {
			return true
		}
		lock, method := lockCall(stmt)
		if method == "" {
			return true
		}
		text := m.text(lock)
		if strings.HasPrefix(method, "R") {
			text += " (read)"
		}
		if len(byLock[text]) == 0 {
			order = append(order, text)
		}
		byLock[text] = append(byLock[text], stmt)
		m.held[stmt] = true
		return true
	})
	for _, text := range order {
		m.add(byLock[text][0], "without the lock "+text, true, func(on string) {
			for _, stmt := range byLock[text] {
				m.around(stmt, "if !"+on+" { ", " }")
			}
		})
	}
}

func lockCall(stmt ast.Stmt) (lock ast.Expr, method string) {
	var call *ast.CallExpr
	switch s := stmt.(type) {
	case *ast.ExprStmt:
		call, _ = s.X.(*ast.CallExpr)
	case *ast.DeferStmt:
		call = s.Call
	}
	if call == nil || len(call.Args) > 0 {
		return nil, ""
	}
	selector, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return nil, ""
	}
	switch selector.Sel.Name {
	case "Lock", "Unlock", "RLock", "RUnlock":
		return selector.X, selector.Sel.Name
	}
	return nil, ""
}

func (m *mutator) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.GenDecl:
		return n.Tok != token.CONST
	case *ast.IfStmt:
		m.negate(n.Cond)
	case *ast.ForStmt:
		if n.Cond != nil {
			m.negate(n.Cond)
		}
	case *ast.SwitchStmt:
		if n.Tag == nil {
			for _, clause := range n.Body.List {
				for _, cond := range clause.(*ast.CaseClause).List {
					m.negate(cond)
				}
			}
		}
	case *ast.BinaryExpr:
		m.binary(n)
	case *ast.BlockStmt:
		m.statements(n.List)
	case *ast.CaseClause:
		m.statements(n.Body)
	case *ast.CommClause:
		m.statements(n.Body)
	}
	return true
}

func (m *mutator) negate(cond ast.Expr) {
	m.add(cond, "not "+short(m.text(cond)), false, func(on string) { m.around(cond, "(", ") != "+on) })
}

// shifted maps each comparison to the one that differs from it only for equal operands.
var shifted = map[token.Token]token.Token{
	token.LSS: token.LEQ, token.LEQ: token.LSS,
	token.GTR: token.GEQ, token.GEQ: token.GTR,
}

func (m *mutator) binary(b *ast.BinaryExpr) {
	text := m.text(b)
	switch b.Op {
	case token.LAND, token.LOR:
		before := map[token.Token]string{token.LAND: "(%s || (", token.LOR: "(!%s && ("}[b.Op]
		for _, part := range []ast.Expr{b.X, b.Y} {
			m.add(part, "left out in "+short(text)+": "+short(m.text(part)), false, func(on string) {
				m.around(part, fmt.Sprintf(before, on), "))")
			})
		}
	default:
		other, ok := shifted[b.Op]
		if !ok || strings.Contains(text, "\n") {
			return
		}
		m.add(b, fmt.Sprintf("%s instead of %s in %s", other, b.Op, short(text)), false, func(on string) {
			m.around(b, fmt.Sprintf("(%s && (%s %s %s) || !%s && (", on, m.text(b.X), other, m.text(b.Y), on), "))")
		})
	}
}

func (m *mutator) statements(list []ast.Stmt) {
	for _, stmt := range list {
		switch s := stmt.(type) {
		case *ast.ExprStmt:
			if !m.held[stmt] && !ends(s) {
				m.leaveOut(stmt)
			}
		case *ast.IncDecStmt, *ast.SendStmt, *ast.GoStmt:
			m.leaveOut(stmt)
		case *ast.AssignStmt:
			if s.Tok != token.DEFINE && !blank(s) {
				m.leaveOut(stmt)
			}
		case *ast.DeferStmt:
			if m.held[stmt] {
				continue
			}
			m.leaveOut(stmt)
			call := flat(m.text(s.Call))
			if strings.Contains(call, "recover()") || strings.Contains(call, "//") {
				continue
			}
			m.add(stmt, "at once: "+short(m.text(stmt)), false, func(on string) {
				m.around(s, "if "+on+" { "+call+" } else { ", " }")
			})
		}
	}
}

// flat joins the lines of a call into one line, so that line numbers do not change.
func flat(call string) string {
	lines := strings.Split(call, "\n")
	for i, line := range lines {
		line = strings.TrimSpace(line)
		if line != "" && i+1 < len(lines) && !strings.ContainsAny(line[len(line)-1:], "{(,") {
			line += ";"
		}
		lines[i] = line
	}
	return strings.Join(lines, " ")
}

func (m *mutator) leaveOut(stmt ast.Stmt) {
	m.add(stmt, "without "+short(m.text(stmt)), false, func(on string) { m.around(stmt, "if !"+on+" { ", " }") })
}

// ends reports whether a statement may be the terminating statement of its function, such as a panic.
func ends(s *ast.ExprStmt) bool {
	call, ok := s.X.(*ast.CallExpr)
	if !ok {
		return false
	}
	switch fun := call.Fun.(type) {
	case *ast.Ident:
		return fun.Name == "panic"
	case *ast.SelectorExpr:
		return fun.Sel.Name == "Goexit" || fun.Sel.Name == "Exit"
	}
	return false
}

// blank reports whether an assignment only uses a value or a package.
func blank(s *ast.AssignStmt) bool {
	for _, left := range s.Lhs {
		if name, ok := left.(*ast.Ident); !ok || name.Name != "_" {
			return false
		}
	}
	return true
}

func (m *mutator) apply() []byte {
	slices.SortFunc(m.edits, func(a, b edit) int {
		return cmp.Or(a.at-b.at, a.order[0]-b.order[0], a.order[1]-b.order[1])
	})
	var out bytes.Buffer
	done := 0
	for _, e := range m.edits {
		out.Write(m.src[done:e.at])
		out.WriteString(e.text)
		done = e.at
	}
	out.Write(m.src[done:])
	return out.Bytes()
}

func functionName(f *ast.FuncDecl) string {
	if f.Recv == nil || len(f.Recv.List) == 0 {
		return f.Name.Name
	}
	t := f.Recv.List[0].Type
	for {
		switch x := t.(type) {
		case *ast.StarExpr:
			t = x.X
			continue
		case *ast.IndexExpr:
			t = x.X
			continue
		case *ast.IndexListExpr:
			t = x.X
			continue
		}
		break
	}
	if name, ok := t.(*ast.Ident); ok {
		return name.Name + "." + f.Name.Name
	}
	return f.Name.Name
}

// short returns text on one line, truncated to 70 bytes.
func short(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > 70 {
		text = text[:67] + "..."
	}
	return text
}
