package saga_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"math/big"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

func TestDoTxEndingItsTransactionIsInDoubt(t *testing.T) {
	for name, returned := range map[string]error{"commits": nil, "commits and fails": errDeclined} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := newTxMemory(t)
				bad := inTx("hotel")
				do := bad.DoTx
				bad.DoTx = func(ctx context.Context, tx *sql.Tx, s *trip) error {
					require.NoError(t, do(ctx, tx, s))
					require.NoError(t, tx.Commit())
					return returned
				}
				sg := sequence(inTx("flight"), bad)
				r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
				mustStart(t, r, sg)
				_, err := result[trip](t.Context(), r, "trip-1")
				require.ErrorIs(t, err, saga.ErrCompensated)
				require.ErrorContains(t, err, "step has ended its transaction itself")
				require.Equal(t, []string{"do flight", "do hotel", "undo hotel", "undo flight"}, store.l.did(), "once, and undone")
			})
		})
	}
}

func TestTimedOutDoTxIsNotInDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newTxMemory(t)
		slow := inTx("hotel")
		slow.Timeout, slow.Attempts = time.Second, 2
		slow.DoTx = func(ctx context.Context, _ *sql.Tx, _ *trip) error {
			<-ctx.Done()
			synctestSettle()
			return nil
		}
		sg := sequence(slow)
		r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		_, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.NotContains(t, err.Error(), "itself")
		require.Empty(t, store.l.did())
	})
}

// synctestSettle waits until database/sql has rolled back.
func synctestSettle() { time.Sleep(time.Millisecond) }

type inner struct{ Amount int }

type kept struct {
	inner
	Name  string
	At    time.Time
	Price *big.Int
	Raw   json.RawMessage
	Next  *kept
	Map   map[string][]inner
	_     struct{}
}

type hidden struct{ cache map[string]int }

type dashed struct {
	Name  string
	Cache map[string]int `json:"-"`
}

type (
	shadowed struct {
		base
		ID string
	}
	twice struct {
		A string `json:"B"`
		B string
	}
	ambiguous struct {
		left
		right
	}
	base  struct{ ID string }
	left  struct{ N int }
	right struct{ N int }
)

func register[S any](codec saga.Codec[S]) func() {
	return registerWith(saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{}), codec)
}

func registerWith[S any](e saga.Engine, codec saga.Codec[S]) func() {
	sg := &saga.Saga[S]{Name: "trip", Codec: codec, Steps: []saga.Step[S]{{Name: "a", Do: noCall[S], ReadOnly: true}}}
	return func() { saga.Register(e, sg) }
}

// An undemanding engine registers every definition.
type undemanding struct{ saga.Engine }

func (undemanding) Register(*saga.Definition) error { return nil }

type anyCodec[S any] struct{}

func (anyCodec[S]) Encode(*S) ([]byte, error) { return []byte(rand.Text()), nil } // different each time
func (anyCodec[S]) Decode([]byte, *S) error   { return nil }

func TestRegisterRejectsLossyState(t *testing.T) {
	_ = hidden{}.cache
	lost := "is not kept by JSON and would be lost when a saga is taken over"
	require.PanicsWithError(t, `saga: trip: s.cache `+lost+
		`: export it without the tag "-" and with a name of its own in JSON, or set Codec`, register[hidden](nil))
	for where, fn := range map[string]func(){
		"s.Cache":        register[dashed](nil),
		"s.Cache ":       register[*dashed](nil),
		"s.Of.cache":     register[struct{ Of []map[string]*hidden }](nil),
		"s.hidden.cache": register[struct{ hidden }](nil),
		"s.in":           register[struct{ in kept }](nil),
		"s.inner":        register[struct{ *inner }](nil),
		"s.Last ":        register[struct{ Last error }](nil),
		"s.Ready ":       register[struct{ Ready chan int }](nil),
		"s.Then ":        register[struct{ Then func() }](nil),
		"s.List ":        register[struct{ List []map[string]error }](nil),
		"s of type chan": register[chan int](nil),
		"s.ID ":          register[shadowed](nil),
		"s.B ":           register[twice](nil),
		"s.N ":           register[ambiguous](nil),
		"s.List.B ":      register[struct{ List []map[string]twice }](nil),
		"s.B  ":          registerWith[twice](undemanding{}, nil), // on another engine
	} {
		func() {
			defer func() { require.ErrorContains(t, recover().(error), where[:len(where)-1]) }()
			fn()
		}()
	}
	for _, fn := range []func(){
		register[kept](nil), register[int](nil), register[map[string]any](nil), register[any](nil),
		register[hidden](anyCodec[hidden]{}), register[oneWay](nil), register[netip.Addr](nil),
	} {
		require.NotPanics(t, fn)
	}
	require.NoError(t, saga.Run(t.Context(), &saga.Saga[hidden]{Name: "trip", Steps: []saga.Step[hidden]{{
		Name: "a", ReadOnly: true, Do: func(context.Context, *hidden) error { return nil },
	}}}, &hidden{}), "Run stores nothing")
}
