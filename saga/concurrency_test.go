package saga_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/store"
)

// A crew counts the sagas of each definition whose step is at work.
type crew struct {
	mu   sync.Mutex
	now  map[string]map[string]int // by definition and command
	most map[string]int
}

func newCrew() *crew {
	return &crew{now: map[string]map[string]int{}, most: map[string]int{}}
}

// works returns a definition of one step that takes some time.
func (c *crew) works(name string, concurrency int, takes func() time.Duration) *saga.Saga[trip] {
	st := step("work")
	st.Attempts = -1
	st.Do = func(ctx context.Context, _ *trip) error {
		id := saga.CommandFrom(ctx).ID
		c.mu.Lock()
		if c.now[name] == nil {
			c.now[name] = map[string]int{}
		}
		c.now[name][id]++
		c.most[name] = max(c.most[name], len(c.now[name]))
		c.mu.Unlock()
		defer func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.now[name][id]--; c.now[name][id] == 0 {
				delete(c.now[name], id)
			}
		}()
		select {
		case <-time.After(takes()):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return &saga.Saga[trip]{Name: name, Concurrency: concurrency, Steps: []saga.Step[trip]{st}}
}

func (c *crew) mostOf(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.most[name]
}

func lasting(d time.Duration) func() time.Duration { return func() time.Duration { return d } }

// enqueue starts sagas that a runner then has to claim.
func enqueue(t *testing.T, st store.Store, sg *saga.Saga[trip], first, n int) {
	t.Helper()
	idle := saga.NewRunner(st, saga.RunnerConfig{})
	saga.Register(idle, sg)
	for i := first; i < first+n; i++ {
		_, err := saga.Start(t.Context(), idle, sg, fmt.Sprint(sg.Name, "-", i), trip{})
		require.NoError(t, err)
	}
}

func requireCompleted(t *testing.T, r *saga.Runner, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	_, err := result[trip](ctx, r, id)
	require.NoError(t, err, id)
}

func TestARunnerHoldsNoMoreOfADefinitionThanItsConcurrency(t *testing.T) {
	for name, start := range map[string]func(*testing.T, store.Store, *saga.Runner, *saga.Saga[trip]){
		"claimed": func(t *testing.T, st store.Store, _ *saga.Runner, sg *saga.Saga[trip]) {
			enqueue(t, st, sg, 0, 100)
		},
		"started here": func(t *testing.T, _ store.Store, r *saga.Runner, sg *saga.Saga[trip]) {
			for i := range 100 {
				_, err := saga.Start(t.Context(), r, sg, fmt.Sprint(sg.Name, "-", i), trip{})
				require.NoError(t, err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCrew()
				sg, st := c.works("trip", 8, lasting(time.Second)), saga.NewMemory()
				r, _ := begin(t, st, saga.RunnerConfig{}, sg)
				begun := time.Now()
				start(t, st, r, sg)
				for i := range 100 {
					requireCompleted(t, r, fmt.Sprint("trip-", i))
				}
				require.Equal(t, 8, c.mostOf("trip"))
				require.LessOrEqual(t, time.Since(begun), 15*time.Second, "it does not wait for the next poll")
				require.LessOrEqual(t, r.Stats().Claimed, int64(100), "what may not begin is not claimed")
				require.EqualValues(t, 100, total(r).Completed)
			})
		})
	}
}

// Of a long backlog, the runner may hold two sagas. Sagas of another definition begin as soon
// as the runner asks for them.
func TestABoundedBacklogLeavesThePlacesToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, store := newCrew(), saga.NewMemory()
		many, few := c.works("many", 2, lasting(time.Minute)), c.works("few", 0, lasting(time.Minute))
		enqueue(t, store, many, 0, 1000)
		begin(t, store, saga.RunnerConfig{Concurrency: 12}, many, few)
		time.Sleep(10 * time.Second)
		enqueue(t, store, few, 0, 10)
		time.Sleep(1001 * time.Millisecond)
		require.Equal(t, 10, c.mostOf("few"))
		require.Equal(t, 2, c.mostOf("many"))
	})
}

func TestAnUpdateOfTheRunnerKeepsTheBoundOfADefinition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, store := newCrew(), saga.NewMemory()
		sg := c.works("trip", 6, lasting(time.Second))
		enqueue(t, store, sg, 0, 1000)
		r, _ := begin(t, store, saga.RunnerConfig{Concurrency: 3}, sg)
		for _, places := range []int{3, 64, 2, 6, 5, 1000} {
			require.NoError(t, r.Update(func(cfg *saga.RunnerConfig) { cfg.Concurrency = places }))
			time.Sleep(5 * time.Second)
			c.mu.Lock()
			c.most["trip"] = 0
			c.mu.Unlock()
			time.Sleep(5 * time.Second)
			require.LessOrEqual(t, c.mostOf("trip"), min(places, 6))
			require.Greater(t, c.mostOf("trip"), min(places, 6)*3/4, "until so few are left it does not claim again")
		}
	})
}

func TestEachVersionOfADefinitionHasItsOwnConcurrency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, store := newCrew(), saga.NewMemory()
		first, second := c.works("trip", 2, lasting(time.Second)), c.works("trip", 3, lasting(time.Second))
		second.Version = 1
		enqueue(t, store, first, 0, 50)
		enqueue(t, store, second, 50, 50)
		r, _ := begin(t, store, saga.RunnerConfig{}, first, second)
		for i := range 100 {
			requireCompleted(t, r, fmt.Sprint("trip-", i))
		}
		require.Equal(t, 5, c.mostOf("trip"))
	})
}

// A parent that waits holds no place, also none of its definition.
func TestChildrenKeepTheConcurrencyOfTheirDefinition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, store := newCrew(), saga.NewMemory()
		child := c.works("child", 3, lasting(time.Second))
		parent := &saga.Saga[trip]{Name: "parent", Concurrency: 1, Steps: []saga.Step[trip]{{
			Name: "children", Saga: saga.ChildrenOf(child, func(*trip) ([]trip, error) { return make([]trip, 20), nil }, nil),
		}}}
		enqueue(t, store, parent, 0, 3)
		r, _ := begin(t, store, saga.RunnerConfig{}, parent, child)
		begun := time.Now()
		for i := range 3 {
			requireCompleted(t, r, fmt.Sprint("parent-", i))
		}
		require.Equal(t, 3, c.mostOf("child"))
		require.Less(t, time.Since(begun), 40*time.Second)
	})
}

// A forgetting store lets leases end while their sagas are at work.
type forgetting struct {
	store.Store
	rng func(n int) int
}

func (f *forgetting) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	if f.rng(3) == 0 {
		return nil, errTooLong
	}
	return f.Store.Heartbeat(ctx, req)
}

// Random definitions, with and without bounds, of which sagas are started here and elsewhere,
// by runners whose places and leases come and go: no runner has more of a definition at work
// than its Concurrency, no place is lost, and each saga ends.
func TestConcurrencyOfDefinitionsStress(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				rng := rand.New(rand.NewPCG(seed, 7))
				pick := func(n int) int {
					mu.Lock()
					defer mu.Unlock()
					return rng.IntN(n)
				}
				takes := func() time.Duration { return time.Duration(1+pick(3000)) * time.Millisecond }
				st := &forgetting{saga.NewMemory(), pick}
				var crews []*crew
				var runners []*saga.Runner
				definitions := make([][]*saga.Saga[trip], 1+pick(2)) // by runner
				bounds := []int{pick(4), pick(4), 1 + pick(3), 0}
				for i := range definitions {
					c := newCrew()
					for d, bound := range bounds {
						definitions[i] = append(definitions[i], c.works(fmt.Sprint("trip-", d), bound, takes))
					}
					r, _ := begin(t, store.Store(st), saga.RunnerConfig{
						Concurrency: 1 + pick(12), LeaseTTL: 2 * time.Second, MaxTakeovers: -1, OnEvent: silent,
					}, definitions[i]...)
					crews, runners = append(crews, c), append(runners, r)
				}
				var ids []string
				for i := range 120 {
					n, d := pick(len(runners)), pick(len(bounds))
					switch pick(8) {
					case 0:
						time.Sleep(takes())
					case 1:
						require.NoError(t, runners[n].Update(func(cfg *saga.RunnerConfig) { cfg.Concurrency = 1 + pick(12) }))
					case 2, 3:
						enqueue(t, st, definitions[0][d], i, 1)
						ids = append(ids, fmt.Sprint("trip-", d, "-", i))
					default:
						ids = append(ids, fmt.Sprint("trip-", d, "-", i))
						_, err := saga.Start(t.Context(), runners[n], definitions[n][d], ids[len(ids)-1], trip{})
						require.NoError(t, err)
					}
				}
				for _, id := range ids {
					requireCompleted(t, runners[0], id)
				}
				time.Sleep(5 * time.Second)
				for d, bound := range bounds {
					name := fmt.Sprint("trip-", d)
					for i, c := range crews {
						if bound > 0 {
							require.LessOrEqual(t, c.mostOf(name), bound, name)
						}
						require.Zero(t, runners[i].Stats().Held)
					}
				}
				// Each place is there still.
				for i, r := range runners {
					require.NoError(t, r.Update(func(cfg *saga.RunnerConfig) { cfg.Concurrency = 64 }))
					for d, bound := range bounds {
						name := fmt.Sprint("trip-", d)
						crews[i].mu.Lock()
						crews[i].most[name] = 0
						crews[i].mu.Unlock()
						for k := range bound {
							_, err := saga.Start(t.Context(), r, definitions[i][d], fmt.Sprint("last-", i, d, k), trip{})
							require.NoError(t, err)
						}
						synctest.Wait()
						require.Equal(t, bound, crews[i].mostOf(name))
					}
				}
			})
		})
	}
}

// A runner that has less places than definitions claims a saga of each in turn.
func TestDefinitionsTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, store := newCrew(), saga.NewMemory()
		a, b := c.works("a", 0, lasting(time.Minute)), c.works("b", 0, lasting(time.Minute))
		enqueue(t, store, a, 0, 2)
		enqueue(t, store, b, 0, 2)
		ended := make(chan string, 4)
		begin(t, store, saga.RunnerConfig{Concurrency: 1, OnEvent: on(saga.EventCompleted, func(e saga.Event) { ended <- e.Saga })}, a, b)
		for _, next := range []string{"a", "b", "a", "b"} {
			require.Equal(t, next, <-ended)
		}
	})
}

// A runner whose places, all or those for a definition, are taken by sagas that it has started
// claims those that wait as soon as there is a place.
func TestAPlaceIsTakenAtOnce(t *testing.T) {
	for name, places := range map[string]struct{ ofDefinition, ofRunner int }{"definition": {1, 0}, "runner": {0, 1}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, store := newCrew(), saga.NewMemory()
				sg := c.works("trip", places.ofDefinition, lasting(10*time.Second))
				r, _ := begin(t, store, saga.RunnerConfig{Poll: 3 * time.Second, Concurrency: places.ofRunner}, sg)
				_, err := saga.Start(t.Context(), r, sg, "trip-0", trip{})
				require.NoError(t, err)
				begun := time.Now()
				enqueue(t, store, sg, 1, 1)
				requireCompleted(t, r, "trip-1")
				require.Less(t, time.Since(begun), 20*time.Second+time.Millisecond)
			})
		})
	}
}

// The place of a child is kept while it is started, for which the store takes some time.
func TestTheStartOfAChildKeepsItsPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, g := newCrew(), &gate{Store: saga.NewMemory()}
		child := c.works("child", 1, lasting(time.Minute))
		parent := &saga.Saga[trip]{Name: "parent", Steps: []saga.Step[trip]{{
			Name: "child", Saga: saga.ChildOf(child, func(*trip) (trip, error) { return trip{}, nil }, nil),
		}}}
		r, _ := begin(t, store.Store(g), saga.RunnerConfig{}, parent, child)
		g.start = func(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
			if req.Saga == "child" {
				enqueue(t, g.Store, child, 0, 1)
				r.Wake()
				time.Sleep(time.Second)
			}
			return g.Store.Start(ctx, req)
		}
		_, err := saga.Start(t.Context(), r, parent, "parent-1", trip{})
		require.NoError(t, err)
		requireCompleted(t, r, "parent-1")
		requireCompleted(t, r, "child-0")
		require.Equal(t, 1, c.mostOf("child"))
	})
}

// A startless store answers no Start until the test says so, and then fails.
type startless struct {
	store.Store
	asked, fail chan struct{}
}

func (s *startless) Start(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
	if req.ID != "lost" {
		return s.Store.Start(ctx, req)
	}
	close(s.asked)
	<-s.fail
	return store.Record{}, false, errTooLong
}

// A claim that comes while a Start has the last place of a definition leaves a saga behind. If
// the Start fails, that saga has the place at once.
func TestThePlaceOfAStartThatFailsIsTakenAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrew()
		st := &startless{saga.NewMemory(), make(chan struct{}), make(chan struct{})}
		sg := c.works("trip", 2, lasting(time.Minute))
		r, _ := begin(t, store.Store(st), saga.RunnerConfig{Poll: time.Hour, LeaseTTL: time.Hour}, sg)
		_, err := saga.Start(t.Context(), r, sg, "held", trip{})
		require.NoError(t, err)
		go func() { _, _ = saga.Start(t.Context(), r, sg, "lost", trip{}) }()
		<-st.asked
		enqueue(t, st, sg, 0, 1)
		r.Wake()
		synctest.Wait()
		require.Equal(t, 1, c.mostOf("trip"))
		close(st.fail)
		synctest.Wait()
		require.Equal(t, 2, c.mostOf("trip"))
	})
}

// What a claim has taken may have ended before the claim is over: what it has left behind does
// not wait for the next Poll.
func TestSagasThatEndBeforeTheirClaimMakeRoomAtOnce(t *testing.T) {
	for name, test := range map[string]struct{ ofDefinition, ofRunner int }{"definition": {1, 0}, "runner": {0, 1}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const n = 400
				begun, st := time.Now(), saga.NewMemory()
				nothing := saga.Step[trip]{Name: "nothing", Do: func(context.Context, *trip) error { return nil }, ReadOnly: true}
				sg := &saga.Saga[trip]{Name: "trip", Concurrency: test.ofDefinition, Steps: []saga.Step[trip]{nothing}}
				enqueue(t, st, sg, 0, n)
				r, _ := begin(t, st, saga.RunnerConfig{Concurrency: test.ofRunner, Poll: time.Hour, LeaseTTL: 4 * time.Hour}, sg)
				for total(r).Completed < n {
					time.Sleep(time.Second)
				}
				require.Less(t, time.Since(begun), time.Minute)
			})
		})
	}
}

// A runner claims a saga of its own whose lease is over for the store, but not here, as after
// a suspension, in which its clock may have stood still: the attempt before ends.
func TestARunnerLosesASagaThatItClaimsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, sg := saga.NewMemory(), slow(time.Hour)
		r, _ := begin(t, st, saga.RunnerConfig{OnEvent: silent}, sg)
		in := mustStart(t, r, sg)
		_, err := st.Heartbeat(t.Context(), store.HeartbeatRequest{Owner: in.Owner, LeaseTTL: 1, Held: []store.Held{{ID: in.ID, Epoch: in.Epoch}}})
		require.NoError(t, err)
		time.Sleep(time.Millisecond)
		r.Wake()
		synctest.Wait()
		stats := r.Stats()
		require.Equal(t, []int64{1, 1, 1}, []int64{stats.Held, stats.InFlight, stats.Lost})
	})
}

// A runner takes over a saga of its own, whose lease has ended, while an attempt that ignores
// its ctx goes on: the saga has one place.
func TestASagaThatIsTakenOverFromItselfHasOnePlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, st := newCrew(), &forgetting{saga.NewMemory(), func(int) int { return 0 }}
		sg := c.works("trip", 2, lasting(500*time.Millisecond))
		var attempts atomic.Int64
		do := sg.Steps[0].Do
		sg.Steps[0].Do = func(ctx context.Context, s *trip) error {
			if attempts.Add(1) == 1 {
				time.Sleep(10 * time.Second)
			}
			return do(ctx, s)
		}
		r, _ := begin(t, store.Store(st), saga.RunnerConfig{LeaseTTL: time.Second, OnEvent: silent}, sg)
		for round := range 3 {
			attempts.Store(0)
			_, err := saga.Start(t.Context(), r, sg, fmt.Sprint("trip-", round), trip{})
			require.NoError(t, err)
			requireCompleted(t, r, fmt.Sprint("trip-", round))
			time.Sleep(20 * time.Second)
			require.Zero(t, r.Stats().Held)
		}
		for i := range 2 {
			_, err := saga.Start(t.Context(), r, sg, fmt.Sprint("last-", i), trip{})
			require.NoError(t, err)
		}
		synctest.Wait()
		require.Equal(t, 2, c.mostOf("trip"))
	})
}
