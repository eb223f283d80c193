package saga

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/saga/internal/participant"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

const (
	maxPayload = 64 << 10 // maximum bytes in the payload of a signal
	maxCarried = 4096     // maximum bytes in the text that RunnerConfig.Inject returns
)

// Start implements [Engine]. Programs call [Handle.Start]. The state must be encoded by the definition's Codec. Start
// does not check whether the state can be decoded.
func (r *Runner) Start(ctx context.Context, d *Definition, id string, state []byte) (*Instance, error) {
	req, err := r.newStart(ctx, d, id, state)
	if err != nil {
		return nil, err
	}
	rec, err := r.start(ctx, req)
	if err != nil {
		return nil, err
	}
	return r.show(&rec), nil
}

// StartTx implements [TxEngine]. Programs call [Handle.StartTx].
func (r *Runner) StartTx(ctx context.Context, tx *sql.Tx, d *Definition, id string, state []byte) error {
	if r.tx == nil {
		return fmt.Errorf("%w: StartTx of %q", ErrNoTx, id)
	}
	req, err := r.newStart(ctx, d, id, state)
	if err != nil {
		return err
	}
	list, _ := members(req.Progress)
	req.Progress = object(append(list, member{"unreported", json.RawMessage("true")}))
	rec, _, err := r.tx.StartTx(ctx, tx, req)
	if err != nil {
		return fmt.Errorf("saga: start of %q: %w", id, err)
	}
	if rec.Saga != d.p.name {
		return fmt.Errorf("%w: %q is a %s", ErrExists, id, rec.Saga)
	}
	return nil
}

// newStart checks the arguments of Start or StartTx and returns the request for the store.
func (r *Runner) newStart(
	ctx context.Context, d *Definition, id string, state []byte,
) (req store.StartRequest, err error) {
	if ctx.Err() != nil {
		return req, ended.Error(ctx)
	}
	if _, err := r.program(d.p.name, d.p.version); err != nil {
		return req, err
	}
	if err := participant.CheckID(id); err != nil {
		return req, err
	}
	carried := ""
	if r.cfg.Inject != nil {
		hook(ctx, "Inject", func(ctx context.Context, to *string) { *to = r.cfg.Inject(ctx) }, &carried)
	}
	if len(carried) > maxCarried || !utf8.ValidString(carried) {
		carried = ""
	}
	return startRequest(d.p, id, state, carried)
}

// startRequest returns the request for a new saga. In the new record, the first steps are already marked as started, so
// its first runner can call them without another commit.
func startRequest(p *program, id string, data []byte, carried string) (store.StartRequest, error) {
	tenant, err := p.tenantOf(data)
	m := newMachine(p)
	m.carried = carried
	m.advance(time.Time{})
	return store.StartRequest{
		ID: id, Saga: p.name, Version: p.version, Status: m.Status, State: data, Progress: m.encode(),
		Nonce: rand.Int64(), CompleteIn: p.timeout, Tenant: tenant, Log: []store.Entry{{Kind: EventCreated}},
	}, err
}

// claimAtOnce makes this runner the owner of the new saga if the runner has a free place. The place is reserved until
// free is called.
func (r *Runner) claimAtOnce(req *store.StartRequest) (free func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.reserve(1) == 0 {
		return func() {}
	}
	req.Owner, req.LeaseTTL = r.owner, r.cfg.LeaseTTL
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.unreserve(1)
	}
}

// Wait returns a saga of any definition once it has ended or is stuck. If there is no such saga, the error matches
// [ErrNotFound]. If ctx is done first, the error matches ctx.Err() and includes the store's latest error. Programs call
// [Handle.Result].
func (r *Runner) Wait(ctx context.Context, id string) (*Instance, error) {
	rec, err := r.wait(ctx, id)
	if err != nil {
		return nil, err
	}
	return r.show(&rec), nil
}

// wait returns the record of a saga once it has ended or is stuck.
func (r *Runner) wait(ctx context.Context, id string) (rec store.Record, err error) {
	var failed error
	for first := true; ; first = false {
		if ctx.Err() != nil {
			return rec, errors.Join(ended.Error(ctx), failed)
		}
		// Listen before reading the store: otherwise wait could miss that the saga ends between the two. If this runner holds
		// the saga, it has not ended, so it is read only after the first Poll.
		done, here := r.listen(id)
		rec, err = store.Record{}, nil
		if !first || !here {
			call, cancel := context.WithTimeout(ctx, r.cfg.LeaseTTL) // a connection may hang
			rec, err = r.store.Load(call, id)
			cancel()
		}
		switch {
		case errors.Is(err, ErrNotFound):
			r.unlisten(id, done)
			return rec, fmt.Errorf("saga: result of %q: %w", id, err)
		case err != nil:
			failed = fmt.Errorf("saga: result of %q: %w", id, err)
			if ctx.Err() == nil { // otherwise Load failed because ctx is done
				r.storeFailed(ctx, failed)
			}
		case rec.Status == Stuck || rec.Status.Ended():
			r.unlisten(id, done)
			return rec, nil
		default:
			failed = nil
		}
		t := time.NewTimer(r.cfg.Poll)
		select {
		case rec = <-done:
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
		r.unlisten(id, done)
		if rec.Status.Ended() { // a stuck saga is read again, because an operator may have retried it
			return rec, nil
		}
	}
}

// listen returns a channel that receives the saga's record when this runner no longer holds the saga. here reports
// whether the runner holds the saga now, which implies that the saga has not ended.
func (r *Runner) listen(id string) (ended chan store.Record, here bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ended = make(chan store.Record, 1)
	r.waiters[id] = append(r.waiters[id], ended)
	h := r.held[id]
	return ended, h != nil && h.isHeld()
}

func (r *Runner) unlisten(id string, ended chan store.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiters[id] = slices.DeleteFunc(r.waiters[id], func(c chan store.Record) bool { return c == ended })
	if len(r.waiters[id]) == 0 {
		delete(r.waiters, id)
	}
}

// wakeResults sends the record to the calls to Wait that wait for the saga. The caller holds r.mu.
func (r *Runner) wakeResults(rec store.Record) {
	for _, ended := range r.waiters[rec.ID] {
		ended <- rec
	}
	delete(r.waiters, rec.ID)
}

// Signal is like [Handle.Signal], for a saga of any definition.
func (r *Runner) Signal(ctx context.Context, id, name string, payload []byte) error {
	req, err := r.signalRequest(id, name, payload)
	if err != nil {
		return err
	}
	rec, err := r.store.Post(ctx, req)
	if err != nil {
		return fmt.Errorf("saga: signal %q of %q: %w", name, id, err)
	}
	if rec.Owner == "" {
		r.Wake()
	}
	return nil
}

// SignalTx is like [Handle.SignalTx], for a saga of any definition.
func (r *Runner) SignalTx(ctx context.Context, tx *sql.Tx, id, name string, payload []byte) error {
	if r.tx == nil {
		return fmt.Errorf("%w: SignalTx of %q", ErrNoTx, id)
	}
	req, err := r.signalRequest(id, name, payload)
	if err != nil {
		return err
	}
	if _, err := r.tx.PostTx(ctx, tx, req); err != nil {
		return fmt.Errorf("saga: signal %q of %q: %w", name, id, err)
	}
	return nil
}

// signalRequest checks a signal and returns the request for the store.
func (r *Runner) signalRequest(id, name string, payload []byte) (req store.PostRequest, err error) {
	if !validName(name) {
		return req, fmt.Errorf("saga: name of the signal is %s: must be 1 to %d bytes of UTF-8 without NUL",
			quoted(name, maxName), maxName)
	}
	if len(payload) > maxPayload {
		return req, fmt.Errorf("saga: payload of signal %q has %d bytes: must be at most %d",
			name, len(payload), maxPayload)
	}
	return store.PostRequest{ID: id, Name: name, Payload: payload, Admit: func(rec *store.Record) error {
		p, _ := r.program(rec.Saga, rec.Version) // nil if this process does not know the definition
		if p != nil {
			if _, err := load(p, rec); err != nil {
				p = nil // another build of the program wrote the record, with other steps
			}
		}
		if why := refuseSignal(show(rec, p), p, name); why != "" {
			return fmt.Errorf("%w: %s", ErrNotAllowed, why)
		}
		return nil
	}}, nil
}

// refuseSignal returns why a saga does not accept a new signal, or "" if it does. A saga that has turned back accepts
// no signals, because Undos may already have run without the signal. p is the saga's definition, or nil if it is not
// known.
func refuseSignal(in *Instance, p *program, name string) string {
	switch {
	case p != nil && !p.hasAwait(name):
		return fmt.Sprintf("no step of %s version %d awaits it", in.Saga, in.Version)
	case in.Status == Stuck && in.TurnedBack:
		return "it is stuck on its way back"
	case in.Status != Running && in.Status != Stuck:
		return fmt.Sprintf("it is %s", in.Status)
	}
	return ""
}
