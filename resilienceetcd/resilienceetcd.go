// Package resilienceetcd provides a [lease.Store] in etcd 3.4 or later, through go.etcd.io/etcd/client/v3. With this
// store, package lease elects a leader without a SQL database.
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
// A term ends when its etcd lease ends. The term's epoch is the etcd revision at which the term started. With the
// condition that [Store.Fence] returns, an etcd transaction fails if another term has started. With a Store of this
// package, [lease.Term.Fence] returns [lease.ErrNoFence]. To fence transactions in a SQL database, use package sqllease
// instead.
//
// # Time
//
// In etcd, a TTL is a number of whole seconds. A Store rounds a TTL up to whole seconds. [Validate] returns an error
// for a TTL that would be rounded. An etcd server has a minimum TTL of 1.5 election timeouts, which is 2 seconds by
// default. The server raises a shorter TTL to this minimum.
//
// etcd may end a lease up to half a second after the TTL. If the etcd cluster elects another member as its leader, etcd
// may end a lease up to a full TTL after this election. After the leading process has died, no process leads until etcd
// ends the lease. A lease that ends late never makes two processes lead at the same time.
//
// # Cost
//
// A waiting candidate reads three keys and a TTL at each Poll of [lease.Config]. Three times in each TTL, a leader
// reads the same keys and TTL, and renews the etcd lease. The renewal writes no keys. Only an election, a resignation
// and a run of Every write keys.
//
// # Failures
//
// If a member of the etcd cluster is killed, no term ends. If you restore a cluster from a snapshot, increase its
// revision (etcdutl snapshot restore --bump-revision). Otherwise epochs may be repeated.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
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
	// Prefix is the prefix of the keys. A lease has three keys: Prefix + "term/" + name, Prefix + "held/" + name and
	// Prefix + "run/" + name. The client needs permission to read and write all three keys. An empty Prefix means
	// "lease/".
	Prefix string
}

// A Store is a [lease.Store] in etcd. A Store is safe for concurrent use, by any number of processes on one cluster.
type Store struct {
	client *clientv3.Client
	prefix string
}

var _ lease.Store = (*Store)(nil)

// New returns a Store. New sends no request, and the Store never closes the client. New panics if client is nil.
func New(client *clientv3.Client, cfg Config) *Store {
	if client == nil {
		panic("resilienceetcd: *clientv3.Client is nil: must be set")
	}
	if cfg.Prefix == "" {
		cfg.Prefix = "lease/"
	}
	return &Store{client, cfg.Prefix}
}

// Validate returns an error if cfg is invalid, or if cfg.TTL is not a number of whole seconds. A Store rounds a TTL up
// to whole seconds, which lengthens the time without a leader after a leader has died.
func Validate(cfg lease.Config) error {
	err := cfg.Validate()
	if cfg.TTL%time.Second != 0 {
		err = errors.Join(err, fmt.Errorf("resilienceetcd: lease.Config.TTL is %v: must be whole seconds", cfg.TTL))
	}
	return err
}

// Fence returns a condition for an etcd transaction. The condition requires that the lease's current term has this
// epoch. If the condition is false, another term has started, or the term was resigned.
func (s *Store) Fence(name string, epoch int64) clientv3.Cmp {
	return unchanged(s.prefix+"term/"+name, epoch)
}

func unchanged(key string, revision int64) clientv3.Cmp {
	return clientv3.Compare(clientv3.ModRevision(key), "=", revision)
}

// A holder is the value of the key term/. The ModRevision of this key is the epoch. The key remains when the term is
// over.
type holder struct {
	Token  string `json:"token"`
	Holder string `json:"holder"`
}

// A snapshot is the state of a lease when it was read.
type snapshot struct {
	lease.Record
	id           clientv3.LeaseID // the etcd lease, which ends together with the key held/; 0 if the term is over
	seconds      int64            // the TTL of the etcd lease id, which is the value of the key held/
	held, latest int64            // the ModRevisions of the keys held/ and run/
}

// call calls f, and repeats it up to twice if it times out. Each call gets a part of the time until ctx's deadline. The
// client sends each request to the next member of the cluster. Without a repetition, a member that hangs could get the
// same one of the requests of each renewal. Every renewal would then fail.
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
		for _, kv := range r.GetResponseRange().Kvs { // there is one value, or none
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
				return at, fmt.Errorf("value of %s: %w", kv.Key, err)
			}
		}
	}
	if at.id == 0 {
		return at, nil
	}
	ttl, err := call(ctx, func(ctx context.Context) (*clientv3.LeaseTimeToLiveResponse, error) {
		return s.client.TimeToLive(ctx, at.id)
	})
	if err == nil { // etcd rounds down to seconds, and deletes the key shortly after the lease has ended
		at.Left = max(time.Duration(ttl.TTL)*time.Second, 100*time.Millisecond)
	}
	return at, err
}

// write executes ops unless the lease has changed since at was read. It returns the new revision, or 0 if the lease has
// changed. If repeat is true, write may try several times. The change may then be an earlier try whose answer was lost.
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

// hold grants a new etcd lease, and returns it with an operation that writes the key held/ under that lease.
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

// revoke ends an etcd lease that is no longer needed. If that fails, the lease ends after its TTL.
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
		value, _ := json.Marshal(holder{req.Token, req.Holder}) // two strings can always be encoded
		revision, err := s.write(ctx, at, true, clientv3.OpPut(s.prefix+"term/"+req.Name, string(value)), hold)
		if err != nil {
			return at.Record, wrap("acquire", err)
		}
		if revision != 0 {
			at.Token, at.Holder, at.Epoch, at.Left = req.Token, req.Holder, revision, req.TTL
			return at.Record, nil
		}
		s.revoke(ctx, id) // another process was faster, or an earlier try succeeded and its answer was lost
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
				continue // the etcd lease has ended after it was read
			}
			if err != nil || req.Run == 0 {
				return wrap("renew", err)
			}
		} else { // the TTL is different, or the term has ended and no other has started
			hold, granted, err := s.hold(ctx, req.Name, req.TTL)
			if err != nil {
				return wrap("renew", err)
			}
			ops, id = append(ops, hold), granted
		}
		if req.Run != 0 {
			ops = append(ops, clientv3.OpPut(s.prefix+"run/"+req.Name, strconv.FormatInt(req.Run, 10)))
		}
		// write must not repeat here. If its first try succeeded and the answer was lost, the second try would fail. This
		// loop would then revoke the lease of the first try, and return ErrRunTaken for its run.
		revision, err := s.write(ctx, at, false, ops...)
		switch {
		case err != nil:
			return wrap("renew", err)
		case revision == 0:
			s.revoke(ctx, id)
			continue
		case id != 0:
			s.revoke(ctx, at.id) // the etcd lease with the old TTL
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
