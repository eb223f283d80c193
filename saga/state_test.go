package saga_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/gob"
	"encoding/json"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

type stay struct {
	Rooms map[string]int
	Until time.Time // a struct with unexported fields
	Guest struct{ Name, Phone string }
	bill  // embedded: JSON keeps its fields
}

type bill struct{ Food, Bar int }

// TestParallelStepsMergeState: the first step is done when the second one, which started in parallel, returns its
// own changes.
func TestParallelStepsMergeState(t *testing.T) {
	at := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	type write = func(*stay)
	sets := func(k string, n int) write { return func(s *stay) { s.Rooms[k] = n } }
	deletes := func(k string) write { return func(s *stay) { delete(s.Rooms, k) } }
	drops := func(s *stay) { s.Rooms = nil }
	till := func(at time.Time) write { return func(s *stay) { s.Until = at } }
	for name, c := range map[string]struct {
		first, second write
		want          write  // the expected change from the initial state
		conflict      string // or the expected conflict
	}{
		"entries of one map": {sets("a", 1), sets("b", 2),
			func(s *stay) { s.Rooms["a"], s.Rooms["b"] = 1, 2 }, ""},
		"an entry, and none": {sets("old", 1), func(*stay) {}, sets("old", 1), ""},
		"an entry, and another that is new": {sets("old", 1), sets("b", 2),
			func(s *stay) { s.Rooms["old"], s.Rooms["b"] = 1, 2 }, ""},
		"one entry, alike":                    {sets("a", 1), sets("a", 1), sets("a", 1), ""},
		"one entry":                           {sets("a", 1), sets("a", 2), nil, "Rooms[a]"},
		"one entry that was there":            {sets("old", 1), sets("old", 2), nil, "Rooms[old]"},
		"an entry that the other has removed": {deletes("old"), sets("old", 2), nil, "Rooms[old]"},
		"an entry is removed": {sets("a", 1), deletes("old"),
			func(s *stay) { s.Rooms = map[string]int{"a": 1} }, ""},
		"an entry is removed by both": {deletes("old"), deletes("old"), func(s *stay) { s.Rooms = map[string]int{} },
			""},
		"the map is dropped":                        {func(*stay) {}, drops, drops, ""},
		"the map is dropped by both":                {drops, drops, drops, ""},
		"the map is dropped while an entry changes": {sets("a", 1), drops, nil, "Rooms"},
		"an entry of a map that was dropped":        {drops, sets("a", 1), nil, "Rooms"},
		"a time":                                    {func(*stay) {}, till(at), till(at), ""},
		"a time, alike":                             {till(at), till(at), till(at), ""},
		"a time, each its own":                      {till(at), till(at.Add(1)), nil, "Until"},
		"fields of one struct": {func(s *stay) { s.Guest.Name = "A" }, func(s *stay) { s.Guest.Phone = "1" },
			func(s *stay) { s.Guest.Name, s.Guest.Phone = "A", "1" }, ""},
		"one field of a struct": {func(s *stay) { s.Guest.Name = "A" }, func(s *stay) { s.Guest.Name = "B" },
			nil, "Guest.Name"},
		"fields of an embedded struct": {func(s *stay) { s.Food = 1 }, func(s *stay) { s.Bar = 2 },
			func(s *stay) { s.Food, s.Bar = 1, 2 }, ""},
		"one field of an embedded struct": {func(s *stay) { s.Food = 1 }, func(s *stay) { s.Food = 2 }, nil, "bill.Food"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				one := func(name string, takes time.Duration, do write) saga.Step[stay] {
					return saga.Step[stay]{
						Name: name, Parallel: name != "first", Attempts: 1, Undo: func(context.Context, *stay) error { return nil },
						Do: func(_ context.Context, s *stay) error { time.Sleep(takes); do(s); return nil },
					}
				}
				sg := &saga.Saga[stay]{Name: "stay",
					Steps: []saga.Step[stay]{one("first", time.Second, c.first), one("second", 2*time.Second, c.second)}}
				r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, sg)
				begun := func() stay { return stay{Rooms: map[string]int{"old": 7}} }
				_, err := saga.Register(r, sg).Start(t.Context(), "stay-1", begun())
				require.NoError(t, err)
				got, err := saga.Register(r, sg).Result(t.Context(), "stay-1")
				if c.conflict != "" {
					require.EqualError(t, detail(t, err).Err, "saga: two steps that run in parallel have both changed s."+c.conflict)
					return
				}
				require.NoError(t, err)
				want := begun()
				c.want(&want)
				require.Equal(t, want, got)
			})
		})
	}
}

// TestParallelStepsMergeLossyValues: encoding changes these values. The last step starts after the first one, and
// the step in parallel ends while it runs. No other step has changed the value that it changes.
func TestParallelStepsMergeLossyValues(t *testing.T) {
	type odd struct {
		At     time.Time
		Any    any
		Few    []int `json:",omitempty"`
		Named  map[string]any
		Beside int
	}
	type write = func(*odd)
	for name, c := range map[string]struct{ first, beside, last write }{
		"the time":           {first: func(s *odd) { s.At = time.Now() }, last: func(s *odd) { s.At = time.Now() }},
		"a number as any":    {first: func(s *odd) { s.Any = 1 }, last: func(s *odd) { s.Any = 2 }},
		"a list without any": {first: func(s *odd) { s.Few = []int{} }, last: func(s *odd) { s.Few = append(s.Few, 1) }},
		"a map of any":       {first: func(s *odd) { s.Named["a"] = 1 }, last: func(s *odd) { s.Named["a"] = 2 }},
		"a number, alike":    {first: func(*odd) {}, beside: func(s *odd) { s.Any = 1 }, last: func(s *odd) { s.Any = 1 }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				one := func(name string, takes time.Duration, do write) saga.Step[odd] {
					return saga.Step[odd]{
						Name: name, Parallel: name == "beside", Attempts: 1, Undo: func(context.Context, *odd) error { return nil },
						Do: func(_ context.Context, s *odd) error { time.Sleep(takes); do(s); return nil },
					}
				}
				sg := &saga.Saga[odd]{Name: "odd", Steps: []saga.Step[odd]{
					one("first", time.Second, c.first),
					one("beside", 1500*time.Millisecond, func(s *odd) {
						s.Beside = 1
						if c.beside != nil {
							c.beside(s)
						}
					}),
					one("last", time.Second, c.last),
				}}
				r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, sg)
				_, err := saga.Register(r, sg).Start(t.Context(), "odd-1", odd{Named: map[string]any{}})
				require.NoError(t, err)
				s, err := saga.Register(r, sg).Result(t.Context(), "odd-1")
				require.NoError(t, err)
				require.Equal(t, 1, s.Beside)
			})
		})
	}
}

type (
	mark   int
	marked struct {
		mark // no struct: its Codec stores it
		A    int
	}
	sealed struct{ b int }
	deep   struct {
		sealed // its exported fields are not merged either
		A      int
	}
	within struct {
		part struct{ B int } // not embedded
		A    int
	}
)

func TestParallelStepsChangeCodecState(t *testing.T) {
	_, _, _ = marked{}.mark, deep{}.b, within{}.part
	writeBeside(t, func(s *marked) { s.A = 1 })
	writeBeside(t, func(s *deep) { s.A = 1 })
	writeBeside(t, func(s *within) { s.A = 1 })
}

func writeBeside[S any](t *testing.T, write func(*S)) {
	synctest.Test(t, func(t *testing.T) {
		one := func(name string) saga.Step[S] {
			return saga.Step[S]{Name: name, Parallel: name != "first", ReadOnly: true,
				Do: func(_ context.Context, s *S) error { write(s); return nil }}
		}
		sg := &saga.Saga[S]{Name: "beside", Codec: anyCodec[S]{}, Steps: []saga.Step[S]{one("first"), one("second")}}
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		_, err := saga.Register(r, sg).Start(t.Context(), "beside-1", *new(S))
		require.NoError(t, err)
		_, err = saga.Register(r, sg).Result(t.Context(), "beside-1")
		require.NoError(t, err)
	})
}

// TestStepsChangeBytesSharedWithCodec: the Codec shares its bytes with the state. Changes that a step makes to them
// are stored, except those of a DoTx that fails.
func TestStepsChangeBytesSharedWithCodec(t *testing.T) {
	change := func(_ context.Context, s *[]byte) error { (*s)[0] = 'm'; return nil }
	first := saga.Step[[]byte]{Name: "first", ReadOnly: true, Do: change}
	beside := saga.Step[[]byte]{Name: "beside", ReadOnly: true, Parallel: true,
		Do: func(context.Context, *[]byte) error { return nil }}
	fails := saga.Step[[]byte]{Name: "fails", ReadOnly: true, DoTx: func(ctx context.Context, _ *sql.Tx, s *[]byte) error {
		if saga.CommandFrom(ctx).Attempt == 1 {
			(*s)[1] = 'x'
			return errDeclined
		}
		return nil
	}}
	for name, list := range map[string][]saga.Step[[]byte]{
		"one after the other":      {first},
		"in parallel with another": {first, beside},
		"a DoTx that fails":        {first, fails},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				memory := newTxMemory(t)
				sg := &saga.Saga[[]byte]{Name: "bytes", Codec: aliasing{}, Steps: list}
				r, _ := begin[[]byte](t, memory, saga.RunnerConfig{}, sg)
				_, err := saga.Register(r, sg).Start(t.Context(), "bytes-1", []byte("paid"))
				require.NoError(t, err)
				_, err = saga.Register(r, sg).Result(t.Context(), "bytes-1")
				require.NoError(t, err)
				rec, err := memory.Load(t.Context(), "bytes-1")
				require.NoError(t, err)
				require.Equal(t, "maid", string(rec.State))
			})
		})
	}
}

// TestStartRejectsLossyState: such a state would make the saga stuck at its next claim, or change its meaning.
func TestStartRejectsLossyState(t *testing.T) {
	_, err := startWith(t, nil, map[string]any{"amount": int64(1<<53 + 1)})
	require.ErrorContains(t, err, "saga: trip: state does not come back as it was: ")
	_, err = startWith(t, nil, map[string]any{"amount": int64(1 << 53)})
	require.NoError(t, err)
	_, err = startWith(t, nil, oneWay{1})
	require.ErrorContains(t, err, "saga: trip: state does not decode: ")
	_, err = startWith[oneWay](t, anyCodec[oneWay]{}, oneWay{1})
	require.NoError(t, err, "a Codec writes as it likes")
	_, err = startWith(t, nil, restless{1})
	require.NoError(t, err, "and so does a type, if it reads what it was")
	_, err = startWith(t, nil, once{1})
	require.ErrorContains(t, err, "saga: trip: state does not encode: ")
}

func startWith[S any](t *testing.T, codec saga.Codec[S], s S) (*saga.Instance, error) {
	sg := &saga.Saga[S]{Name: "trip", Codec: codec, Steps: []saga.Step[S]{
		{Name: "a", ReadOnly: true, Do: func(context.Context, *S) error { return nil }},
	}}
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	sagas := saga.Register(r, sg)
	return sagas.Start(t.Context(), "trip-1", s)
}

// A oneWay encodes itself in a form that it cannot decode.
type oneWay struct{ n int }

func (o oneWay) MarshalJSON() ([]byte, error) { return []byte(`"one"`), nil }

// A gobCodec stores values that JSON cannot encode.
type gobCodec[S any] struct{}

func (gobCodec[S]) Encode(s *S) ([]byte, error) {
	var b bytes.Buffer
	err := gob.NewEncoder(&b).Encode(s)
	return b.Bytes(), err
}

func (gobCodec[S]) Decode(data []byte, s *S) error {
	return gob.NewDecoder(bytes.NewReader(data)).Decode(s)
}

// TestStateUnequalToItself does not conflict with a step that has changed nothing.
func TestStateUnequalToItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nothing := func(context.Context, *float64) error { return nil }
		sg := &saga.Saga[float64]{Name: "sum", Codec: gobCodec[float64]{}, Steps: []saga.Step[float64]{
			{Name: "one", Do: nothing, ReadOnly: true}, {Name: "two", Do: nothing, ReadOnly: true, Parallel: true},
		}}
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		_, err := saga.Register(r, sg).Start(t.Context(), "sum-1", math.NaN())
		require.NoError(t, err)
		_, err = saga.Register(r, sg).Result(t.Context(), "sum-1")
		require.NoError(t, err)
	})
}

// A restless value encodes itself differently each time.
type restless struct{ N int }

func (r restless) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]any{"N": r.N, "at": rand.Text()})
}

// A once value encodes itself correctly only if it was not decoded.
type once struct{ n int }

func (o once) MarshalJSON() ([]byte, error) {
	if o.n == 0 {
		return nil, errDown
	}
	return []byte("{}"), nil
}
