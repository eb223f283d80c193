// Package sagastore defines what package saga asks of a store. It is for those who implement one: package
// sqlstore is a store in PostgreSQL, MySQL, MariaDB or SQLite, and saga.NewMemory keeps sagas in the process.
// Package storetest tests a store.
//
// Before 1.0.0, a minor version may change this package.
package sagastore

import (
	"context"
	"database/sql"
	"errors"
	"time"
)

// A Store keeps sagas and their logs: saga.NewMemory in the process, package sqlstore in
// PostgreSQL, MySQL, MariaDB or SQLite.
//
//   - Each method is one atomic write or one consistent read, except that List and Counts
//     may read each definition at a time of its own. A write that
//     returned nil survives a crash of the process and of the database.
//   - The store has one clock. Every time in a [Record] or an [Entry] is of that clock,
//     and every duration in a request counts from its now.
//   - [ErrFenced] means that nothing was written and nothing will be. Any other error of
//     a write leaves open whether the write happened. The caller then reads the record,
//     or repeats the write.
//   - Strings and bytes come back as they were given; nil bytes may come back empty.
//
// A Store is safe for concurrent use by many runners in many processes. State and
// Progress are opaque to it.
type Store interface {
	// Start inserts a saga and its log. If the ID exists already, Start changes nothing
	// and returns the saga that has it. created reports which.
	//
	// The new record has the request's ID, Saga, Version, Parent, ParentStep, Tenant, Status,
	// State, Progress and Nonce, Seq len(Log), CompleteBy now + CompleteIn (none if that is zero), and
	// CreatedAt and UpdatedAt now. If the request has an Owner, the record is claimed
	// from the start: Owner, Epoch 1, WakeAt now + LeaseTTL. Otherwise it has Owner "",
	// Epoch 0 and WakeAt now. Everything else is zero. Start costs one commit.
	Start(ctx context.Context, req StartRequest) (rec Record, created bool, err error)

	// Claim claims up to Limit due sagas for Owner and returns them as they are
	// afterwards, in any order. A saga is due if its Status is Running or Compensating,
	// its WakeAt is not after now, and its Saga and Version are among Definitions.
	// Sagas of crashed owners (Owner is not "") come before the others, and those of one
	// definition by ascending WakeAt. The definition whose first saga was due first comes
	// first. Rows that another claim has locked are skipped, not waited for.
	//
	// In each claimed record, Previous is the Owner before, Epoch is one higher, Owner
	// is the request's, and WakeAt is now + LeaseTTL. Takeovers is one higher if Previous
	// is neither "" nor the request's Owner, which has not crashed. Seq, UpdatedAt and
	// the log do not change. The record is not woken any more: the new owner looks at all that
	// has come. No saga is claimed twice in one epoch.
	Claim(ctx context.Context, req ClaimRequest) ([]Record, error)

	// Heartbeat sets WakeAt to now + LeaseTTL for each saga of Held whose Owner and Epoch
	// are still as given, and returns those sagas. It is one statement for all of them.
	// It does not wait for a row that another transaction has locked: such a saga is
	// returned with Locked set, and keeps its WakeAt.
	Heartbeat(ctx context.Context, req HeartbeatRequest) ([]Renewed, error)

	// Commit writes the next state of one saga and appends to its log, if and only if
	// the record's Epoch and Seq are still the request's. Otherwise, and if there is no
	// such saga, it returns ErrFenced.
	//
	// Status, State, Progress, Failures, Takeovers, LastError and Nonce become the
	// request's, except that a nil State leaves State as it is. A Version other than zero becomes
	// the record's. Seq grows by len(Log),
	// and UpdatedAt is now. Only Start and Commit change Nonce. WakeAt
	// and Owner stay, unless Release is set: then Owner is "" and WakeAt is now + WakeIn, or now
	// if the record was woken since it was claimed. So nothing is lost that comes while its owner
	// writes it back to wait, and the owner need not look again.
	// Entry i of Log is stored with Seq req.Seq + 1 + i, Epoch req.Epoch and At now. Commit
	// costs one round trip and at most one commit; concurrent commits of several sagas may
	// share one.
	Commit(ctx context.Context, req CommitRequest) (Receipt, error)

	// Post does one of three things. It returns the record as it is afterwards, or ErrNotFound.
	//
	// With Cancel, it asks the owner of a running saga to turn back: if Status is Running and no
	// cancellation was requested before, it sets CancelRequested, CancelNote (to Payload) and
	// UpdatedAt, and wakes the record.
	//
	// With a Name, it keeps a message for a saga, unless it has one of that name already: the first
	// payload remains. Before it keeps a new one, Post calls Admit, if that is not nil, with the
	// record. It returns the error of Admit as it is, and then keeps nothing. A Commit of the saga
	// comes before the call of Admit, or after the message is kept. If the saga's Status is Running,
	// the record is woken, even if the message was kept before.
	//
	// With neither, it only wakes the record, if its Status is Running or Compensating. It may return
	// the zero Record, and that the saga does not exist is no error.
	//
	// To wake a record means: it is due as soon as it is released (see Commit); and if its Owner is ""
	// and its WakeAt after now, WakeAt becomes now. Epoch, Seq and the log stay, so that the owner's
	// next commit does not fail.
	Post(ctx context.Context, req PostRequest) (Record, error)

	// Messages returns the messages of one saga, by ascending name in byte order. A saga that does not
	// exist has none. Messages sees every Post that returned before Messages was called.
	Messages(ctx context.Context, id string) ([]Message, error)

	// Load returns one record, or ErrNotFound. It sees every write that returned before
	// Load was called.
	Load(ctx context.Context, id string) (Record, error)

	// List returns a page of the records that the filter admits, those that were started
	// last first. next is the After of the following page, or "" if this is the last. List
	// may return an error if the filter's After is not the next of a page.
	List(ctx context.Context, f Filter) (recs []Record, next string, err error)

	// Counts counts the sagas that have not ended, of each definition that has any, by ascending name. A
	// number that is CountLimit stands for so many or more.
	Counts(ctx context.Context) (Counts, error)

	// History returns up to limit entries of the log of one saga, by ascending Seq,
	// from the first after the Seq given. The log has no gap from 1 to the record's
	// Seq. A saga that does not exist has no log. A limit of zero means no limit.
	History(ctx context.Context, id string, after int64, limit int) ([]Entry, error)

	// Children returns up to Limit sagas that have the Parent and ParentStep of the request,
	// and one of its Status if that is not empty, in any order. A limit of zero means no
	// limit. Children sees every write that returned before Children was called. Its cost
	// does not grow with the number of sagas that the request does not admit.
	Children(ctx context.Context, req ChildrenRequest) ([]ChildRecord, error)

	// DeleteEnded deletes sagas with their logs and messages, and returns how many: those that
	// have no Parent and that ended in status at least age ago, up to limit, the oldest first;
	// and before them, up to limit of each generation, their children that have ended, in
	// whichever status. If it has deleted limit sagas or more, a later call goes on with the
	// parents. The Parent and ParentStep of a child that has not ended become "" when its
	// parent is deleted. DeleteEnded skips sagas without Parent whose rows are locked. It
	// returns an error if age or limit is negative, and deletes nothing if status is not
	// Completed, Compensated or Abandoned.
	DeleteEnded(ctx context.Context, status Status, age time.Duration, limit int) (int, error)
}

var (
	// ErrNotFound means that no saga has the id.
	ErrNotFound = errors.New("saga: not found")
	// ErrFenced is returned by Commit and CommitTx if the saga has another Epoch or Seq than
	// the request, or does not exist: another owner has it, or another write came first.
	// Nothing was written.
	ErrFenced = errors.New("saga: fenced: another owner has the saga")
	// ErrNotMigrated is returned by the Check of a store whose tables are missing or have
	// another version.
	ErrNotMigrated = errors.New("saga: the store is not migrated")
)

// A Checker is a Store that reports whether it is ready for use. Runner.Run returns
// its ErrNotMigrated.
type Checker interface {
	// Check returns an error that is [ErrNotMigrated] if the store was not set up for
	// this version. Any other error means that it could not find out.
	Check(ctx context.Context) error
}

// A Notifier is a Store that tells runners of due sagas, so that these do not wait for
// the next poll.
type Notifier interface {
	// Listen calls notify, from one goroutine, when sagas may have become due, until
	// ctx ends or Listen fails. The runner then calls it again after RunnerConfig.Poll.
	Listen(ctx context.Context, notify func()) error
}

// A TxStore is a Store in a database of package [database/sql]. A saga can start, and a
// step can commit, in one transaction with the user's own rows. StartTx and sagas with
// DoTx or UndoTx need one.
type TxStore interface {
	Store

	// Begin begins the transaction of one DoTx or UndoTx. In SQLite it takes the write
	// lock immediately (BEGIN IMMEDIATE).
	Begin(ctx context.Context) (*sql.Tx, error)

	// Exclusive reports whether a transaction of Begin excludes all other writers,
	// heartbeats included, as in SQLite. A runner then ends the transaction after a third
	// of a lease.
	Exclusive() bool

	// StartTx is Start inside tx. It neither commits tx nor rolls it back. An ID that
	// exists already must leave tx usable.
	StartTx(ctx context.Context, tx *sql.Tx, req StartRequest) (rec Record, created bool, err error)

	// PostTx is Post inside tx. It neither commits tx nor rolls it back, and sees what
	// tx has written. Until tx ends it may keep the owner of the saga from committing.
	PostTx(ctx context.Context, tx *sql.Tx, req PostRequest) (Record, error)

	// CommitTx is Commit inside tx. It neither commits tx nor rolls it back. It is the
	// last statement of tx. If another owner has claimed the saga in a newer epoch, it
	// matches no row and returns ErrFenced, even if that claim was committed after tx
	// began. (READ COMMITTED has this effect on PostgreSQL. Under snapshot isolation
	// the database's serialization failure is as good.)
	CommitTx(ctx context.Context, tx *sql.Tx, req CommitRequest) (Receipt, error)
}
