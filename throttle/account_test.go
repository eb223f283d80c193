// The tests in this file need unexported names.

package throttle

import (
	"sync"
	"testing"
	"time"
)

// Whatever is done with an account, anything else may be done at once. The race detector sees
// what takes no lock: nothing else puts two goroutines in order.
func TestAccountUnderStress(t *testing.T) {
	limit := Limit{Rate: 100, Burst: 50}
	cfg := Config{Rate: 10, Burst: 5, Quotas: []Quota{{N: 100, Every: time.Hour}}}.withDefaults()
	each := newTerms(&cfg)
	calls := []func(a *account){
		func(a *account) { a.take(1, 0, true) },
		func(a *account) { a.peek(0) },
		func(a *account) { a.refund(1) },
		func(a *account) { a.use(each) },
		func(a *account) { a.idle() },
		func(a *account) { a.snapshot() },
		func(a *account) { a.restore(snapshotKey{Full: time.Now().Add(time.Minute).UnixNano()}, 1) },
		func(a *account) { a.assign(limit, func() *terms { return each }, true) },
		func(a *account) { a.unassign(func() *terms { return each }) },
		func(a *account) { a.adopt(each) },
		func(a *account) { a.usage() },
	}
	for i, one := range calls {
		for _, other := range calls[:i+1] {
			var a account
			a.make(&ledger{}, each)
			var both sync.WaitGroup
			for _, call := range []func(*account){one, other} {
				both.Go(func() {
					for range 10 {
						call(&a)
					}
				})
			}
			both.Wait()
		}
	}
}
