package breaker

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A step is a failure of a call that was admitted after so many runs had begun, at a time, or a success.
type step struct {
	admitted uint32
	at       time.Duration
	timeout  bool
	success  bool
}

// after records the steps, and returns the run and the time of the last one.
func after(steps []step) (r run, now time.Duration) {
	var number uint32
	for _, s := range steps {
		now = s.at * time.Millisecond
		if s.success {
			r.end()
			continue
		}
		r.add(failure{admitted: s.admitted, at: now, timeout: s.timeout}, number+1)
		number = r.first.number
	}
	return r, now
}

func TestRun(t *testing.T) {
	for name, test := range map[string]struct {
		steps     []step
		count     int
		burst     int
		undecided bool
	}{
		"none":                       {nil, 0, 0, false},
		"one failure":                {[]step{{at: 5}}, 1, 1, false},
		"one after another":          {[]step{{at: 5}, {admitted: 1, at: 5}, {admitted: 1, at: 6}}, 3, 1, false},
		"two in flight together":     {[]step{{at: 5}, {at: 5}}, 1, 2, true},
		"the burst lasts 250ms":      {[]step{{at: 5}, {at: 255}}, 1, 2, false},
		"and no longer":              {[]step{{at: 5}, {at: 256}}, 2, 1, false},
		"young":                      {[]step{{at: 5}, {at: 6}, {admitted: 1, at: 254}}, 2, 2, true},
		"old":                        {[]step{{at: 5}, {at: 6}, {admitted: 1, at: 255}}, 2, 2, false},
		"half are timeouts":          {[]step{{at: 5}, {at: 6}, {admitted: 1, at: 7, timeout: true}}, 2, 2, false},
		"a third is timeouts":        {[]step{{at: 5}, {at: 6}, {1, 7, true, false}, {1, 8, false, false}}, 3, 2, true},
		"a burst of timeouts":        {[]step{{at: 5, timeout: true}, {at: 6, timeout: true}}, 1, 2, false},
		"timeouts in a burst":        {[]step{{at: 5}, {at: 6, timeout: true}, {at: 7, timeout: true}}, 1, 3, true},
		"success":                    {[]step{{at: 5}, {at: 6}, {at: 7, success: true}}, 0, 2, false},
		"the burst outlasts the run": {[]step{{at: 5}, {at: 6}, {at: 7, success: true}, {at: 8}}, 0, 3, false},
		"a new run":                  {[]step{{at: 5}, {at: 6}, {at: 7, success: true}, {admitted: 1, at: 8}}, 1, 1, false},
		"the new run's burst": {[]step{{at: 5}, {at: 7, success: true}, {1, 8, false, false},
			{1, 9, false, false}}, 1, 2, true},
		"of the old burst, in the new": {[]step{{at: 5}, {at: 7, success: true}, {1, 8, false, false},
			{0, 9, false, false}}, 1, 2, true},
	} {
		t.Run(name, func(t *testing.T) {
			r, now := after(test.steps)
			require.Equal(t, test.count, r.count)
			require.Equal(t, test.burst, r.burst)
			require.Equal(t, test.undecided, r.undecided(now))
			require.Equal(t, test.undecided,
				test.count > 0 && !(&Config{ConsecutiveFailures: test.count}).tooManyConsecutive(&r, now))
			require.False(t, (&Config{ConsecutiveFailures: test.count + 1}).tooManyConsecutive(&r, now))
			require.False(t, (&Config{}).tooManyConsecutive(&r, now))
		})
	}
}

// The numbers of runs wrap around.
func TestMomentNumbersWrap(t *testing.T) {
	m := moment{number: 3}
	require.True(t, m.interrupted(failure{admitted: 1<<32 - 1}))
	require.False(t, m.interrupted(failure{admitted: 3}))
	require.False(t, m.interrupted(failure{admitted: 4}))
}

func TestRunRetryAfter(t *testing.T) {
	var r run
	add := func(admitted, number uint32, d time.Duration) {
		r.add(failure{admitted: admitted, retryAfter: d}, number)
	}
	add(0, 1, 2*time.Second)
	add(0, 2, 3*time.Second)
	add(1, 2, time.Second)
	require.Equal(t, 3*time.Second, r.retryAfter)
	r.end()
	add(0, 2, time.Hour)
	require.Zero(t, r.retryAfter, "the run has ended")
	add(1, 2, time.Second)
	require.Equal(t, time.Second, r.retryAfter)
}

// A window is driven by a text: a letter is a success (s), a failure that begins a burst (f), one that belongs
// to it (b), one that counts by itself (x), or the break of a stream (k); a dot is a tenth of the window.
func TestWindowEvents(t *testing.T) {
	for name, test := range map[string]struct {
		calls             int
		text              string
		events            int64
		succeeded, failed int64
	}{
		"one by one":                             {0, "xxxx", 4, 0, 4},
		"a burst":                                {0, "fbbb", 1, 0, 4},
		"a burst of one":                         {0, "sf", 1, 1, 1},
		"half of the failures":                   {0, "fbbbxxxx", 5, 0, 8},
		"less than half":                         {0, "fbbbxxxxx", 9, 0, 9},
		"the largest of two":                     {0, "fbbfbbb", 4, 0, 7},
		"the larger one first":                   {0, "fbbbfbb", 4, 0, 7},
		"the second, when the first has left":    {0, "fbbb.fbb.........", 1, 0, 3},
		"neither":                                {0, "fbbb.fbb..........x", 1, 0, 1},
		"a larger one before a smaller":          {0, "fbb.f.fbb.........x", 2, 0, 4},
		"across tenths":                          {0, "fb.bb.........x", 1, 0, 3},
		"in a window of calls":                   {6, "sfbbs", 1, 2, 3},
		"that has left it in part":               {6, "fbbssss", 1, 4, 2},
		"all but one":                            {6, "fbbbxxxxx", 6, 0, 6},
		"a burst that goes on after it has left": {3, "fbbsssbx", 2, 1, 2},
		"the later of two of the same size":      {6, "fbbsfbbs", 2, 2, 4},
		"all of it":                              {6, "fbbbxxxxxx", 6, 0, 6},
		"broken streams":                         {6, "sssskk", 2, 2, 2},
		"more breaks than successes":             {6, "xskk", 3, 0, 3},
		"the newest success breaks":              {3, "sskxx", 3, 0, 3},
		"the newest success, found again":        {9, "sxxsxxkkx", 7, 0, 7},
		"a success in each tenth":                {0, "s.s.ks", 1, 2, 1},
		"a success that has left does not":       {0, "s.k", 1, 0, 1},
		"a success that left before its break":   {0, "s..........k", 1, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{Window: 10 * time.Second, WindowCalls: test.calls}
			var w window
			var r run
			w.reset(&cfg, 0)
			now, number := time.Duration(0), uint32(0)
			for _, step := range test.text {
				f := failure{admitted: number, at: now}
				switch step {
				case '.':
					now += time.Second
				case 's':
					w.succeed(now)
				case 'k':
					w.replaceSuccess(now, 0)
				case 'x':
					w.fail(now, 0)
				case 'f':
					number++
					r.first = moment{number, now}
					w.fail(now, 0)
					w.addToBurst(f, r.first)
				case 'b':
					f.admitted--
					f.at = r.first.at // or it would be no burst
					w.fail(now, 0)
					w.addToBurst(f, r.first)
				}
			}
			w.advance(now)
			require.Equal(t, []int64{test.events, test.succeeded, test.failed}, []int64{w.events(), w.succeeded, w.failed})
		})
	}
}

// The window keeps the longest RetryAfter of its failures, without going through them.
func TestWindowHints(t *testing.T) {
	for _, calls := range []int{0, 10} {
		for _, hints := range []string{"3 1 2", "1 2 3", "3 2 1", "0 0 5 0 0", "9 1 1 1 1 1 1 1 1 1 1",
			"9 0 0 0 0 0 0 0 0 0 0 0", "2 9 0 0 0 0 0 0 0 0 4 3"} {
			t.Run(fmt.Sprint(calls, " ", hints), func(t *testing.T) {
				cfg := Config{Window: 10 * time.Second, WindowCalls: calls}
				var w window
				w.reset(&cfg, 0)
				var all []time.Duration
				for i, text := range strings.Fields(hints) {
					var n int
					_, err := fmt.Sscan(text, &n)
					require.NoError(t, err)
					all = append(all, time.Duration(n))
					w.fail(time.Duration(i)*time.Second, time.Duration(n))
					longest := time.Duration(0)
					for _, d := range all[max(0, len(all)-10):] {
						longest = max(longest, d)
					}
					require.Equal(t, longest, w.longestRetryAfter(), "after %d", i+1)
				}
			})
		}
	}
}
