package throttle_test

import (
	"context"
	"errors"
	"fmt"
	"math/big"
	"math/rand/v2"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/throttle"
)

// A model is what the script computes, in exact arithmetic: microseconds.
type model struct {
	tat     *big.Rat // nil: there is no key
	written int64    // when
	windows map[string]modelWindow
	stored  bool // whether the last answer was
}

// A modelWindow is what has been spent of a quota.
type modelWindow struct{ used, end int64 }

func fixed(whole, part any) *big.Rat {
	rat := func(v any) *big.Rat { r, _ := new(big.Rat).SetString(fmt.Sprint(v)); return r }
	return new(big.Rat).Add(rat(whole), new(big.Rat).Quo(rat(part), rat(uint64(1)<<32)))
}

func up(r *big.Rat) int64 {
	n := new(big.Int).Add(r.Num(), new(big.Int).Sub(r.Denom(), big.NewInt(1)))
	return n.Div(n, r.Denom()).Int64()
}

// period returns the bounds of the period around now that a calendar has, if times has
// them.
func period(now int64, times string) (begin, end int64, ok bool) {
	for text := range strings.FieldsSeq(times) {
		at, _ := strconv.ParseInt(text, 10, 64)
		if at > now {
			return begin, at, begin != 0
		}
		begin = at
	}
	return 0, 0, false
}

func (m *model) answer(now int64, args []any) []int64 {
	m.stored = false
	if args[4] == "reset" {
		m.tat, m.windows = nil, nil
	}
	quotas := args[6 : 6+3*args[5].(int)]
	tail := args[6+len(quotas):]
	n, cost := int64(tail[0].(int)), fixed(tail[1], tail[2])
	owed, owedTime := int64(tail[3].(int)), fixed(tail[4], tail[5])
	if owed == 0 { // what was admitted alone was given back
		owedTime.SetInt64(0)
	}
	held := m.tat != nil
	m.stored = held && owed != 0 || owed > 0

	var present []modelWindow // as they are now
	var lengths []int64
	fits := true
	for q := quotas; len(q) > 0; q = q[3:] {
		w := m.windows[q[0].(string)]
		if w.end <= now {
			w = modelWindow{}
		}
		length, err := strconv.ParseInt(q[2].(string), 10, 64)
		if err == nil && w.used > 0 && m.written > now { // the clock has been set back
			w.end -= m.written - now
		}
		if err != nil {
			begin, end, ok := period(now, q[2].(string))
			if !ok {
				m.stored = false
				return []int64{-1, now}
			}
			w.end, length = end, end-begin
		} else if w.used == 0 {
			w.end = now + length
		}
		w.used = max(0, w.used+owed)
		fits = fits && w.used+n <= int64(q[1].(int))
		present, lengths = append(present, w), append(lengths, length)
	}

	at := func(us int64) *big.Rat { return new(big.Rat).SetInt64(us) }
	whole := func(t *big.Rat) int64 { return new(big.Int).Div(t.Num(), t.Denom()).Int64() }
	longest, tat := 2*int64(args[0].(uint64))+1, at(now)
	switch {
	case held && m.written > now: // the clock has been set back: what was owed is owed
		tat = new(big.Rat).Sub(m.tat, at(m.written-now))
		m.stored = true
	case held:
		tat = m.tat
	}
	if whole(tat) < now {
		tat = at(now)
	}
	before := tat
	tat = new(big.Rat).Add(tat, owedTime)
	if whole(tat) < now {
		tat = at(now)
	} else if owed > 0 && whole(tat)-now > longest {
		tat = at(max(now+longest, whole(before)))
		if whole(tat) == whole(before) {
			tat = before
		}
	}
	taken, wait := int64(0), int64(0)
	if n > 0 {
		next := new(big.Rat).Add(tat, cost)
		over := new(big.Rat).Sub(new(big.Rat).Sub(next, at(now)), fixed(args[2], args[3]))
		wait = max(0, up(over))
		if fits = fits && over.Sign() <= 0; fits {
			tat, taken, m.stored = next, n, true
		}
	}
	answer := []int64{taken, wait, up(new(big.Rat).Sub(tat, at(now)))}
	if m.stored {
		m.tat, m.written = tat, now
	}
	for i, w := range present {
		w.used += taken
		if m.stored {
			if m.windows == nil {
				m.windows = map[string]modelWindow{}
			}
			m.windows[quotas[3*i].(string)] = w
		}
		answer = append(answer, w.used, w.end-now, lengths[i])
	}
	return answer
}

// ttl matches how long the script lets the key live.
var ttl = regexp.MustCompile(`'PX', (string\.format\('%\.0f', .*?\))\)\n`)

// Each answer and each key of the script is the exact one, on a clock that stands
// still, runs and is set back. The keys live for an hour, as their server's own clock
// goes on; how long they would is noted beside them.
func TestTheScriptIsExact(t *testing.T) {
	rdb := client(t, services.Redis(t))
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	for _, c := range []struct {
		rate          float64
		burst, levels int
		quotas        []throttle.Quota
	}{
		{rate: 10, burst: 5},
		{rate: 3, burst: 7, levels: 3},
		{rate: 1e4 / 3, burst: 9},
		{rate: 1e9, burst: 1e9},
		{rate: 7e8, burst: 10},
		{rate: 1.0 / 3600, burst: 20, levels: 2},
		{rate: 1.0 / (24 * 3600), burst: 100},
		{rate: 10, burst: 9, levels: 2, quotas: []throttle.Quota{{N: 25, Every: 2 * time.Second}, {N: 60, Every: 7 * time.Second}}},
		{rate: 1.0 / 300, burst: 20, quotas: []throttle.Quota{{N: 50, Per: throttle.Day}, {N: 100, Per: throttle.Month, In: berlin}, {N: 30, Every: time.Hour}}},
		{burst: 20, quotas: []throttle.Quota{{N: 20, Per: throttle.Week}, {N: 10, Every: time.Hour}}},
	} {
		t.Run(fmt.Sprint(c.rate, c.quotas), func(t *testing.T) {
			random := rand.New(rand.NewPCG(uint64(c.burst), 8))
			p := prefix(t, rdb)
			now := int64(1_790_000_000_000_000)
			var m model
			var n, level int
			took, did := make(map[int64]int), make(map[any]int)
			levels := max(c.levels, 1)
			cfg := throttle.SharedConfig{
				Name: "exact", Prefix: p, Rate: c.rate, Burst: c.burst, Quotas: c.quotas, Timeout: patient, OnOutage: throttle.AdmitAll, RetryEvery: 1,
				Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
					tail := args[6+3*args[5].(int):]
					if tail[0] != 0 && random.IntN(12) == 0 { // the call is admitted alone, and Redis told of it with the next one
						return nil, errors.New("down")
					}
					const clock = "redis.call('TIME')"
					require.Equal(t, 1, strings.Count(script, clock))
					script = strings.Replace(script, clock, fmt.Sprintf("{'%d', '%06d'}", now/1e6, now%1e6), 1)
					require.Len(t, ttl.FindAllString(script, -1), 1)
					script = ttl.ReplaceAllString(script, "'PX', 3600000) redis.call('SET', KEYS[1]..':px', $1, 'PX', 3600000)\n")
					value, err := rdb.Eval(ctx, script, keys, args...).Result()
					require.NoError(t, err)
					want := m.answer(now, args)
					got := value.([]any)
					require.Len(t, got, len(want))
					for i := range want {
						require.EqualValues(t, want[i], got[i], "%v at %d: %v", args, now, got)
					}
					did[args[4]]++
					if tail[3] != 0 {
						did[tail[3].(int) > 0]++
					}
					if tail[0] != 0 || want[0] < 0 {
						took[want[0]]++
					}
					if m.tat == nil {
						require.Zero(t, rdb.Exists(ctx, keys[0]).Val())
					} else if m.stored {
						last := want[2]
						for i := range c.quotas {
							if want[3+3*i] > 0 {
								last = max(last, want[4+3*i])
							}
						}
						held, err := rdb.Get(ctx, keys[0]).Result()
						require.NoError(t, err)
						held, _, _ = strings.Cut(held, "|")
						fields := strings.Fields(held)
						require.Len(t, fields, 4)
						w, _ := strconv.ParseUint(fields[0], 10, 64)
						f, _ := strconv.ParseUint(fields[1], 10, 64)
						require.Less(t, f, uint64(1)<<32)
						require.Equal(t, fmt.Sprint(now), fields[2])
						if c.rate > 0 {
							require.Zero(t, m.tat.Cmp(fixed(w, f)), "%s: %v", held, m.tat)
							require.Equal(t, tail[6], fields[3])
						}
						px, err := rdb.Get(ctx, keys[0]+":px").Int64()
						require.NoError(t, err)
						require.GreaterOrEqual(t, 1000*px, last, "what is owed must not be forgotten")
						require.LessOrEqual(t, 1000*px, last+2000)
					}
					return value, nil
				},
			}
			if c.rate == 0 {
				cfg.Burst = 0
			}
			if c.levels > 1 {
				cfg.Levels = c.levels
				cfg.Priority = func(context.Context) int { return level }
			}
			s := throttle.NewShared(cfg)
			token := 1e6 / max(c.rate, 1.0/600)
			for range 600 {
				switch random.IntN(16) {
				case 4:
					if len(c.quotas) > 0 { // up to 50 days, forward and back
						now += int64(random.IntN(50 * 24 * 3600 * 1e6))
					}
				case 5:
					if len(c.quotas) > 0 && random.IntN(3) == 0 {
						now -= int64(random.IntN(50 * 24 * 3600 * 1e6))
					}
				case 9:
					if len(c.quotas) > 0 { // midnight
						const day = 24 * 3600 * 1e6
						now += day - now%day
					}
				case 6:
					if random.IntN(5) == 0 {
						require.NoError(t, s.Reset(t.Context(), ""))
						require.NoError(t, s.Refund(t.Context(), "", 1), "of nothing")
					}
				case 7:
					require.NoError(t, s.Refund(t.Context(), "", 1+random.IntN(4)))
				case 8:
					s.Peek(t.Context(), "")
				case 0:
					now += int64(token * float64(random.IntN(2*c.burst)))
				case 1:
					now -= int64(token * float64(random.IntN(3*c.burst)))
				case 2: // whole tokens: what refills fits to the microsecond
					now += int64(token)
				case 3:
					now += int64(token) + 1
				}
				n, level = 1+random.IntN(max(1, c.burst/3)), random.IntN(levels)
				if random.IntN(20) == 0 {
					require.NoError(t, rdb.Del(t.Context(), p+"exact").Err())
					m.tat, m.windows = nil, nil
				}
				if random.IntN(20) == 0 { // long ago, and not gone yet
					whole := now - 1 - int64(random.IntN(1e6))
					m.tat, m.written, m.windows = fixed(whole, 7), whole-1, nil
					require.NoError(t, rdb.Set(t.Context(), p+"exact", fmt.Sprintf("%d 7 %d 2", whole, whole-1), time.Hour).Err())
				}
				s.Take(t.Context(), "", n)
			}
			require.NotZero(t, took[0])
			require.Greater(t, len(took), 1)
			require.NotZero(t, did["reset"])
			require.NotZero(t, did[true], "debts")
			require.NotZero(t, did[false], "refunds")
			if len(c.quotas) > 0 && c.quotas[len(c.quotas)-1].Per == "" && c.quotas[0].Per != "" {
				require.NotZero(t, took[-1], "asked for other periods")
			}
		})
	}
}
