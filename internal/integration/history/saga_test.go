package history_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// A store of sagas is, for each id, a register of (epoch, seq, nonce) that Claim and Commit
// compare and swap, beside which a cancellation and the first signal of each name are kept.
// An operation without an answer takes effect once, late, or never.
func TestSaga(t *testing.T) { search(t, &sagaTarget) }

var sagaTarget = target{name: "saga", length: 3 * time.Second, worker: sagaWorker, begin: sagaBegin, check: sagaCheck}

type sagaPlan struct {
	Driver   string // of database/sql, or memory
	LeaseTTL time.Duration
	Timeout  time.Duration // of an operation
	Pause    time.Duration // of a client, at most
	Sagas    int           // at once
	Lost     int           // percentage of operations whose request or answer is lost, or late
}

func sagaBegin(r *run) {
	rng := r.rng
	ms := func(of ...int) time.Duration { return time.Duration(of[rng.IntN(len(of))]) * time.Millisecond }
	p := sagaPlan{
		Driver: []string{"pgx", "mysql", "sqlite", "memory"}[rng.IntN(4)], LeaseTTL: ms(5, 30, 100), Timeout: ms(50, 200),
		Pause: ms(2, 10, 30), Sagas: 1 + rng.IntN(5), Lost: []int{0, 5, 15}[rng.IntN(3)],
	}
	r.plan, r.calm = p, ms(200, 800)
	if p.Driver == "memory" {
		r.start("")
		r.troubles = [][]trouble{r.disturb(p.LeaseTTL)[:1]} // is not killed: what it knows would end with it
		return
	}
	r.db = newDatabase(r, p.Driver, 4*p.Timeout)
	require.NoError(r, sagaStore(r.db, p.Driver).(*sqlstore.Store).Migrate(r.Context()))
	proxies := r.db.start(r, 3)
	r.troubles = [][]trouble{r.disturb(2 * p.Timeout)}
	if len(proxies) > 0 {
		r.troubles = append(r.troubles, network(proxies, p.Timeout, 2*p.Timeout))
	}
}

func sagaStore(d *database, driver string) store.Store {
	if driver == "memory" {
		return saga.NewMemory()
	}
	return sqlstore.New(d.DB, map[string]sqlstore.Dialect{"pgx": sqlstore.PostgreSQL, "mysql": sqlstore.MySQL,
		"sqlite": sqlstore.SQLite}[driver], sqlstore.Config{})
}

// A sagaOp is one operation on one saga. A Claim is one for each saga that it may claim.
type sagaOp struct {
	Kind string // start, claim, commit, cancel, signal, signals, load
	ID   string
	// how it ended: ok, other (start: the saga existed), fenced, none (no saga); empty: unknown
	Done string `json:",omitempty"`

	Owner             string `json:",omitempty"` // of a start or a claim
	Epoch, Seq, Nonce int64  `json:",omitempty"` // of a commit; and of a start
	Log               int64  `json:",omitempty"` // entries
	Release, End      bool   `json:",omitempty"`
	Name              int    `json:",omitempty"` // of a signal
	Payload           string `json:",omitempty"`

	Got     *sagaRecord  `json:",omitempty"`
	Signals [2]string    `json:",omitzero"`
	Claimed []sagaRecord `json:",omitempty"` // before a claim is divided
}

// A sagaRecord is what the store has of a saga.
type sagaRecord struct {
	ID                string `json:",omitempty"`
	Epoch, Seq, Nonce int64
	Owner             string `json:",omitempty"`
	Ended, Canceled   bool
	Until             int64  `json:",omitempty"` // the end of the owner's lease, in microseconds; of a claim and a start
	Previous          string `json:",omitempty"`
}

func recordOf(rec store.Record) *sagaRecord {
	r := &sagaRecord{Epoch: rec.Epoch, Seq: rec.Seq, Nonce: rec.Nonce, Owner: rec.Owner, Ended: rec.Status.Ended(),
		Canceled: rec.CancelRequested}
	if rec.Owner != "" {
		r.Until = rec.WakeAt.UnixMicro()
	}
	return r
}

// Sagas are new after a while, so that the history of each is short.
const lifeOfSagas = 400 * time.Millisecond

type sagaProcess struct {
	sagaPlan
	*worker
	*journal[sagaOp]
	store store.Store

	mu    sync.Mutex
	known map[string]sagaRecord // as last seen
}

func sagaWorker(ctx context.Context, w *worker) {
	p := &sagaProcess{worker: w, journal: newJournal[sagaOp](w), known: make(map[string]sagaRecord)}
	if err := json.Unmarshal(w.Plan, &p.sagaPlan); err != nil {
		panic(err)
	}
	var d database
	if p.Driver != "memory" {
		var err error
		if d.DB, err = connect(p.Driver, w.Addr); err != nil {
			panic(err)
		}
	}
	p.store = sagaStore(&d, p.Driver)
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for rng := w.rand(i); pause(ctx, between(rng, 0, p.Pause)); {
				p.act(i, rng)
			}
		})
	}
	all.Wait()
}

// attempt calls fn, and loses some requests, some answers, and delivers some late.
func attempt[T any](p *sagaProcess, fn func(ctx context.Context) (T, error)) (none T, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), p.Timeout)
	defer cancel()
	if rand.IntN(100) >= p.Lost {
		return fn(ctx)
	}
	switch rand.IntN(3) {
	case 0:
	case 1:
		_, _ = fn(ctx)
	default:
		time.AfterFunc(rand.N(4*p.LeaseTTL), func() {
			ctx, cancel := context.WithTimeout(context.Background(), p.Timeout)
			defer cancel()
			_, _ = fn(ctx)
		})
	}
	return none, errLost
}

func (p *sagaProcess) act(client int, rng *rand.Rand) {
	generation := now() / int64(lifeOfSagas)
	id, def := fmt.Sprintf("%d.%d", generation, rng.IntN(p.Sagas)), store.Definition{Saga: fmt.Sprint(generation),
		Version: 1}
	switch n := rng.IntN(20); {
	case n < 4:
		req := store.StartRequest{ID: id, Saga: def.Saga, Version: 1, Status: saga.Running, State: []byte("{}"),
			Progress: []byte("{}"), Nonce: rng.Int64(), Log: make([]store.Entry, 1+rng.IntN(2))}
		if rng.IntN(2) == 0 {
			req.Owner, req.LeaseTTL = p.owner(), p.LeaseTTL
		}
		p.do(client, sagaOp{Kind: "start", ID: id, Nonce: req.Nonce, Owner: req.Owner, Log: int64(len(req.Log))},
			func(op *sagaOp, _ func()) {
				type answer struct {
					store.Record
					created bool
				}
				a, err := attempt(p, func(ctx context.Context) (answer, error) {
					rec, created, err := p.store.Start(ctx, req)
					return answer{rec, created}, err
				})
				if p.settle(op, a.Record, err); err == nil && !a.created {
					op.Done = "other"
				}
			})
	case n < 8:
		req := store.ClaimRequest{Owner: p.owner(), LeaseTTL: p.LeaseTTL, Limit: 1 + rng.IntN(3),
			Definitions: []store.Definition{def}}
		p.do(client, sagaOp{Kind: "claim", ID: def.Saga, Owner: req.Owner}, func(op *sagaOp, _ func()) {
			recs, err := attempt(p, func(ctx context.Context) ([]store.Record, error) { return p.store.Claim(ctx, req) })
			if err == nil {
				op.Done = "ok"
			}
			for _, rec := range recs {
				got := recordOf(rec)
				got.ID, got.Previous = rec.ID, rec.Previous
				op.Claimed = append(op.Claimed, *got)
				p.know(rec.ID, *got)
			}
		})
	case n < 14:
		rec, ok := p.recall(id)
		if !ok {
			return
		}
		if rng.IntN(10) == 0 { // of an execution that was lost
			rec.Epoch--
		}
		req := store.CommitRequest{
			ID: id, Epoch: rec.Epoch, Seq: rec.Seq, Nonce: rng.Int64(), Status: saga.Running, Progress: []byte("{}"),
			Log: make([]store.Entry, 1+rng.IntN(3)), Release: rng.IntN(3) == 0,
		}
		if req.Release && rng.IntN(10) == 0 {
			req.Status = saga.Completed
		}
		for done := ""; done == ""; { // an answer that was lost: once more, as it was
			p.do(client, sagaOp{Kind: "commit", ID: id, Epoch: req.Epoch, Seq: req.Seq, Nonce: req.Nonce,
				Log: int64(len(req.Log)), Release: req.Release, End: req.Status.Ended()}, func(op *sagaOp, _ func()) {
				rc, err := attempt(p, func(ctx context.Context) (store.Receipt, error) { return p.store.Commit(ctx, req) })
				switch {
				case err == nil:
					op.Done = "ok"
					p.know(id, sagaRecord{Epoch: req.Epoch, Seq: req.After()})
					op.Got = &sagaRecord{Canceled: rc.CancelRequested}
				case errors.Is(err, store.ErrFenced):
					op.Done = "fenced"
				}
				done = op.Done
			})
			if rng.IntN(2) == 0 {
				break
			}
		}
	case n < 15:
		p.do(client, sagaOp{Kind: "cancel", ID: id}, func(op *sagaOp, _ func()) {
			rec, err := attempt(p, func(ctx context.Context) (store.Record, error) {
				return p.store.Post(ctx, store.PostRequest{ID: id, Payload: []byte("why"), Cancel: true})
			})
			p.settle(op, rec, err)
		})
	case n < 17:
		name, payload := rng.IntN(2), p.owner()
		p.do(client, sagaOp{Kind: "signal", ID: id, Name: name, Payload: payload}, func(op *sagaOp, _ func()) {
			rec, err := attempt(p, func(ctx context.Context) (store.Record, error) {
				return p.store.Post(ctx, store.PostRequest{ID: id, Name: string(rune('a' + name)), Payload: []byte(payload)})
			})
			p.settle(op, rec, err)
		})
	case n < 18:
		p.look(client, sagaOp{Kind: "signals", ID: id}, func(op *sagaOp) {
			list, err := attempt(p, func(ctx context.Context) ([]store.Message, error) { return p.store.Messages(ctx, id) })
			if err == nil {
				op.Done = "ok"
			}
			for _, s := range list {
				op.Signals[s.Name[0]-'a'] = string(s.Payload)
			}
		})
	default:
		p.look(client, sagaOp{Kind: "load", ID: id}, func(op *sagaOp) {
			rec, err := attempt(p, func(ctx context.Context) (store.Record, error) { return p.store.Load(ctx, id) })
			p.settle(op, rec, err)
		})
	}
}

// owner returns a text that nobody else uses.
func (p *sagaProcess) owner() string {
	return fmt.Sprintf("%d.%d", p.Number, rand.Int64()) // nor does the process that follows one that was killed
}

// settle fills in how an operation that returns a record has ended.
func (p *sagaProcess) settle(op *sagaOp, rec store.Record, err error) {
	switch {
	case err == nil:
		op.Done, op.Got = "ok", recordOf(rec)
		p.know(op.ID, *op.Got)
	case errors.Is(err, saga.ErrNotFound):
		op.Done = "none"
	}
}

func (p *sagaProcess) know(id string, rec sagaRecord) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known[id] = rec
}

func (p *sagaProcess) recall(id string) (sagaRecord, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	rec, ok := p.known[id]
	return rec, ok
}

// A sagaState is a saga in the store.
type sagaState struct {
	exists  bool
	rec     sagaRecord
	signals [2]string
	last    bool // the history is over: what never had an answer had no effect
}

// rounding is that of the stores' times, in microseconds.
const rounding = 2000

// sagaStep takes an operation without an answer for one that took effect. It may be the
// last of all, after which nothing is read.
func sagaStep(s sagaState, op sagaOp, leaseTTL time.Duration) (bool, sagaState) {
	if op.Kind == "last" {
		s.last = true
		return true, s
	}
	if s.last {
		return op.Done == "", s
	}
	if op.Done == "none" {
		return !s.exists, s
	}
	effect := op.Done == "ok" || op.Done == ""
	ok := s.exists
	switch op.Kind {
	case "start":
		if effect {
			ok = !s.exists
			s.exists, s.rec = true, sagaRecord{Seq: op.Log, Nonce: op.Nonce, Owner: op.Owner}
			if op.Owner != "" {
				s.rec.Epoch = 1
				if op.Got != nil {
					s.rec.Until = op.Got.Until
				}
			}
		}
	case "claim":
		ok = ok && !s.rec.Ended
		previous := s.rec
		ok = ok && (op.Epoch == 0 || op.Epoch == s.rec.Epoch+1) // known of one without an answer
		s.rec.Epoch, s.rec.Owner, s.rec.Until = s.rec.Epoch+1, op.Owner, 0
		if op.Got != nil {
			s.rec.Until = op.Got.Until
			ok = ok && op.Got.Previous == previous.Owner && s.rec.Until-leaseTTL.Microseconds() >= previous.Until-rounding
		}
	case "commit":
		if op.Done == "ok" && ok && s.rec.Nonce == op.Nonce { // once more, as it was
			return op.Got.Canceled == s.rec.Canceled, s
		}
		matches := ok && s.rec.Epoch == op.Epoch && s.rec.Seq == op.Seq
		if op.Done == "fenced" {
			return !matches, s
		}
		ok = matches && (op.Got == nil || op.Got.Canceled == s.rec.Canceled)
		s.rec.Seq, s.rec.Nonce, s.rec.Ended = op.Seq+op.Log, op.Nonce, op.End
		if op.Release {
			s.rec.Owner, s.rec.Until = "", 0
		}
		return ok, s
	case "cancel":
		if op.Done == "" {
			ok = ok && !s.rec.Ended && !s.rec.Canceled
		}
		s.rec.Canceled = s.rec.Canceled || !s.rec.Ended
	case "signal":
		if op.Done == "" {
			ok = ok && s.signals[op.Name] == ""
		}
		if s.signals[op.Name] == "" {
			s.signals[op.Name] = op.Payload
		}
	case "signals":
		return s.signals == op.Signals, s
	}
	if op.Got != nil {
		got := *op.Got
		got.ID, got.Until, got.Previous = "", s.rec.Until, ""
		ok = ok && got == s.rec
	}
	return ok, s
}

// A commit without an answer may be seen before its repetition is answered.
func TestCommitThatIsRepeatedIsOne(t *testing.T) {
	at := func(client int, call, ret int64, op sagaOp) porcupine.Operation {
		return porcupine.Operation{ClientId: client, Input: op, Call: call, Return: ret}
	}
	once := sagaOp{Kind: "commit", Nonce: 7, Seq: 1, Log: 2}
	again := once
	again.Done, again.Got = "ok", &sagaRecord{}
	ops := []porcupine.Operation{
		at(1, 0, 1, sagaOp{Kind: "start", Done: "ok", Nonce: 6, Log: 1, Got: &sagaRecord{Seq: 1, Nonce: 6}}),
		at(1, 2, unknown, once),
		at(2, 3, 4, sagaOp{Kind: "load", Done: "ok", Got: &sagaRecord{Seq: 3, Nonce: 7}}),
		at(1, 5, 6, again),
		at(2, 7, 8, sagaOp{Kind: "load", Done: "ok", Got: &sagaRecord{Seq: 3, Nonce: 7}}),
	}
	require.True(t, porcupine.CheckOperations(sagaModel(sagaPlan{}), ops))
	other := again
	other.Nonce = 8
	ops[3].Input = other
	require.False(t, porcupine.CheckOperations(sagaModel(sagaPlan{}), ops), "another one at the same Seq")
}

// A cancellation without an answer may have been seen by a commit alone.
func TestCancellationThatACommitTellsOfIsKept(t *testing.T) {
	ops := []porcupine.Operation{
		{ClientId: 1, Call: 0, Return: 1,
			Input: sagaOp{Kind: "start", Done: "ok", Nonce: 6, Log: 1, Got: &sagaRecord{Seq: 1, Nonce: 6}}},
		{ClientId: 2, Call: 2, Return: unknown, Input: sagaOp{Kind: "cancel"}},
		{ClientId: 1, Call: 3, Return: 4,
			Input: sagaOp{Kind: "commit", Done: "ok", Nonce: 7, Seq: 1, Log: 1, Got: &sagaRecord{Canceled: true}}},
	}
	require.True(t, porcupine.CheckOperations(sagaModel(sagaPlan{}), sagaNeeded(ops)))
	require.False(t, porcupine.CheckOperations(sagaModel(sagaPlan{}), slices.Delete(slices.Clone(ops), 1, 2)),
		"nobody has canceled")
}

func sagaModel(plan sagaPlan) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return sagaState{} },
		Step: func(state, input, _ any) (bool, any) {
			ok, s := sagaStep(state.(sagaState), input.(sagaOp), plan.LeaseTTL)
			return ok, s
		},
		DescribeOperation: func(input, _ any) string {
			op := input.(sagaOp)
			text, _ := json.Marshal(op)
			return fmt.Sprintf("%s %s", op.Kind, text)
		},
		DescribeState: func(state any) string { return fmt.Sprintf("%+v", state) },
	}
}

// sagaPossible reports whether what the operations read could be written by one of them.
func sagaPossible(ops []porcupine.Operation) bool {
	nonces, owners, started, last := map[int64]bool{}, map[string]bool{"": true}, false, false
	leases := int64(0)
	for _, o := range ops {
		op := o.Input.(sagaOp)
		if op.Kind == "claim" || op.Kind == "start" && op.Owner != "" {
			leases++
		}
		nonces[op.Nonce], owners[op.Owner] = true, true
		started, last = started || op.Kind == "start", last || op.Kind == "last"
	}
	return started && last && !slices.ContainsFunc(ops, func(o porcupine.Operation) bool {
		op := o.Input.(sagaOp)
		if op.Kind == "commit" {
			return op.Done == "ok" && op.Epoch > leases
		}
		return op.Got != nil && !(nonces[op.Got.Nonce] && owners[op.Got.Owner])
	})
}

// sagaNeeded leaves out operations without an answer that cannot have had an effect, or one
// that another of them explains as well: each doubles what there is to search.
func sagaNeeded(ops []porcupine.Operation) (needed []porcupine.Operation) {
	nonces, from := map[int64]bool{}, map[int64]bool{} // that were read; Seqs at which a commit is known
	payloads, canceled := map[string]bool{}, false
	epochs, started, last := map[int64]string{}, false, int64(0) // their owners, if known
	epochOf := map[string]int64{}
	for _, o := range ops {
		op := o.Input.(sagaOp)
		if op.Kind == "commit" && op.Done == "ok" {
			from[op.Seq], last = true, max(last, op.Epoch)
			canceled = canceled || op.Got != nil && op.Got.Canceled
			continue
		}
		payloads[op.Signals[0]], payloads[op.Signals[1]] = true, true
		if got := op.Got; got != nil {
			nonces[got.Nonce], canceled, last = true, canceled || got.Canceled, max(last, got.Epoch)
			if got.Owner != "" {
				epochs[got.Epoch], epochOf[got.Owner] = got.Owner, got.Epoch
			}
			if got.Previous != "" {
				epochs[got.Epoch-1], epochOf[got.Previous] = got.Previous, got.Epoch-1
			}
		}
	}
	for _, o := range ops {
		switch op := o.Input.(sagaOp); op.Kind {
		case "start":
			started = started || op.Done == "ok" || nonces[op.Nonce]
		case "commit":
			if nonces[op.Nonce] {
				from[op.Seq] = true
			}
		}
	}
	unseen := last + 1 - int64(len(epochs)) // claims that may explain the rest, with one after the last that was read
	asked := false                          // to be canceled
	for _, o := range ops {                 // by their calls
		op, keep := o.Input.(sagaOp), true
		if op.Done == "" {
			switch op.Kind {
			case "start":
				keep = nonces[op.Nonce] || !started
			case "claim":
				if op.Epoch = epochOf[op.Owner]; op.Epoch == 0 {
					keep = unseen > 0
					unseen--
				}
				o.Input = op
			case "commit":
				keep = nonces[op.Nonce] || !from[op.Seq]
			case "signal":
				keep = payloads[op.Payload]
			case "cancel":
				keep, asked = canceled && !asked, true
			}
		}
		if keep {
			needed = append(needed, o)
		}
	}
	return needed
}

func sagaCheck(r *run) *finding {
	plan := r.plan.(sagaPlan)
	byID := make(map[string][]porcupine.Operation)
	add := func(e entry[sagaOp], op sagaOp) {
		ret := e.Return
		if op.Done == "" {
			ret = unknown
		}
		byID[op.ID] = append(byID[op.ID],
			porcupine.Operation{ClientId: e.Process*10 + e.Client, Input: op, Call: e.Call, Return: ret})
	}
	entries := read[sagaOp](r)
	generations := make(map[string]map[string]bool)
	owned := make(map[[2]string]bool) // sagas, and who was read to own them
	for _, e := range entries {
		if e.Op.Got != nil {
			owned[[2]string{e.Op.ID, e.Op.Got.Owner}] = true
		}
		for _, rec := range e.Op.Claimed {
			owned[[2]string{rec.ID, rec.Previous}] = true
		}
		if g, _, ok := strings.Cut(e.Op.ID, "."); ok {
			if generations[g] == nil {
				generations[g] = make(map[string]bool)
			}
			generations[g][e.Op.ID] = true
		}
	}
	for _, e := range entries {
		op := e.Op
		done := op.Done
		if done == "" {
			done = "unknown"
		}
		r.count(op.Kind+" "+done, 1)
		switch {
		case op.Kind != "claim":
			if op.Done != "" || op.Kind != "load" && op.Kind != "signals" {
				add(e, op)
			}
		case op.Done == "":
			for id := range generations[op.ID] { // it may have claimed any
				op.ID = id
				add(e, op)
			}
		default:
			more := maps.Clone(generations[op.ID])
			for _, rec := range op.Claimed {
				one := op
				one.ID, one.Got, one.Claimed = rec.ID, &rec, nil
				add(e, one)
				delete(more, rec.ID)
			}
			for id := range more {
				if owned[[2]string{id, op.Owner}] { // in a later round of the same Claim, which had no answer
					add(e, sagaOp{Kind: "claim", ID: id, Owner: op.Owner})
				}
			}
		}
	}
	for id, all := range byID {
		ops, last := sagaNeeded(all), int64(0)
		for _, op := range ops {
			if last = max(last, op.Call); op.Return != unknown {
				last = max(last, op.Return)
			}
		}
		ops = append(ops, porcupine.Operation{ClientId: 1000, Input: sagaOp{Kind: "last"}, Call: last + 1, Return: last + 2})
		if found := r.judge(fmt.Sprintf("%s: saga %s is not a register", plan.Driver, id), sagaModel(plan), ops,
			sagaPossible); found != nil {
			// What was left out may explain it: then it is none.
			all = append(all, ops[len(ops)-1])
			switch porcupine.CheckOperationsTimeout(sagaModel(plan), all, 10*patience) {
			case porcupine.Ok:
				continue
			case porcupine.Unknown:
				found.what += " (by the operations that have an effect; all of them are too many to decide)"
			}
			found.all = all
			return found
		}
	}
	return nil
}
