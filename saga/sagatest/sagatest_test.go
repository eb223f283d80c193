package sagatest_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/gob"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sagatest"
)

// A hotel is a participant. Each of its guarantees can be disabled.
type hotel struct {
	mu       sync.Mutex      // guards seen and rooms, since steps run in parallel
	seen     map[string]bool // command ids
	rooms    map[string]bool // booked, by saga and step
	once     bool            // it applies a command once
	barrier  bool            // it declines a Do that arrives after its Undo
	tolerant bool            // it accepts an Undo without a Do
}

type state struct{ Booked []string }

func (h *hotel) command(ctx context.Context, s *state) error {
	id := saga.CommandFrom(ctx).ID
	base, op := id[:strings.LastIndex(id, "/")], id[strings.LastIndex(id, "/")+1:]
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.seen[id] && h.once {
		return nil
	}
	if op == "do" && h.seen[base+"/undo"] && h.barrier {
		return errors.New("undone already")
	}
	h.seen[id] = true
	if op == "do" {
		if h.rooms[base] {
			return errors.New("no room left")
		}
		h.rooms[base] = true
		s.Booked = append(s.Booked, base)
		return nil
	}
	if !h.rooms[base] && !h.tolerant {
		return errors.New("no such booking")
	}
	h.rooms[base] = false
	return nil
}

func (h *hotel) saga() *saga.Saga[state] {
	step := func(name string) saga.Step[state] {
		return saga.Step[state]{Name: name, Do: h.command, Undo: h.command}
	}
	room := step("room")
	suite := step("suite")
	suite.Parallel = true
	last := step("confirm")
	last.Pivot, last.Undo = true, nil
	mail := step("mail")
	mail.Undo = nil
	tx := saga.Step[state]{
		Name:   "log",
		DoTx:   func(context.Context, *sql.Tx, *state) error { panic("not called") },
		UndoTx: func(context.Context, *sql.Tx, *state) error { panic("not called") },
	}
	return &saga.Saga[state]{Name: "stay", Steps: []saga.Step[state]{tx, step("key"), room, suite, last, mail}}
}

func newHotel() *hotel {
	return &hotel{seen: make(map[string]bool), rooms: make(map[string]bool), once: true, barrier: true, tolerant: true}
}

// A recorder is a testing.TB that records the errors.
type recorder struct {
	testing.TB
	mu   sync.Mutex
	errs []string
}

func (r *recorder) Helper() {}
func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.errs = append(r.errs, fmt.Sprintf(format, args...))
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit()
}

func TestCheckPassesGoodSteps(t *testing.T) {
	h := newHotel()
	runs := 0
	sagatest.Check(t, h.saga(), func() *state { return &state{} }, func(t testing.TB, c sagatest.Case[state]) {
		runs++
		var in []string
		for base, booked := range h.rooms {
			if booked {
				in = append(in, base[strings.LastIndex(base, "/")+1:])
			}
		}
		want := slices.DeleteFunc(slices.Clone(c.InEffect), func(s string) bool { return s == "log" })
		require.ElementsMatch(t, want, in, c.Scenario)
		clear(h.rooms)
		clear(h.seen)
	})
	require.Equal(t, 1+4*3+3, runs)
}

func TestCheckFindsBadSteps(t *testing.T) {
	for _, c := range []struct {
		want  string
		wrong func(*hotel)
	}{
		{"nothing goes wrong: Do of key again: no room left", func(h *hotel) { h.once = false }},
		{"key is undone and was never done: Undo of key: no such booking", func(h *hotel) { h.tolerant = false }},
		{"key is undone and was never done: the Do of key that comes after its Undo must be declined",
			func(h *hotel) { h.barrier = false }},
	} {
		h := newHotel()
		c.wrong(h)
		r := &recorder{TB: t}
		sagatest.Check(r, h.saga(), func() *state { return &state{} })
		require.Contains(t, r.errs, c.want)
	}
}

// TestCheckRunsStepsOfEveryKind checks a read-only step, a DoTx, and a step after the pivot.
func TestCheckRunsStepsOfEveryKind(t *testing.T) {
	h := newHotel()
	step := func(name string) saga.Step[state] {
		return saga.Step[state]{Name: name, Do: h.command, Undo: h.command}
	}
	quote := saga.Step[state]{Name: "quote", ReadOnly: true, Do: func(context.Context, *state) error { return nil }}
	receipt := step("receipt")
	room := step("room")
	voucher := saga.Step[state]{
		Name: "voucher",
		DoTx: func(context.Context, *sql.Tx, *state) error { panic("not called") },
		Undo: h.command,
	}
	pay := saga.Step[state]{Name: "pay", Do: h.command, Pivot: true}
	sg := &saga.Saga[state]{Name: "stay", Steps: []saga.Step[state]{quote, room, voucher, pay, receipt}}
	var runs []sagatest.Case[state]
	sagatest.Check(t, sg, func() *state { return &state{} }, func(_ testing.TB, c sagatest.Case[state]) {
		runs = append(runs, c)
	})
	require.Len(t, runs, 1+4+3, "four failures of room and three of the pivot")
	require.Equal(t, []string{"room", "voucher", "pay", "receipt"}, runs[0].InEffect)
	require.Empty(t, runs[1].InEffect)
}

// If one of two parallel steps fails, the ctx of the other one ends.
func TestCheckAllowsCanceledParallelStep(t *testing.T) {
	wait := func(ctx context.Context, _ *state) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
			return nil
		}
	}
	none := func(context.Context, *state) error { return nil }
	sg := &saga.Saga[state]{Name: "stay", Steps: []saga.Step[state]{
		{Name: "room", Do: none, Undo: none}, {Name: "flight", Do: wait, Undo: none, Parallel: true},
	}}
	r := &recorder{TB: t}
	sagatest.Check(r, sg, func() *state { return &state{} })
	require.NotContains(t, strings.Join(r.errs, "\n"), "canceled")
}

// The charge is called again after its reply was lost, and takes the answer "duplicate" for a failure.
func TestCheckRepeatsPivot(t *testing.T) {
	charge := func(ctx context.Context, _ *state) error {
		if saga.CommandFrom(ctx).Attempt > 1 {
			return errors.New("duplicate")
		}
		return nil
	}
	sg := &saga.Saga[state]{Name: "stay", Steps: []saga.Step[state]{{Name: "charge", Do: charge, Pivot: true}}}
	r := &recorder{TB: t}
	sagatest.Check(r, sg, func() *state { return &state{} })
	require.Contains(t, r.errs, "the reply of charge is lost: Do of charge: duplicate")
}

func TestCheckEndsIfStepIsAlwaysRefused(t *testing.T) {
	sg := newHotel().saga()
	sg.Steps[1].Do = func(context.Context, *state) error { return refusedForGood{} }
	r := &recorder{TB: t}
	sagatest.Check(r, sg, func() *state { return &state{} })
	require.Contains(t, r.errs, "nothing goes wrong: Do of key: refused")
}

type refusedForGood struct{}

func (refusedForGood) Error() string { return "refused" }
func (refusedForGood) Refused() bool { return true }

func TestCheckFindsLossyState(t *testing.T) {
	nothing := func(context.Context, *odd) error { return nil }
	sg := &saga.Saga[odd]{Name: "odd", Steps: []saga.Step[odd]{{Name: "a", Do: nothing, Undo: nothing}}}
	r := &recorder{TB: t}
	sagatest.Check(r, sg, func() *odd { return &odd{F: func() {}} })
	require.Contains(t, r.errs[0], "nothing goes wrong: the state does not survive its Codec")
	sg.Codec = forgetful{}
	r.errs = nil
	sagatest.Check(r, sg, func() *odd { return &odd{F: func() {}} })
	require.Contains(t, r.errs[0], `does not come back from its Codec as it was: <nil>, "full" and then "empty"`)
}

// anyOrder is a Codec that encodes a map in random order.
type anyOrder struct{}

func (anyOrder) Encode(s *map[int]int) ([]byte, error) {
	var b bytes.Buffer
	err := gob.NewEncoder(&b).Encode(s)
	return b.Bytes(), err
}

func (anyOrder) Decode(data []byte, s *map[int]int) error {
	return gob.NewDecoder(bytes.NewReader(data)).Decode(s)
}

func TestCheckAcceptsUnorderedCodec(t *testing.T) {
	nothing := func(context.Context, *map[int]int) error { return nil }
	sg := &saga.Saga[map[int]int]{Name: "map", Codec: anyOrder{},
		Steps: []saga.Step[map[int]int]{{Name: "a", ReadOnly: true, Do: nothing}}}
	sagatest.Check(t, sg, func() *map[int]int {
		s := make(map[int]int)
		for i := range 100 {
			s[i] = i
		}
		return &s
	})
}

func TestCheckRejectsInvalidDefinition(t *testing.T) {
	r := &recorder{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		sagatest.Check(r, &saga.Saga[odd]{}, func() *odd { return nil })
	}()
	<-done
	require.Len(t, r.errs, 1)
	require.Contains(t, r.errs[0], "saga.Saga.Steps is empty")
}

type odd struct{ F func() }

// A forgetful Codec loses the state.
type forgetful struct{}

func (forgetful) Encode(s *odd) ([]byte, error) {
	if s.F == nil {
		return []byte("empty"), nil
	}
	return []byte("full"), nil
}

func (forgetful) Decode([]byte, *odd) error { return nil }

// TestCheckSkipsWaits: Check needs no runner for a Delay, an Await or children.
func TestCheckSkipsWaits(t *testing.T) {
	h := newHotel()
	child := h.saga()
	sg := h.saga()
	sg.Steps[0].Delay, sg.Steps[0].Await = time.Hour, "paid"
	sg.Steps = append(sg.Steps, saga.Step[state]{Name: "approval", Await: "approved"},
		saga.Step[state]{Name: "below", Child: saga.ChildOf(child, func(*state) (state, error) { return state{}, nil }, nil)})
	sagatest.Check(t, sg, func() *state { return &state{} }, func(t testing.TB, c sagatest.Case[state]) {
		require.NotContains(t, c.InEffect, "approval")
		require.NotContains(t, c.InEffect, "below")
	})
}
