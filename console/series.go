package console

import (
	"math"
	"strconv"

	"github.com/go-resilience/resilience/policy"
)

// A series has the samples of a metric over time. For a counter, a sample is the growth of the counter in one second.
type series struct {
	policy.Metric        // the metric in the latest sample
	name, unit    string // parts of Metric.Name
	attrs         []policy.Attr
	born          int       // number of the first sample
	seen          int       // number of the latest sample
	flat          float32   // value of all samples while ring is nil
	ring          []float32 // allocated when the value first changes; most values never change
}

// newSeries returns a series whose first sample has the number now.
func newSeries(m policy.Metric, now int) *series {
	sr := &series{Metric: m, born: now, seen: now}
	sr.name, sr.unit, sr.attrs = m.Parse()
	if !m.Counter {
		sr.flat = float32(m.Value)
	}
	return sr
}

// add adds the value of the sample with the number now. If samples before it were missed, a counter's growth since the
// latest sample is divided evenly among them.
func (sr *series) add(value float64, now int) {
	v := float32(value)
	missed := max(now-sr.seen, 1)
	if sr.Counter {
		v = float32(max(value-sr.Value, 0) / float64(missed))
	}
	sr.Value = value
	switch {
	case sr.ring != nil:
	case v == sr.flat:
		sr.seen = now
		return
	default:
		sr.ring = make([]float32, kept)
		for i := max(sr.born, now-kept); i <= sr.seen; i++ {
			sr.ring[i%kept] = sr.flat
		}
	}
	for i := max(sr.seen+1, now-kept+1); i <= now; i++ {
		sr.ring[i%kept] = v
	}
	sr.seen = now
}

// at returns the sample with the number i, which must be one of the last kept samples.
func (sr *series) at(i int) float64 {
	switch {
	case i > sr.seen:
		return 0
	case sr.ring == nil:
		return float64(sr.flat)
	}
	return float64(sr.ring[i%kept])
}

// sum returns the sum of at most n samples up to last, and the number of these samples. The first sample of a counter
// is not included, because it has no growth.
func (sr *series) sum(last, n int) (total float64, samples int) {
	from := max(sr.born, last-n+1)
	if sr.Counter && from == sr.born {
		from++
	}
	samples = max(last-from+1, 0)
	for i := from; i <= last; i++ {
		total += sr.at(i)
	}
	return total, samples
}

// points returns the retained samples, rounded to four digits, for a chart.
func (sr *series) points(now int) []float64 {
	points := []float64{}
	for i := max(sr.born, now-kept+1); i <= now; i++ {
		points = append(points, round(sr.at(i)))
	}
	return points
}

// round returns v with four digits, which are enough for a chart.
func round(v float64) float64 {
	if v = finite(v); v != 0 {
		v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'g', 4, 64), 64)
	}
	return v
}

// finite returns v, or 0 if v is NaN or infinite, which JSON cannot represent.
func finite(v float64) float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	return v
}
