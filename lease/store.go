package lease

import (
	"context"
	"database/sql"
	"time"
)

// A Store keeps leases. [NewMemory] keeps them in the process, package sqllease in PostgreSQL, MySQL, MariaDB or
// SQLite, package redislease in Redis, and the modules resiliencek8s and resilienceetcd in Kubernetes and etcd. Package
// storetest tests other implementations:
//
//	var _ lease.Store = (*Store)(nil)
//
// A term belongs to a token, a random string of its candidate. Each method is atomic. The store measures all
// durations with its own clock or by observation, never with the caller's clock. An error other than [ErrLost] and
// [ErrRunTaken] means that the call may have taken effect, or may still do so; the caller repeats the call. A
// Store is safe for concurrent use by many candidates in many processes.
type Store interface {
	// Acquire gives the lease to the token if it is free, and returns the record as it is afterwards. If the
	// token already has the lease, the lease is renewed: the answer to an earlier call may have been lost.
	//
	// A new term lasts for the TTL, which the store may round up, and has an Epoch that is greater than any
	// before it. It does not start while a fenced transaction (see [Fencer]) is open.
	Acquire(ctx context.Context, req Request) (Record, error)

	// Renew extends the lease by the TTL and, if req.Run is set, records the run. It returns [ErrLost] if the
	// lease is not the token's, and [ErrRunTaken] if req.Run is not later than the record's LastRun. It does not
	// wait for fenced transactions.
	Renew(ctx context.Context, req Request) error

	// Release ends the token's term, whose epoch can then no longer be fenced. The record then has no Token and no
	// Holder. If the lease is not the token's, Release does nothing.
	Release(ctx context.Context, name, token string) error

	// Load returns the record of a lease. A lease that has never been held has the Epoch 0.
	Load(ctx context.Context, name string) (Record, error)
}

// A Request is a request to a [Store] to grant or renew a lease.
type Request struct {
	Name   string        // the name of the lease
	Token  string        // the token of the candidate's term
	Holder string        // the candidate's Config.Holder; only for Acquire
	TTL    time.Duration // the duration of the lease without another renewal

	// Run is the scheduled instant of a run of [Candidate.Every] that starts, or 0. Renew stores it as the record's
	// LastRun unless LastRun is equal or later. A store treats it as an opaque number.
	Run int64
}

// A Record is a lease as a [Store] had it. It has no times of the store's clock, because etcd and Kubernetes do not
// report any.
type Record struct {
	Name   string        // the name of the lease
	Token  string        // the term's token, even after it has ended; empty if the lease was released
	Holder string        // the term's holder, even after it has ended; empty if the lease was released
	Epoch  int64         // the term's epoch, or a greater number if the lease was released; 0 if it was never held
	Left   time.Duration // the time until the term ends; 0 if it has ended

	// LastRun is the scheduled instant of the last run of [Candidate.Every], in Unix milliseconds. Until the first
	// run it is the time of the first call to Every that has led. It is 0 if there was no such call.
	LastRun int64
}

// Held reports whether a process held the lease when the record was read.
func (r Record) Held() bool { return r.Token != "" && r.Left > 0 }

// A Fencer is a Store in a database of package [database/sql], for [Term.Fence]:
//
//	var _ lease.Fencer = (*Store)(nil)
type Fencer interface {
	Store

	// Fence returns [ErrLost] unless the current term has this epoch. Otherwise no other term can start
	// until tx ends. It delays neither Renew nor the Fence of other transactions, if the database allows
	// that.
	Fence(ctx context.Context, tx *sql.Tx, name string, epoch int64) error
}
