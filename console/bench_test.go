package console_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

// crowd returns a registry of n policies, and a function that calls each policy once.
func crowd(n int) (*registry.Registry, func()) {
	reg := registry.New()
	var calls []func()
	for i := range n / 4 {
		name := fmt.Sprintf("dependency-%03d", i)
		r, c := retry.New(retry.Config{Name: name}), breaker.New(breaker.Config{Name: name})
		s, l := bulkhead.New(bulkhead.Config{Name: name, Limit: 8}),
			throttle.New(throttle.Config{Name: name, Rate: 1e6, Burst: 1000})
		reg.MustAdd(r, c, s, l)
		f := r.Wrap(c.Wrap(l.Wrap(s.Wrap(func(context.Context) error { return nil }))))
		calls = append(calls, func() { _ = f(context.Background()) })
	}
	return reg, func() {
		for _, call := range calls {
			call()
		}
	}
}

// BenchmarkSecond reports the CPU time per second for 1000 policies with calls: for their samples, and for viewers
// that request the overview over loopback, including the viewers' own time. It also reports the memory of ten minutes
// of samples. An iteration takes one second of real time, so 10 cpu-ms/s are 1% of a core.
func BenchmarkSecond(b *testing.B) {
	for _, viewers := range []int{0, 1, 8} {
		b.Run(fmt.Sprintf("viewers-%d", viewers), func(b *testing.B) {
			reg, call := crowd(1000)
			call()
			before := heap()
			page := console.New(reg, console.Config{})
			defer page.Close()
			server := httptest.NewServer(page)
			defer server.Close()
			ctx, stop := context.WithCancel(b.Context())
			var watching sync.WaitGroup
			for range viewers {
				watching.Go(func() {
					for ctx.Err() == nil {
						req, _ := http.NewRequestWithContext(ctx, "GET", server.URL, nil)
						if res, err := http.DefaultClient.Do(req); err == nil {
							_, _ = io.Copy(io.Discard, res.Body) // the viewer's time is measured
							_ = res.Body.Close()
						}
						time.Sleep(time.Second)
					}
				})
			}
			time.Sleep(2500 * time.Millisecond)
			var spent time.Duration
			for b.Loop() {
				call()
				before := cpu()
				time.Sleep(time.Second)
				spent += cpu() - before
			}
			b.ReportMetric(float64(spent)/float64(b.N)/1e6, "cpu-ms/s")
			b.ReportMetric(float64(heap()-before)/1e6, "MB")
			b.ReportMetric(0, "ns/op")
			stop()
			watching.Wait()
		})
	}
}

// heap returns the bytes that are in use.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// cpu returns the CPU time of the process.
func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
