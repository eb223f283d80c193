package throttle

import (
	"context"
	_ "embed"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"
)

//go:embed shared.lua
var script string

// An answer is the result of the script.
type answer struct {
	taken      int
	wait, debt time.Duration
}

// eval runs the script, which takes the first of amounts that is there. It returns an
// error for a result that the script cannot have returned.
func (t *sharedTerms) eval(ctx context.Context, c sharedCall, amounts []int) (a answer, err error) {
	most, room := t.room[0], t.room[c.level]
	args := append(make([]any, 0, 7), most.whole, most.part, room.whole, room.part)
	for _, n := range amounts {
		cost := t.token.times(n)
		args = append(args, n, cost.whole, cost.part)
	}
	value, err := t.cfg.Eval(ctx, script, []string{c.full}, args...)
	if err != nil {
		return answer{}, err
	}
	fields, ok := value.([]any)
	if !ok || len(fields) != 3 {
		return answer{}, fmt.Errorf("throttle: %s: the script's answer is %T %v: must be three integers", t.cfg.Name, value, value)
	}
	var n [3]int64
	for i, field := range fields {
		if n[i], ok = integer(field); !ok || n[i] < 0 || n[i] > math.MaxInt64/1000 {
			return answer{}, fmt.Errorf("throttle: %s: the script's answer has %T %v: must be an integer of 0 or more", t.cfg.Name, field, field)
		}
	}
	if n[0] != 0 && !slices.Contains(amounts, int(n[0])) {
		return answer{}, fmt.Errorf("throttle: %s: the script's answer is %d tokens: must be 0 or one of %v", t.cfg.Name, n[0], amounts)
	}
	return answer{int(n[0]), time.Duration(n[1]) * time.Microsecond, time.Duration(n[2]) * time.Microsecond}, nil
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
