package harm

import (
	"slices"
	"time"
)

// A Measurement holds the results of a client in a cell of a row, summed over all seeds.
type Measurement struct {
	Asked    int // number of all calls
	Counted  int // number of calls whose answers count for the rules
	Answered int // number of counted calls that were answered within the caller's patience
	Refused  int // number of counted calls that a policy refused
	Sent     int // number of requests that reached the server, plus number of refused dials

	AskedInFault, SentInFault int     // Asked and Sent during the fault, or in total if the fault does not end
	Recovering                int     // number of counted calls that started within the row's recovery time
	Seconds                   float64 // time in which requests may have been sent, summed over all seeds
	Runs                      int
	// Back is the time from the end of the fault until 99% of calls are answered again; see backAfter. It is
	// the maximum over all seeds.
	Back time.Duration

	took []time.Duration // the times that answered calls took, sorted
	lost time.Duration   // the patience of callers whose call was not answered
}

// add adds the results of a run.
func (m *Measurement) add(w *World) {
	r := w.row
	within := func(at time.Duration) bool { return r.FaultEnd == 0 || at >= r.Fault && at < r.FaultEnd }
	for _, res := range w.results {
		m.Asked++
		if within(res.at) {
			m.AskedInFault++
		}
		if !res.counted {
			continue
		}
		m.Counted++
		if r.FaultEnd > 0 && res.at >= r.FaultEnd && res.at < r.FaultEnd+r.Recovery {
			m.Recovering++
		}
		switch {
		case res.answered:
			m.Answered++
			m.took = append(m.took, res.took)
		case res.refused:
			m.Refused++
		}
	}
	slices.Sort(m.took)
	m.lost = w.cell.Patience
	m.Sent += len(w.sent)
	for _, at := range w.sent {
		if within(at) {
			m.SentInFault++
		}
	}
	m.Runs++
	m.Seconds += (max(r.Length, w.arrived) + w.cell.Patience).Seconds()
	if r.FaultEnd > 0 {
		m.Back = max(m.Back, backAfter(w.results, r.FaultEnd))
	}
}

// backAfter returns the time from end, the end of the fault, until the client has recovered. From then on,
// 99% of the counted calls that start within any period of one second are answered.
func backAfter(results []result, end time.Duration) (back time.Duration) {
	var counted []result
	for _, r := range results {
		if r.counted && r.at >= end {
			counted = append(counted, r)
		}
	}
	slices.SortFunc(counted, func(a, b result) int { return int(a.at - b.at) })
	for i, r := range counted {
		if r.answered {
			continue
		}
		calls, lost, last := 0, 0, r.at
		for _, next := range counted[i:] {
			if next.at >= r.at+time.Second {
				break
			}
			if calls++; !next.answered {
				lost++
				last = next.at
			}
		}
		if 100*lost > calls {
			back = max(back, last-end)
		}
	}
	return back
}

// Share returns the share of the counted calls that were answered.
func (m *Measurement) Share() float64 { return float64(m.Answered) / float64(max(1, m.Counted)) }

// P50 and P99 return the 50th and 99th percentiles of the time that answered calls took.
func (m *Measurement) P50() time.Duration { return m.quantile(0.5) }
func (m *Measurement) P99() time.Duration { return m.quantile(0.99) }

func (m *Measurement) quantile(q float64) time.Duration {
	if len(m.took) == 0 {
		return 0
	}
	return m.took[int(q*float64(len(m.took)))]
}

// SentPerCall returns the average number of requests for each call.
func (m *Measurement) SentPerCall() float64 { return float64(m.Sent) / float64(max(1, m.Asked)) }

// P99OfAll returns the 99th percentile of the time of all counted calls. The time of a call that was not
// answered is its caller's patience.
func (m *Measurement) P99OfAll() time.Duration {
	if n := int(0.99 * float64(m.Counted)); n < m.Answered {
		return m.took[n]
	}
	return m.lost
}
