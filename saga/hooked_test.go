package saga_test

import (
	"context"
	"slices"
	"strings"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A hooked store passes each call of a runner to a hook. The hook may make the call, delay it, or lose its result.
type hooked struct {
	saga.Store
	hook func(ctx context.Context, method, id string, call func(context.Context) error) error
}

func through[T any](
	ctx context.Context, h *hooked, method, id string, call func(context.Context) (T, error),
) (v T, err error) {
	err = h.hook(ctx, method, id, func(ctx context.Context) (err error) { v, err = call(ctx); return err })
	return v, err
}

func (h *hooked) Start(ctx context.Context, req store.StartRequest) (rec store.Record, created bool, err error) {
	rec, err = through(ctx, h, "Start", req.ID, func(ctx context.Context) (rec store.Record, err error) {
		rec, created, err = h.Store.Start(ctx, req)
		return rec, err
	})
	return rec, created && err == nil, err
}

func (h *hooked) Claim(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
	return through(ctx, h, "Claim", "", func(ctx context.Context) ([]store.Record, error) {
		return h.Store.Claim(ctx, req)
	})
}

func (h *hooked) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	return through(ctx, h, "Heartbeat", "", func(ctx context.Context) ([]store.Renewed, error) {
		return h.Store.Heartbeat(ctx, req)
	})
}

func (h *hooked) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	return through(ctx, h, "Commit", req.ID, func(ctx context.Context) (store.Receipt, error) {
		return h.Store.Commit(ctx, req)
	})
}

func (h *hooked) Load(ctx context.Context, id string) (store.Record, error) {
	return through(ctx, h, "Load", id, func(ctx context.Context) (store.Record, error) { return h.Store.Load(ctx, id) })
}

// Post calls the hook with the method Signal, Cancel or Wake.
func (h *hooked) Post(ctx context.Context, req store.PostRequest) (store.Record, error) {
	method := "Signal"
	switch {
	case req.Cancel:
		method = "Cancel"
	case req.Name == "":
		method = "Wake"
	}
	return through(ctx, h, method, req.ID, func(ctx context.Context) (store.Record, error) {
		return h.Store.Post(ctx, req)
	})
}

func (h *hooked) Messages(ctx context.Context, id string) ([]store.Message, error) {
	return through(ctx, h, "Messages", id, func(ctx context.Context) ([]store.Message, error) {
		return h.Store.Messages(ctx, id)
	})
}

// Children calls the hook with an id such as "step of order-1", and sorts the children by their id.
func (h *hooked) Children(ctx context.Context, req store.ChildrenRequest) ([]store.ChildRecord, error) {
	id := req.Step + " of " + req.Parent
	return through(ctx, h, "Children", id, func(ctx context.Context) ([]store.ChildRecord, error) {
		list, err := h.Store.Children(ctx, req)
		slices.SortFunc(list, func(a, b store.ChildRecord) int { return strings.Compare(a.ID, b.ID) })
		return list, err
	})
}
