// Package soak runs a program with every pattern around and inside the others, as the
// README recommends, through everything that its dependencies can do, and then counts.
package soak_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/saga"
)

var soakFor = flag.Duration("soak.for", 15*time.Second, "how long the soak runs, at least")

// The findings of a soak.
const (
	stuckSagas        = "sagas are stuck"
	neverEnded        = "sagas have not ended"
	chargedForNothing = "customers were charged without an order"
	openedByAnAnswer  = "a breaker was opened by an answer"
	openedForTooLong  = "a breaker opened for longer than it may"
	stayedOpen        = "a breaker is open though all is well"
	neverOpened       = "a breaker never opened though all hung"
)

// TestSoak is the soak: healthy, hanging, refusing, asking to be left alone, closed by
// an operator, limping, and back, at least once each. Run it for longer by
// -soak.for 60s.
func TestSoak(t *testing.T) {
	require.Empty(t, soak(t, rules{}, *soakFor, "", phases...))
}

// TestSoakFindsEachRuleThatIsMissing switches off the rules of the protocol one by
// one: the soak must find what each is for.
func TestSoakFindsEachRuleThatIsMissing(t *testing.T) {
	for name, m := range mutants {
		t.Run(name, func(t *testing.T) {
			require.Contains(t, soak(t, m.rules, 0, m.finds, m.in), m.finds)
		})
	}
}

// A phase is a time in which something is wrong, and the time after it.
type phase struct {
	begin func(*shop)
	// end, if not nil, is called before the dependencies are well again.
	end func(s *shop, findings map[string]string)
}

var (
	well = phase{begin: func(*shop) {}}

	hung = phase{
		begin: func(s *shop) {
			s.payments.is(hanging)
			s.database.Hang()
			s.cache.Hang()
		},
		end: func(s *shop, findings map[string]string) {
			if s.openings("old") == 0 {
				findings[neverOpened] = "old"
			}
		},
	}
	refused = phase{begin: func(s *shop) {
		s.payments.is(refusing)
		s.database.Refuse()
		s.database.Reset()
		s.cache.Refuse()
		s.cache.Reset()
	}}
	asked = phase{
		begin: func(s *shop) { s.payments.is(asking) },
		end: func(s *shop, _ map[string]string) {
			s.payments.is(askingAYear)
			s.during(openFor)
		},
	}
	forced = phase{
		begin: func(s *shop) { s.breakers["payments"].ForceOpen(errors.New("maintenance")) },
		end: func(s *shop, _ map[string]string) {
			for deadline := time.Now().Add(time.Minute); s.rules.refusalIsAnAttempt && len(s.stuck()) == 0 &&
				time.Now().Before(deadline); {
				s.during(50 * time.Millisecond) // until the attempts are used up
			}
			s.breakers["payments"].Enable()
		},
	}
	limped = phase{begin: func(s *shop) {
		s.payments.is(limping)
		s.database.Slow(faultproxy.Both, 4000)
	}}

	phases = []phase{well, hung, refused, asked, forced, limped}
)

// soak runs a shop through phases, again and again for a time, and returns what was
// wrong. It ends early when it has found what it was to find.
func soak(t *testing.T, r rules, d time.Duration, wanted string, phases ...phase) (findings map[string]string) {
	findings = map[string]string{}
	s := newShop(t, r)
	stop := s.begin()
	end := time.Now().Add(d)
	for first := true; first || time.Now().Before(end); first = false {
		for _, p := range phases {
			p.begin(s)
			s.during(2 * openFor)
			if p.end != nil {
				p.end(s, findings)
			}
			s.payments.is(healthy)
			s.database.Heal()
			s.cache.Heal()
			s.afterwards(findings)
		}
	}
	stop()
	s.judgeOpenings(findings)
	if _, found := findings[wanted]; !found {
		s.settle(findings)
	}
	t.Logf("%d orders, %d openings", len(s.orders), len(s.opened))
	return findings
}

// judgeOpenings adds what is wrong with the openings of the breakers so far.
func (s *shop) judgeOpenings(findings map[string]string) {
	for _, c := range s.allOpened() {
		if saysNothingOfTheDependency(c.Err) {
			findings[openedByAnAnswer] = fmt.Sprintf("%s: %v", c.Name, c.Err)
		}
		if c.OpenFor > openFor+openFor/10 { // a tenth at random
			findings[openedForTooLong] = fmt.Sprintf("%s: %v, %v", c.Name, c.OpenFor, c.Err)
		}
	}
}

// during lets the traffic go on for a time.
func (s *shop) during(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	<-t.C
}

// afterwards lets the traffic go on with everything well. After OpenFor no breaker is
// open, and from then on none opens: only answers come.
func (s *shop) afterwards(findings map[string]string) {
	s.during(openFor)
	for name, b := range s.breakers {
		// On a machine that is too slow for the traffic, the probes time out: after 10s there is less of it.
		began := time.Now()
		for ; b.State() != breaker.Closed; s.during(10 * time.Millisecond) {
			s.sparse.Store(time.Since(began) > 10*time.Second)
			if s.judgeOpenings(findings); findings[openedForTooLong] != "" || time.Since(began) > 2*time.Minute {
				findings[stayedOpen] = fmt.Sprintf("%s: %+v", name, b.Stats())
				break
			}
		}
		s.sparse.Store(false)
	}
	before := len(s.allOpened())
	s.during(openFor / 2)
	for _, c := range s.allOpened()[before:] {
		if !errors.Is(c.Err, context.DeadlineExceeded) { // which is how slow this machine is
			findings[openedByAnAnswer] = fmt.Sprintf("%s: %v", c.Name, c.Err)
		}
	}
}

func (s *shop) allOpened() []breaker.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.opened
}

func (s *shop) openings(name string) (n int) {
	for _, c := range s.allOpened() {
		if c.Name == name {
			n++
		}
	}
	return n
}

// begin starts the traffic; what it returns ends it.
func (s *shop) begin() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	every := func(d time.Duration, do func(ctx context.Context, i int)) {
		work.Go(func() {
			tick := time.NewTicker(d)
			defer tick.Stop()
			for i := 0; ; i++ {
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
					if i%50 == 0 || !s.sparse.Load() {
						work.Go(func() { do(ctx, i) })
					}
				}
			}
		})
	}
	within := func(d time.Duration, do func(context.Context)) func(context.Context, int) {
		return func(ctx context.Context, _ int) {
			ctx, cancel := context.WithTimeout(ctx, d)
			defer cancel()
			do(ctx)
		}
	}
	// Half of the users that are asked for do not exist.
	every(10*time.Millisecond, within(2*time.Second, func(ctx context.Context) {
		_ = s.get(ctx, fmt.Sprintf("/user/%d", rand.IntN(2*knownID)))
	}))
	// Users change.
	every(50*time.Millisecond, within(2*time.Second, func(ctx context.Context) {
		_ = s.users.Write(ctx, rand.IntN(knownID), func(context.Context) error { return nil })
	}))
	// Browsers that leave.
	every(20*time.Millisecond, within(20*time.Millisecond, func(ctx context.Context) { _ = s.get(ctx, "/slow") }))
	// Payments that do not exist, callers in a hurry, and a header that cannot be sent.
	every(20*time.Millisecond, within(2*time.Second, func(ctx context.Context) { s.look(ctx, s.client, "1") }))
	every(50*time.Millisecond, within(time.Millisecond, func(ctx context.Context) { s.look(ctx, s.client, "1") }))
	every(20*time.Millisecond, within(2*time.Second, func(ctx context.Context) { s.look(ctx, s.client, "1\n") }))
	every(50*time.Millisecond, within(1500*time.Millisecond, func(ctx context.Context) { s.look(ctx, s.old, "1") }))
	// Orders: some customers' cards are declined, and some things are sold out.
	every(25*time.Millisecond, func(ctx context.Context, i int) {
		id := fmt.Sprintf("order-%d", i)
		switch i % 5 {
		case 3:
			id += "-declined"
		case 4:
			id += "-soldout"
		}
		if _, err := saga.Register(s.runner, s.order).Start(ctx, id, order{Customer: id}); err == nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.orders = append(s.orders, id)
		}
	})
	return func() {
		cancel()
		work.Wait()
	}
}

func (s *shop) stuck() []*saga.Instance {
	page, _, err := s.runner.List(context.Background(), saga.Filter{Status: []saga.Status{saga.Stuck}, Limit: 1000})
	require.NoError(s.t, err)
	return page
}

// settle waits until every saga has ended and compares what was paid for with what
// was ordered.
func (s *shop) settle(findings map[string]string) {
	under := []saga.Status{saga.Running, saga.Compensating}
	deadline := time.Now().Add(5 * time.Minute)
	for {
		page, _, err := s.runner.List(context.Background(), saga.Filter{Status: under, Limit: 1})
		require.NoError(s.t, err)
		if len(page) == 0 {
			break
		}
		if time.Now().After(deadline) {
			findings[neverEnded] = fmt.Sprintf("%+v", page[0])
			break
		}
		s.during(50 * time.Millisecond)
	}
	if stuck := s.stuck(); len(stuck) > 0 {
		findings[stuckSagas] = fmt.Sprintf("%d: %s", len(stuck), stuck[0].LastError)
	}
	placed := map[string]bool{}
	rows, err := s.db.Query(`SELECT id FROM orders`)
	require.NoError(s.t, err)
	defer rows.Close()
	for rows.Next() {
		var id string
		require.NoError(s.t, rows.Scan(&id))
		placed[id] = true
	}
	require.NoError(s.t, rows.Err())
	wrong := 0
	for _, id := range s.orders {
		if s.payments.charged(id) != placed[id] {
			wrong++
		}
	}
	if wrong > 0 {
		findings[chargedForNothing] = fmt.Sprintf("%d of %d", wrong, len(s.orders))
	}
}
