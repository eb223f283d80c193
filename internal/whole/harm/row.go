package harm

import (
	"fmt"
	"io"
	"time"
)

// A Row is one variant of a row of the table: a trouble, and the results that NewClient must achieve.
type Row struct {
	ID   string // the row's number in the table, a slash, and the variant: "5/h2 blue-green"
	Name string // the trouble, for the table

	HTTP2    bool // HTTP/2 rather than HTTP/1.1
	Streams  bool // a call is complete when its stream has ended as the server meant it to
	Stubborn bool // the server completes requests whose client has canceled
	Workers  int  // how many requests the server handles concurrently; zero means any number

	Rate     float64         // the arrivals per second in go test; zero means that only the script calls
	Rates    []float64       // the arrivals per second in make harm; nil means Rate
	Patience time.Duration   // the time that callers wait in go test; zero means without limit
	Waits    []time.Duration // the patience in make harm; nil means Patience
	Cancels  bool            // callers cancel after their patience and give no deadline
	Poisson  bool            // arrivals are random rather than evenly spaced

	Length   time.Duration // how long calls arrive
	MinCalls int           // calls arrive for longer than Length until there are as many
	Fault    time.Duration // the start of the fault
	FaultEnd time.Duration // the end of the fault; zero means that the fault lasts
	Recovery time.Duration // the time after FaultEnd in which arrivals need not be answered

	Server Handler
	Script []Event
	Call   func(n int) Call // the nth call, from 0; nil means Call{}
	Config Config           // the settings of NewClient that are not defaults
	Tuned  Tuning           // the settings of every client's base transport that are not defaults

	Must Must
	Long bool // only make harm runs the row
	Real bool // the row runs on real addresses, in real time; see runReal
}

// A Must is the rules of a row. The zero Must is rules A and B of the package.
type Must struct {
	LoadOnly  bool    // rule A does not apply
	SendFewer float64 // from this rate on, fewer requests must be sent than calls are made; during the fault if it ends
	Goodput   float64 // the share of Capacity that must be answered, instead of rule A
	Capacity  float64 // calls per second
	MaxLost   float64 // the largest share of calls that may be lost; zero means any
	NoRefusal bool    // no call may be refused by a policy
	Returns   bool    // 99% must be answered once Recovery and the time to notice silence have passed
	P99       float64 // the largest p99, as a multiple of plain's; zero means any
	Hosts     float64 // the number of hosts, each with its own budget; zero means 1
	Lost      bool    // no client can meet the rules for callers of 300ms: the queue is in the server
}

// A Tuning changes the base transport.
type Tuning struct {
	MaxConnsPerHost int
}

// An Event is a line of a row's script.
type Event struct {
	At time.Duration // since the start of the run
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
	Uncounted bool          // the answer does not count, though the requests do
	Cancels   time.Duration // the caller cancels at a random time up to this; zero means never
}

// A Cell is a rate and a patience at which a row runs.
type Cell struct {
	Rate     float64
	Patience time.Duration
}

// String returns the cell as the list of red rows has it: "20/s 1s".
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
