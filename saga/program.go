package saga

import (
	"context"
	"database/sql"
	"math/rand/v2"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/machine"
	"github.com/go-resilience/resilience/saga/internal/plan"
)

const defaultTimeout = time.Minute // of an attempt

// A program is a definition that is ready to run. It hides the type of the state, which
// it takes and returns as an any that holds a *S.
type program interface {
	planned() *plan.Plan
	encode(s any) ([]byte, error)
	encodeFirst(s any) ([]byte, error)
	decode(data []byte) (any, error)
	call(ctx context.Context, unit int, op Op, s any) error
	callTx(ctx context.Context, tx *sql.Tx, unit int, op Op, s any) error
	zero() any

	child(unit int) (program, error) // of a unit with children
	beginChildren(unit int, s any) (states []any, err error)
	endChildren(unit int, s any, states []any) error
}

// startRequest returns the request for a new saga. Its first steps are started with the record.
func startRequest(p *plan.Plan, id string, data []byte, carried string) store.StartRequest {
	m := machine.New(p)
	m.Carried = carried
	m.Advance(time.Time{})
	return store.StartRequest{
		ID: id, Saga: p.Name, Version: p.Version, Status: m.Status, Data: data, Steps: m.Steps(),
		Nonce: rand.Int64(), CompleteIn: p.Deadline, Log: []store.Entry{{Kind: EventCreated}},
	}
}
