package lease

import (
	"context"
	"iter"
	"time"
)

// A State says who holds a lease.
type State struct {
	Name   string
	Holder string    // empty: nobody
	Epoch  int64     // of the term; of the last one if nobody holds the lease
	Since  time.Time // since when, by the store's clock; zero if nobody ever has held it
	Until  time.Time // when the term ends unless it is renewed; zero if nobody holds the lease
	Now    time.Time // the store's clock
}

// Look returns who holds a lease.
func Look(ctx context.Context, store Store, name string) (State, error) {
	rec, err := store.Load(ctx, name)
	if err != nil {
		return State{}, err
	}
	s := State{Name: name, Holder: rec.Holder, Epoch: rec.Epoch, Since: rec.Since, Until: rec.Until, Now: rec.Now}
	if !rec.Held() {
		s.Holder, s.Since, s.Until = "", rec.Until, time.Time{}
	}
	return s, nil
}

// Look returns who holds the lease that the candidate competes for.
func (c *Candidate) Look(ctx context.Context) (State, error) { return Look(ctx, c.store, c.Name()) }

// watchEvery is how often Watch asks the store.
const watchEvery = time.Second

// Watch yields who holds a lease, for a page or a proxy: first as it is now, and then
// each change, until ctx ends. It asks the store once a second, so that it may miss
// a shorter term. If the store fails it yields the error, once a second, and goes
// on if the loop does.
//
//	for state, err := range lease.Watch(ctx, store, "billing") {
//		...
//	}
func Watch(ctx context.Context, store Store, name string) iter.Seq2[State, error] {
	return func(yield func(State, error) bool) {
		tick := time.Tick(watchEvery)
		var last State
		for first := true; ; {
			call, cancel := context.WithTimeout(ctx, 5*watchEvery)
			s, err := Look(call, store, name)
			cancel()
			if ctx.Err() != nil {
				return
			}
			news := first || s.Holder != last.Holder || s.Epoch != last.Epoch
			if err == nil {
				first, last = false, s
			}
			if (err != nil || news) && !yield(s, err) {
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-tick:
			}
		}
	}
}
