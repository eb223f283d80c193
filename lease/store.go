package lease

import (
	"context"
	"database/sql"
	"time"
)

// A Store keeps leases. [NewMemory] keeps them in the process, package sqllease in
// PostgreSQL, MySQL, MariaDB or SQLite, package redislease in Redis. Package storetest
// has the tests that every Store must pass.
//
// A term of a lease belongs to a token, a random text of its candidate. Each method is atomic. All
// times are of the store's clock; no method may use the clock of the caller. An error other than
// ErrLost leaves open whether the call has taken effect, now or later: the caller repeats it.
//
// A Store is safe for concurrent use by many candidates in many processes.
type Store interface {
	// Acquire gives the lease to the token if it is free, and returns the record as it is
	// afterwards. If the lease is the token's already and has not ended, it is renewed: a
	// repeated call, whose first answer was lost.
	//
	// A new term has the request's Token and Holder, Since now, Until now + TTL, and an Epoch
	// that is at least the last one plus one, and at least the time now in microseconds since
	// 1970. It does not begin while a transaction that has been fenced (see [Fencer]) is open.
	Acquire(ctx context.Context, req Request) (Record, error)

	// Renew sets Until to now + TTL, and Ran to now for a Run, if the lease is the token's, and
	// else returns an error that is [ErrLost]. It does not wait for fenced transactions.
	Renew(ctx context.Context, req Request) error

	// Release gives up the token's lease, which then has no Token and no Holder, and whose Epoch
	// can no longer be fenced. If the lease is another's, Release does nothing.
	Release(ctx context.Context, name, token string) error

	// Load returns the record of a lease: without a Token and with Epoch 0 if nobody has ever held it.
	Load(ctx context.Context, name string) (Record, error)
}

// A Request asks a [Store] for a lease, or to renew it.
type Request struct {
	Name   string
	Token  string
	Holder string // of Acquire
	TTL    time.Duration
	Run    bool // of Renew: a run of [Every] begins
}

// A Record is a lease as a [Store] keeps it.
type Record struct {
	Name   string
	Token  string // of the term; empty if the lease was given up
	Holder string // of the term, also when it has run out; empty if the lease was given up
	Epoch  int64
	Since  time.Time // when the term began, or the lease was given up
	Until  time.Time // when the term ends or has ended, or the lease was given up
	Ran    time.Time // when the last run of [Every] began; zero: never
	Now    time.Time // the store's clock when the record was read
}

// Held reports whether the lease was held when the record was read.
func (r Record) Held() bool { return r.Token != "" && r.Until.After(r.Now) }

// A Fencer is a Store in a database of package [database/sql], for [Term.Fence].
type Fencer interface {
	// Fence returns an error that is [ErrLost] unless the lease's term is still the one with this
	// epoch, and keeps any other from beginning until tx ends. It keeps neither Renew nor the
	// Fence of other transactions waiting, where the database allows it.
	Fence(ctx context.Context, tx *sql.Tx, name string, epoch int64) error
}
