package history_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/redis/go-redis/v9"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle"
)

// A Shared that refuses in outages admits at most Burst + Rate x time over any interval,
// whatever happens, and a Burst more for each time that Redis has lost its data. It refuses
// only if calls may have taken what there was. Each decision is made at some moment
// between the call and its return, by the clock of Redis, which is that of the machine.
//
// One that limits locally admits the parts of its instances more for each outage in the
// interval, and its part of the Rate while it is cut off and others are not. One that admits
// all in outages has no such bound, but pays afterwards, from its Burst and as much of the time
// to come. Neither refuses a call because of an outage, nor otherwise without need: a call that
// was decided alone may take a token when Redis gets it, and is owed until Redis has answered
// its instance again, perhaps twice. An instance that decides alone refuses if it may have used
// up its own part.
func TestThrottle(t *testing.T) { search(t, &throttleTarget) }

var throttleTarget = target{name: "throttle", length: 4 * time.Second, worker: throttleWorker, begin: throttleBegin, check: throttleCheck}

type throttlePlan struct {
	Rate                float64
	Burst, Instances    int
	Timeout, RetryEvery time.Duration
	Pause               time.Duration // of a client, at most
	Turn                time.Duration // the processes call in turns of so long; 0: all at a time
	Restarts            bool
	OnOutage            throttle.OutagePolicy
}

func throttleBegin(r *run) {
	rng := r.rng
	p := throttlePlan{
		Rate: []float64{5, 50, 200}[rng.IntN(3)], Burst: []int{1, 5, 20}[rng.IntN(3)], Instances: 2 + rng.IntN(4),
		Timeout: 100 * time.Millisecond, RetryEvery: 50 * time.Millisecond,
		Pause: time.Duration([]int{10, 50, 200}[rng.IntN(3)]) * time.Millisecond, Restarts: rng.IntN(3) == 0,
		// They take turns, so that few histories have all of them.
		OnOutage: []throttle.OutagePolicy{throttle.RefuseAll, throttle.LimitLocally, throttle.RefuseAll, throttle.LimitLocally, throttle.AdmitAll}[r.seed%5],
	}
	if p.OnOutage == throttle.LimitLocally { // so that what is forgotten is more than what an instance gets that is cut off
		p.Rate, p.Burst, p.Pause, p.Restarts = min(p.Rate, 50), max(p.Burst, 5), min(p.Pause, 50*time.Millisecond), false
	}
	if p.OnOutage == throttle.LimitLocally && r.seed%5 == 1 { // so that the instance that calls has its part, and the others use none of theirs
		p.Rate, p.Burst, p.Pause, p.Turn = 50, 20, 200*time.Millisecond, 500*time.Millisecond
	}
	if p.OnOutage == throttle.AdmitAll { // so that a debt lasts
		p.Rate, p.Burst, p.Pause = 5, max(p.Burst, 5), min(p.Pause, 50*time.Millisecond)
	}
	r.plan, r.calm = p, []time.Duration{200 * time.Millisecond, time.Second}[rng.IntN(2)]
	server := services.NewRedis(r)
	if p.OnOutage == throttle.LimitLocally { // all are cut off at a time
		for range p.Instances {
			r.start(server.Addr)
		}
		r.troubles = [][]trouble{{{redisStopped, func(rng *rand.Rand) {
			server.Pause()
			time.Sleep(between(rng, p.Timeout, 10*p.Timeout))
			server.Resume()
		}}}}
		return
	}
	var proxies []*faultproxy.Proxy
	for range p.Instances {
		proxies = append(proxies, faultproxy.New(r, server.Addr))
		r.start(proxies[len(proxies)-1].Addr())
	}
	bad := append(network(proxies, p.Timeout, 3*p.Timeout), trouble{redisStopped, func(rng *rand.Rand) {
		server.Pause()
		time.Sleep(between(rng, time.Millisecond, 3*p.Timeout))
		server.Resume()
	}})
	if p.Restarts {
		bad = append(bad, trouble{redisRestarted, func(*rand.Rand) {
			server.Kill()
			server.Start()
		}})
	}
	r.troubles = [][]trouble{r.disturb(3 * p.Timeout), bad}
}

const redisRestarted, redisStopped = "Redis restarted", "Redis stopped"

// A throttleOp is one decision. It is unknown whether a call that was neither admitted nor
// refused has taken a token.
type throttleOp struct {
	Admitted, Refused bool
	Outage            bool // refused because of one
	Unasked           bool // admitted by a process that admits all in an outage, for certain
	Alone             bool // no decision, but a time in which the process decides alone
}

func throttleWorker(ctx context.Context, w *worker) {
	var plan throttlePlan
	if err := json.Unmarshal(w.Plan, &plan); err != nil {
		panic(err)
	}
	client := redis.NewClient(&redis.Options{Addr: w.Addr, ContextTimeoutEnabled: true, MaxRetries: -1, DialTimeout: plan.Timeout})
	shared := throttle.NewShared(throttle.SharedConfig{
		Name: "history", Rate: plan.Rate, Burst: plan.Burst, Instances: plan.Instances, OnOutage: plan.OnOutage,
		Timeout: plan.Timeout, RetryEvery: plan.RetryEvery,
		Eval: resilienceredis.Eval(client),
	})
	log := newJournal[throttleOp](w)
	var present atomic.Pointer[entry[throttleOp]] // the outage
	defer shared.Observe(func(_ context.Context, e throttle.Event) {
		switch e.Kind {
		case throttle.EventOutageBegan: // and lasts, if the process is killed
			o := &entry[throttleOp]{Process: w.Number, Client: 4, ID: int(log.last.Add(1)), Call: now(), Return: never, Op: throttleOp{Alone: true}}
			log.write(o)
			present.Store(o)
		case throttle.EventRecovered:
			if o := present.Swap(nil); o != nil {
				o.Return = now()
				log.write(o)
			}
		}
	})()
	var all sync.WaitGroup
	for i := range 4 {
		rng := w.rand(i)
		all.Go(func() {
			for pause(ctx, between(rng, 0, plan.Pause)) {
				if plan.Turn > 0 && present.Load() == nil && int(now()/int64(plan.Turn))%plan.Instances != w.Place {
					continue
				}
				log.do(i, throttleOp{}, func(op *throttleOp, _ func()) {
					d, err := shared.Admit(ctx, "")
					var limited *throttle.LimitedError
					op.Admitted = err == nil
					op.Unasked = err == nil && plan.OnOutage == throttle.AdmitAll && d.ResetAfter == 0 // Redis knows when the token is there again
					if errors.As(err, &limited) {
						op.Refused, op.Outage = limited.Reason == throttle.OverLimit, limited.Reason == throttle.Outage
					}
				})
			}
		})
	}
	all.Wait()
}

// never is later than anything in a history.
const never = 1 << 62

func throttleCheck(r *run) *finding {
	plan := r.plan.(throttlePlan)
	var admitted, refused, taken, alone, outages []entry[throttleOp]
	calls := make(map[int][]entry[throttleOp]) // by process
	for _, e := range read[throttleOp](r) {
		if !e.Op.Alone {
			calls[e.Process] = append(calls[e.Process], e)
		}
		switch {
		case e.Op.Alone:
			r.count("outages", 1)
			outages = append(outages, e)
			alone = append(alone, cutOff(r, plan, e)...)
			continue
		case e.Op.Outage && plan.OnOutage != throttle.RefuseAll:
			return &finding{what: "a call is refused because of an outage", model: planModel(plan), ops: planOps([]entry[throttleOp]{e})}
		case e.Op.Refused:
			refused = append(refused, e)
			r.count("refused", 1)
			continue
		case e.Op.Admitted:
			admitted = append(admitted, e)
			r.count("admitted", 1)
		default:
			e.Return = never // a request that is late may take its token then
			r.count("unknown", 1)
		}
		taken = append(taken, e)
	}
	if plan.OnOutage != throttle.AdmitAll {
		if most := tooMany(r, plan, admitted, alone); most != nil {
			return &finding{what: "more is admitted than the plan has", model: planModel(plan), ops: planOps(most)}
		}
	}
	decidedAlone := make(map[id]bool)
	if plan.OnOutage != throttle.RefuseAll {
		taken = nil
		for _, own := range calls {
			for i, e := range own {
				until, isAlone := plan.decidedAlone(e, outages)
				if !isAlone {
					if !e.Op.Refused {
						taken = append(taken, e)
					}
					continue
				}
				decidedAlone[id{e.Process, e.ID}] = true
				e.Return = plan.paid(own[i:], until, outages)
				taken = append(taken, e)
				if e.Op.Admitted {
					taken = append(taken, e, e) // its debt
				}
			}
		}
		slices.SortFunc(taken, func(a, b entry[throttleOp]) int { return cmp.Compare(a.Call, b.Call) })
	}
	if plan.OnOutage == throttle.AdmitAll {
		for _, o := range outages {
			if early := unpaid(r, plan, o, outages, calls); early != nil {
				return &finding{what: "what was admitted alone costs nothing", model: planModel(plan), ops: planOps(early)}
			}
		}
	}
	part := plan
	part.Rate, part.Burst = plan.Rate/float64(plan.Instances), max(1, plan.Burst/plan.Instances)
	for _, e := range refused {
		before := tooFew(plan, taken, e)
		if before != nil && plan.OnOutage == throttle.LimitLocally && decidedAlone[id{e.Process, e.ID}] {
			own := slices.DeleteFunc(slices.Clone(calls[e.Process]), func(e entry[throttleOp]) bool { return e.Op.Refused })
			before = tooFew(part, own, e)
		}
		if before != nil {
			return &finding{what: "a call is refused although there was a token", model: planModel(plan), ops: planOps(before)}
		}
	}
	return nil
}

// An id is the process and the ID of an operation.
type id struct{ process, id int }

// decidedAlone reports whether a call may have been decided without Redis, and until when that
// may be so of calls beside it.
func (p throttlePlan) decidedAlone(e entry[throttleOp], outages []entry[throttleOp]) (until int64, alone bool) {
	until, alone = e.Return, e.Op.Unasked || e.Return == 0 || e.Return-e.Call >= int64(p.Timeout*9/10)
	for _, o := range outages {
		if o.Process == e.Process && e.Call <= o.Return && e.Return >= o.Call-int64(p.Timeout) {
			until, alone = max(until, o.Return), true
		}
	}
	return until, alone
}

// unpaid returns calls that Redis admitted although an instance had paid for so much that it
// had admitted alone, in an outage o that is over, that nothing was left for a Burst / Rate; or
// nil.
func unpaid(r *run, plan throttlePlan, o entry[throttleOp], outages []entry[throttleOp], calls map[int][]entry[throttleOp]) (early []entry[throttleOp]) {
	last := o.Return + int64(float64(plan.Burst)/plan.Rate*1e9) - 4*int64(plan.Timeout) // a process may have been stopped
	for _, fault := range r.faults {
		if o.Return == never || fault.Description == redisRestarted && fault.End >= o.Call && fault.Start <= last {
			return nil
		}
	}
	length := float64(o.Return-o.Call)/1e9 + 2*plan.Timeout.Seconds()
	owed := -8 - length/plan.RetryEvery.Seconds() - length*plan.Rate/float64(plan.Instances) // late answers, and what has refilled
	paid := int64(0)
	for _, e := range calls[o.Process] {
		switch slow := e.Return == 0 || e.Return-e.Call >= int64(plan.Timeout*9/10); {
		case e.Return != 0 && e.Return < o.Call, paid > 0:
		case e.Call < o.Return && e.Return < o.Return && !slow:
			if e.Call > o.Call && e.Op.Admitted {
				owed++
			}
		case slow && e.Return > o.Return, slow && e.Return == 0: // it may have taken the debt along
			return nil
		case e.Call > o.Return:
			paid = e.Return
		}
	}
	if paid == 0 || owed < float64(2*plan.Burst+1) {
		return nil
	}
	for _, own := range calls {
		for _, e := range own {
			if _, alone := plan.decidedAlone(e, outages); !alone && e.Op.Admitted && e.Call > paid && e.Return < last {
				early = append(early, e)
			}
		}
	}
	return early
}

// paid returns when Redis has been told of a call that was decided alone until a time: it is
// the first of calls, which are those of its process.
func (p throttlePlan) paid(calls []entry[throttleOp], until int64, outages []entry[throttleOp]) int64 {
	if p.OnOutage == throttle.AdmitAll { // its network may hold a request back, its process may be killed
		return never
	}
	for _, e := range calls {
		if _, alone := p.decidedAlone(e, outages); e.Call > until && !alone {
			return e.Return + int64(p.Timeout)
		}
	}
	return never
}

// over returns what the plan has for an interval, in tokens.
func (p throttlePlan) over(d int64) float64 {
	return float64(p.Burst) + p.Rate*float64(d)/1e9*1.0001 + 0.01
}

// cutOff returns when a process decided alone, or had not yet told Redis of what it had
// admitted alone, while Redis may have answered others.
func cutOff(r *run, plan throttlePlan, e entry[throttleOp]) (times []entry[throttleOp]) {
	e.Call, e.Return = e.Call-int64(plan.Timeout), e.Return+int64(plan.Timeout+plan.Pause)
	for _, fault := range r.faults { // in their order
		if fault.Description != redisStopped || fault.End <= e.Call || fault.Start >= e.Return {
			continue
		}
		before := e
		before.Return = fault.Start
		times, e.Call = append(times, before), fault.End
	}
	return append(times, e)
}

// tooMany returns the fewest calls that were admitted within an interval that has not so
// many tokens, or nil.
func tooMany(r *run, plan throttlePlan, admitted, alone []entry[throttleOp]) (most []entry[throttleOp]) {
	for i, first := range admitted { // by their calls
		within := slices.Clone(admitted[i:])
		slices.SortFunc(within, func(a, b entry[throttleOp]) int { return cmp.Compare(a.Return, b.Return) })
		for n, last := range within {
			tokens := plan.over(last.Return - first.Call)
			for _, fault := range r.faults {
				switch meanwhile := fault.End >= first.Call && fault.Start <= last.Return; {
				case meanwhile && fault.Description == redisRestarted:
					tokens += float64(plan.Burst)
				case meanwhile && plan.OnOutage == throttle.LimitLocally:
					tokens += float64(plan.Instances * max(1, plan.Burst/plan.Instances))
				}
			}
			for _, e := range alone {
				tokens += plan.Rate / float64(plan.Instances) * max(0, float64(min(e.Return, last.Return)-max(e.Call, first.Call))/1e9)
			}
			if float64(n+1) > tokens && (most == nil || n+1 < len(most)) {
				most = within[:n+1]
			}
		}
	}
	return most
}

// tooFew returns the calls before one that was refused, if they cannot have taken the last
// token: the bucket was not full only if, since it was, so many were taken.
func tooFew(plan throttlePlan, taken []entry[throttleOp], refused entry[throttleOp]) []entry[throttleOp] {
	for from := len(taken) - 1; from >= 0; from-- {
		if taken[from].Call > refused.Return {
			continue
		}
		since := min(taken[from].Return, refused.Return) // the latest time at which it may have taken
		n := 0
		for _, e := range taken {
			if e.Return >= since && e.Call <= refused.Return {
				n++
			}
		}
		// A token less than the plan has is enough, and what was there when it was full.
		if float64(n)+1 >= float64(plan.Burst)+plan.Rate*float64(max(0, refused.Call-since))/1e9*0.9999-0.01 {
			return nil
		}
	}
	at := slices.IndexFunc(taken, func(e entry[throttleOp]) bool { return e.Call > refused.Return })
	if at < 0 {
		at = len(taken)
	}
	return append(slices.Clone(taken[max(0, at-plan.Burst-1):at]), refused)
}

func planOps(entries []entry[throttleOp]) (ops []porcupine.Operation) {
	for _, e := range entries {
		ret := e.Return
		if ret == never {
			ret = e.Call
		}
		ops = append(ops, porcupine.Operation{ClientId: e.Process*10 + e.Client, Input: e, Call: e.Call, Return: ret})
	}
	return ops
}

// planModel draws calls as the generic cell rate algorithm admits them.
func planModel(plan throttlePlan) porcupine.Model {
	type bucket struct{ now, full int64 } // the time, and when the bucket is full again
	each := int64(1e9 / plan.Rate)
	return porcupine.Model{
		Init: func() any { return bucket{} },
		Step: func(state, input, _ any) (bool, any) {
			s, e := state.(bucket), input.(entry[throttleOp])
			s.now = max(s.now, e.Call, s.full-int64(plan.Burst-1)*each)
			if !e.Op.Admitted {
				return true, state
			}
			s.full = max(s.full, s.now) + each
			return s.now <= e.Return, s
		},
		DescribeOperation: func(input, _ any) string {
			switch op := input.(entry[throttleOp]).Op; {
			case op.Admitted:
				return "admitted"
			case op.Refused:
				return "refused"
			}
			return "unknown"
		},
		DescribeState: func(state any) string { return fmt.Sprint(state) },
	}
}
