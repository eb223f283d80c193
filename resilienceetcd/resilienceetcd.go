// Package resilienceetcd provides a [lease.Store] in etcd 3.4 or later, through go.etcd.io/etcd/client/v3: an election
// without a database.
//
//	client, err := clientv3.New(clientv3.Config{
//		Endpoints:            []string{"etcd-0:2379", "etcd-1:2379", "etcd-2:2379"},
//		DialKeepAliveTime:    10 * time.Second, // finds a member that hangs
//		DialKeepAliveTimeout: 2 * time.Second,
//	})
//	...
//	store := resilienceetcd.New(client, resilienceetcd.Config{})
//	billing := lease.New(store, lease.Config{Name: "billing"})
//	err = billing.Loop(ctx, func(ctx context.Context, term lease.Term) error { // while this process leads
//		...
//		res, err := client.Txn(ctx).If(store.Fence("billing", term.Epoch())).Then(writes...).Commit()
//		...
//	})
//
// An etcd lease ends a term. The term's epoch is the revision that began it, and a Cmp of [Store.Fence] makes a
// transaction of etcd fail if another term has begun. For a fence in a SQL database, use package sqllease:
// [lease.Term.Fence] returns [lease.ErrNoFence] with a Store of this package.
//
// # Time
//
// etcd counts a TTL in whole seconds. A Store rounds a TTL up, and a server raises a TTL that is less than one and a
// half election timeouts, which is 2 seconds by default. [Validate] reports a TTL that is rounded. etcd ends a lease up
// to half a second after its TTL. If a cluster elects another leader, it starts the TTL of all leases again. No process
// leads until then, but two never lead at the same time.
//
// # Cost
//
// A waiting candidate reads three keys and a TTL every Poll of [lease.Config]. Every third of the TTL, a leader reads
// them and renews the etcd lease, which writes nothing. An election, a resignation and a run of Every write.
//
// # Failures
//
// A member that is killed costs no term. A cluster that is restored from a snapshot must increase its revision (etcdutl
// snapshot restore --bump-revision), or epochs repeat.
package resilienceetcd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-resilience/resilience/lease"
)

// A Config configures a [Store]. The zero Config is usable.
type Config struct {
	// Prefix is the prefix of the keys: Prefix + "term/", "held/" or "run/", and the name of the lease. The client needs
	// the permission to read and write them. Empty means "lease/".
	Prefix string
}

// A Store is a [lease.Store] in etcd. It is safe for concurrent use, by any number of processes on one cluster.
type Store struct {
	client *clientv3.Client
	prefix string
}

var _ lease.Store = (*Store)(nil)

// New returns a Store. It does not use the client, and the Store never closes it. New panics if client is nil.
func New(client *clientv3.Client, cfg Config) *Store {
	if client == nil {
		panic("resilienceetcd: the *clientv3.Client is nil: must be set")
	}
	if cfg.Prefix == "" {
		cfg.Prefix = "lease/"
	}
	return &Store{client, cfg.Prefix}
}

// Validate returns an error if cfg is invalid, or if its TTL is not a number of whole seconds. A Store rounds such a
// TTL up: after a leader has died, no process leads for longer than the TTL.
func Validate(cfg lease.Config) error {
	err := cfg.Validate()
	if cfg.TTL%time.Second != 0 {
		err = errors.Join(err, fmt.Errorf("resilienceetcd: lease.Config.TTL is %v: must be whole seconds", cfg.TTL))
	}
	return err
}

// Fence returns a condition for a transaction of etcd: that the lease's current term has this epoch. If the transaction
// fails, another term has begun, or the term was resigned.
func (s *Store) Fence(name string, epoch int64) clientv3.Cmp {
	return unchanged(s.prefix+"term/"+name, epoch)
}

func unchanged(key string, revision int64) clientv3.Cmp {
	return clientv3.Compare(clientv3.ModRevision(key), "=", revision)
}

// A holder is the value of the key term/, whose ModRevision is the epoch. It remains when the term is over.
type holder struct {
	Token  string `json:"token"`
	Holder string `json:"holder"`
}

// A snapshot is a lease as it was read.
type snapshot struct {
	lease.Record
	id           clientv3.LeaseID // the etcd lease of the key held/, with which the key ends; 0 if the term is over
	seconds      int64            // the TTL of id, the value of the key
	held, latest int64            // the ModRevisions of the keys held/ and run/
}

// call calls f up to three times, each time with a part of the time until ctx's deadline. A client sends each call to
// the next member. A member that hangs would otherwise get the same call of each renewal, and all renewals would fail.
func call[T any](ctx context.Context, f func(context.Context) (T, error)) (T, error) {
	for left := 3; left > 1; left-- {
		try, cancel := ctx, func() {}
		if deadline, ok := ctx.Deadline(); ok {
			try, cancel = context.WithTimeout(ctx, time.Until(deadline)/time.Duration(left))
		}
		result, err := f(try)
		timedOut := try.Err() != nil && ctx.Err() == nil
		cancel()
		if !timedOut {
			return result, err
		}
	}
	return f(ctx)
}

func (s *Store) read(ctx context.Context, name string) (at snapshot, err error) {
	at.Name = name
	resp, err := call(ctx, func(ctx context.Context) (*clientv3.TxnResponse, error) {
		return s.client.Txn(ctx).Then(clientv3.OpGet(s.prefix+"term/"+name),
			clientv3.OpGet(s.prefix+"held/"+name), clientv3.OpGet(s.prefix+"run/"+name)).Commit()
	})
	if err != nil {
		return at, err
	}
	for i, r := range resp.Responses {
		for _, kv := range r.GetResponseRange().Kvs { // one, or none
			switch i {
			case 0:
				var h holder
				err = json.Unmarshal(kv.Value, &h)
				at.Epoch, at.Token, at.Holder = kv.ModRevision, h.Token, h.Holder
			case 1:
				at.held, at.id = kv.ModRevision, clientv3.LeaseID(kv.Lease)
				at.seconds, err = strconv.ParseInt(string(kv.Value), 10, 64)
			case 2:
				at.latest = kv.ModRevision
				at.LastRun, err = strconv.ParseInt(string(kv.Value), 10, 64)
			}
			if err != nil {
				return at, fmt.Errorf("the value of %s: %w", kv.Key, err)
			}
		}
	}
	if at.id == 0 {
		return at, nil
	}
	ttl, err := call(ctx, func(ctx context.Context) (*clientv3.LeaseTimeToLiveResponse, error) {
		return s.client.TimeToLive(ctx, at.id)
	})
	if err == nil { // etcd rounds down to seconds, and deletes the key a moment after the end of the lease
		at.Left = max(time.Duration(ttl.TTL)*time.Second, 100*time.Millisecond)
	}
	return at, err
}

// write writes ops unless the lease has changed since it was read. It returns the revision, or 0 if the lease has
// changed. If repeat is set, that change may be an earlier try, whose answer was lost.
func (s *Store) write(ctx context.Context, at snapshot, repeat bool, ops ...clientv3.Op) (revision int64, err error) {
	commit := func(ctx context.Context) (*clientv3.TxnResponse, error) {
		return s.client.Txn(ctx).If(s.Fence(at.Name, at.Epoch), unchanged(s.prefix+"held/"+at.Name, at.held),
			unchanged(s.prefix+"run/"+at.Name, at.latest)).Then(ops...).Commit()
	}
	var resp *clientv3.TxnResponse
	if repeat {
		resp, err = call(ctx, commit)
	} else {
		resp, err = commit(ctx)
	}
	if err != nil || !resp.Succeeded {
		return 0, err
	}
	return resp.Header.Revision, nil
}

// hold returns a write of the key held/ with a new etcd lease.
func (s *Store) hold(ctx context.Context, name string, ttl time.Duration) (clientv3.Op, clientv3.LeaseID, error) {
	granted, err := call(ctx, func(ctx context.Context) (*clientv3.LeaseGrantResponse, error) {
		return s.client.Grant(ctx, seconds(ttl))
	})
	if err != nil {
		return clientv3.Op{}, 0, err
	}
	value := strconv.FormatInt(seconds(ttl), 10)
	return clientv3.OpPut(s.prefix+"held/"+name, value, clientv3.WithLease(granted.ID)), granted.ID, nil
}

func seconds(ttl time.Duration) int64 { return int64((ttl + time.Second - 1) / time.Second) }

// revoke ends an etcd lease that is not needed any more. If it fails, the TTL ends the lease.
func (s *Store) revoke(ctx context.Context, id clientv3.LeaseID) {
	if id != 0 {
		_, _ = s.client.Revoke(ctx, id)
	}
}

// Acquire implements [lease.Store].
func (s *Store) Acquire(ctx context.Context, req lease.Request) (lease.Record, error) {
	for {
		at, err := s.read(ctx, req.Name)
		if err != nil || at.Held() && at.Token != req.Token {
			return at.Record, wrap("acquire", err)
		}
		if at.Held() {
			at.Left = req.TTL
			err = s.Renew(ctx, lease.Request{Name: req.Name, Token: req.Token, TTL: req.TTL})
			return at.Record, err
		}
		hold, id, err := s.hold(ctx, req.Name, req.TTL)
		if err != nil {
			return at.Record, wrap("acquire", err)
		}
		value, _ := json.Marshal(holder{req.Token, req.Holder}) // two strings are no error
		revision, err := s.write(ctx, at, true, clientv3.OpPut(s.prefix+"term/"+req.Name, string(value)), hold)
		if err != nil {
			return at.Record, wrap("acquire", err)
		}
		if revision != 0 {
			at.Token, at.Holder, at.Epoch, at.Left = req.Token, req.Holder, revision, req.TTL
			return at.Record, nil
		}
		s.revoke(ctx, id) // another process was faster, or the answer to the first try was lost
	}
}

// Renew implements [lease.Store].
func (s *Store) Renew(ctx context.Context, req lease.Request) error {
	for {
		at, err := s.read(ctx, req.Name)
		switch {
		case err != nil:
			return wrap("renew", err)
		case at.Token != req.Token:
			return lease.ErrLost
		case req.Run != 0 && req.Run <= at.LastRun:
			return lease.ErrRunTaken
		}
		var ops []clientv3.Op
		var id clientv3.LeaseID
		if at.id != 0 && at.seconds == seconds(req.TTL) {
			_, err = call(ctx, func(ctx context.Context) (*clientv3.LeaseKeepAliveResponse, error) {
				return s.client.KeepAliveOnce(ctx, at.id)
			})
			if errors.Is(err, rpctypes.ErrLeaseNotFound) {
				continue // it ended after it was read
			}
			if err != nil || req.Run == 0 {
				return wrap("renew", err)
			}
		} else { // the TTL is another, or the term has ended and no other has begun
			hold, granted, err := s.hold(ctx, req.Name, req.TTL)
			if err != nil {
				return wrap("renew", err)
			}
			ops, id = append(ops, hold), granted
		}
		if req.Run != 0 {
			ops = append(ops, clientv3.OpPut(s.prefix+"run/"+req.Name, strconv.FormatInt(req.Run, 10)))
		}
		// A second try would take a run that the first has recorded for one that is taken, and revoke its etcd lease.
		revision, err := s.write(ctx, at, false, ops...)
		switch {
		case err != nil:
			return wrap("renew", err)
		case revision == 0:
			s.revoke(ctx, id)
			continue
		case id != 0:
			s.revoke(ctx, at.id) // the old TTL
		}
		return nil
	}
}

// Release implements [lease.Store].
func (s *Store) Release(ctx context.Context, name, token string) error {
	for {
		at, err := s.read(ctx, name)
		if err != nil || at.Token != token {
			return wrap("release", err)
		}
		ops := []clientv3.Op{clientv3.OpPut(s.prefix+"term/"+name, "{}"), clientv3.OpDelete(s.prefix + "held/" + name)}
		revision, err := s.write(ctx, at, true, ops...)
		if err != nil {
			return wrap("release", err)
		}
		if revision != 0 {
			s.revoke(ctx, at.id)
			return nil
		}
	}
}

// Load implements [lease.Store].
func (s *Store) Load(ctx context.Context, name string) (lease.Record, error) {
	at, err := s.read(ctx, name)
	return at.Record, wrap("load", err)
}

func wrap(method string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("resilienceetcd: %s: %w", method, err)
}
