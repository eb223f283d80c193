package throttle

import (
	"context"
	_ "embed"
	"fmt"
	"math"
	"slices"
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

// eval runs the script, which takes the first of amounts that is there. It returns an
// error for a result that the script cannot have returned.
//
// The script compares its clock with the periods of a calendar around the present one. If
// the clock of this instance is off by more than a period, it answers with its own time,
// and eval runs it once more.
func (s *Shared) eval(ctx context.Context, t *sharedTerms, c sharedCall, amounts []int) (answer, error) {
	for first := true; ; first = false {
		value, err := t.cfg.Eval(ctx, script, []string{c.full}, t.args(c, amounts, time.Now().UnixNano()+s.ahead.Load())...)
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
		return t.read(n, amounts)
	}
}

// args returns the arguments of the script. now is in nanoseconds of Unix time.
func (t *sharedTerms) args(c sharedCall, amounts []int, now int64) []any {
	most, room := t.room[0], t.room[c.level]
	args := append(make([]any, 0, 12), most.whole, most.part, room.whole, room.part, c.do, len(t.quotas))
	for i := range t.quotas {
		q := &t.quotas[i]
		args = append(args, strings.NewReplacer(" ", "_", "|", "_").Replace(q.window()), q.room[c.level], q.times(now))
	}
	for _, n := range amounts {
		cost := t.token.times(n)
		args = append(args, n, cost.whole, cost.part)
	}
	return args
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
	fields, ok := value.([]any)
	first := int64(0)
	if len(fields) > 0 {
		first, _ = integer(fields[0])
	}
	if elsewhere := len(fields) == 2 && first == -1 && len(t.quotas) > 0; !ok || !elsewhere && len(fields) != 3+3*len(t.quotas) {
		return nil, fmt.Errorf("throttle: %s: the script's answer is %T %v: must be %d integers", t.cfg.Name, value, value, 3+3*len(t.quotas))
	}
	n := make([]int64, len(fields))
	for i, field := range fields {
		if n[i], ok = integer(field); !ok || n[i] < 0 && !(len(n) == 2 && i == 0) || n[i] > math.MaxInt64/1000 {
			return nil, fmt.Errorf("throttle: %s: the script's answer has %T %v: must be an integer of 0 or more", t.cfg.Name, field, field)
		}
	}
	return n, nil
}

// read returns the answer that n are.
func (t *sharedTerms) read(n []int64, amounts []int) (answer, error) {
	if len(n) == 2 {
		return answer{}, fmt.Errorf("throttle: %s: the clock of Redis jumps", t.cfg.Name)
	}
	if n[0] != 0 && !slices.Contains(amounts, int(n[0])) {
		return answer{}, fmt.Errorf("throttle: %s: the script's answer is %d tokens: must be 0 or one of %v", t.cfg.Name, n[0], amounts)
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
