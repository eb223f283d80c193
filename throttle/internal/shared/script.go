package shared

import (
	"context"
	_ "embed"
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/reply"
)

//go:embed shared.lua
var script string

// Terms are a limit in the units of the script.
type Terms struct {
	Name       string
	Timeout    time.Duration // how long a call waits for an answer
	RetryEvery time.Duration // how often one call tries Redis during an outage
	Instances  int
	Eval       func(ctx context.Context, script string, keys []string, args ...any) (any, error)

	Token  Micros
	Room   []Micros // by level
	Quotas []Quota
}

// A Quota is one of Terms.
type Quota struct {
	Window string
	Room   []int // by level
	Times  func(now int64) string
}

// Micros is a time in microseconds and 2^-32ths of one.
type Micros struct{ Whole, Part uint64 }

// longest is more than is ever owed: 73 000 years.
const longest = 1 << 61

// Times returns the time of n tokens that take m each, or longest if it is longer.
func (m Micros) Times(n int) Micros {
	over, whole := bits.Mul64(m.Whole, uint64(n))
	if over > 0 || whole > longest {
		return Micros{Whole: longest}
	}
	hi, lo := bits.Mul64(m.Part, uint64(n))
	return Micros{whole + hi<<32 + lo>>32, lo & math.MaxUint32}
}

// Up returns the time in microseconds, rounded up.
func (m Micros) Up() int64 {
	if m.Part > 0 {
		return int64(m.Whole) + 1
	}
	return int64(m.Whole)
}

// String returns the time in decimal, 0 only if it is.
func (m Micros) String() string {
	return strconv.FormatFloat(float64(m.Whole)+float64(m.Part)/(1<<32), 'g', -1, 64)
}

// A Call is one to be decided.
type Call struct {
	Key      string
	Full     string // the key in Redis
	N, Level int
	Refund   int
	Do       string // what the script is to do: take or reset
}

// An Answer is the result of the script.
type Answer struct {
	Taken      int
	Wait, Debt time.Duration
	Windows    []Window // of the quotas
}

// A Window is what has been spent of a quota.
type Window struct {
	Used         int64
	Left, Length time.Duration
}

// eval runs the script for a call, and has it add a debt. It returns an error for a result
// that the script cannot have returned.
//
// The script compares its clock with the periods of a calendar around the present one. If
// the clock of this instance is off by more than a period, it answers with its own time,
// and eval runs it once more.
func (r *Redis) eval(ctx context.Context, t *Terms, c Call, d debt) (Answer, error) {
	for first := true; ; first = false {
		value, err := t.Eval(ctx, script, []string{c.Full}, t.args(c, d, time.Now().UnixNano()+r.ahead.Load())...)
		if err != nil {
			return Answer{}, err
		}
		n, err := t.integers(value)
		if err != nil {
			return Answer{}, err
		}
		if len(n) == 2 && first {
			r.ahead.Store(n[1]*1000 - time.Now().UnixNano())
			continue
		}
		return t.read(n, c.N)
	}
}

// args returns the arguments of the script. now is in nanoseconds of Unix time.
func (t *Terms) args(c Call, d debt, now int64) []any {
	most, room, cost := t.Room[0], t.Room[c.Level], t.Token.Times(c.N)
	args := append(make([]any, 0, 13+3*len(t.Quotas)), most.Whole, most.Part, room.Whole, room.Part, c.Do, len(t.Quotas))
	for _, q := range t.Quotas {
		args = append(args, strings.NewReplacer(" ", "_", "|", "_").Replace(q.Window), q.Room[c.Level], q.Times(now))
	}
	more, less := t.owed(d), t.Token.Times(c.Refund)
	return append(args, c.N, cost.Whole, cost.Part,
		d.tokens-c.Refund, int64(more.Whole)-int64(less.Whole), int64(more.Part)-int64(less.Part), t.Token.String())
}

// owed returns the time of a debt's tokens, less what this instance's part of the rate has
// refilled since.
func (t *Terms) owed(d debt) Micros {
	m := t.Token.Times(d.tokens)
	refilled := uint64(max(0, time.Since(d.since).Microseconds())) / uint64(t.Instances)
	if m.Whole < refilled {
		return Micros{}
	}
	return Micros{m.Whole - refilled, m.Part}
}

// integers returns the integers of an answer: 3 and 3 for each quota, or 2 that say what
// time it is.
func (t *Terms) integers(value any) ([]int64, error) {
	fields, _ := value.([]any)
	first := int64(0)
	if len(fields) > 0 {
		first, _ = reply.Int(fields[0])
	}
	if elsewhere := len(fields) == 2 && first == -1 && len(t.Quotas) > 0; !elsewhere && len(fields) != 3+3*len(t.Quotas) {
		return nil, fmt.Errorf("throttle: %s: the script's answer is %T %v: must be %d integers", t.Name, value, value, 3+3*len(t.Quotas))
	}
	n := make([]int64, len(fields))
	for i, field := range fields {
		var ok bool
		if n[i], ok = reply.Int(field); !ok || n[i] < 0 && i > 0 || n[i] > math.MaxInt64/1000 {
			return nil, fmt.Errorf("throttle: %s: the script's answer has %T %v: must be an integer of 0 or more", t.Name, field, field)
		}
	}
	return n, nil
}

// read returns the answer that n are.
func (t *Terms) read(n []int64, asked int) (Answer, error) {
	if len(n) == 2 {
		return Answer{}, fmt.Errorf("throttle: %s: the clock of Redis jumps", t.Name)
	}
	if n[0] != 0 && n[0] != int64(asked) {
		return Answer{}, fmt.Errorf("throttle: %s: the script's answer is %d tokens: must be 0 or %d", t.Name, n[0], asked)
	}
	us := func(n int64) time.Duration { return time.Duration(n) * time.Microsecond }
	a := Answer{Taken: int(n[0]), Wait: us(n[1]), Debt: us(n[2])}
	for w := n[3:]; len(w) > 0; w = w[3:] {
		a.Windows = append(a.Windows, Window{w[0], us(w[1]), us(w[2])})
	}
	return a, nil
}
