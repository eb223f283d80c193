package console

import (
	"fmt"
	"time"

	"github.com/go-resilience/resilience/saga"
)

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
	X, Y int
	Text string
	Tone tone
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
	from := start.Sub(in.CreatedAt)
	step := stepOf(span)
	for d := (from + step - 1) / step * step; d <= from+span; d += step {
		t.Ticks = append(t.Ticks, mark{X: at(in.CreatedAt.Add(d)), Y: t.Height - 8, Text: "+" + inStepsOf(step, d)})
	}
	return t
}

// stepOf returns the time between two ticks: a round one, of which at most five are in span.
func stepOf(span time.Duration) time.Duration {
	for _, unit := range []struct {
		of    time.Duration
		times []time.Duration
	}{
		{time.Millisecond, []time.Duration{1, 2, 5, 10, 20, 50, 100, 200, 500}},
		{time.Second, []time.Duration{1, 2, 5, 10, 20, 30}},
		{time.Minute, []time.Duration{1, 2, 5, 10, 20, 30}},
		{time.Hour, []time.Duration{1, 2, 3, 6, 12}},
	} {
		for _, n := range unit.times {
			if span <= 5*n*unit.of {
				return n * unit.of
			}
		}
	}
	const day = 24 * time.Hour
	return (span/5/day + 1) * day
}

// inStepsOf returns a multiple of step as a text, exactly.
func inStepsOf(step, d time.Duration) string {
	for _, u := range []struct {
		of   time.Duration
		name string
	}{{24 * time.Hour, "d"}, {time.Hour, "h"}, {time.Minute, "min"}, {time.Second, "s"}} {
		if step%u.of == 0 {
			return fmt.Sprintf("%d %s", d/u.of, u.name)
		}
	}
	return fmt.Sprintf("%d ms", d/time.Millisecond)
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
