package console

import (
	"fmt"
	"slices"
)

// A graph is the steps of a saga as they wait for each other, from left to right.
type graph struct {
	Width, Height int
	Boxes         []box
	Lines         []edge
	PivotAt       int // where the pivot ends; 0 if there is none
}

type box struct {
	X, Y, W, H  int
	Name, Title string
	State       string
	Tone        tone
	Pivot       bool
}

// An edge is the d of an SVG path.
type edge struct {
	D    string
	Tone tone
}

const (
	boxWidth, boxHeight = 150, 48
	columnGap, rowGap   = 44, 16
	margin              = 12
)

// newGraph lays out steps. A step stands right of all that it comes after.
func newGraph(steps []unitView) graph {
	column := map[string]int{}
	for _, s := range steps { // a definition has no circles, but names steps in any order
		settle(steps, s.Name, column)
	}
	g := graph{Height: 2 * margin}
	row := map[int]int{} // of each column, its height so far
	placed := map[string]box{}
	for _, s := range steps {
		col := column[s.Name]
		x := margin + col*(boxWidth+columnGap)
		top := max(row[col], margin)
		b := box{X: x, Y: top, W: boxWidth, H: boxHeight, Name: clip(s.Name), Title: s.Name, State: string(s.Status), Tone: s.Tone, Pivot: s.Pivot}
		placed[s.Name] = b
		g.Boxes = append(g.Boxes, b)
		bottom := g.Boxes[len(g.Boxes)-1].Y + boxHeight
		row[col] = bottom + rowGap
		g.Width, g.Height = max(g.Width, x+boxWidth+margin), max(g.Height, bottom+margin)
		if s.Pivot {
			g.PivotAt = x + boxWidth + columnGap/2
		}
	}
	for _, s := range steps {
		to := placed[s.Name]
		for _, name := range s.After {
			from, ok := placed[name]
			if !ok {
				continue
			}
			x1, y1, x2, y2 := from.X+boxWidth, from.Y+boxHeight/2, to.X, to.Y+boxHeight/2
			d := fmt.Sprintf("M%d %dH%d", x1, y1, x2)
			if y1 != y2 {
				// The turn is beside the step that waits, so that lines past other columns stay level.
				bend := x2 - columnGap/2
				d = fmt.Sprintf("M%d %dH%dC%d %d %d %d %d %d", x1, y1, bend-columnGap/2, bend, y1, bend, y2, x2, y2)
			}
			g.Lines = append(g.Lines, edge{D: d, Tone: s.Tone})
		}
	}
	if g.PivotAt > g.Width {
		g.Width = g.PivotAt + margin
	}
	return g
}

// settle finds the column of a step: one right of the last that it comes after.
func settle(steps []unitView, name string, column map[string]int) int {
	if c, ok := column[name]; ok {
		return c
	}
	at := slices.IndexFunc(steps, func(u unitView) bool { return u.Name == name })
	if at < 0 {
		return 0
	}
	c := 0
	for _, before := range steps[at].After {
		c = max(c, settle(steps, before, column)+1)
	}
	column[name] = c
	return c
}

// clip shortens a name that would not fit into its box.
func clip(name string) string {
	const fits = 17
	if r := []rune(name); len(r) > fits {
		return string(r[:fits-1]) + "…"
	}
	return name
}
