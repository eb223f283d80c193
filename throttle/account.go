package throttle

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/throttle/internal/bucket"
)

// A ledger is what accounts have in common: their lock, their clock and the counts of their
// calls. A Limiter has one alone; the accounts of a Group share a few.
type ledger struct {
	mu       sync.Mutex
	latest   int64  // when the last account was made
	shift    int64  // of the clock
	did      Totals // without the refused calls
	refusals tally
	waiters  *waiters // of the Group, or nil
}

// shifted returns what the clock says, now. If that is long before accounts were made, it is
// the clock of a synctest bubble, and time goes on from there.
func (l *ledger) shifted(now int64) int64 {
	if by := l.latest - now - l.shift; by > int64(time.Hour) {
		l.shift += by
	}
	return now + l.shift
}

// An account is what has been spent of a limit, and the calls that wait for it. A Group holds
// many: what few of them need is in more.
type account struct {
	*ledger
	terms   atomic.Pointer[terms] // stored under mu
	tat     bucket.Time           // without the tokens of the calls that wait
	spent   int64                 // tokens, less those given back
	refused uint32                // calls
	set     bool                  // by Group.Set
	more    *more                 // nil if there are no quotas and no call waits
}

type more struct {
	windows []window // of the quotas
	queue   queue
}

// make makes a an account with a full burst: its tat is in the past.
func (a *account) make(l *ledger, t *terms) {
	a.ledger = l
	a.terms.Store(t)
	l.latest = l.shifted(steady())
	if t.quotas != nil {
		a.more = &more{windows: make([]window, len(t.quotas))}
	}
}

// A caller is who an account belongs to.
type caller struct {
	observers *observers
	key       string // of the member of a Group
}

// take takes n tokens if they are there for a level. If not, and if that is final, it counts
// the refusal. It returns the measure after that, and the bound of a limit with quotas.
func (a *account) take(n, level int, final bool) (m measure, b *bound, ok bool) {
	now := steady() // not under mu: a clock that was read too early does no harm
	a.mu.Lock()
	defer a.mu.Unlock()
	m = a.measureAt(now)
	if a.more != nil {
		m = a.serve() // calls that wait go first, even if their timer is late
	}
	switch {
	case m.quotas != nil:
		b = m.takeAll(a.more.windows, present(), n, level, false)
		ok = b.OK
	case n <= 0:
		ok = true
	case !m.cannot(n, level) && m.fits(n, level):
		m.tat, ok = m.pay(m.tat, n), true
	}
	if ok {
		a.spend(m, n)
	} else if final {
		a.refuse(m.refusal(b, n, level))
	}
	return m, b, ok
}

// spend takes and counts the tokens of an admitted call. The caller holds mu.
func (a *account) spend(m measure, n int) {
	if n > 0 {
		a.tat = m.pay(a.tat, n)
	}
	a.count(n)
}

// count counts an admitted call of n tokens. The caller holds mu.
func (a *account) count(n int) {
	a.did.Admitted++
	a.lose(n)
}

// lose counts n tokens as spent. The caller holds mu.
func (a *account) lose(n int) {
	a.did.Spent += int64(n)
	a.spent += int64(n)
}

// refuse counts a refused call. The caller holds mu.
func (a *account) refuse(why Reason) {
	a.refusals[why.index()]++
	if a.refused < math.MaxUint32 {
		a.refused++
	}
}

// measure returns the limit as it is for a call that no other makes room for: the tokens of
// the calls that wait are taken. The caller holds mu.
func (a *account) measure() measure { return a.measureAt(steady()) }

func (a *account) measureAt(now int64) measure {
	m := measure{a.terms.Load(), a.shifted(now), a.tat}
	if a.more != nil && a.more.queue.tokens != 0 {
		m.tat = m.rate.Add(m.tat, m.rate.Of(a.more.queue.tokens))
	}
	return m
}

// acquire takes the tokens of a call that began under cfg.
func (a *account) acquire(ctx context.Context, by caller, cfg *Config, n, level int) error {
	m, b, ok := a.take(n, level, false)
	if ok {
		return nil
	}
	return a.wait(ctx, by, cfg, n, level, m, b)
}

// wait is acquire for tokens that were not there: it returns a refusal, or nil after a wait.
func (a *account) wait(ctx context.Context, by caller, cfg *Config, n, level int, m measure, b *bound) error {
	e := &LimitedError{Cost: n, Level: level}
	switch {
	case b != nil && b.why != OverLimit:
		b.refuse(e)
	case m.cannot(n, level):
		e.Reason, e.After = TooCostly, never
	case cfg.MaxWait == 0:
		e.Reason, e.After = OverLimit, m.wait(n, level)
	default:
		return a.waitInLine(ctx, by, cfg, n, level)
	}
	return a.tellRefused(ctx, by, cfg, e)
}

// tellRefused counts and reports a refused call that began under cfg.
func (a *account) tellRefused(ctx context.Context, by caller, cfg *Config, e *LimitedError) error {
	a.mu.Lock()
	a.refuse(e.Reason)
	a.mu.Unlock()
	e.Name, e.Key = cfg.Name, by.key
	if e.Limit == 0 {
		e.Limit = a.terms.Load().size()
	}
	report(ctx, by.observers, e)
	return e
}

// decide takes n tokens if they are there for a level, and says why not.
func (a *account) decide(n, level int) (Decision, Reason) {
	m, b, ok := a.take(n, level, true)
	d := m.decision(b, ok, n, level)
	if ok {
		return d, ""
	}
	return d, m.refusal(b, n, level)
}

func (a *account) peek(level int) Decision {
	a.mu.Lock()
	defer a.mu.Unlock()
	m := a.measure()
	if m.quotas != nil {
		return m.takeAll(a.more.windows, present(), 1, level, true).Decision
	}
	return m.decision(nil, m.wait(1, level) == 0, 1, level)
}

// refund gives n tokens, at most those that were spent, back to the calls that wait, and the
// rest to the burst.
func (a *account) refund(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if n = int(min(int64(n), a.spent)); n <= 0 {
		return
	}
	a.did.Refunded += int64(n)
	a.spent -= int64(n)
	m := a.measure()
	a.tat = m.back(a.tat, n)
	if m.quotas != nil {
		m.refund(a.more.windows, n)
	}
	a.serve()
}

// use puts the terms next into effect. Tokens that have been spent stay spent.
func (a *account) use(next *terms) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.begin(next)
}

// begin is use for a caller that holds mu.
func (a *account) begin(next *terms) {
	last := a.terms.Load()
	now := a.shifted(steady())
	if a.queued() > 0 { // what the head has saved is not worth the same at another rate
		a.tat = bucket.Later(a.tat, bucket.Time{NS: now})
	}
	a.tat = next.rate.Follow(a.tat, now, &last.rate)
	if next.quotas != nil && a.more == nil {
		a.more = &more{}
	}
	if a.more != nil {
		from := next.inherit(last)
		a.more.windows = pick(a.more.windows, from)
		for i := range a.more.queue.levels {
			for w := a.more.queue.levels[i].first; w != nil; w = w.next {
				w.ends = pick(w.ends, from)
			}
		}
	}
	a.terms.Store(next)
	a.serve()
}

// idle reports whether a is as one that was never used.
func (a *account) idle() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	m := a.measure()
	if a.set || m.tat.After(m.now) {
		return false
	}
	return m.quotas == nil || !m.spentOf(a.more.windows, present())
}

func (a *account) queued() int {
	if a.more == nil {
		return 0
	}
	return a.more.queue.queued
}
