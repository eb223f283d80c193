package harm

import (
	"fmt"
	"strings"
	"time"
)

// A Verdict is the result of applying the rules to NewClient in a cell of a row.
type Verdict int

// Red means that NewClient did not meet a rule. Close means that NewClient met all rules, but at least one of
// them by less than its margin. Random differences between runs decide between Close and Red, so a row may be
// Close whether or not RedRows lists it.
const (
	Red Verdict = iota
	Close
	Green
)

func (v Verdict) String() string { return [...]string{"red", "close", "green"}[v] }

// A check is a rule that was applied.
type check struct {
	by     float64 // the distance to the rule's limit; negative if the rule is not met
	margin float64 // the smallest by for the verdict Green
	format string  // the text that describes the failure; with args
	args   []any
}

// noticed is the maximum time until NewClient notices that a server does not answer. It equals the default
// ResponseHeaderTimeout.
const noticed = 10 * time.Second

// leastSilence is the minimum time without data before a caller's deadline after which a Transport abandons a
// connection. It equals silentFor of package resiliencehttp.
const leastSilence = 900 * time.Millisecond

// Judge applies the rules of the row to mine, NewClient's measurement. others holds the measurements of the
// other clients by name. Judge returns the verdict and describes the rules that were not met.
func (r *Row) Judge(cell Cell, mine *Measurement, others map[string]*Measurement) (Verdict, string) {
	verdict := Green
	var failures []string
	for _, c := range r.checks(cell, mine, others) {
		switch {
		case c.by < 0:
			verdict = Red
			failures = append(failures, fmt.Sprintf(c.format, c.args...))
		case c.by < c.margin:
			verdict = min(verdict, Close)
		}
	}
	return verdict, strings.Join(failures, "; ")
}

func (r *Row) checks(cell Cell, mine *Measurement, others map[string]*Measurement) []check {
	counted := float64(max(1, mine.Counted))
	all := []check{r.load(mine)}
	add := func(by, margin float64, format string, args ...any) {
		all = append(all, check{by, margin, format, args})
	}
	switch name, best := r.best(others); {
	case r.Must.Goodput > 0:
		goodput := float64(mine.Answered) / (r.Must.Capacity * r.Length.Seconds() * float64(mine.Runs))
		add(goodput-r.Must.Goodput, 0.02, "goodput is %.0f%% of capacity", 100*goodput)
	case !r.Must.LoadOnly:
		least := best*counted - float64(mine.Recovering) - 0.01*counted
		add((float64(mine.Answered)-least)/counted, 0.005, "%s answers %.1f%%", name, 100*best)
	}
	if from := r.Must.SendFewer; from > 0 && cell.Rate >= from {
		asked := float64(max(1, mine.AskedInFault))
		add((asked-float64(mine.SentInFault))/asked-1e-9, 0.02, "sends %.2f per call during the fault",
			float64(mine.SentInFault)/asked)
	}
	if lost := 1 - mine.Share(); r.Must.MaxLost > 0 {
		add(r.Must.MaxLost-lost, r.Must.MaxLost/2, "%.1f%% lost", 100*lost)
	}
	if r.Must.NoRefusal {
		add(-float64(mine.Refused), 0, "%d refused", mine.Refused)
	}
	if r.Must.Returns && cell.Patience >= leastSilence {
		latest := r.Recovery + min(cell.Patience, noticed)
		add((latest - mine.Back).Seconds(), 0, "back after %.1fs", mine.Back.Seconds())
	}
	if plain := others[Plain.Name]; r.Must.P99 > 0 && plain != nil {
		limit := r.Must.P99 * plain.P99OfAll().Seconds() * 1.01
		add(limit-mine.P99OfAll().Seconds(), 0, "p99 is %v, plain's %v", round(mine.P99OfAll()), round(plain.P99OfAll()))
	}
	return all
}

// load applies rule B. For each host, the retry budget allows retries for 20% of the calls, plus 10 retries
// per second. It is initially filled with the retries of 10 seconds.
func (r *Row) load(mine *Measurement) check {
	asked := float64(max(1, mine.Asked))
	allowed := 1.2*asked + 10*max(1, r.Must.Hosts)*(mine.Seconds+10*float64(mine.Runs))
	return check{(allowed - float64(mine.Sent)) / asked, 0.01, "sends %.2f per call", []any{mine.SentPerCall()}}
}

// best returns the largest share of calls that any client answered with which NewClient is compared, and that
// client's name.
func (r *Row) best(others map[string]*Measurement) (name string, share float64) {
	for _, n := range []string{Plain.Name, Retries.Name, Failsafe, RetryableHTTP} {
		m := others[n]
		if m == nil || n == RetryableHTTP && !r.patientPeers() {
			continue
		}
		if name == "" || m.Share() > share {
			name, share = n, m.Share()
		}
	}
	return name, share
}

// Names of the clients from other projects, which internal/benchmarks runs.
const (
	Failsafe      = "failsafe"
	RetryableHTTP = "retryablehttp"
)

// patientPeers reports whether NewClient is compared with go-retryablehttp, which waits 1, 2, 4 and 8 seconds
// between its attempts. This is the case only for rows in which waiting does not help, or in which the faults
// are short.
func (r *Row) patientPeers() bool {
	n, _, _ := strings.Cut(r.ID, "/")
	return n == "2" || n == "5" || n == "14"
}

func round(d time.Duration) time.Duration {
	switch {
	case d >= time.Second:
		return d.Round(10 * time.Millisecond)
	default:
		return d.Round(time.Millisecond)
	}
}
