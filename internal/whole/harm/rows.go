package harm

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"time"
)

const (
	ms = time.Millisecond
	s  = time.Second
)

var (
	allRates = []float64{1, 20, 200}
	allWaits = []time.Duration{300 * ms, s, 10 * s}
)

// slots is the number of slots of NewClient's default bulkhead.
const slots = 100

// quick is the Handler of a server without a fault.
var quick = Takes(20 * ms)

// Rows returns all rows, in the order of the table.
func Rows() []*Row {
	var rows []*Row
	for _, group := range [][]Row{
		none(), cut(), restart(), down(), silent(), blackHole(), twoAddresses(), unavailable(), retryAfter(), slowFew(),
		overload(), slower(), goAway(), streams(), lateEvents(), cancels(), uploads(), fewConns(), coldStart(), manyHosts(),
	} {
		for i := range group {
			rows = append(rows, &group[i])
		}
	}
	return rows
}

func none() (rows []Row) {
	for _, load := range []float64{0.5, 0.9} {
		rows = append(rows, Row{
			ID: fmt.Sprintf("1/%g", load), Name: fmt.Sprintf("none, at %g of capacity", load),
			Rate: load * slots, Poisson: true, Patience: 10 * s, Waits: allWaits, Length: 6 * s,
			Workers: slots, Server: TakesExp(s), Must: Must{P99: 1.1},
		})
	}
	return rows
}

// cut resets all connections while 30 calls are in flight, each of which takes 100ms. Over HTTP/2, these
// calls share one connection.
func cut() (rows []Row) {
	for _, v := range []struct {
		id, name string
		http2    bool
		at       time.Duration
	}{
		{"h2-cold", "one connection with 30 in flight is cut, HTTP/2", true, 0},
		{"h2-warm", "the same, after 10s without trouble", true, 10 * s},
		{"h1", "all connections are cut, 30 in flight, HTTP/1.1", false, 0},
		{"h1-warm", "the same, after 10s without trouble", false, 10 * s},
	} {
		reset := v.at + 50*ms
		rows = append(rows, Row{
			ID: "2/" + v.id, Name: v.name, HTTP2: v.http2,
			Rate: 10, Rates: allRates, Patience: s, Waits: allWaits, Length: reset + 15*s,
			Fault: v.at, FaultEnd: reset,
			Server: Path("/slow", Takes(100*ms), quick),
			Script: []Event{{v.at, Calls(30, Call{Path: "slow"})}, {reset, Cut}},
			Must:   Must{NoRefusal: true},
			Long:   v.id == "h1-warm",
		})
	}
	return rows
}

func restart() []Row {
	return []Row{
		{
			ID: "3/refused", Name: "the server restarts: 200ms refused",
			Rate: 50, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 20 * s,
			Fault: 5 * s, FaultEnd: 5200 * ms, Recovery: s, Server: quick,
			Script: []Event{{5 * s, Refuse}, {5 * s, Cut}, {5200 * ms, Accept}},
			Must:   Must{MaxLost: 0.01},
		},
		{
			ID: "3/503", Name: "the server restarts: 2s of 503",
			Rate: 20, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 20 * s,
			Fault: 5 * s, FaultEnd: 7 * s, Recovery: s, Server: During(5*s, 7*s, Unavailable, quick),
		},
	}
}

func down() []Row {
	return []Row{{
		ID: "4/refused", Name: "down for 30s, connection refused",
		Rate: 10, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 55 * s,
		Fault: 5 * s, FaultEnd: 35 * s, Recovery: 2 * s, Server: quick,
		Script: []Event{{5 * s, Refuse}, {5 * s, Cut}, {35 * s, Accept}},
		Must:   Must{SendFewer: 1},
	}}
}

func silent() (rows []Row) {
	waits := []time.Duration{300 * ms, s, 3 * s, 10 * s, 30 * s}
	for _, http2 := range []bool{true, false} {
		id, over := protocol(http2)
		rows = append(rows, Row{
			ID: "5/" + id + "-silent", Name: "silent for 10s" + over, HTTP2: http2,
			Rate: 10, Rates: allRates, Patience: 3 * s, Waits: waits, Length: 30 * s,
			Fault: 5 * s, FaultEnd: 15 * s, Recovery: 3 * s, Server: During(5*s, 15*s, Silent, quick),
		}, Row{
			ID: "5/" + id + "-blue-green", Name: "old connections silent forever" + over, HTTP2: http2,
			Rate: 10, Rates: allRates, Patience: 3 * s, Waits: waits, Length: 30 * s,
			Fault: 5 * s, FaultEnd: 5 * s, Recovery: 3 * s, Server: OldConns(5*s, Silent, quick),
			Must: Must{Returns: true},
		})
	}
	return rows
}

func blackHole() (rows []Row) {
	for _, http2 := range []bool{true, false} {
		id, over := protocol(http2)
		rows = append(rows, Row{
			ID: "6/" + id + "-all", Name: "all bytes dropped for 15s, on old connections forever" + over,
			HTTP2: http2, Rate: 10, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 35 * s,
			Fault: 5 * s, FaultEnd: 20 * s, Recovery: 2 * s, Server: quick,
			Script: []Event{{5 * s, DropOld}, {5 * s, DropDials}, {20 * s, PassDials}},
			Must:   Must{Returns: true},
		}, Row{
			ID: "6/" + id + "-old", Name: "bytes dropped on old connections forever" + over,
			HTTP2: http2, Rate: 10, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 25 * s,
			Fault: 5 * s, FaultEnd: 5 * s, Recovery: 2 * s, Server: quick,
			Script: []Event{{5 * s, DropOld}}, Must: Must{Returns: true},
		})
	}
	return rows
}

func twoAddresses() []Row {
	return []Row{
		{ID: "7/hole", Name: "one of two addresses is a black hole", Patience: 20 * s, Server: quick, Real: true},
		{ID: "7/refuses", Name: "one of two addresses refuses", Patience: 20 * s, Server: quick, Real: true},
	}
}

func unavailable() (rows []Row) {
	for _, v := range []struct {
		percent  int
		length   time.Duration
		minCalls int
		must     Must
	}{
		{1, 15 * s, 100, Must{}},
		// Of 100 calls whose callers wait 300ms, the share that is answered varies by more than the 1% of rule A.
		{20, 15 * s, 400, Must{}},
		// The breaker computes a failure rate from 20 calls or more. At a failure rate near 50%, it opens at
		// a random time.
		{50, 30 * s, 100, Must{LoadOnly: true, SendFewer: 20}},
		{100, 15 * s, 100, Must{SendFewer: 1}},
	} {
		rows = append(rows, Row{
			ID: fmt.Sprintf("8/%d", v.percent), Name: fmt.Sprintf("%d%% of answers are 503", v.percent),
			Rate: 20, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: v.length, MinCalls: v.minCalls,
			Server: Share(float64(v.percent)/100, Unavailable, Takes(50*ms)), Must: v.must,
		})
	}
	// Only the retry budget limits the load in this row: the breaker stays closed, and there are more retries
	// than the budget initially holds.
	return append(rows, Row{
		ID: "8/30", Name: "30% of answers are 503, judged by load only", Rate: 200, Patience: 300 * ms, Length: 10 * s,
		Server: During(0, s, quick, Share(0.3, Unavailable, quick)), Must: Must{LoadOnly: true},
	})
}

func retryAfter() []Row {
	return []Row{
		{
			ID: "9/429", Name: "1% of answers are 429 with Retry-After 1s",
			Rate: 20, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 20 * s, MinCalls: 200,
			Server: Share(0.01, Status(429, s), Takes(50*ms)),
		},
		{
			ID: "9/60s", Name: "one answer is 503 with Retry-After 60s",
			Rate: 20, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 20 * s, MinCalls: 100,
			Server: func(w *World, rw http.ResponseWriter, r *Request) {
				if r.Number == 10 {
					Status(503, 60*s)(w, rw, r)
					return
				}
				Takes(50*ms)(w, rw, r)
			},
		},
	}
}

func slowFew() []Row {
	server := EveryNth(100, Takes(s), quick)
	return []Row{
		{
			ID: "10/default", Name: "1% of answers take 50 times as long",
			Rate: 20, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 15 * s, MinCalls: 200,
			Server: server, Must: Must{P99: 1},
		},
		{
			ID: "10/hedged", Name: "the same, with hedging",
			Rate: 20, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 15 * s, MinCalls: 200,
			Server: server, Must: Must{P99: 0.5},
			Config: Config{HedgeAfter: 100 * ms},
		},
	}
}

// overload returns rows with more load than the server can handle. Each call takes a third of the callers'
// patience, but at most one second.
func overload() (rows []Row) {
	for _, v := range []struct {
		how, callers string
		cancels      bool
	}{{"deadline", "with a deadline of", false}, {"cancel", "that cancel after", true}} {
		for _, load := range []float64{1.2, 2, 5} {
			for _, patience := range []time.Duration{300 * ms, s, 10 * s} {
				service := min(patience/3, s)
				services := time.Duration(8)
				if load < 2 {
					services = 24 // more time, because the queue grows slowly
				}
				capacity := slots / service.Seconds()
				rows = append(rows, Row{
					ID:   fmt.Sprintf("11/%s-%g-%v", v.how, load, patience),
					Name: fmt.Sprintf("load of %g times the slots, callers %s %v", load, v.callers, patience),
					Rate: load * capacity, Poisson: true, Patience: patience, Cancels: v.cancels,
					Length:  services * service,
					Workers: slots, Server: Takes(service), Must: Must{Goodput: 0.8, Capacity: capacity},
					Long: patience != s || load == 5 || v.cancels && load != 2,
				})
			}
		}
	}
	return rows
}

func slower() (rows []Row) {
	const workers = 4
	service := 100 * ms
	for _, v := range []struct {
		id, name string
		stubborn bool
	}{
		{"polite", "10 times slower for 10s", false},
		{"stubborn", "the same, and the server completes canceled requests", true},
	} {
		rows = append(rows, Row{
			ID: "12/" + v.id, Name: v.name, Stubborn: v.stubborn, Workers: workers, Config: Config{Slots: workers},
			Rate: 0.5 * workers / service.Seconds(), Poisson: true, Patience: 3 * s, Waits: allWaits, Length: 28 * s,
			Fault: 5 * s, FaultEnd: 15 * s, Recovery: 3 * s,
			Server: During(5*s, 15*s, Takes(10*service), Takes(service)), Must: Must{Lost: v.stubborn},
		})
	}
	return rows
}

func goAway() (rows []Row) {
	for _, http2 := range []bool{true, false} {
		id, over := protocol(http2)
		rows = append(rows, Row{
			ID: "13/" + id, Name: "connections are closed gracefully every 5s" + over, HTTP2: http2, MinCalls: 100,
			Rate: 20, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 20 * s,
			Server: GoAway(5*s, 100*ms), Must: Must{NoRefusal: true}, Long: !http2,
		})
	}
	return rows
}

// streams returns rows whose responses are streams. They do not run at 200 calls per second, because there
// would be more open streams than NewClient has slots.
func streams() []Row {
	whole := Stream{Every: 2500 * ms, Events: 3}
	broken := Stream{Every: 2500 * ms, Events: 3, CutAt: 1}
	row := func(id, name string, rate float64, server Handler, must Must) Row {
		return Row{
			ID: "14/" + id, Name: "streams of 5s: " + name, HTTP2: true, Streams: true,
			Rate: rate, Rates: []float64{1, rate}, Length: 20 * s, Server: server, Must: must,
		}
	}
	cutOnce := row("cut-once", "all are cut at the same time", 6, whole.Serve, Must{NoRefusal: true})
	cutOnce.Fault, cutOnce.FaultEnd = 8*s, 8*s
	cutOnce.Script = []Event{{8 * s, Cut}}
	return []Row{
		row("503", "20% of answers are 503", 20, Share(0.2, Unavailable, whole.Serve), Must{NoRefusal: true}),
		row("cut-2%", "2% are cut", 20, Share(0.02, broken.Serve, whole.Serve), Must{}),
		cutOnce,
		row("cut-all", "all are always cut", 6, broken.Serve, Must{SendFewer: 6}), // at 1 call per second, too few are cut
	}
}

func lateEvents() (rows []Row) {
	for _, http2 := range []bool{true, false} {
		id, over := protocol(http2)
		rows = append(rows, Row{
			ID: "15/" + id + "-first", Name: "headers immediately, first event after 15s" + over,
			HTTP2: http2, Streams: true, Rate: 1, Patience: s, Length: 10 * s,
			Server: Stream{First: 15 * s, Every: s, Events: 3}.Serve,
		}, Row{
			ID: "15/" + id + "-every", Name: "one event every 60s" + over,
			HTTP2: http2, Streams: true, Rate: 1, Patience: s, Length: 10 * s,
			Server: Stream{Every: 60 * s, Events: 4}.Serve,
		})
	}
	return rows
}

func cancels() []Row {
	half := func(upTo time.Duration) func(int) Call {
		return func(n int) Call {
			if n%2 == 0 {
				return Call{Cancels: upTo, Uncounted: true}
			}
			return Call{}
		}
	}
	return []Row{
		{
			ID: "16/h1", Name: "half of the callers cancel, HTTP/1.1",
			Rate: 20, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 15 * s, MinCalls: 100,
			Server: Takes(150 * ms), Call: half(200 * ms),
		},
		{
			ID: "16/h2", Name: "half of the callers cancel, HTTP/2", HTTP2: true,
			Rate: 20, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 15 * s, MinCalls: 100,
			Server: Takes(150 * ms), Call: half(200 * ms),
		},
		{
			ID: "16/streams", Name: "half of the readers of streams cancel", HTTP2: true, Streams: true,
			Rate: 20, Length: 15 * s, Server: Stream{Every: 500 * ms, Events: 3}.Serve, Call: half(s),
		},
	}
}

func uploads() []Row {
	every := func(period int, body func() io.ReadCloser) func(int) Call {
		return func(n int) Call {
			if n%period == 0 {
				return Call{Path: "upload", Body: body}
			}
			return Call{}
		}
	}
	server := Path("/upload", Reads, quick)
	return []Row{
		{
			ID: "17/upload", Name: "uploads of 10MB at 1MB/s", Rate: 2, Length: 10 * s, Server: server,
			Call: every(20, func() io.ReadCloser { return &slowBody{left: 100, chunk: 100_000, every: 100 * ms} }),
		},
		{
			ID: "17/trickle", Name: "request bodies of a byte a second, 15s", Rate: 5, Length: 10 * s, Server: server,
			Call: every(2, func() io.ReadCloser { return &slowBody{left: 15, chunk: 1, every: s} }),
		},
	}
}

// A slowBody is a request body that is sent in chunks, one every interval.
type slowBody struct {
	left, chunk int
	every       time.Duration
	unread      bytes.Reader
}

func (b *slowBody) Read(p []byte) (int, error) {
	if b.unread.Len() == 0 {
		if b.left == 0 {
			return 0, io.EOF
		}
		b.left--
		time.Sleep(b.every)
		b.unread.Reset(make([]byte, b.chunk))
	}
	return b.unread.Read(p)
}

func (b *slowBody) Close() error { return nil }

func fewConns() []Row {
	calls := []Event{{0, Calls(20, Call{})}}
	return []Row{
		{
			ID: "18/default", Name: "MaxConnsPerHost 2, 20 callers", Patience: 5 * s, Length: s,
			Server: Takes(100 * ms), Tuned: Tuning{MaxConnsPerHost: 2}, Script: calls,
		},
		{
			ID: "18/300ms", Name: "the same, headers within 300ms", Patience: 5 * s, Length: s,
			Server: Takes(100 * ms), Tuned: Tuning{MaxConnsPerHost: 2}, Script: calls, Config: Config{HeaderTimeout: 300 * ms},
		},
	}
}

func coldStart() []Row {
	return []Row{{
		ID: "19/503", Name: "cold start: 2s of 503",
		Rate: 20, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 20 * s,
		FaultEnd: 2 * s, Recovery: s, Server: During(0, 2*s, Unavailable, quick),
	}}
}

func manyHosts() []Row {
	const hosts = 300
	dead := []Event{{0, func(w *World) { w.Net.Refuse("h0.test") }}}
	call := func(n int) Call {
		if n%4 == 0 {
			return Call{Host: "h0.test", Uncounted: true}
		}
		return Call{Host: fmt.Sprintf("h%d.test", 1+n%(hosts-1))}
	}
	return []Row{
		{
			ID: "20/dead", Name: "300 hosts, one of them is dead", Rate: 20, Patience: 3 * s, Waits: allWaits, Length: 10 * s,
			Server: quick, Script: dead, Call: call, Must: Must{Hosts: hosts, NoRefusal: true},
		},
		{
			ID: "20/503", Name: "the same, 60% of first answers are 503",
			Rate: 80, Patience: 3 * s, Waits: allWaits, Length: 10 * s,
			Server: FirstAttempts(Share(0.6, Unavailable, quick), quick), Script: dead, Call: call,
			Must: Must{Hosts: hosts, NoRefusal: true},
		},
	}
}

// protocol returns the texts for the protocol in a row's ID and in its Name.
func protocol(http2 bool) (id, over string) {
	if http2 {
		return "h2", ", HTTP/2"
	}
	return "h1", ", HTTP/1.1"
}
