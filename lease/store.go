package lease

import (
	"context"
	"database/sql"
	"time"
)

// A Store stores leases. [NewMemory] returns a Store in the process's memory. Package sqllease provides a Store in
// PostgreSQL, MySQL, MariaDB or SQLite. Package redislease provides a Store in Redis. The module resiliencek8s provides
// a Store in Kubernetes, and the module resilienceetcd provides a Store in etcd. Package storetest has tests for other
// implementations:
//
//	var _ lease.Store = (*Store)(nil)
//
// A term is identified by its token, a random string that the candidate has generated. Each method is atomic. The
// store measures durations with its own clock or by observing changes. It never compares the times of different
// callers' clocks. A call that returns an error other than [ErrLost] and [ErrRunTaken] may have taken effect, or may
// take effect later. The caller repeats the call after such an error. A Store is safe for concurrent use by many
// candidates in many processes.
type Store interface {
	// Acquire gives the lease to the request's token if the lease is free. Acquire returns the lease's record. If the
	// token already has the lease, Acquire renews the lease, because the answer to an earlier call may have been lost.
	//
	// A new term lasts for the TTL, which the store may round up. The Epoch of a new term is greater than the Epochs of
	// all earlier terms. No term starts while a fenced transaction is open; see [Fencer].
	Acquire(ctx context.Context, req Request) (Record, error)

	// Renew sets the end of the lease to the current time plus the TTL. If req.Run is not 0, Renew also records the run.
	// Renew returns [ErrLost] if the token does not have the lease. If req.Run is not 0 and is not greater than the
	// record's LastRun, Renew returns [ErrRunTaken]. Some clients repeat a request whose answer was lost. If the first
	// request has recorded the run, Renew returns nil. Renew does not wait for fenced transactions.
	Renew(ctx context.Context, req Request) error

	// Release ends the token's term. After Release, the record has no Token and no Holder, and a Fence with the term's
	// epoch fails. If the token does not have the lease, Release does nothing.
	Release(ctx context.Context, name, token string) error

	// Load returns the record of a lease. If the lease was never held, the record's Epoch is 0.
	Load(ctx context.Context, name string) (Record, error)
}

// A Request is a request to a [Store] to grant or renew a lease.
type Request struct {
	Name   string        // the name of the lease
	Token  string        // the token of the term
	Holder string        // the candidate's Config.Holder; only for Acquire
	TTL    time.Duration // the time after which the lease ends unless it is renewed again

	// Run is the scheduled instant of a run of [Candidate.Every] that is about to start. If no run starts, Run is 0. Renew
	// stores Run as the record's LastRun if Run is greater than the current LastRun. The store treats Run as a plain
	// number.
	Run int64
}

// A Record is the state of a lease in a [Store]. A Record has durations instead of times, because etcd and Kubernetes
// do not report the time of their clocks.
type Record struct {
	Name   string        // the name of the lease
	Token  string        // the token of the current or last term; empty if the lease was released
	Holder string        // the holder of the current or last term; empty if the lease was released
	Epoch  int64         // the epoch of the current or last term, which a release may increase; 0 if never held
	Left   time.Duration // the time until the term ends; 0 if the term has ended

	// LastRun is the scheduled instant of the last run of [Candidate.Every], in Unix milliseconds. Before the first run,
	// LastRun is the time when the first leader called Every. LastRun is 0 if Every has never led.
	LastRun int64
}

// Held reports whether a process held the lease when the record was read.
func (r Record) Held() bool { return r.Token != "" && r.Left > 0 }

// A Fencer is a Store that supports [Term.Fence] in transactions of package [database/sql]:
//
//	var _ lease.Fencer = (*Store)(nil)
type Fencer interface {
	Store

	// Fence returns [ErrLost] unless epoch is the epoch of the current term. If Fence succeeds, no other term can start
	// until tx ends. If the database permits it, Fence delays neither Renew nor the Fence of other transactions.
	Fence(ctx context.Context, tx *sql.Tx, name string, epoch int64) error
}
