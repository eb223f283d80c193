package throttle_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
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
					"batch":  {OnOutage: throttle.RefuseAll, Batch: 10},
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
			if cfg.Batch == 0 { // some are held
				assert.ErrorIs(t, err, throttle.ErrOutage)
			}
		case throttle.AdmitAll:
			assert.NoError(t, err)
		}
	}
	if alone := s.Stats().Alone; !fault.Brief && cfg.Batch == 0 && alone < 21 {
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
		assert.LessOrEqual(t, total, cfg.Burst, "all were there from the start, those of batches too")
	}
	assert.Less(t, slowest, patient, "a call waits for one Timeout, with Batch for two")
}
