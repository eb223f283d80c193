package delay_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/delay"
)

const longest = time.Duration(math.MaxInt64)

func TestJitterStaysWithinItsBounds(t *testing.T) {
	for name, c := range map[string]struct {
		jitter delay.Jitter
		least  func(bound time.Duration) time.Duration
	}{
		"full":  {delay.Full, func(time.Duration) time.Duration { return 0 }},
		"equal": {delay.Equal, func(bound time.Duration) time.Duration { return bound - bound/2 }},
	} {
		for _, bound := range []time.Duration{0, 1, 2, 3, 100, time.Second, longest - 1, longest} {
			least, lowest, highest := c.least(bound), longest, time.Duration(0)
			for range 200 {
				d := c.jitter(bound)
				lowest, highest = min(lowest, d), max(highest, d)
			}
			require.GreaterOrEqual(t, lowest, least, "%s %d", name, bound)
			require.LessOrEqual(t, highest, bound, "%s %d", name, bound)
			if width := bound - least; width > 100 { // 200 delays miss a fifth of the range once in 10^19 times
				require.Less(t, lowest-least, width/5, "%s %d", name, bound)
				require.Less(t, bound-highest, width/5, "%s %d", name, bound)
			}
		}
	}
}

func TestExponentialWithEqualJitter(t *testing.T) {
	b := delay.Exponential(100*time.Millisecond, time.Second, delay.Equal)()
	bound := 100 * time.Millisecond
	for range 20 {
		d := b.NextBackOff()
		require.GreaterOrEqual(t, d, bound/2)
		require.LessOrEqual(t, d, bound)
		bound = min(2*bound, time.Second)
	}
}

func TestCheck(t *testing.T) {
	const exponential, constant = "Exponential(first, longest) with 0 < first <= longest", "Constant(d) with d 0 or more"
	for is, c := range map[string]struct {
		make func() delay.Backoff
		must string
	}{
		"Exponential(1m0s, 30s)": {delay.Exponential(time.Minute, 30*time.Second, delay.Full), exponential},
		"Exponential(0s, 1s)":    {delay.Exponential(0, time.Second, delay.Full), exponential},
		"Exponential(0s, 0s)":    {delay.Exponential(0, 0, delay.Equal), exponential},
		"Exponential(-1s, 1s)":   {delay.Exponential(-time.Second, time.Second, delay.Equal), exponential},
		"Exponential(-2ns, -1ns)": {
			delay.Exponential(-2, -1, delay.Full), exponential,
		},
		"Exponential(1ns, -1ns)": {delay.Exponential(1, -1, delay.Full), exponential},
		"Constant(-1ns)":         {delay.Constant(-1), constant},
	} {
		b := c.make()
		b.Reset()
		require.Negative(t, b.NextBackOff(), "it ends the retrying")
		gotIs, gotMust := delay.Check(b)
		require.Equal(t, [2]string{is, c.must}, [2]string{gotIs, gotMust})
	}
	for _, make := range []func() delay.Backoff{
		delay.Exponential(1, 1, delay.Full), delay.Exponential(longest, longest, delay.Full), delay.Constant(0),
		func() delay.Backoff { return nil },
	} {
		is, must := delay.Check(make())
		require.Empty(t, is+must)
	}
}
