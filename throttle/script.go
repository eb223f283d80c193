package throttle

import (
	"context"
	_ "embed"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

//go:embed shared.lua
var script string

// An answer is the result of the script.
type answer struct {
	taken      int
	wait, debt time.Duration
	windows    []sharedWindow // of the quotas
}

type sharedWindow struct {
	used         int64
	left, length time.Duration
}

// eval runs the script for a call, and has it add a debt. It returns an error for a result
// that the script cannot have returned.
//
// The script compares its clock with the periods of a calendar around the present one. If
// the clock of this instance is off by more than a period, it answers with its own time,
// and eval runs it once more.
func (s *Shared) eval(ctx context.Context, t *sharedTerms, c sharedCall, d debt) (answer, error) {
	for first := true; ; first = false {
		value, err := t.cfg.Eval(ctx, script, []string{c.full}, t.args(c, d, time.Now().UnixNano()+s.ahead.Load())...)
		if err != nil {
			return answer{}, err
		}
		n, err := t.integers(value)
		if err != nil {
			return answer{}, err
		}
		if len(n) == 2 && first {
			s.ahead.Store(n[1]*1000 - time.Now().UnixNano())
			continue
		}
		return t.read(n, c.n)
	}
}

// args returns the arguments of the script. now is in nanoseconds of Unix time.
func (t *sharedTerms) args(c sharedCall, d debt, now int64) []any {
	most, room, cost := t.room[0], t.room[c.level], t.token.times(c.n)
	args := append(make([]any, 0, 13+3*len(t.quotas)), most.whole, most.part, room.whole, room.part, c.do, len(t.quotas))
	for i := range t.quotas {
		q := &t.quotas[i]
		args = append(args, strings.NewReplacer(" ", "_", "|", "_").Replace(q.window()), q.room[c.level], q.times(now))
	}
	args = append(args, c.n, cost.whole, cost.part)
	if owed := d.tokens - c.refund; owed != 0 {
		more, less := t.owed(d), t.token.times(c.refund)
		args = append(args, owed, int64(more.whole)-int64(less.whole), int64(more.part)-int64(less.part))
	}
	return args
}

// owed returns the time of a debt's tokens, less what this instance's part of the rate has
// refilled since.
func (t *sharedTerms) owed(d debt) micros {
	m := t.token.times(d.tokens)
	refilled := uint64(max(0, time.Since(d.since).Microseconds())) / uint64(t.cfg.Instances)
	if m.whole < refilled {
		return micros{}
	}
	return micros{m.whole - refilled, m.part}
}

// times returns the length of the windows in microseconds or, of a calendar, the times
// at which the last period, this one and the next begin, and at which that ends.
func (q *quotaTerms) times(now int64) string {
	if q.calendar == nil {
		return strconv.FormatInt(q.Every.Microseconds(), 10)
	}
	this := q.calendar.at(now)
	last, next := q.calendar.find(time.Unix(0, this.begin-1)), q.calendar.find(time.Unix(0, this.end))
	return fmt.Sprintf("%d %d %d %d", last.begin/1000, this.begin/1000, this.end/1000, next.end/1000)
}

// integers returns the integers of an answer: 3 and 3 for each quota, or 2 that say what
// time it is.
func (t *sharedTerms) integers(value any) ([]int64, error) {
	fields, _ := value.([]any)
	first := int64(0)
	if len(fields) > 0 {
		first, _ = integer(fields[0])
	}
	if elsewhere := len(fields) == 2 && first == -1 && len(t.quotas) > 0; !elsewhere && len(fields) != 3+3*len(t.quotas) {
		return nil, fmt.Errorf("throttle: %s: the script's answer is %T %v: must be %d integers", t.cfg.Name, value, value, 3+3*len(t.quotas))
	}
	n := make([]int64, len(fields))
	for i, field := range fields {
		var ok bool
		if n[i], ok = integer(field); !ok || n[i] < 0 && !(len(n) == 2 && i == 0) || n[i] > math.MaxInt64/1000 {
			return nil, fmt.Errorf("throttle: %s: the script's answer has %T %v: must be an integer of 0 or more", t.cfg.Name, field, field)
		}
	}
	return n, nil
}

// read returns the answer that n are.
func (t *sharedTerms) read(n []int64, asked int) (answer, error) {
	if len(n) == 2 {
		return answer{}, fmt.Errorf("throttle: %s: the clock of Redis jumps", t.cfg.Name)
	}
	if n[0] != 0 && n[0] != int64(asked) {
		return answer{}, fmt.Errorf("throttle: %s: the script's answer is %d tokens: must be 0 or %d", t.cfg.Name, n[0], asked)
	}
	us := func(n int64) time.Duration { return time.Duration(n) * time.Microsecond }
	a := answer{taken: int(n[0]), wait: us(n[1]), debt: us(n[2])}
	for w := n[3:]; len(w) > 0; w = w[3:] {
		a.windows = append(a.windows, sharedWindow{w[0], us(w[1]), us(w[2])})
	}
	return a, nil
}

// integer returns an integer of Redis in any of the types that clients give it.
func integer(v any) (int64, bool) {
	switch v := v.(type) {
	case int64:
		return v, true
	case int:
		return int64(v), true
	case string:
		n, err := strconv.ParseInt(v, 10, 64)
		return n, err == nil
	case []byte:
		n, err := strconv.ParseInt(string(v), 10, 64)
		return n, err == nil
	}
	return 0, false
}
