package fleet_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/fleet"
)

// A job is what a process of its own does until it has ended, or was killed.
type job struct {
	Kind    string // "play", "hold" (two slots) or "wait" (for a slot)
	Addrs   []string
	Name    string
	Number  int
	Often   float64 // the share of calls of Redis that have a fault
	Control string
	Until   time.Time
}

func TestMain(m *testing.M) {
	text := os.Getenv("FLEET_JOB")
	if text == "" {
		os.Exit(m.Run())
	}
	var j job
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		panic(err)
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(3) // the test has ended
	}()
	j.do()
}

// A hold is a reservation of a process, by the clock of this machine.
type hold struct{ from, to time.Time }

// A process does a job.
type process struct {
	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{}

	mu    sync.Mutex
	holds map[string]*hold
	stats fleet.Stats // at its end
}

func start(t *testing.T, j job) *process {
	text, err := json.Marshal(j)
	require.NoError(t, err)
	p := &process{cmd: exec.Command(os.Args[0]), ended: make(chan struct{}), holds: map[string]*hold{}}
	p.cmd.Env = append(os.Environ(), "FLEET_JOB="+string(text))
	p.cmd.Stderr = os.Stderr
	p.stdin, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	t.Cleanup(p.kill)
	go func() {
		defer close(p.ended)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			p.hear(lines.Text())
		}
		_ = p.cmd.Wait()
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, h := range p.holds { // of one that was killed
			if h.to.IsZero() {
				h.to = time.Now()
			}
		}
	}()
	return p
}

func (p *process) hear(line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	what, rest, _ := strings.Cut(line, " ")
	var id string
	var ns int64
	switch _, _ = fmt.Sscan(rest, &id, &ns); what {
	case "+":
		p.holds[id] = &hold{from: time.Unix(0, ns)}
	case "-":
		p.holds[id].to = time.Unix(0, ns)
	case "=":
		_ = json.Unmarshal([]byte(rest), &p.stats)
	}
}

func (p *process) held() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.holds)
}

// kill ends the process with no chance to do anything.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
	_ = p.stdin.Close()
}

// do does the job, in a process of its own.
func (j job) do() {
	rdb := redis.NewUniversalClient(options(j.Addrs))
	l := &line{eval: resilienceredis.Eval(rdb), each: resilienceredis.EvalEach(rdb), often: j.Often,
		random: rand.New(rand.NewPCG(uint64(j.Number), 1))}
	j.prepare(l, rdb)
	cfg := fleet.Config{
		Name: j.Name, Eval: l.Eval, Lease: time.Second, Timeout: 200 * time.Millisecond, RetryEvery: 100 * time.Millisecond,
		MaxWait: 300 * time.Millisecond, Meters: metersOf,
	}
	if j.Number%2 == 1 {
		cfg.EvalEach = l.EvalEach
	}
	if cluster, ok := rdb.(*redis.ClusterClient); ok {
		cfg.Node = resilienceredis.Node(cluster)
	}
	switch j.Kind {
	case "play":
		j.play(fleet.New(cfg), l)
	case "hold":
		cfg.Lease, cfg.Timeout, cfg.Meters = lease, time.Minute, slotsOnly(2)
		limits := fleet.New(cfg)
		for i := range 2 {
			if _, err := limits.Reserve(context.Background()); err != nil {
				panic(err)
			}
			say("+ %d %d", i, time.Now().UnixNano())
		}
		select {}
	case "wait":
		cfg.MaxWait, cfg.Timeout, cfg.Meters = time.Hour, time.Minute, slotsOnly(1)
		_, err := fleet.New(cfg).Reserve(context.Background())
		panic(err)
	}
}

// lease is so long that a process renews it in time on a machine that has much else to do.
const lease = 3 * time.Second

func slotsOnly(n int) func(context.Context) []fleet.Meter {
	return func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Slots("t/running", n)} }
}

var saying sync.Mutex

func say(format string, args ...any) {
	saying.Lock()
	defer saying.Unlock()
	fmt.Printf(format+"\n", args...)
}

const (
	burst    = 100_000_000
	parallel = 8
	perWin   = 200
	window   = 1200 * time.Millisecond
)

type estimateKey struct{}

func metersOf(ctx context.Context) []fleet.Meter {
	estimate := ctx.Value(estimateKey{}).(int)
	return []fleet.Meter{
		fleet.Rate("t/tokens", 1e-6, estimate).Burst(burst).Estimated(),
		fleet.Quota("t/month", burst, throttle.Window{Per: throttle.Month}, estimate).Estimated(),
		fleet.Slots("t/running", parallel), fleet.Rate("t/calls", callRate, 1).Burst(callBurst),
		fleet.Quota("t/window", perWin, throttle.Window{Every: window}, 1),
	}
}

const callRate, callBurst = 300, 30

// play reserves and settles until it is time, and then until all is settled.
func (j job) play(limits *fleet.Limits, l *line) {
	var calls sync.WaitGroup
	for i := range 10 {
		calls.Go(func() {
			random := rand.New(rand.NewPCG(uint64(j.Number), uint64(10+i)))
			for n := 0; time.Now().Before(j.Until); n++ {
				ctx := context.WithValue(context.Background(), estimateKey{}, random.IntN(1000))
				r, err := limits.Reserve(ctx)
				if err != nil {
					time.Sleep(time.Millisecond)
					continue
				}
				id := fmt.Sprintf("%d-%d", i, n)
				say("+ %s %d", id, time.Now().UnixNano())
				select {
				case <-r.Lost():
				case <-time.After(time.Duration(random.IntN(20)) * time.Millisecond):
				}
				say("- %s %d", id, time.Now().UnixNano())
				if random.IntN(10) == 0 {
					r.SettleEach(map[string]int{"tokens": 0, "month": 0})
				} else {
					r.Settle(random.IntN(2000))
				}
			}
		})
	}
	calls.Wait()
	l.mu.Lock()
	l.often = 0
	l.mu.Unlock()
	for deadline := time.Now().Add(30 * time.Second); limits.Stats().Unsettled > 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			panic("settlements are not told")
		}
	}
	text, _ := json.Marshal(limits.Stats())
	say("= %s", text)
}

// An evalFunc is a Config's Eval.
type evalFunc func(ctx context.Context, script string, keys []string, args ...any) (any, error)

// A line is how a process reaches Redis. What goes over it may be lost, or its answer, or come
// late.
type line struct {
	eval   evalFunc
	each   func(ctx context.Context, calls []fleet.Call) []fleet.Reply
	mu     sync.Mutex
	random *rand.Rand
	often  float64 // of faults
	only   string  // what has faults, if not all
	change func(script string) string
	forged func(script string, keys []string, args []any) // after a reservation that was lost
}

var errFault = errors.New("a fault")

// draw returns which fault a call has: 0 to 1, or -1 for none.
func (l *line) draw(op any) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.random == nil || l.only != "" && l.only != op || l.random.Float64() >= l.often {
		return -1
	}
	return l.random.Float64()
}

// faulty makes a call, or loses it or its answer, or has the answer come late.
func (l *line) faulty(ctx context.Context, op any, call func(context.Context)) error {
	fault := l.draw(op)
	if fault >= 0 && fault < 0.3 { // the request is lost
		return errFault
	}
	call(context.WithoutCancel(ctx))
	switch {
	case fault >= 0.3 && fault < 0.7: // the answer is lost
		return errFault
	case fault >= 0.7: // it comes too late
		<-ctx.Done()
	}
	return nil
}

func (l *line) script(script string) string {
	if l.change == nil {
		return script
	}
	return l.change(script)
}

// Eval is a Config's.
func (l *line) Eval(ctx context.Context, script string, keys []string, args ...any) (value any, err error) {
	script = l.script(script)
	made := false
	lost := l.faulty(ctx, args[0], func(ctx context.Context) {
		made = true
		value, err = l.eval(ctx, script, keys, args...)
	})
	if !made && l.forged != nil && args[0] == "take" {
		l.forged(script, keys, args)
	}
	if lost != nil {
		return nil, lost
	}
	return value, err
}

// EvalEach is a Config's.
func (l *line) EvalEach(ctx context.Context, calls []fleet.Call) (replies []fleet.Reply) {
	for i := range calls {
		calls[i].Script = l.script(calls[i].Script)
	}
	lost := l.faulty(ctx, calls[0].Args[0], func(ctx context.Context) { replies = l.each(ctx, calls) })
	if lost != nil {
		replies = make([]fleet.Reply, len(calls))
		for i := range replies {
			replies[i].Err = lost
		}
	}
	return replies
}

// prepare has the script write what it does into a list, so that the oracle knows it whatever the
// processes have heard of it, and whether they were killed. With a control it breaks a rule.
func (j job) prepare(l *line, direct redis.UniversalClient) {
	change := []string{
		"local clock = redis.call('TIME')\n", `local clock = redis.call('TIME')
local journal = string.match(KEYS[1], '^.-{.-}')
local back = tonumber(redis.call('GET', journal .. ':back') or 0)
journal = journal .. ':journal'
clock[1] = clock[1] - back
`,
		"local answer = fits and", `if fits then
  redis.call('RPUSH', journal, 'take ' .. id .. ' ' .. ARGV[7] .. ' ' .. string.format('%.0f', now + 1000000 * back))
end
local answer = fits and`,
		"  return {late and 0", `  local entry = 'settle ' .. ARGV[2] .. ' ' .. (ARGV[8] or 0) .. ' ' .. (late and 1 or 0)
  redis.call('RPUSH', journal, entry)
  return {late and 0`,
	}
	switch j.Control {
	case "forgets the id":
		l.only = "settle"
		change = append(change, "'SET', KEYS[1], 1, 'NX', 'PX'", "'SET', KEYS[1], 1, 'PX'")
	case "without a lease":
		change = append(change, "us / 1000) + 1000", "us / 1000) + 100000", // or the set itself expires
			"set('ZREMRANGEBYSCORE', key, '-inf', now)", "")
	case "settles before it reserves":
		l.only = "take"
		l.forged = func(script string, keys []string, args []any) {
			now, _ := direct.Time(context.Background()).Result()
			settle := []any{"settle", args[1], now.UnixMicro(), 1_100_000}
			states := []string{keys[0] + ":forged:" + args[1].(string), keys[0], keys[1]}
			for i := range states[1:] {
				m := args[3+4*i : 7+4*i] // kind, limit, x, cost
				settle = append(settle, m[0], m[1], m[2], -m[3].(int64), windowNumber(direct, keys[1]))
			}
			_, _ = l.eval(context.Background(), script, states, settle...)
		}
	}
	l.change = func(script string) string {
		for i := 0; i < len(change); i += 2 {
			if strings.Count(script, change[i]) != 1 {
				panic("the script has no, or several, " + change[i])
			}
			script = strings.Replace(script, change[i], change[i+1], 1)
		}
		return script
	}
}

// windowNumber returns the number of the window of a quota, or 0.
func windowNumber(direct redis.UniversalClient, key string) (n int64) {
	_, _ = fmt.Sscan(direct.Get(context.Background(), key).Val(), new(int64), new(int64), new(int64), &n)
	return n
}

func options(addrs []string) *redis.UniversalOptions {
	return &redis.UniversalOptions{Addrs: addrs, ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1,
		MaxRedirects: 3}
}
