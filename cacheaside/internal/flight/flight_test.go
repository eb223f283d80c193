package flight_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
	"github.com/go-resilience/resilience/cacheaside/internal/flight"
)

const s = time.Second

func TestWhatACallDoes(t *testing.T) {
	// Fresh before 10 s, served during a refresh before 20 s, if a load fails before 30 s.
	whole := entry.Entry[int]{Fresh: 10 * s, Stale: 20 * s, Keep: 30 * s}
	paused := whole
	paused.Pause = 28 * s
	absent := entry.Entry[int]{Absent: true, Fresh: 10 * s, Stale: 10 * s, Keep: 10 * s}
	for name, tc := range map[string]struct {
		entry    *entry.Entry[int]
		now      time.Duration
		call     flight.Call
		underWay bool
		want     flight.Move
		how      entry.Standing
	}{
		"nothing":                           {want: flight.Launch},
		"nothing, a load under way":         {underWay: true, want: flight.Wait},
		"fresh":                             {entry: &whole, now: 9 * s, want: flight.Serve, how: entry.Fresh},
		"fresh, early":                      {entry: &whole, now: 9 * s, call: flight.Call{Early: true}, want: flight.Refresh, how: entry.Fresh},
		"fresh, early, a load under way":    {entry: &whole, now: 9 * s, call: flight.Call{Early: true}, underWay: true, want: flight.Serve, how: entry.Fresh},
		"stale":                             {entry: &whole, now: 10 * s, want: flight.Refresh, how: entry.Stale},
		"stale, a load under way":           {entry: &whole, now: 10 * s, underWay: true, want: flight.Serve, how: entry.Stale},
		"stale, paused":                     {entry: &paused, now: 10 * s, want: flight.Serve, how: entry.Stale},
		"kept":                              {entry: &whole, now: 20 * s, want: flight.Launch, how: entry.Kept},
		"kept, a load under way":            {entry: &whole, now: 20 * s, underWay: true, want: flight.Wait, how: entry.Kept},
		"kept, paused":                      {entry: &paused, now: 20 * s, want: flight.Serve, how: entry.Kept},
		"kept, no longer paused":            {entry: &paused, now: 28 * s, want: flight.Launch, how: entry.Kept},
		"dead":                              {entry: &whole, now: 30 * s, want: flight.Launch},
		"dead, but the call takes it":       {entry: &whole, now: 30 * s, call: flight.Call{Stale: 21 * s}, want: flight.Refresh, how: entry.Stale},
		"dead, too old for the call":        {entry: &whole, now: 31 * s, call: flight.Call{Stale: 21 * s}, want: flight.Launch},
		"absence is not served old":         {entry: &absent, now: 10 * s, call: flight.Call{Stale: s}, want: flight.Launch},
		"kept, and the call takes it stale": {entry: &whole, now: 20 * s, call: flight.Call{Stale: 11 * s}, want: flight.Refresh, how: entry.Stale},
	} {
		t.Run(name, func(t *testing.T) {
			move, how := flight.Decide(tc.entry, tc.now, tc.call, tc.underWay)
			require.Equal(t, tc.want, move)
			require.Equal(t, tc.how, how)
		})
	}
}

func TestWhatBecomesOfAResult(t *testing.T) {
	for name, tc := range map[string]struct {
		landing flight.Landing
		want    flight.Verdict
	}{
		"a value":                      {flight.Landing{Memory: true, Joinable: true, Keep: true}, flight.Replace},
		"nothing to keep":              {flight.Landing{Memory: true, Joinable: true}, flight.Remove},
		"overtaken":                    {flight.Landing{Memory: true, Keep: true}, flight.Overtaken},
		"overtaken in the Store":       {flight.Landing{Memory: true, Joinable: true, Invalidated: true, Keep: true}, flight.Overtaken},
		"it did not want to be kept":   {flight.Landing{Memory: true, Passing: true, Keep: true}, flight.Leave},
		"no memory":                    {flight.Landing{Keep: true}, flight.Leave},
		"no memory, overtaken":         {flight.Landing{Keep: true, Invalidated: true}, flight.Overtaken},
		"failed":                       {flight.Landing{Outcome: flight.Failed, Memory: true, Joinable: true}, flight.Postpone},
		"failed, overtaken":            {flight.Landing{Outcome: flight.Failed, Memory: true}, flight.Postpone},
		"an answer that is not kept":   {flight.Landing{Outcome: flight.Answered, Memory: true, Joinable: true}, flight.Leave},
		"an answer that was overtaken": {flight.Landing{Outcome: flight.Answered, Memory: true}, flight.Leave},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, flight.Judge(tc.landing)) })
	}
}

// entries are those of a cache.
type entries map[int]*entry.Entry[string]

func (m entries) GetIfPresent(key int) (*entry.Entry[string], bool) {
	e, ok := m[key]
	return e, ok
}

func (m entries) Set(key int, e *entry.Entry[string]) (*entry.Entry[string], bool) {
	m[key] = e
	return e, true
}

func (m entries) Invalidate(key int) (e *entry.Entry[string], _ bool) {
	delete(m, key)
	return nil, true
}

// A Table needs no clock, no lock and no goroutine: the order of what happens is that of
// the calls.
func TestFlightOfAKey(t *testing.T) {
	m := flight.Memory[int, string]{Entries: entries{}}
	m.Remembers.Store(true)
	table := flight.NewTable(&m)
	launch := func() *flight.Flight[int, string] {
		f := new(flight.Flight[int, string])
		table.Launch(f, 1, "1", nil)
		return f
	}
	value := func(v string) flight.Result[string] {
		return flight.Result[string]{Source: flight.Loaded, Answer: flight.Answer[string]{
			Entry: &entry.Entry[string]{Value: v, Fresh: 10 * s, Stale: 10 * s, Keep: 10 * s},
		}}
	}

	// A load that an invalidation overtakes answers its callers and is not kept.
	first := launch()
	require.Equal(t, first, table.Plan(1, 0, flight.Call{}).Flight)
	table.Forget(1)
	second := launch()
	verdict, _ := table.Land(first, value("old"), 0)
	require.Equal(t, flight.Overtaken, verdict)
	require.Equal(t, "old", first.Answer().Entry.Value)
	require.Nil(t, m.Peek(1))
	verdict, late := table.Land(second, value("new"), 0)
	require.Equal(t, flight.Replace, verdict)
	require.False(t, late)
	require.Equal(t, "new", m.Peek(1).Value)

	// The last caller that leaves ends the load, whose result comes late.
	table.Forget(1)
	third := launch()
	table.Join(third)
	last, _ := table.Leave(third)
	require.False(t, last)
	last, canceled := table.Leave(third)
	require.True(t, last)
	require.True(t, canceled)
	require.ErrorIs(t, third.Answer().Err, context.Canceled)
	_, late = table.Land(third, value("late"), 0)
	require.True(t, late)
	require.Nil(t, m.Peek(1))

	// One load that keeps nothing runs at a time; callers join the next.
	fourth, fifth := launch(), new(flight.Flight[int, string])
	follow, wait := table.Turn(fourth)
	require.Nil(t, follow)
	require.Nil(t, wait)
	table.Launch(fifth, 1, "1", nil)
	follow, wait = table.Turn(fifth)
	require.Nil(t, follow)
	require.Equal(t, fourth, wait)
	require.Equal(t, fifth, table.Plan(1, 0, flight.Call{}).Flight)
	verdict, _ = table.Land(fourth, value("passing"), 0)
	require.Equal(t, flight.Leave, verdict)
	require.Nil(t, m.Peek(1))

	// A failure, a Close.
	overdue, counts := table.Overdue(fifth, 0, errors.New("overdue"))
	require.True(t, overdue && counts)
	table.Land(fifth, flight.Result[string]{Outcome: flight.Failed}, 0)
	require.Zero(t, table.Len())
}
