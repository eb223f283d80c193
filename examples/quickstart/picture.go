package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// A picture prints the results of both sides, phase by phase. On a terminal, it redraws them while the scenario runs.
// For any other output, it prints each phase once, after the phase's last call.
type picture struct {
	w    io.Writer
	live bool
	*scenario
	start time.Time
	drawn int // number of lines on the screen, if live
	shown int // number of phases that have been printed, if not live
}

func newPicture(f *os.File, s *scenario) *picture {
	stat, err := f.Stat()
	terminal := err == nil && stat.Mode()&os.ModeCharDevice != 0
	return &picture{w: f, live: terminal, scenario: s, start: time.Now()}
}

const header = "phase          client     calls answered  stale failed" +
	"      p50      p99  backend in flight goroutines\n"

// update prints the results so far. i is the index of the current phase.
func (p *picture) update(i int) {
	if p.live {
		p.draw(p.table(i))
		return
	}
	if p.shown == 0 && p.drawn == 0 {
		fmt.Fprint(p.w, header)
		p.drawn = 1
	}
	for ; p.shown < i && p.over(p.shown); p.shown++ {
		fmt.Fprint(p.w, p.rows(p.shown))
	}
}

// over reports whether all calls that started in phase i have ended. i must be a past phase.
func (p *picture) over(i int) bool {
	for _, s := range p.sides {
		if s.tallies[i].running.Load() > 0 {
			return false
		}
	}
	return true
}

// finish prints the table, the breaker's changes, and the verdict.
func (p *picture) finish() {
	last := len(badHalfMinute) - 1
	if p.live {
		p.draw(p.table(last))
	} else {
		p.update(len(badHalfMinute))
	}
	var b strings.Builder
	for _, s := range p.sides {
		b.WriteString(row("all", s.name, summarize(s.tallies...)))
	}
	b.WriteString("\n" + p.breaker())
	plain, resilient := summarize(p.plain.tallies...), summarize(p.resilient.tallies...)
	b.WriteString("\n" + verdict(plain, resilient, p.plain.outage(), p.resilient.outage()) + "\n")
	fmt.Fprint(p.w, b.String())
}

func (p *picture) draw(table string) {
	if p.drawn > 0 {
		fmt.Fprintf(p.w, "\x1b[%dA\x1b[J", p.drawn)
	}
	p.drawn = strings.Count(table, "\n")
	fmt.Fprint(p.w, table)
}

func (p *picture) table(i int) string {
	var b strings.Builder
	b.WriteString(header)
	for n := range i + 1 {
		b.WriteString(p.rows(n))
	}
	return b.String()
}

func (p *picture) rows(i int) string {
	var b strings.Builder
	for _, s := range p.sides {
		b.WriteString(row(badHalfMinute[i].Name, s.name, summarize(s.tallies[i])))
	}
	return b.String()
}

func row(phase, client string, s summary) string {
	if client != "plain" {
		phase = ""
	}
	return fmt.Sprintf("%-14s %-9s %6d %8d %6d %6d %5.0f ms %5.0f ms %8d %9d %10d\n",
		phase, client, s.Calls, s.Answered, s.Stale, s.Failed, s.P50, s.P99,
		s.BackendRequests, s.MaxInFlight, s.MaxGoroutines)
}

// breaker returns a text with the state changes of the breaker and their times.
func (p *picture) breaker() string {
	var b strings.Builder
	b.WriteString("breaker:")
	p.resilient.mu.Lock()
	defer p.resilient.mu.Unlock()
	for _, c := range p.resilient.changes {
		fmt.Fprintf(&b, " %.1fs %v", c.At.Sub(p.start).Seconds(), c.To)
	}
	return b.String() + "\n"
}

func verdict(plain, resilient summary, plainOutage, resilientOutage int64) string {
	share := func(s summary) float64 { return 100 * float64(s.Answered) / float64(max(s.Calls, 1)) }
	return fmt.Sprintf("Of the same %d calls, the plain client answered %.1f%%, "+
		"and the client with policies %.1f%% (%d of them stale). "+
		"Its p99 was %.0f ms instead of %.0f ms. During the outage it sent the backend %d requests instead of %d.",
		plain.Calls, share(plain), share(resilient), resilient.Stale, resilient.P99, plain.P99,
		resilientOutage, plainOutage)
}
