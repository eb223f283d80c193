package throttle

import (
	"context"
	_ "embed"
	"fmt"
	"math"
	"strconv"
	"time"
)

//go:embed shared.lua
var script string

// An answer is what the script returned.
type answer struct {
	taken      int
	wait, debt time.Duration
}

// eval runs the script and makes sure that its answer is one.
func (s *Shared) eval(ctx context.Context, t *sharedTerms, c sharedCall, want int) (a answer, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	key := s.cfg.Prefix + s.cfg.Name
	if s.cfg.Key != nil {
		key += "/" + c.key
	}
	most, room := t.room[0], t.room[c.level]
	args := []any{most.whole, most.part, room.whole, room.part}
	for _, n := range []int{want, c.n} {
		cost := t.token.times(n)
		args = append(args, n, cost.whole, cost.part)
		if n == c.n {
			break
		}
	}
	s.asked.Add(1)
	value, err := s.cfg.Eval(ctx, script, []string{key}, args...)
	if err != nil {
		return answer{}, err
	}
	fields, ok := value.([]any)
	if !ok || len(fields) != 3 {
		return answer{}, fmt.Errorf("throttle: %s: the script's answer is %T %v: must be three integers", s.cfg.Name, value, value)
	}
	var n [3]int64
	for i, field := range fields {
		if n[i], ok = integer(field); !ok || n[i] < 0 || n[i] > math.MaxInt64/1000 {
			return answer{}, fmt.Errorf("throttle: %s: the script's answer has %T %v: must be an integer of 0 or more", s.cfg.Name, field, field)
		}
	}
	if n[0] != 0 && n[0] != int64(c.n) && n[0] != int64(want) {
		return answer{}, fmt.Errorf("throttle: %s: the script's answer is %d tokens: must be %d or %d", s.cfg.Name, n[0], c.n, want)
	}
	return answer{int(n[0]), time.Duration(n[1]) * time.Microsecond, time.Duration(n[2]) * time.Microsecond}, nil
}

// integer returns what clients make of an integer of Redis.
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
