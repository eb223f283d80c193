package harm

import (
	"fmt"
	"io"
	"time"
)

// A Row is one variant of a row of the table: a fault, and the results that NewClient must achieve.
type Row struct {
	ID   string // the row's number in the table, a slash, and the variant: "5/h2 blue-green"
	Name string // the description of the fault, for the table

	HTTP2    bool // use HTTP/2 instead of HTTP/1.1
	Streams  bool // responses are streams; a call is answered only if the whole stream arrives
	Stubborn bool // the server completes a request even if its client has canceled
	Workers  int  // the number of requests that the server handles concurrently; zero means no limit

	Rate     float64         // the calls per second in go test; zero means that only Script starts calls
	Rates    []float64       // the rates that make harm runs; nil means Rate
	Patience time.Duration   // the time that callers wait for an answer in go test; zero means no limit
	Waits    []time.Duration // the values of Patience that make harm runs; nil means Patience
	Cancels  bool            // callers cancel after Patience instead of setting a deadline
	Poisson  bool            // calls start at random times instead of evenly spaced times

	Length   time.Duration // the time during which calls start
	MinCalls int           // if Length is too short for MinCalls calls, calls start for longer
	Fault    time.Duration // the start of the fault
	FaultEnd time.Duration // the end of the fault; zero means that the fault does not end
	Recovery time.Duration // the time after FaultEnd in which calls may start that need not be answered

	Server Handler
	Script []Event
	Call   func(n int) Call // the nth call, from 0; nil means Call{}
	Config Config           // the settings of NewClient that differ from the defaults
	Tuned  Tuning           // the settings of all clients' base transports that differ from the defaults

	Must Must
	Long bool // only make harm runs the row
	Real bool // the row runs on real IP addresses and in real time; see runReal
}

// A Must specifies the rules of a row. The zero Must means rules A and B, which the package comment defines.
type Must struct {
	LoadOnly bool // rule A does not apply
	// SendFewer is the rate, in calls per second, from which on NewClient must send fewer requests than there
	// are calls. If the fault ends, only the time of the fault counts. Zero means that the rule does not
	// apply.
	SendFewer float64
	Goodput   float64 // the share of Capacity that must be answered; replaces rule A
	Capacity  float64 // the number of calls per second that the server can answer
	MaxLost   float64 // the largest share of calls that may go unanswered; zero means no limit
	NoRefusal bool    // no call may be refused by a policy
	// Returns means that after the fault, 99% of calls must be answered again. This must be the case once
	// Recovery has passed, and the time in which NewClient notices that a server no longer responds.
	Returns bool
	P99     float64 // the largest 99th percentile of latency, relative to plain's; zero means no limit
	Hosts   float64 // the number of hosts, each with its own budget; zero means 1
	// Lost means that no client can meet the rules if callers wait only 300ms, because requests queue in the
	// server.
	Lost bool
}

// A Tuning changes the settings of the base transport.
type Tuning struct {
	MaxConnsPerHost int
}

// An Event is a line of a row's script.
type Event struct {
	At time.Duration // the time since the start of the run
	Do func(w *World)
}

// Events for scripts.
var (
	Refuse    = func(w *World) { w.Net.Refuse("") }
	Accept    = func(w *World) { w.Net.Accept("") }
	Cut       = func(w *World) { w.Net.Cut() }
	DropOld   = func(w *World) { w.Net.DropOld() }
	DropDials = func(w *World) { w.Net.DropDials(true) }
	PassDials = func(w *World) { w.Net.DropDials(false) }
)

// Calls starts n calls at the same time.
func Calls(n int, c Call) func(*World) {
	return func(w *World) {
		for range n {
			w.call(c)
		}
	}
}

// A Call is a request of a caller. The zero Call is a GET of svc.test.
type Call struct {
	Host      string // empty means svc.test
	Path      string // empty means /
	Body      func() io.ReadCloser
	Uncounted bool          // the call's answer does not count for the rules, but its requests do
	Cancels   time.Duration // the caller cancels at a random time of up to Cancels; zero means never
}

// A Cell is a rate of calls and a patience of callers with which a row runs.
type Cell struct {
	Rate     float64
	Patience time.Duration
}

// String returns the cell in the form that RedRow.Cells matches, such as "20/s 1s".
func (c Cell) String() string {
	s := fmt.Sprintf("%.4g/s", c.Rate)
	if c.Patience > 0 {
		s += " " + c.Patience.String()
	}
	return s
}

// Quick returns the cell that go test runs.
func (r *Row) Quick() Cell { return Cell{r.Rate, r.Patience} }

// Cells returns the cells that make harm runs: Quick, and each rate of Rates with each patience of Waits.
func (r *Row) Cells() []Cell {
	cells := []Cell{r.Quick()}
	rates, waits := r.Rates, r.Waits
	if rates == nil {
		rates = []float64{r.Rate}
	}
	if waits == nil {
		waits = []time.Duration{r.Patience}
	}
	for _, rate := range rates {
		for _, wait := range waits {
			if c := (Cell{rate, wait}); c != r.Quick() {
				cells = append(cells, c)
			}
		}
	}
	return cells
}
