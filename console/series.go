package console

import (
	"math"
	"strconv"

	"github.com/go-resilience/resilience/policy"
)

// A series is one metric over time. For a counter it holds the growth in each second.
type series struct {
	policy.Metric        // as of the latest sample
	what, unit    string // the parts of its Name
	attrs         []policy.Attr
	born          int     // its first sample
	seen          int     // its latest sample
	flat          float32 // the value of all samples while ring is nil
	ring          []float32
}

// newSeries returns a series that starts with sample now.
func newSeries(m policy.Metric, now int) *series {
	sr := &series{Metric: m, born: now, seen: now}
	sr.what, sr.unit, sr.attrs = m.Parse()
	if !m.Counter {
		sr.flat = float32(m.Value)
	}
	return sr
}

// add notes the value of sample now, and of those before it that were missed.
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

// at returns sample i, which is one of those that are kept.
func (sr *series) at(i int) float64 {
	switch {
	case i > sr.seen:
		return 0
	case sr.ring == nil:
		return float64(sr.flat)
	}
	return float64(sr.ring[i%kept])
}

// sum returns the sum of at most n samples, of which last is the latest, and their number.
// The first sample of a counter is no growth, and does not count.
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

// points returns the samples that are kept, rounded to four digits.
func (sr *series) points(now int) []float64 {
	points := []float64{}
	for i := max(sr.born, now-kept+1); i <= now; i++ {
		points = append(points, round(sr.at(i)))
	}
	return points
}

// round returns v with four digits, which are enough to draw it.
func round(v float64) float64 {
	if v = finite(v); v != 0 {
		v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'g', 4, 64), 64)
	}
	return v
}

// finite returns v, or 0 for what JSON has no number for.
func finite(v float64) float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	return v
}
