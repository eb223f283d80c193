package cacheaside

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// A step is what a flight does with the answer of a Store.
type step int

const (
	use      step = iota // return the value, which is fresh
	useOld               // return the value, which is past its TTL
	fill                 // load the value, and fill the Store
	pass                 // load the value, which is not kept
	askAgain             // ask for the lease at once: the value cannot be used
	rest                 // ask again after a rest
	fail                 // fail as the load of another process
	refuse               // the State is none of those that there are
)

// next returns the step after an answer: its State, what its value may be used for, and whether
// the flight waits for a load of another process.
func next(s State, value standing, usable, waits bool) step {
	switch s {
	case Hit:
		if value == fresh {
			return use
		}
		return askAgain
	case Leased:
		return fill
	case Fenced:
		return pass
	case Failed:
		switch {
		case usable:
			return useOld
		case waits:
			return fail
		}
		return askAgain
	case Busy:
		if value == stale {
			return useOld
		}
		return rest
	}
	return refuse
}

// Intervals at which the Store is asked again about a load of another process.
const (
	pollFirst = 5 * time.Millisecond
	pollMost  = 100 * time.Millisecond
)

// consult asks the Store for the answers of flights. It returns those that must load: one with
// the lease must then fill the Store. It lands the others.
func (l *load[K, V]) consult(asking []*flight[K, V]) (toLoad []*flight[K, V]) {
	c := l.c
	began := c.now()
	for {
		l.ask(asking)
		asking = l.wanted(asking)
		var landed, again, resting []*flight[K, V]
		pause := pollMost
		for _, f := range asking {
			if !f.asked {
				toLoad = append(toLoad, f)
				continue
			}
			e := l.read(f)
			switch next(f.lookup.State, e.standing(c.now()), e.fallback(c.now()), f.ask.Waits != "") {
			case use:
				f.hit, f.result = true, e
				if e.absent {
					f.fault = ErrNotFound
				}
				landed = append(landed, f)
			case useOld:
				e.pause = c.now() + l.cfg.ErrorPause
				if f.lookup.State == Busy {
					e.pause = c.now() + min(f.lookup.Wait, pollMost)
				}
				f.result, f.past = e, true
				landed = append(landed, f)
			case fill:
				f.leased = true
				c.offer(f, e, true)
				toLoad = append(toLoad, f)
			case pass:
				c.mu.Lock()
				f.passing = true
				c.mu.Unlock()
				toLoad = append(toLoad, f)
			case askAgain:
				f.ask.Refresh, f.ask.Pause, f.damaged = true, 0, e == nil
				again = append(again, f)
			case rest:
				c.offer(f, e, false)
				f.ask.Refresh, f.damaged = false, false // the next value is another one
				f.ask.Waits = cmp.Or(f.ask.Waits, f.lookup.Waits)
				pause = min(pause, max(f.lookup.Wait, time.Millisecond))
				resting = append(resting, f)
			case fail:
				f.fault = fmt.Errorf("%s%v: %w", prefix(l.cfg.Name), f.key, errElsewhere)
				landed = append(landed, f)
			default:
				f.fault = fmt.Errorf("%sthe Store answered with State %q", prefix(l.cfg.Name), f.lookup.State)
				landed = append(landed, f)
			}
		}
		if len(landed) > 0 {
			c.land(l, landed, c.now(), len(toLoad)+len(again)+len(resting) == 0)
		}
		asking = append(again, resting...)
		switch {
		case len(toLoad) > 0:
			l.split(asking, false)
			return toLoad
		case len(asking) == 0:
			return nil
		case len(again) == 0:
			// The longer the load takes, the longer the intervals: polling adds at most an
			// eighth to the wait.
			pause = min(max((c.now()-began)/8, pollFirst), pause)
			timer := time.NewTimer(pause/2 + c.chance(pause))
			select {
			case <-timer.C:
			case <-l.Done():
				timer.Stop()
			}
		}
		if asking = l.wanted(asking); len(asking) == 0 {
			return nil
		}
	}
}

// ask asks the Store about the keys of flights. It waits for the answer even if l ends: other
// processes would wait for a lease that this process does not know about.
func (l *load[K, V]) ask(flights []*flight[K, V]) {
	t, at := l.c.tier, l.c.now() // before trusts: an invalidation in between is later than at
	t.each(len(flights), func(i int) string { return flights[i].written }, func(shard uint8, some []int) {
		var asks []Ask
		var asked []*flight[K, V]
		for _, i := range some {
			f := flights[i]
			f.asked = false
			if t.trusts(f.written) {
				f.ask.Token = cmp.Or(f.ask.Token, newToken())
				asks, asked = append(asks, f.ask), append(asked, f)
			}
		}
		if len(asks) == 0 || !t.mayAsk(shard) {
			return
		}
		looks, err := t.store.Acquire(context.WithoutCancel(l), asks...)
		if err == nil && len(looks) != len(asks) {
			err = fmt.Errorf("the Store gave %d answers about %d keys", len(looks), len(asks))
		}
		if err == nil {
			for i, f := range asked {
				f.lookup, f.at, f.asked = looks[i], at, true
				f.leased = looks[i].State == Leased
			}
		}
		t.ended(l, shard, err)
	})
}

// read decodes what the Store holds. It returns nil if that is nothing or unreadable.
func (l *load[K, V]) read(f *flight[K, V]) *entry[V] {
	if f.lookup.Value == nil || f.damaged {
		return nil
	}
	e, err := l.cfg.open(f.lookup.Value)
	if err != nil {
		l.c.reportOf(l, f, EventCodecFailed, err)
		return nil
	}
	l.cfg.begin(e, f.at, f.lookup.Fresh) // from the call: the answer may have taken a while
	return e
}

// fill stores the results of flights that have a lease, or gives the lease back.
func (l *load[K, V]) fill(flights []*flight[K, V]) {
	c, t := l.c, l.c.tier
	var full []*flight[K, V]
	var values []Filling
	for _, f := range flights {
		e, now := f.result, c.now()
		switch {
		case !f.leased:
		case isFailure(f.fault):
			l.release(f, !behavior.IsAnswered(f.fault) && !behavior.IsRefused(f.fault) && l.Err() != context.Canceled)
		case e == nil && f.shared: // no process may serve the old value when a load fails
			c.announce(l, []K{f.key}, func() {}, c.report, t.invalidate)
		case e == nil || e.keep <= now || l.cfg.Lag > 0 && !c.isCurrent(f):
			l.release(f, false)
		default:
			data, err := l.cfg.seal(e)
			if err != nil {
				c.reportOf(l, f, EventCodecFailed, err)
				l.release(f, false)
				break
			}
			full = append(full, f)
			values = append(values, Filling{
				Key: f.written, Version: l.cfg.Version, Grant: f.lookup.Grant, Value: data, Fresh: e.fresh - now, Keep: e.keep - now,
			})
		}
	}
	t.each(len(values), func(i int) string { return values[i].Key }, func(shard uint8, some []int) {
		if !t.mayAsk(shard) {
			return
		}
		part := make([]Filling, len(some))
		for n, i := range some {
			part[n] = values[i]
		}
		current, err := t.store.Fill(context.WithoutCancel(l), part...)
		if err == nil && len(current) != len(part) {
			err = fmt.Errorf("the Store gave %d answers about %d values", len(current), len(part))
		}
		for n, i := range some {
			full[i].leased = false
			full[i].invalidated = err == nil && !current[n]
		}
		t.ended(l, shard, err)
	})
}

func (c *Cache[K, V]) isCurrent(f *flight[K, V]) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current(f.key) == f
}

// release gives the lease of f back, if it has one. If that fails, the lease ends by itself.
func (l *load[K, V]) release(f *flight[K, V], failed bool) {
	if f.question == nil || !f.leased {
		return
	}
	f.leased = false
	t := l.c.tier
	if shard := t.store.Shard(f.written); t.mayAsk(shard) {
		t.ended(l, shard, t.store.Release(context.WithoutCancel(l), f.ask, failed))
	}
}
