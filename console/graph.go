package console

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-resilience/resilience/saga"
)

// A graph is the steps of a saga as they wait for each other, from left to right, with the
// alternatives of a step below it.
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
	Alternative bool
}

// An edge is the d of an SVG path.
type edge struct {
	D    string
	Tone tone
	Or   bool // to an alternative
}

const (
	boxWidth, boxHeight = 150, 48
	columnGap, rowGap   = 44, 16
	margin              = 12
)

// newGraph lays out steps. A step stands right of all that it comes after.
func newGraph(units []unitView) graph {
	var steps []unitView
	or := map[string][]unitView{}
	for _, u := range units {
		if u.Of == "" {
			steps = append(steps, u)
		} else {
			or[u.Of] = append(or[u.Of], u)
		}
	}
	column := map[string]int{}
	for _, s := range steps { // a definition has no circles, but names steps in any order
		settle(steps, s.Name, column, 0)
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
		for _, a := range or[s.Name] {
			last := g.Boxes[len(g.Boxes)-1]
			below := b
			below.Y = last.Y + boxHeight + rowGap
			below.Name, below.Title, below.State, below.Tone, below.Pivot, below.Alternative = clip(a.Name), a.Name, string(a.Status), a.Tone, false, true
			g.Boxes = append(g.Boxes, below)
			g.Lines = append(g.Lines, edge{D: fmt.Sprintf("M%d %dV%d", x+boxWidth/2, last.Y+boxHeight, below.Y), Tone: a.Tone, Or: true})
		}
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
func settle(steps []unitView, name string, column map[string]int, depth int) int {
	if c, ok := column[name]; ok {
		return c
	}
	at := slices.IndexFunc(steps, func(u unitView) bool { return u.Name == name })
	if at < 0 || depth > len(steps) {
		return 0
	}
	c := 0
	for _, before := range steps[at].After {
		c = max(c, settle(steps, before, column, depth+1)+1)
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

// A timeline has a row for each step that was begun, with a mark for each entry of the log.
type timeline struct {
	Width, Height int
	Rows          []lane
	Ticks         []mark
}

type lane struct {
	Name  string
	Title string
	Y     int
	Bars  []bar
	Marks []mark
}

// A bar is the time before an entry: an attempt, or the wait for it.
type bar struct {
	X, Y, W int
	Tone    tone
}

type mark struct {
	X, Y  int
	Text  string
	Tone  tone
	Ended bool
}

const (
	laneHeight = 26
	laneNames  = 150
	laneWidth  = 800
)

func newTimeline(units []unitView, log []entryView, in *saga.Instance) timeline {
	end := in.Now
	if in.Status.Ended() || in.Status == saga.Stuck {
		end = in.UpdatedAt
	}
	start := in.CreatedAt
	if len(log) > 0 && log[0].Seq > 1 {
		start = log[0].At
	}
	span := max(end.Sub(start), time.Millisecond)
	at := func(t time.Time) int {
		share := float64(t.Sub(start)) / float64(span)
		return laneNames + int(min(max(share, 0), 1)*laneWidth)
	}
	t := timeline{Width: laneNames + laneWidth + 20}
	names := []string{""}
	for _, u := range units {
		names = append(names, u.Name)
	}
	last := start // an attempt begins, at the earliest, when the one before it has ended
	begun := map[string]time.Time{}
	lanes := map[string]*lane{}
	for _, e := range log {
		l := lanes[e.Step]
		if l == nil {
			l = &lane{Name: clip(e.Step), Title: e.Step}
			if e.Step == "" {
				l.Name, l.Title = "saga", "the saga itself"
			}
			lanes[e.Step] = l
		}
		tone := toneOfEntry(e.Kind)
		if e.Step != "" {
			from, again := begun[e.Step]
			if !again {
				from = last
			}
			l.Bars = append(l.Bars, bar{X: at(from), W: max(at(e.At)-at(from), 1), Tone: tone})
			begun[e.Step] = e.At
			last = e.At
		}
		text := e.Kind
		if e.Attempt > 0 {
			text = fmt.Sprintf("%s %d: %s", e.Op, e.Attempt, e.Kind)
		}
		l.Marks = append(l.Marks, mark{X: at(e.At), Text: text + " after " + ago(e.At.Sub(in.CreatedAt)), Tone: tone})
	}
	y := 8
	for _, name := range names {
		l := lanes[name]
		if l == nil {
			continue
		}
		l.Y = y + laneHeight/2
		for i := range l.Bars {
			l.Bars[i].Y = l.Y - 4
		}
		for i := range l.Marks {
			l.Marks[i].Y = l.Y
		}
		t.Rows = append(t.Rows, *l)
		y += laneHeight
	}
	t.Height = y + 24
	for i := range 5 {
		d := time.Duration(float64(span) * float64(i) / 4)
		t.Ticks = append(t.Ticks, mark{X: laneNames + laneWidth*i/4, Y: t.Height - 8, Text: strings.TrimPrefix("+"+ago(start.Sub(in.CreatedAt)+d), "")})
	}
	return t
}

func toneOfEntry(kind string) tone {
	switch saga.EventKind(kind) {
	case saga.EventDone, saga.EventCompleted, saga.EventSkipped:
		return well
	case saga.EventFailed, saga.EventUndoFailed, saga.EventStuck:
		return fail
	case saga.EventNoEffect, saga.EventRefused, saga.EventTurnedBack, saga.EventCanceled, saga.EventTakenOver:
		return warn
	case saga.EventUndone, saga.EventCompensated, saga.EventAbandoned, saga.EventParked, saga.EventReleased:
		return "idle"
	}
	return "blue"
}
