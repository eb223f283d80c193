// Package sagastore defines the interface of the stores of package saga. Programs that run sagas do not need it:
// package sqlstore is a store in PostgreSQL, MySQL, MariaDB or SQLite, and saga.NewMemory returns a store in the
// process's memory. This package is for programmers who write another store:
//
//	var _ sagastore.Store = (*Store)(nil)
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) sagastore.Store { return newStore(t) })
//	}
//
// Package storetest has the tests that every store must pass. A program passes the store to saga.NewRunner.
//
// # Contents
//
// A store keeps for each saga:
//
//   - a [Record]: the saga's status, its encoded state and progress, its owner, and when it is due
//   - a flag, whether the saga was woken since it was last claimed; see Store.Post
//   - a log: a list of [Entry], numbered from 1 to the record's Seq, to which Start and Commit append
//   - messages: at most one [Message] for each name, which Post adds
//
// Runners communicate only through the store.
//
// # Use by a Runner
//
// A saga.Runner uses a store in this order:
//
//  1. Run calls Check, if the store is a [Checker], and Listen, if it is a [Notifier].
//  2. Start inserts a saga. If the runner has a free place, it is the new saga's owner from the start.
//  3. Claim acquires due sagas: at each RunnerConfig.Poll, when Listen notifies the runner, and when the runner itself
//     has made a saga due. These sagas were started without an owner, were released, or had an owner that crashed. If a
//     step of the saga awaits signals, Messages then returns them.
//  4. Heartbeat extends the leases of all sagas that the runner holds, three times in each RunnerConfig.LeaseTTL. The
//     runner cancels the attempts of a saga that Heartbeat does not return, or whose lease ends by its local clock.
//  5. Commit records the results of attempts, and the steps that are about to start, before the runner starts further
//     attempts. If Commit returns an error, the runner loads the record: if the record has the commit's Nonce, the
//     commit was written; if Epoch and Seq are unchanged, the runner repeats the commit; otherwise it stops running the
//     saga.
//  6. Commit with Release ends the runner's ownership if the saga waits, has ended or is stuck, or if Run stops.
//  7. Post adds a signal, requests that a saga turn back, or wakes a parent whose child has ended. Any process may call
//     Post, not only the saga's owner.
//  8. Load and Children return the results of sagas and of children. List, Counts and History serve operators, metrics
//     and health checks. An operator's actions are commits with the Epoch and Seq of a loaded record.
//  9. DeleteEnded deletes old sagas, for each final status that RunnerConfig.Retention limits: 200 per call, at an
//     interval of three times LeaseTTL, or of a tenth of Poll while there are more.
//
// A runner limits the duration of its own calls, except Listen, to LeaseTTL or a part of it. Other calls, such as
// Start, have the ctx of the program. A method must return soon after its ctx is done.
//
// # Optional interfaces
//
// A store can implement more interfaces, which a Runner finds by a type assertion:
//
//   - [Checker] reports missing tables when Run starts. Without it, every call to the store fails instead.
//   - [Notifier] saves the wait for the next poll. Without it, a saga that another process has started, released or
//     woken waits for up to RunnerConfig.Poll.
//   - [TxStore] lets a saga start, receive a signal, or record a step in one transaction with the program's rows.
//     Without it, the error of Handle.StartTx, Handle.SignalTx, and the registration of a saga with DoTx or UndoTx is
//     saga.ErrNoTx.
//
// # Limits
//
// The comments of [Record], [PostRequest] and [Message] have the maximum lengths, which package saga checks. IDs,
// names, owners and tenants are valid UTF-8 without NUL bytes. They are compared as bytes: case, accents and trailing
// spaces matter. LastError, CancelNote and an Entry's Error are valid UTF-8 without NUL bytes, of up to 13,000 bytes.
// State and payloads are arbitrary bytes. Progress is JSON text, which may contain the escape \u0000. PostgreSQL's type
// jsonb rejects that escape, and does not return the text unchanged.
//
// # Stability
//
// The package is unstable until 1.0.0: until then, a minor version may change it.
package sagastore

import (
	"context"
	"database/sql"
	"errors"
	"time"
)

// A Store persists sagas with their logs and messages. saga.NewMemory returns a Store in the process's memory, and
// package sqlstore implements it in PostgreSQL, MySQL, MariaDB and SQLite. Package storetest tests an implementation:
//
//	var _ sagastore.Store = (*Store)(nil)
//
// A Store is safe for concurrent use by many runners in many processes. All its methods obey these rules:
//
//   - A method is one atomic write, or one consistent read. Only List and Counts may read each definition and status at
//     a different time. A write that returned nil survives a crash of the process and of the database.
//   - Load, Messages and Children return the effects of every write that returned before they were called. A replica
//     that lags does not suffice. The tests of package storetest expect the same of the other reads.
//   - The store has a single clock for all processes. Each time in a [Record], an [Entry] or [Counts] is a time of that
//     clock, and each duration in a request counts from the clock's current time, called now below. Times may be
//     truncated to milliseconds, but all methods must return the same truncated time. Durations must not be rounded up:
//     a lease of a nanosecond ends immediately.
//   - Errors match [ErrNotFound] and [ErrFenced] by [errors.Is]. After any other error, a write may have happened, or
//     may still happen later. The caller loads the record, or repeats the write.
//   - If ctx is done when a method is called, the method changes nothing. It returns an error other than ErrNotFound
//     and ErrFenced, unless the result is certain without the data.
//   - Texts and bytes are returned unchanged, except that nil bytes may be returned as empty bytes. A request is not
//     changed, and not used after the method has returned. A record that was returned belongs to the caller.
type Store interface {
	// Start inserts a record and its log, if no saga has the ID. Otherwise it changes nothing, and returns the saga that
	// has the ID, whatever its definition, and false. If several calls have the same ID, one of them returns true. If
	// Start does not know whether its own insertion happened, it returns an error, and the caller compares the record's
	// Nonce.
	//
	// The new record has the ID, Saga, Version, Status, State, Progress, Parent, ParentStep, Tenant and Nonce of the
	// request. Seq is len(Log), CreatedAt and UpdatedAt are the same now, and CompleteBy is now + CompleteIn, or zero if
	// CompleteIn is zero. If the request has an Owner, the saga is claimed by it: Epoch is 1 and WakeAt is now + LeaseTTL.
	// Otherwise Epoch is 0 and WakeAt is now. All other fields are zero, and the saga is not woken.
	//
	// Entry i of the log has Seq i + 1, the record's Epoch, and At now. Start does not check whether Parent exists. It
	// should cost one commit.
	Start(ctx context.Context, req StartRequest) (rec Record, created bool, err error)

	// Claim makes Owner the owner of up to Limit due sagas, and returns their new records in any order. It returns no
	// records and no error if no saga is due, or if Limit or Definitions admit none.
	//
	// A saga is due if its Status is Running or Compensating, its WakeAt is not after now, and its Saga and Version are
	// among Definitions. The sagas of owners that have crashed, whose Owner is not "", are claimed before all others. In
	// each of the two groups, the sagas of a tenant that have the same definition are claimed by ascending WakeAt. Claim
	// skips rows that another transaction has locked, and does not wait for them.
	//
	// Among the sagas without an owner, the tenants take turns, so that a saga does not wait until all due sagas of
	// another tenant are claimed: no tenant gets two sagas more than another one that has due sagas left. Turns
	// continue over the claims of a process, since a runner may have one free place at a time. The turn of a tenant
	// is divided equally among its definitions, and the first saga of a turn is the one with the earliest WakeAt. A
	// store need not let tenants take turns for the sagas of crashed owners.
	//
	// In a claimed record, Previous is the old Owner, Owner is the request's, Epoch is one higher, and WakeAt is now +
	// LeaseTTL. Takeovers is one higher if Previous is neither "" nor the request's Owner. All other fields and the log do
	// not change. The saga is no longer woken, because its new owner reads all messages. Two claims never return the same
	// saga with the same Epoch.
	//
	// After an error, the caller does not hold the sagas that were claimed. They are due again when their leases end.
	Claim(ctx context.Context, req ClaimRequest) ([]Record, error)

	// Heartbeat sets WakeAt to now + LeaseTTL for each saga of Held whose Owner and Epoch are still the request's, even if
	// its lease has ended. It changes no other field, and returns these sagas in any order. It omits a saga that does not
	// exist, or whose Owner or Epoch differ; this is not an error.
	//
	// Heartbeat does not wait for a row that another transaction has locked, for example the transaction of a DoTx: a
	// single slow transaction would cost the leases of all sagas of the runner. Such a saga is returned with Locked set,
	// and its WakeAt does not change. Heartbeat should be one transaction for all sagas.
	Heartbeat(ctx context.Context, req HeartbeatRequest) ([]Renewed, error)

	// Commit writes the next state of a saga and appends to its log, if the record's Epoch and Seq are the request's.
	// Otherwise, or if the saga does not exist, it changes nothing and returns ErrFenced. It checks neither Owner nor
	// Status, and it does not matter whether the lease has ended: an operator commits without being the owner, and a saga
	// that has ended can be turned back. Of concurrent commits with the same Epoch and Seq, one succeeds.
	//
	// A store that repeats a commit itself must not return ErrFenced if its own earlier try may have been written. It
	// returns the error of that try.
	//
	// Status, Progress, Failures, Takeovers, LastError and Nonce become the request's, and UpdatedAt is now. State becomes
	// the request's unless that is nil; an empty State that is not nil is written. Version becomes the request's unless
	// that is zero. Seq becomes [CommitRequest.After]. Entry i of the log has Seq req.Seq + 1 + i, Epoch req.Epoch and At
	// now.
	//
	// Without Release, Owner and WakeAt do not change. With Release, Owner becomes "", and WakeAt becomes now + WakeIn, or
	// now if the saga was woken since it was last claimed or, if it never was, started. Without this, a signal would wait
	// for WakeIn if it arrived after the owner had read the messages. The next Claim, not Commit, resets the flag.
	//
	// Commit should cost one round trip and at most one commit of the database. It may share that with the commits of
	// other sagas, but each of them has its own result.
	Commit(ctx context.Context, req CommitRequest) (Receipt, error)

	// Post performs one of three requests, and returns the record as changed. If the saga does not exist, the error is
	// ErrNotFound, except in the third case. No request changes Epoch, Seq, Nonce or the log, because the owner's next
	// commit must not fail.
	//
	// With Cancel, Post requests that the saga turn back. If Status is Running and CancelRequested is false, it sets
	// CancelRequested, sets CancelNote to Payload and UpdatedAt to now, and wakes the saga. Otherwise it changes nothing
	// and returns no error. The owner is notified by its next Commit or Heartbeat.
	//
	// With a Name and without Cancel, Post adds a message, unless the saga has a message with this name, whose payload
	// then remains. Before it adds a message, it calls Admit with the record, unless Admit is nil. If Admit returns an
	// error, Post adds no message, and returns the record and that error itself, not wrapped. The call to Admit and the
	// addition are one atomic step: no Commit of the saga comes between them. If Status is Running, Post wakes the saga,
	// even if it already had the message. After an error of Admit it need not.
	//
	// Without a Name and without Cancel, Post wakes the saga if Status is Running or Compensating. It may return the zero
	// Record. If the saga does not exist, the error is nil.
	//
	// To wake a saga is to set its flag, for which see Commit, and, if Owner is "" and WakeAt is after now, to set WakeAt
	// to now.
	Post(ctx context.Context, req PostRequest) (Record, error)

	// Messages returns the messages of a saga by ascending name, in byte order. A saga that does not exist has none.
	Messages(ctx context.Context, id string) ([]Message, error)

	// Load returns the record of a saga. If it does not exist, the error is ErrNotFound, even if id cannot be an ID in
	// this store, for example because it is not UTF-8: programs pass IDs from their clients. Every method except Start
	// also treats such an ID, or the Step of a ChildrenRequest, as one that no saga has, without an error of the database.
	Load(ctx context.Context, id string) (Record, error)

	// List returns a page of the sagas that the filter selects, by descending CreatedAt. Sagas with the same CreatedAt
	// have a fixed order. next is the After of the following page, or "" if this is the last page. No saga occurs on two
	// pages. If no saga matches, List returns no records and no error. If After is not the next of a page, it may return
	// an error.
	List(ctx context.Context, f Filter) (recs []Record, next string, err error)

	// Counts counts the sagas that have not ended, by definition. Its cost should not depend on the number of sagas that
	// have ended, and it should read at most CountLimit sagas for each number.
	Counts(ctx context.Context) (Counts, error)

	// History returns the entries of a saga's log whose Seq is greater than after, by ascending Seq: at most limit
	// entries, or all of them if limit is zero or less. A saga that does not exist has no entries; this is not an error.
	History(ctx context.Context, id string, after int64, limit int) ([]Entry, error)

	// Children returns sagas whose Parent and ParentStep are the request's, in any order. Its cost should depend only on
	// the number of sagas that it returns: a parent may have thousands of children that have ended.
	Children(ctx context.Context, req ChildrenRequest) ([]ChildRecord, error)

	// DeleteEnded deletes sagas with their logs and messages, and returns the number of deleted sagas. Their IDs can then
	// be used again. It deletes nothing if status is not Completed, Compensated or Abandoned, or if limit is zero. It
	// returns an error if age or limit is negative.
	//
	// It selects up to limit sagas without Parent that ended in status at least age ago, the oldest first. A saga ended at
	// its WakeAt, because a runner releases a saga with WakeIn zero when it ends. DeleteEnded skips a saga whose row
	// another transaction has locked.
	//
	// Descendants are deleted before their parents: for each generation, it selects up to limit children that have ended,
	// in any final status and at any time, of the sagas selected before. It deletes the youngest generation first, and
	// stops after a generation if it has deleted limit sagas or more. The result may be greater than limit, but is less
	// than twice as many. A result of limit or more means that a further call may delete more. When a saga is deleted, the
	// Parent and ParentStep of its remaining children, which have not ended, become "".
	DeleteEnded(ctx context.Context, status Status, age time.Duration, limit int) (int, error)
}

var (
	// ErrNotFound is the error of Load, Post and PostTx if no saga has the ID. It is the same error as saga.ErrNotFound.
	ErrNotFound = errors.New("saga: not found")
	// ErrFenced is the error of Commit and CommitTx if the record's Epoch or Seq differs from the request's, or the saga
	// does not exist: another owner has claimed the saga, or another write came first. The request was not written, and
	// will not be.
	ErrFenced = errors.New("saga: fenced: another owner has the saga")
	// ErrNotMigrated is the error of Check if the store's tables are missing or have another version.
	ErrNotMigrated = errors.New("saga: the store is not migrated")
)

// A Checker is a [Store] that reports whether it is ready for use:
//
//	var _ sagastore.Checker = (*Store)(nil)
type Checker interface {
	// Check returns nil if the store is ready. It returns an error that matches [ErrNotMigrated] if the store was not set
	// up for this version of the program; Runner.Run then returns that error. Any other error means that the state of the
	// store is unknown; Run reports the error and continues. Check changes nothing. Run calls it once, and waits for up to
	// a third of RunnerConfig.LeaseTTL.
	Check(ctx context.Context) error
}

// A Notifier is a [Store] that notifies runners of due sagas before their next poll:
//
//	var _ sagastore.Notifier = (*Store)(nil)
//
// A notification may be lost or superfluous: a lost notification costs up to one RunnerConfig.Poll. The writes to be
// notified of make a saga due immediately and are Start and StartTx without an Owner, Commit and CommitTx with Release,
// and Post and PostTx for a saga without an owner.
type Notifier interface {
	// Listen calls notify, from one goroutine, when sagas may have become due, in this or any other process. It also calls
	// notify once when it has connected, because sagas may have become due before. notify does not block. Listen returns
	// when ctx is done, or with an error when it may miss notifications. The runner then calls Listen again after
	// RunnerConfig.Poll.
	Listen(ctx context.Context, notify func()) error
}

// A TxStore is a [Store] in a database of package [database/sql]:
//
//	var _ sagastore.TxStore = (*Store)(nil)
//
// A saga can start or get a message, and a step can be recorded, in one transaction with rows of the program.
// Handle.StartTx, Handle.SignalTx, and steps with DoTx or UndoTx need a TxStore. A method with a tx neither commits it
// nor rolls it back. Its effects are visible to others, and survive a crash, when the caller has committed tx.
type TxStore interface {
	Store

	// Begin starts the transaction of a DoTx or UndoTx, in which the program writes its rows before CommitTx. When ctx is
	// done before tx has ended, tx is rolled back, as in [sql.DB.BeginTx]. On a database with a single writer, such as
	// SQLite, tx must have the write lock when Begin returns (BEGIN IMMEDIATE): acquiring the lock later can fail.
	Begin(ctx context.Context) (*sql.Tx, error)

	// Exclusive reports whether a transaction of Begin excludes all other writers, heartbeats included, as on SQLite. A
	// runner then ends each such transaction after a third of RunnerConfig.LeaseTTL. The result does not change.
	Exclusive() bool

	// StartTx is Start inside tx, which any part of the program may have started in the store's database. If the ID
	// exists, tx must remain usable; on PostgreSQL, a failed INSERT would abort it.
	StartTx(ctx context.Context, tx *sql.Tx, req StartRequest) (rec Record, created bool, err error)

	// PostTx is Post inside tx, and sees the writes of tx, such as a saga that it has started. After ErrNotFound or an
	// error of Admit, tx must remain usable. Until tx ends, PostTx may prevent the saga's owner from committing.
	PostTx(ctx context.Context, tx *sql.Tx, req PostRequest) (Record, error)

	// CommitTx is Commit inside tx, and the last statement of tx. It must fail if another owner's claim of a newer
	// epoch was committed after tx started, even if the snapshot of tx is older than that claim. Otherwise a slow
	// owner would commit its rows after another owner has done the step. It returns ErrFenced, or under snapshot
	// isolation the database's serialization failure; on PostgreSQL, READ COMMITTED suffices. If CommitTx or the
	// commit of tx fails, the runner loads the record as after Commit.
	CommitTx(ctx context.Context, tx *sql.Tx, req CommitRequest) (Receipt, error)
}
