package fleet

import (
	"cmp"
	"context"
	"time"

	"golang.org/x/sync/errgroup"
)

// A settlement is a script call that is sent to Redis in the background, such as a correction by Settle. After an
// error, the settlement is retried, at most ten times.
type settlement struct {
	Call
	tries int
}

const (
	maxUnsettled = 100_000
	maxBatch     = 64
	maxTries     = 11
)

// enqueue sends c in the background. If maxUnsettled calls are pending, enqueue drops c. The caller holds l.mu.
func (l *Limits) enqueue(c Call) {
	if l.stats.Unsettled >= maxUnsettled {
		l.stats.NeverSettled++
		return
	}
	l.stats.Unsettled++
	l.send(settlement{Call: c})
}

// send sends s in the background, together with the other settlements that are due. The caller holds l.mu.
func (l *Limits) send(s settlement) {
	l.due = append(l.due, s)
	if !l.sending {
		l.sending = true
		go l.sendAll()
	}
}

// sendAll sends settlements until none is due.
func (l *Limits) sendAll() {
	for {
		l.mu.Lock()
		n := min(len(l.due), maxBatch)
		batch := l.due[:n]
		l.due = l.due[n:]
		l.sending = n > 0
		l.mu.Unlock()
		if n == 0 {
			return
		}
		calls := make([]Call, n)
		for i, s := range batch {
			calls[i] = s.Call
		}
		cfg := l.setting.Load()
		for i, r := range l.evalEach(cfg, cfg.Timeout, calls) {
			l.sent(cfg, batch[i], r)
		}
	}
}

// sent records the reply to a settlement. If the settlement failed, sent sends it again after RetryEvery.
func (l *Limits) sent(cfg *Config, s settlement, r Reply) {
	a, err := parseReply(r)
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.tries++; err != nil && s.tries < maxTries {
		time.AfterFunc(cfg.RetryEvery, func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.send(s)
		})
		return
	}
	l.stats.Unsettled--
	switch {
	case err != nil:
		l.stats.NeverSettled++
	case a.at(0) == 0:
		l.stats.LateSettled++
	case a.at(0) == 1 && len(a) > 2:
		l.stats.Forgiven += a.at(2)
	}
	l.wakeClose()
}

// evalEach runs calls together. It waits for all of them for at most within.
func (l *Limits) evalEach(cfg *Config, within time.Duration, calls []Call) []Reply {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	l.mu.Lock()
	l.stats.RoundTrips++
	l.mu.Unlock()
	replies := make([]Reply, len(calls))
	if cfg.EvalEach != nil {
		err := callUser("EvalEach", func() error { copy(replies, cfg.EvalEach(ctx, calls)); return nil })
		for i := range replies {
			replies[i].Err = cmp.Or(replies[i].Err, err)
		}
		return replies
	}
	var all errgroup.Group
	all.SetLimit(8)
	for i, c := range calls {
		all.Go(func() error {
			replies[i].Err = callUser("Eval", func() (err error) {
				replies[i].Value, err = cfg.Eval(ctx, c.Script, c.Keys, c.Args...)
				return err
			})
			return nil
		})
	}
	_ = all.Wait()
	return replies
}
