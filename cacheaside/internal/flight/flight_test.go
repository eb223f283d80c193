package flight_test

import (
	"context"
	"errors"
	"math"
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
	deadPaused := whole
	deadPaused.Pause = 40 * s
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
		"dead, paused":                      {entry: &deadPaused, now: 30 * s, want: flight.Launch},
		"dead, paused, the call takes it":   {entry: &deadPaused, now: 30 * s, call: flight.Call{Stale: 21 * s}, want: flight.Serve, how: entry.Stale},
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
		"a value":                       {flight.Landing{Memory: true, Joinable: true, Keep: true}, flight.Replace},
		"nothing to keep":               {flight.Landing{Memory: true, Joinable: true}, flight.Remove},
		"overtaken":                     {flight.Landing{Memory: true, Keep: true}, flight.Overtaken},
		"overtaken in the Store":        {flight.Landing{Memory: true, Joinable: true, Invalidated: true, Keep: true}, flight.Overtaken},
		"not overtaken after all":       {flight.Landing{Memory: true, Joinable: true, Passing: true, Keep: true}, flight.Replace},
		"overtaken, and not to be kept": {flight.Landing{Memory: true, Joinable: true, Passing: true, Invalidated: true, Keep: true}, flight.Leave},
		"it did not want to be kept":    {flight.Landing{Memory: true, Passing: true, Keep: true}, flight.Leave},
		"no memory":                     {flight.Landing{Keep: true}, flight.Leave},
		"no memory, overtaken":          {flight.Landing{Keep: true, Invalidated: true}, flight.Overtaken},
		"failed":                        {flight.Landing{Outcome: flight.Failed, Memory: true, Joinable: true}, flight.Postpone},
		"failed, overtaken":             {flight.Landing{Outcome: flight.Failed, Memory: true}, flight.Postpone},
		"an answer that is not kept":    {flight.Landing{Outcome: flight.Answered, Memory: true, Joinable: true}, flight.Leave},
		"an answer that was overtaken":  {flight.Landing{Outcome: flight.Answered, Memory: true}, flight.Leave},
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

// A table is that of a cache with or without memory.
type table struct {
	flight.Table[int, string]
	memory *flight.Memory[int, string]
}

func newTable(remembers bool) *table {
	m := new(flight.Memory[int, string])
	if remembers {
		m.Entries = entries{}
	}
	m.Remembers.Store(remembers)
	return &table{flight.NewTable(m), m}
}

// launch launches a flight of key 1 that is to replace old, or nil.
func (t *table) launch(terms flight.Terms, old *entry.Entry[string]) *flight.Flight[int, string] {
	f := &flight.Flight[int, string]{Terms: terms}
	t.Launch(f, 1, "1", old)
	return f
}

// until10 is fresh before 10 s, stale before 20 s, and kept before 30 s.
func until10(v string) *entry.Entry[string] {
	return &entry.Entry[string]{Value: v, Fresh: 10 * s, Stale: 20 * s, Keep: 30 * s}
}

func loaded(e *entry.Entry[string]) flight.Result[string] {
	return flight.Result[string]{Source: flight.Loaded, Answer: flight.Answer[string]{Entry: e}}
}

func TestWhatIsNoLongerToBeKeptIsRemoved(t *testing.T) {
	table := newTable(true)
	table.Entries.Set(1, until10("old"))
	verdict, _ := table.Land(table.launch(flight.Terms{}, nil), loaded(until10("late")), 30*s)
	require.Equal(t, flight.Remove, verdict)
	require.Nil(t, table.Peek(1))
}

func TestAllThatBeganBeforeAVersionIsOvertaken(t *testing.T) {
	table := newTable(true)
	first := table.launch(flight.Terms{}, nil)
	table.memory.EndAll()
	require.Nil(t, table.Plan(1, 0, flight.Call{}).Flight)
	second := table.launch(flight.Terms{}, nil)
	closed := 0
	table.Close(context.Canceled, func(*flight.Flight[int, string], bool) { closed++ })
	require.Equal(t, 2, closed)
	third := table.launch(flight.Terms{}, nil)
	table.Offer(third, until10("of this version"), 0)
	require.NotNil(t, table.Peek(1))
	table.memory.EndAll()
	require.Nil(t, table.Peek(1))
	verdict, _ := table.Land(third, loaded(until10("old")), 0)
	require.Equal(t, flight.Overtaken, verdict)
	require.NotNil(t, table.Crowd(third), "two loads run on without callers")
	for _, f := range []*flight.Flight[int, string]{first, second} {
		table.Land(f, loaded(until10("late")), 0)
	}
	require.Zero(t, table.Len())
}

func TestALoadThatHasCallersIsNotOneThatRunsOnWithoutThem(t *testing.T) {
	table := newTable(true)
	for range 2 {
		table.Leave(table.launch(flight.Terms{}, nil))
	}
	f := table.launch(flight.Terms{}, nil)
	crowd := table.Crowd(f)
	table.Land(f, loaded(until10("")), 0)
	require.Equal(t, crowd, table.Crowd(f))
	select {
	case <-crowd:
		require.Fail(t, "neither of those that run on has ended")
	default:
	}
}

func TestAnOldValueOfTheStoreIsKeptIfNothingNewerIsThere(t *testing.T) {
	for name, tc := range map[string]struct {
		newer, forgets bool
		want           string
	}{
		"":                        {want: "old"},
		"newer":                   {newer: true, want: "new"},
		"the cache hears nothing": {forgets: true},
	} {
		t.Run(name, func(t *testing.T) {
			table := newTable(true)
			f := table.launch(flight.Terms{}, nil)
			table.memory.Remembers.Store(!tc.forgets)
			if tc.newer {
				table.Entries.Set(1, until10("new"))
			}
			table.Offer(f, until10("old"), 0)
			require.True(t, f.HasOld())
			if e := table.Peek(1); tc.want == "" {
				require.Nil(t, e)
			} else {
				require.Equal(t, tc.want, e.Value)
				require.Equal(t, e, table.Before(f, 0))
			}
		})
	}
}

// Without memory, only calls that began before the Store was asked get its old value.
func TestWhoIsOfferedAnOldValue(t *testing.T) {
	absent := until10("")
	absent.Absent = true
	for name, tc := range map[string]struct {
		memory        bool
		old           *entry.Entry[string] // asked for at 5 s
		at, now       time.Duration        // the call
		offers, waits bool                 // served at once, if the load fails
	}{
		"stale":                        {old: until10("old"), now: 10 * s, offers: true, waits: true},
		"kept":                         {old: until10("old"), now: 20 * s, waits: true},
		"dead":                         {old: until10("old"), now: 30 * s},
		"of a call of then":            {old: until10("old"), at: 5 * s, now: 10 * s, offers: true, waits: true},
		"of a later call":              {old: until10("old"), at: 6 * s, now: 10 * s},
		"of a later call, with memory": {memory: true, old: until10("old"), at: 6 * s, now: 10 * s, offers: true, waits: true},
		"of a call that takes none":    {memory: true, old: until10("old"), at: flight.NoOld, now: 10 * s},
	} {
		t.Run(name, func(t *testing.T) {
			table := newTable(tc.memory)
			table.memory.Remembers.Store(false)
			f := table.launch(flight.Terms{}, nil)
			table.Reserve(f, nil, 0)
			table.Reserve(f, absent, 0)
			require.False(t, f.HasOld())
			table.Reserve(f, until10("an earlier one"), 4*s)
			offered := f.Offered()
			require.Equal(t, offered, f.Offered())
			table.Reserve(f, tc.old, 5*s)
			select {
			case <-offered:
			default:
				t.Fatal("not offered")
			}
			want := func(served bool) *entry.Entry[string] {
				if served {
					return tc.old
				}
				return nil
			}
			require.Equal(t, want(tc.offers), table.Offers(f, tc.at, tc.now))
			require.Equal(t, want(tc.waits), table.Standby(f, tc.at, tc.now))
			table.Overdue(f, tc.now, context.DeadlineExceeded)
			require.Nil(t, table.Offers(f, tc.at, tc.now), "it has an answer")
		})
	}
	table := newTable(true)
	f := table.launch(flight.Terms{}, nil)
	table.Entries.Set(1, absent)
	require.Equal(t, absent, table.Before(f, 0))
	require.Nil(t, table.Standby(f, 0, 0), "that a key is not found is no value")
	table = newTable(false)
	f = table.launch(flight.Terms{}, nil)
	require.Nil(t, table.Offers(f, 0, 0))
	require.Nil(t, table.Standby(f, 0, 0))
	old := until10("launched with")
	require.Equal(t, old, table.Offers(table.launch(flight.Terms{}, old), 6*s, 0))
}

func TestWhatAFlightReplacesIsNoneAfterAnInvalidation(t *testing.T) {
	for _, invalidated := range []bool{false, true} {
		table := newTable(true)
		old := until10("old")
		f := table.launch(flight.Terms{}, old)
		require.Equal(t, old, table.Before(f, 0))
		table.Land(f, flight.Result[string]{Outcome: flight.Answered, Invalidated: invalidated}, 0)
		require.Equal(t, !invalidated, table.Before(f, 0) != nil)
	}
}

func TestACallThatSkipsMemoryJoinsAFlightOfTheStore(t *testing.T) {
	kept := newTable(true)
	overtaken := kept.launch(flight.Terms{}, nil)
	require.Nil(t, kept.Plan(1, 0, flight.Call{SkipMemory: true}).Flight)
	verdict, _ := kept.Land(overtaken, loaded(until10("old")), 0)
	require.Equal(t, flight.Overtaken, verdict)

	table := newTable(false)
	f := table.launch(flight.Terms{ErrorPause: s}, nil)
	require.Nil(t, table.Rest(f))
	require.Equal(t, 1, table.Len())
	require.Equal(t, f, table.Plan(1, 0, flight.Call{SkipMemory: true}).Flight)
	table.Rested(f)
	require.Equal(t, flight.Launch, table.Plan(1, 0, flight.Call{SkipMemory: true}).Move)

	// Only what rests itself ceases to, and nobody joins what has answered.
	g := table.launch(flight.Terms{}, until10("old"))
	require.Nil(t, table.Rest(g))
	table.Rested(f)
	require.Equal(t, g, table.Follow(f))
	last, _ := table.Leave(g)
	require.False(t, last, "f is one of its callers")
	require.False(t, f.HasOld())
	table.Reserve(f, until10("old"), 0)
	require.True(t, f.HasOld())
	table.Land(f, flight.Result[string]{Outcome: flight.Failed}, 0)
	require.False(t, table.Paused(1, 0), "it has not loaded itself")
	table.Rested(g)
	table.Overdue(g, 0, context.DeadlineExceeded)
	last, canceled := table.Leave(g)
	require.False(t, last || canceled, "it has answered")
	require.Nil(t, table.Rest(g))
	require.Nil(t, table.Plan(1, 0, flight.Call{}).Flight)
}

func TestALoadThatIsToFinishGoesOnIfItsResultWillBeKept(t *testing.T) {
	for name, tc := range map[string]struct {
		memory, turned, finishes bool
	}{
		"in memory":          {memory: true, finishes: true},
		"in the Store":       {finishes: true},
		"without a lease":    {turned: true},
		"not even in memory": {memory: true, turned: true},
	} {
		t.Run(name, func(t *testing.T) {
			table := newTable(tc.memory)
			f := table.launch(flight.Terms{Finish: true}, nil)
			if tc.turned {
				table.Turn(f)
			}
			last, _ := table.Leave(f)
			require.Equal(t, !tc.finishes, last)
		})
	}
}

// A key with NaN is never found again.
func TestNothingIsRememberedOfAKeyThatIsNotFound(t *testing.T) {
	old := &entry.Entry[string]{Fresh: s, Stale: s, Keep: s}
	table := flight.NewTable(new(flight.Memory[float64, string]))
	f := &flight.Flight[float64, string]{Terms: flight.Terms{Finish: true, ErrorPause: s}}
	table.Launch(f, math.NaN(), "NaN", old)
	table.Rest(f)
	require.Equal(t, 1, table.Len())
	table.Turn(f)
	last, _ := table.Leave(f)
	require.True(t, last)
	table.Land(f, flight.Result[string]{Outcome: flight.Failed}, 0)
	require.Zero(t, table.Len())
	f = &flight.Flight[float64, string]{Terms: flight.Terms{ErrorPause: s}}
	table.Launch(f, math.NaN(), "NaN", old)
	table.Land(f, flight.Result[string]{Outcome: flight.Failed}, 0)
	require.Zero(t, table.Len())
}

func TestAFailurePausesTheLoadsOfAnOldValue(t *testing.T) {
	table := newTable(false)
	fail := func(key int, now time.Duration) {
		f := &flight.Flight[int, string]{Terms: flight.Terms{ErrorPause: s}}
		table.Launch(f, key, "", until10("old"))
		table.Land(f, flight.Result[string]{Outcome: flight.Failed}, now)
	}
	fail(1, 29*s)
	require.True(t, table.Paused(1, 30*s-1))
	require.False(t, table.Paused(1, 30*s))
	table.Forget(1)
	require.False(t, table.Paused(1, 29*s))
	fail(1, 29*s)
	table.Land(table.launch(flight.Terms{}, nil), loaded(until10("new")), 29*s)
	require.False(t, table.Paused(1, 29*s))
	fail(1, 30*s)
	require.False(t, table.Paused(1, 30*s), "it may not be served any more")
	for key := range 100 {
		fail(key, 0)
	}
	fail(100, s-1)
	require.Equal(t, 101, table.Len())
	fail(101, 2*s)
	for key := range 101 {
		fail(key, 2*s)
	}
	require.Equal(t, 102, table.Len())
	for key := range 203 {
		fail(1000+key, 4*s)
	}
	require.Equal(t, 203, table.Len(), "those that have passed are removed")
}

func TestTurnsOfLoadsThatKeepNothing(t *testing.T) {
	table := newTable(true)
	first := table.launch(flight.Terms{}, nil)
	table.Turn(first)
	second := table.launch(flight.Terms{}, nil)
	_, wait := table.Turn(second)
	require.Equal(t, first, wait)
	require.Equal(t, 3, table.Len(), "each once, and the one that runs alone")
	table.Overdue(first, 0, context.DeadlineExceeded)
	_, wait = table.Turn(second)
	require.Nil(t, wait, "the first has answered")
	table.Land(first, flight.Result[string]{Outcome: flight.Failed}, 0)
	third := table.launch(flight.Terms{}, nil)
	_, wait = table.Turn(third)
	require.Equal(t, second, wait)
	table.Land(second, loaded(until10("passing")), 0)
	_, wait = table.Turn(third)
	require.Nil(t, wait)
}

func TestAJamIsOverOnceThereIsASlot(t *testing.T) {
	var f flight.Flight[int, string]
	first := f.Jammed()
	f.Queue(true)
	<-first
	f.Queue(false)
	select {
	case <-f.Jammed():
		require.Fail(t, "it does not wait for a slot any more")
	default:
	}
}
