package throttle_test

import (
	"context"
	"fmt"
	"math/big"
	"math/rand/v2"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/throttle"
)

// A model is what the script computes, in exact arithmetic: microseconds.
type model struct {
	tat     *big.Rat // nil: there is no key
	windows map[string]modelWindow
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
	if args[4] == "reset" {
		m.tat, m.windows = nil, nil
	}
	var present []modelWindow // as they are now
	var ids []string
	var rooms, lengths []int64
	amounts := args[6:]
	for range args[5].(int) {
		id, room, times := amounts[0].(string), amounts[1].(int), amounts[2].(string)
		amounts = amounts[3:]
		w := m.windows[id]
		if w.end <= now {
			w = modelWindow{}
		}
		length, err := strconv.ParseInt(times, 10, 64)
		if err != nil {
			begin, end, ok := period(now, times)
			if !ok {
				return []int64{-1, now}
			}
			w.end, length = end, end-begin
		} else if w.used == 0 || w.end > now+length {
			w.end = now + length
		}
		present, ids = append(present, w), append(ids, id)
		rooms, lengths = append(rooms, int64(room)), append(lengths, length)
	}
	rate := m.take(now, append(append([]any{}, args[:4]...), amounts...), args[4] == "refund", func(n int64) bool {
		for i, w := range present {
			if args[4] != "refund" && w.used+n > rooms[i] {
				return false
			}
		}
		for i := range present {
			if args[4] == "refund" {
				n = -min(n, present[i].used)
			}
			if present[i].used += n; m.tat != nil {
				if m.windows == nil {
					m.windows = map[string]modelWindow{}
				}
				m.windows[ids[i]] = present[i]
			}
			if args[4] == "refund" {
				n = int64(amounts[0].(int))
			}
		}
		return true
	})
	for i, w := range present {
		rate = append(rate, w.used, w.end-now, lengths[i])
	}
	return rate
}

func (m *model) take(now int64, args []any, refund bool, quotas func(n int64) bool) []int64 {
	at := new(big.Rat).SetInt64(now)
	most, room := fixed(args[0], args[1]), fixed(args[2], args[3])
	tat := at
	if m.tat != nil && m.tat.Cmp(at) > 0 {
		tat = m.tat
		if whole := new(big.Int).Div(tat.Num(), tat.Denom()); whole.Int64()-now > int64(args[0].(uint64)) {
			tat = new(big.Rat).Add(at, most)
		}
	}
	debt := func(t *big.Rat) *big.Rat { return new(big.Rat).Sub(t, at) }
	if refund {
		if tat = new(big.Rat).Sub(tat, fixed(args[5], args[6])); tat.Cmp(at) < 0 {
			tat = at
		}
		if m.tat != nil {
			m.tat = tat
		}
		quotas(int64(args[4].(int)))
		return []int64{int64(args[4].(int)), 0, up(debt(tat))}
	}
	var wait int64
	for i := 4; i < len(args); i += 3 {
		next := new(big.Rat).Add(tat, fixed(args[i+1], args[i+2]))
		over := new(big.Rat).Sub(debt(next), room)
		wait = max(0, up(over))
		before := m.tat
		if m.tat = next; over.Sign() <= 0 && quotas(int64(args[i].(int))) {
			return []int64{int64(args[i].(int)), 0, up(debt(next))}
		}
		m.tat = before
	}
	return []int64{0, wait, up(debt(tat))}
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
		batch         int
		quotas        []throttle.Quota
	}{
		{rate: 10, burst: 5},
		{rate: 3, burst: 7, levels: 3},
		{rate: 1e4 / 3, burst: 9, batch: 4},
		{rate: 1e9, burst: 1e9, batch: 1000},
		{rate: 7e8, burst: 10},
		{rate: 1.0 / 3600, burst: 20, levels: 2},
		{rate: 1.0 / (24 * 3600), burst: 100, batch: 7},
		{rate: 10, burst: 9, levels: 2, quotas: []throttle.Quota{{N: 25, Every: 2 * time.Second}, {N: 60, Every: 7 * time.Second}}},
		{rate: 1.0 / 300, burst: 20, quotas: []throttle.Quota{{N: 50, Per: throttle.Day}, {N: 100, Per: throttle.Month, In: berlin}, {N: 30, Every: time.Hour}}},
		{burst: 20, batch: 5, quotas: []throttle.Quota{{N: 20, Per: throttle.Week}, {N: 10, Every: time.Hour}}},
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
				Name: "exact", Prefix: p, Rate: c.rate, Burst: c.burst, Quotas: c.quotas, Batch: c.batch, Timeout: patient, OnOutage: throttle.RefuseAll,
				Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
					const clock = "redis.call('TIME')"
					require.Equal(t, 1, strings.Count(script, clock))
					script = strings.Replace(script, clock, fmt.Sprintf("{'%d', '%06d'}", now/1e6, now%1e6), 1)
					require.Len(t, ttl.FindAllString(script, -1), 1)
					script = ttl.ReplaceAllString(script, "'PX', 3600000) redis.call('SET', KEYS[1]..':px', $1, 'PX', 3600000)\n")
					value, err := rdb.Eval(ctx, script, keys, args...).Result()
					require.NoError(t, err)
					there := m.tat != nil
					want := m.answer(now, args)
					got := value.([]any)
					require.Len(t, got, len(want))
					for i := range want {
						require.EqualValues(t, want[i], got[i], "%v at %d: %v", args, now, got)
					}
					did[args[4]]++
					if args[4] == "take" || want[0] < 0 {
						took[want[0]]++
					}
					if args[4] == "reset" || args[4] == "refund" && !there {
						require.Zero(t, rdb.Exists(ctx, keys[0]).Val())
					} else if want[0] > 0 && (there || args[4] == "take") {
						last := want[2]
						for i := range c.quotas {
							if want[3+3*i] > 0 {
								last = max(last, want[4+3*i])
							}
						}
						held, err := rdb.Get(ctx, keys[0]).Result()
						require.NoError(t, err)
						held, _, _ = strings.Cut(held, "|")
						whole, part, _ := strings.Cut(held, " ")
						w, _ := strconv.ParseUint(whole, 10, 64)
						f, _ := strconv.ParseUint(part, 10, 64)
						require.Less(t, f, uint64(1)<<32)
						require.Zero(t, m.tat.Cmp(fixed(w, f)), "%s: %v", held, m.tat)
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
					m.tat, m.windows = fixed(whole, 7), nil
					require.NoError(t, rdb.Set(t.Context(), p+"exact", fmt.Sprintf("%d 7", whole), time.Hour).Err())
				}
				s.Take(t.Context(), "", n)
			}
			require.NotZero(t, took[0])
			require.Greater(t, len(took), 1)
			require.Zero(t, s.Stats().Failed)
			require.NotZero(t, did["reset"])
			require.NotZero(t, did["refund"])
			if len(c.quotas) > 0 && c.quotas[len(c.quotas)-1].Per == "" && c.quotas[0].Per != "" {
				require.NotZero(t, took[-1], "asked for other periods")
			}
		})
	}
}

// A round trip without tokens, by which a Shared finds out whether Redis answers,
// takes none and writes nothing.
func TestFindingOutTakesNothing(t *testing.T) {
	rdb := client(t, services.Redis(t))
	p := prefix(t, rdb)
	found := make(chan error, 1)
	first := true
	s := throttle.NewShared(throttle.SharedConfig{
		Name: "probe", Prefix: p, Rate: 1.0 / 3600, Burst: 3, Timeout: patient, OnOutage: throttle.RefuseAll,
		Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
			if first {
				first = false
				<-ctx.Done()
				return nil, ctx.Err()
			}
			value, err := redis.NewScript(script).Run(ctx, rdb, keys, args...).Result()
			if len(args) == 6 {
				found <- err
			}
			return value, err
		},
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, s.Wait(ctx, ""), context.DeadlineExceeded)
	require.NoError(t, <-found)
	require.Zero(t, rdb.Exists(t.Context(), p+"probe").Val())
	require.Equal(t, 2, s.Take(t.Context(), "", 1).Remaining)
	require.Zero(t, s.Stats().Failed)
}
