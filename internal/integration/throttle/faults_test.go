package throttle_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle"
)

// Whatever happens between an instance and Redis, its calls return, follow OnOutage,
// and are decided by Redis again when that is possible; and no more calls are
// admitted than the limit and the policy allow, also when Redis hears later of calls
// that were given up.
func TestFaults(t *testing.T) {
	const timeout = 150 * time.Millisecond
	addr := services.Redis(t)
	for name, connect := range clients {
		for _, fault := range faultproxy.Every(timeout) {
			t.Run(name+"/"+fault.Name, func(t *testing.T) {
				t.Parallel()
				p := prefix(t, client(t, addr))
				var policies sync.WaitGroup
				for name, c := range map[string]throttle.SharedConfig{
					"refuse": {OnOutage: throttle.RefuseAll},
					"admit":  {OnOutage: throttle.AdmitAll},
					"local":  {OnOutage: throttle.LimitLocally, Instances: 4},
				} {
					c.Name, c.Prefix, c.Rate, c.Burst = name, p, 1.0/3600, 60
					c.Timeout, c.RetryEvery = timeout, 100*time.Millisecond
					proxy := faultproxy.New(t, addr)
					c.Eval = connect(t, proxy.Addr())
					direct := c
					direct.Eval = connect(t, addr)
					direct.Timeout = patient
					policies.Go(func() { endure(t, proxy, fault, c, throttle.NewShared(direct)) })
				}
				policies.Wait()
			})
		}
	}
}

// endure has an instance go through a fault, next to one that reaches Redis.
func endure(t *testing.T, proxy *faultproxy.Proxy, fault faultproxy.Fault, cfg throttle.SharedConfig, direct *throttle.Shared) {
	s := throttle.NewShared(cfg)
	admitted, slowest := 0, time.Duration(0)
	call := func() error {
		began := time.Now()
		err := s.Wait(t.Context(), "")
		slowest = max(slowest, time.Since(began))
		if err == nil {
			admitted++
		}
		return err
	}
	// until makes calls until one was, or was not, decided by Redis.
	until := func(alone bool) {
		for deadline := time.Now().Add(patient); ; {
			before := s.Stats().Alone
			_ = call()
			if s.Stats().Alone > before == alone {
				return
			}
			if time.Now().After(deadline) {
				t.Errorf("%s: alone: never %v", cfg.Name, alone)
				return
			}
		}
	}
	until(false)
	fault.Begin(proxy)
	until(true)
	for range 20 {
		_ = direct.Wait(t.Context(), "")
		if fault.Brief {
			continue
		}
		err := call()
		switch cfg.OnOutage {
		case throttle.RefuseAll:
			assert.ErrorIs(t, err, throttle.ErrOutage)
		case throttle.AdmitAll:
			assert.NoError(t, err)
		}
	}
	if alone := s.Stats().Alone; !fault.Brief && alone < 21 {
		t.Errorf("%s: %d decided alone", cfg.Name, alone)
	}
	proxy.Heal()
	until(false)
	for direct.Allow(context.Background(), "") {
	}
	for range 100 {
		_ = call() // by Redis or, on a busy machine, alone
	}
	// The limit, and what the policy adds to it.
	total := admitted + int(direct.Stats().Admitted)
	switch {
	case cfg.OnOutage == throttle.AdmitAll:
		assert.LessOrEqual(t, total-int(s.Stats().Alone), cfg.Burst)
	case cfg.OnOutage == throttle.LimitLocally:
		assert.LessOrEqual(t, total, cfg.Burst+cfg.Burst/cfg.Instances)
	default:
		assert.LessOrEqual(t, total, cfg.Burst)
	}
	assert.Less(t, slowest, patient, "a call waits for one Timeout")
}

// Answers that come late, one in 1.5 s at each instance, give nothing: the plan is kept.
func TestLateAnswersGiveNothing(t *testing.T) {
	const instances, rate, burst = 8, 20, 20
	rdb := client(t, services.Redis(t))
	eval, p := resilienceredis.Eval(rdb), prefix(t, rdb)
	began := rdb.Time(t.Context()).Val()
	end := time.Now().Add(6 * time.Second)
	var admitted, late atomic.Int64
	var all sync.WaitGroup
	for range instances {
		var next atomic.Int64
		s := throttle.NewShared(throttle.SharedConfig{
			Name: "plan", Prefix: p, Rate: rate, Burst: burst, Instances: instances, Timeout: 300 * time.Millisecond,
			Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
				value, err := eval(ctx, script, keys, args...)
				if now, due := time.Now().UnixNano(), next.Load(); now >= due && next.CompareAndSwap(due, now+15e8) {
					late.Add(1)
					time.Sleep(500 * time.Millisecond) // Redis has decided; its answer is on the way
				}
				return value, err
			},
		})
		all.Go(func() {
			for time.Now().Before(end) {
				if s.Allow(t.Context(), "") {
					admitted.Add(1)
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
	all.Wait()
	plan := burst + rate*rdb.Time(t.Context()).Val().Sub(began).Seconds()
	t.Logf("%d admitted of %.0f, %d late answers", admitted.Load(), plan, late.Load())
	assert.LessOrEqual(t, float64(admitted.Load()), 1.05*plan)
	assert.NotZero(t, late.Load())
}
