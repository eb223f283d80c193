// Package sagastore defines the interface of the stores of package saga. Programs that run sagas do not need this
// package, because they use an existing store. Package sqlstore provides a store in PostgreSQL, MySQL, MariaDB or
// SQLite. saga.NewMemory returns a store in the process's memory. Package sagastore is for programmers who write
// another store:
//
//	var _ sagastore.Store = (*Store)(nil)
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) sagastore.Store { return newStore(t) })
//	}
//
// Package storetest has the tests that every store must pass. To use a store, pass it to saga.NewRunner.
//
// # Contents
//
// For each saga, a store contains:
//
//   - a [Record]: the saga's status, its encoded state and progress, its owner, and the time when it is due
//   - a flag that reports whether the saga was woken since it was last claimed; see Store.Post
//   - a log: a list of [Entry], to which Start and Commit append; the entries are numbered from 1 to the record's Seq
//   - messages: at most one [Message] with each name; Post adds them
//
// Runners communicate only through the store.
//
// A request to turn back is a flag of [PostRequest] and [Record], not a message, because the owner then learns of the
// request from each Commit and Heartbeat without reading messages. A store has the method Children besides List,
// because a parent can have thousands of children: Children reads only three columns of each child, and one index entry
// to find out whether any child has not ended.
//
// # Use by a Runner
//
// A saga.Runner calls the methods of a store in this order:
//
//  1. When Run starts, it calls the method Check of a [Checker] and the method Listen of a [Notifier].
//  2. Start inserts a saga. If the runner that starts the saga has capacity for another saga, that runner becomes the
//     owner of the saga.
//  3. Claim acquires due sagas: sagas that were started without an owner, that were released, or whose owner has
//     crashed. The runner calls Claim at each RunnerConfig.Poll. The runner also calls Claim when Listen notifies it,
//     and when one of its own writes has made a saga due. If a step of a claimed saga awaits signals, the runner calls
//     Messages after Claim.
//  4. Heartbeat extends the leases of all sagas that the runner holds, three times in each RunnerConfig.LeaseTTL. The
//     runner cancels the attempts of a saga if Heartbeat does not return the saga, or if the saga's lease has ended
//     according to the runner's local clock.
//  5. Commit records the results of attempts and the steps that are about to start. The runner starts these steps only
//     after the commit. If Commit returns an error, the runner loads the record. If the record has the commit's Nonce,
//     the commit was written. If the record's Epoch and Seq are unchanged, the runner repeats the commit. If another
//     write has changed the record, the runner stops running the saga. If the store rejects a commit for a LeaseTTL,
//     but accepts five commits of a log entry alone, the saga becomes stuck.
//  6. Commit with Release ends the runner's ownership. The runner releases a saga when the saga waits, has ended or is
//     stuck, or when Run stops.
//  7. Post adds a signal, requests that a saga turn back, or wakes a parent whose child has ended. Any process may call
//     Post, not only the saga's owner.
//  8. Load and Children return the results of sagas and of their children. List, Counts and History are for operators,
//     metrics and health checks. To perform an operator's action, the runner loads the record and calls Commit with its
//     Epoch and Seq.
//  9. DeleteEnded deletes old sagas with a final status, if RunnerConfig.Retention limits that status. Each call to
//     DeleteEnded has the limit 200. The interval between calls to DeleteEnded is three times LeaseTTL, or a tenth of
//     Poll while more old sagas remain.
//
// Except for Listen, a runner's own calls to the store have a timeout of at most LeaseTTL. The loads of Runner.Wait
// also have this timeout, and so does a Start that makes the runner the owner of the new saga. Other calls for the
// program have the program's ctx. A method of a store must return soon after its ctx is done.
//
// # Optional interfaces
//
// A store can implement optional interfaces, which a Runner detects with a type assertion:
//
//   - [Checker] reports missing tables when Run starts. Without a Checker, Run starts even if tables are missing, and
//     every call to the store fails.
//   - [Notifier] notifies runners of due sagas. Without a Notifier, a saga that another process has started, released
//     or woken waits for up to RunnerConfig.Poll.
//   - [TxStore] lets a saga start, receive a signal, or record a step in one transaction with the program's rows. If
//     the store is not a TxStore, the methods Handle.StartTx and Handle.SignalTx fail with saga.ErrNoTx. The
//     registration of a saga with DoTx or UndoTx also fails with saga.ErrNoTx.
//
// # Limits
//
// The comments of [Record], [PostRequest] and [Message] specify maximum lengths, which package saga checks. IDs, names,
// owners and tenants are valid UTF-8 without NUL bytes. Texts are compared byte by byte, so case, accents and trailing
// spaces matter. LastError, CancelNote and an Entry's Error are valid UTF-8 without NUL bytes, of up to 13,000 bytes.
// State and payloads are arbitrary bytes. Progress is JSON text, which may contain the escape \u0000. Do not store
// Progress as PostgreSQL's type jsonb, which rejects the escape \u0000 and changes the text.
//
// # Stability
//
// The package is unstable until 1.0.0. Before 1.0.0, a minor version may change the package.
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
// A Store is safe for concurrent use by many runners in many processes. All methods of a Store obey these rules:
//
//   - A method is one atomic write, or one consistent read. The only exceptions are List and Counts, which may read
//     different definitions and statuses at different times. A write that returned nil survives a crash of the process
//     and of the database.
//   - Load, Messages and Children return the effects of every write that returned before they were called, so they must
//     not read from a replica that lags. The tests of package storetest expect that List, Counts and History also
//     return these effects.
//   - The store has a single clock for all processes. All times in a [Record], an [Entry] or [Counts] are times of the
//     store's clock. A duration in a request starts at the current time of the store's clock; in the comments of the
//     methods, this time is named now. Times may be truncated to milliseconds, but all methods must return the same
//     truncated time. Durations must not be rounded up. For example, a lease of a nanosecond must end immediately.
//   - Where a method's comment requires [ErrNotFound] or [ErrFenced], the method's error matches the required error by
//     [errors.Is], and nothing was written. After any other error, a write may have happened or may still happen, so
//     the caller loads the record or repeats the write.
//   - If ctx is done when a method is called, the method changes nothing and returns an error. The error of a method
//     whose ctx is done must not be ErrNotFound or ErrFenced. The only exception is a method that can determine its
//     result without reading the data.
//   - Texts and bytes are returned unchanged, except that nil bytes may be returned as empty bytes. A method does not
//     change its request, and does not use the request after the method has returned. A returned record belongs to the
//     caller.
type Store interface {
	// Start inserts a record and its log if no saga has the ID. If a saga has the ID, Start changes nothing and returns
	// that saga's record, even if the saga has another definition. Start also reports whether it inserted the record, as
	// the result created. If several calls have the same ID, created is true for one of them. If Start does not know
	// whether its own insertion happened, it returns an error. After an error of Start, the caller loads the record and
	// compares the record's Nonce with the request's.
	//
	// The new record has the ID, Saga, Version, Status, State, Progress, Parent, ParentStep, Tenant and Nonce of the
	// request. The record's Seq is len(Log), and its CreatedAt and UpdatedAt are now. CompleteBy is now + CompleteIn, or
	// zero if CompleteIn is zero. If the request has an Owner, that runner holds the saga: Epoch is 1 and WakeAt is now +
	// LeaseTTL. Without an Owner, Epoch is 0 and WakeAt is now. All other fields of the record are zero, and the saga's
	// woken flag is not set.
	//
	// Entry i of the log has the Seq i + 1 and the record's Epoch. Its At is now. Start does not check whether Parent
	// exists. Start should cost one commit of the database.
	Start(ctx context.Context, req StartRequest) (rec Record, created bool, err error)

	// Claim makes Owner the owner of up to Limit due sagas, and returns their new records in any order. Claim returns no
	// records and no error if no saga is due, if Limit is zero or less, or if Definitions is empty.
	//
	// A saga is due if its Status is Running or Compensating, its WakeAt is not after now, and its Saga and Version are
	// among Definitions. If a due saga has an Owner, that owner has crashed. Claim first claims the sagas of crashed
	// owners, and then the sagas without an owner. In both groups, sagas of the same tenant and definition are claimed by
	// ascending WakeAt. Claim does not wait for rows that another transaction has locked, but skips them.
	//
	// For the sagas without an owner, the tenants take turns. Among the tenants that still have due sagas, the numbers of
	// claimed sagas differ by at most one. Therefore a saga does not wait until all due sagas of another tenant are
	// claimed. The turns continue in the next claim of the process. If each claim started with the same tenant, a runner
	// that claims one saga at a time would claim only that tenant's sagas. A tenant's share of a claim is divided equally
	// among the tenant's definitions. The tenant's saga with the earliest WakeAt is claimed first. For the sagas of
	// crashed owners, a store need not let tenants take turns.
	//
	// In a claimed record, Previous is the old Owner, Owner is the request's Owner, Epoch is higher by 1, and WakeAt is
	// now + LeaseTTL. Takeovers is higher by 1 if Previous is neither "" nor the request's Owner. Claim changes no other
	// field, and does not change the log. Claim resets the saga's woken flag, because the new owner reads all messages.
	// Two claims never return the same saga with the same Epoch.
	//
	// If Claim returns an error, sagas may still have been claimed. The caller does not run these sagas. Sagas that were
	// claimed but do not run are due again when their leases end.
	Claim(ctx context.Context, req ClaimRequest) ([]Record, error)

	// Heartbeat extends the leases of the sagas in Held. If a saga's Owner and Epoch still equal the request's, Heartbeat
	// sets the saga's WakeAt to now + LeaseTTL, even if the lease has ended. Heartbeat changes no other field, and returns
	// the sagas that Owner still holds, in any order. Heartbeat omits sagas that do not exist, or whose Owner or Epoch
	// differ, and returns no error for them.
	//
	// If another transaction, such as the transaction of a DoTx, has locked a row, Heartbeat does not wait for the row. If
	// Heartbeat waited for locks, a single slow transaction would cost the runner the leases of all its sagas. A saga
	// whose row is locked is returned with Locked set, and its WakeAt does not change. Heartbeat should be one transaction
	// for all sagas.
	Heartbeat(ctx context.Context, req HeartbeatRequest) ([]Renewed, error)

	// Commit writes the next state of a saga and appends to its log, if the record's Epoch and Seq equal the request's. If
	// Epoch or Seq differ, or if the saga does not exist, Commit changes nothing and returns ErrFenced. Commit does not
	// check Owner or the end of the lease, because an operator commits without being the owner. Commit does not check
	// Status, because a saga that has ended can still turn back. If several commits have the same Epoch and Seq, one of
	// them succeeds.
	//
	// A store may repeat a commit by itself after an error. If it is unknown whether the first try was written, and the
	// second try finds another Epoch or Seq, Commit returns the error of the first try, not ErrFenced.
	//
	// The record gets the request's Status, Progress, Failures, Takeovers, LastError and Nonce, and UpdatedAt is now. The
	// record gets the request's State unless State is nil; an empty State that is not nil is written. The record gets the
	// request's Version unless Version is zero. Seq becomes [CommitRequest.After]. Entry i of the log has the Seq
	// req.Seq + 1 + i and the Epoch req.Epoch. Its At is now.
	//
	// Without Release, Owner and WakeAt do not change. With Release, Owner becomes "", and WakeAt becomes now + WakeIn, or
	// now if the saga's woken flag is set. If there were no woken flag, a signal that arrived after the owner had read the
	// messages would have to wait for WakeIn. Commit does not reset the woken flag; the next Claim resets it.
	//
	// Commit should cost one round trip and at most one commit of the database. The commits of several sagas may share one
	// commit of the database, but each of them has its own result.
	Commit(ctx context.Context, req CommitRequest) (Receipt, error)

	// Post performs one of the three requests below, and returns the changed record. If the saga does not exist, the error
	// is ErrNotFound, except for the third request. Post never changes Epoch, Seq, Nonce or the log, because otherwise the
	// owner's next commit would fail.
	//
	// First, if Cancel is set, Post requests that the saga turn back. If Status is Running and CancelRequested is false,
	// Post sets CancelRequested, sets CancelNote to Payload and UpdatedAt to now, and wakes the saga. For any other saga,
	// a Post with Cancel changes nothing and returns no error. The owner learns of the request to turn back from the
	// result of its next Commit or Heartbeat.
	//
	// Second, with a Name and without Cancel, Post adds a message. If the saga already has a message with this name, Post
	// does not add another, and the payload does not change. Before Post adds a message, it calls Admit with the record,
	// unless Admit is nil. If Admit returns an error, Post adds no message, and returns the record and Admit's error, not
	// wrapped. The call to Admit and the addition are one atomic step: no Commit of the saga comes between them. Post
	// wakes a Running saga even if the saga already had the message. If Admit returns an error, Post need not wake the
	// saga.
	//
	// Third, without a Name and without Cancel, Post wakes a saga that is Running or Compensating. For this third request,
	// Post may return the zero Record, and returns no error if the saga does not exist.
	//
	// To wake a saga means to set its woken flag, which Commit and Claim use. When Post wakes a saga whose Owner is "" and
	// whose WakeAt is after now, Post also sets WakeAt to now.
	Post(ctx context.Context, req PostRequest) (Record, error)

	// Messages returns the messages of a saga by ascending name, in byte order. If the saga does not exist, Messages
	// returns no messages and no error.
	Messages(ctx context.Context, id string) ([]Message, error)

	// Load returns the record of a saga. If the saga does not exist, the error is ErrNotFound. Programs pass IDs from
	// their clients, so an ID may be invalid in this store, for example because it is not UTF-8. For an invalid ID, Load
	// returns ErrNotFound and not the database's error. All other methods except Start also treat an invalid ID as the ID
	// of a saga that does not exist. Children treats an invalid Step like an invalid ID.
	Load(ctx context.Context, id string) (Record, error)

	// List returns a page of the sagas that the filter selects, by descending CreatedAt. Sagas with the same CreatedAt
	// have a fixed order. next is the value of Filter.After for the following page, or "" after the last page. No saga
	// occurs on two pages. If no saga matches, List returns no records and no error. If Filter.After is not a value that
	// List has returned as next, List may return an error.
	List(ctx context.Context, f Filter) (recs []Record, next string, err error)

	// Counts returns the numbers of sagas that have not ended, separately for each definition. The cost of Counts should
	// not depend on the number of sagas that have ended. For each number, Counts should read at most CountLimit sagas.
	Counts(ctx context.Context) (Counts, error)

	// History returns entries of a saga's log by ascending Seq. It returns only entries whose Seq is greater than the
	// argument after. History returns at most limit entries, or all entries if limit is zero or less. If the saga does not
	// exist, History returns no entries and no error.
	History(ctx context.Context, id string, after int64, limit int) ([]Entry, error)

	// Children returns the sagas whose Parent and ParentStep equal the request's, in any order. A parent may have
	// thousands of other children that have ended. Therefore, the cost of Children should depend only on the number of
	// returned sagas.
	Children(ctx context.Context, req ChildrenRequest) ([]ChildRecord, error)

	// DeleteEnded deletes sagas with their logs and messages, and returns the number of deleted sagas. The IDs of deleted
	// sagas can be used again. If status is not final, or limit is zero, DeleteEnded deletes nothing. If age or limit is
	// negative, DeleteEnded returns an error.
	//
	// DeleteEnded selects up to limit sagas that have no Parent, have the given status, and ended at least age ago. The
	// sagas that ended first are selected first. An ended saga's WakeAt is the time when the saga ended, because the
	// runner released the saga with a WakeIn of zero. DeleteEnded skips sagas whose rows another transaction has locked.
	//
	// Descendants are deleted before their parents. DeleteEnded selects up to limit children of the selected sagas, then
	// up to limit children of those children, and so on. Each of these selections is a generation. DeleteEnded selects
	// only children that have ended, with any final status and at any time. DeleteEnded deletes the youngest generation
	// first. After each generation, DeleteEnded stops if it has deleted limit sagas or more. The result may therefore be
	// greater than limit, but is less than 2 * limit. If the result is limit or more, another call may delete more sagas.
	// When a saga is deleted, the Parent and ParentStep of its remaining children become "".
	DeleteEnded(ctx context.Context, status Status, age time.Duration, limit int) (int, error)
}

var (
	// ErrNotFound is the error of Load, Post and PostTx if no saga has the ID. ErrNotFound is the same error as
	// saga.ErrNotFound.
	ErrNotFound = errors.New("saga: not found")
	// ErrFenced is the error of Commit and CommitTx if the record's Epoch or Seq differs from the request's, or if the
	// saga does not exist. ErrFenced means that another owner has claimed the saga, or that another write came first. A
	// request that fails with ErrFenced was not written, and will not be written later.
	ErrFenced = errors.New("saga: fenced: another owner has the saga")
	// ErrNotMigrated is the error of Check if the store's tables are missing or have another version.
	ErrNotMigrated = errors.New("saga: store is not migrated")
)

// A Checker is a [Store] that reports whether it is ready for use:
//
//	var _ sagastore.Checker = (*Store)(nil)
type Checker interface {
	// Check returns nil if the store is ready. If the store was not set up for this version of the program, Check returns
	// an error that matches [ErrNotMigrated], and Runner.Run returns that error. If Check returns an error that does not
	// match ErrNotMigrated, the state of the store is unknown; Run reports the error and continues. Check changes nothing.
	// Run calls Check once, with a timeout of a third of RunnerConfig.LeaseTTL.
	Check(ctx context.Context) error
}

// A Notifier is a [Store] that notifies runners of due sagas before their next poll:
//
//	var _ sagastore.Notifier = (*Store)(nil)
//
// A notification may be lost or unnecessary. If a notification is lost, a saga waits for up to one RunnerConfig.Poll. A
// store should notify runners of each write after which a saga is due immediately. Such a write can be a Start or
// StartTx without an Owner, a Commit or CommitTx with Release, or a Post or PostTx for a saga without an owner.
type Notifier interface {
	// Listen calls notify when a write may have made sagas due. The write may come from this process or any other process.
	// Listen calls notify from one goroutine, and notify does not block. Listen also calls notify once when it has
	// connected, because sagas may have become due before it connected. Listen returns when ctx is done. Listen returns an
	// error when it may miss notifications; the runner calls Listen again after RunnerConfig.Poll.
	Listen(ctx context.Context, notify func()) error
}

// A TxStore is a [Store] in a database of package [database/sql]:
//
//	var _ sagastore.TxStore = (*Store)(nil)
//
// With a TxStore, a program can start or signal a saga, or record a step, in the same transaction in which it writes
// its own rows. Handle.StartTx, Handle.SignalTx, and steps with DoTx or UndoTx need a TxStore. A method with a
// parameter tx neither commits tx nor rolls it back. Writes in tx are visible to other transactions, and survive a
// crash, after the caller has committed tx.
type TxStore interface {
	Store

	// Begin starts the transaction of a DoTx or UndoTx, in which the program writes its rows before the runner calls
	// CommitTx. If ctx is done before tx has ended, tx is rolled back, as in [sql.DB.BeginTx]. On a database with a single
	// writer, such as SQLite, tx must have the write lock when Begin returns (BEGIN IMMEDIATE), because acquiring the lock
	// later can fail.
	Begin(ctx context.Context) (*sql.Tx, error)

	// Exclusive reports whether a transaction from Begin excludes all other writers, including heartbeats, as on SQLite.
	// If Exclusive returns true, a runner ends a transaction from Begin after a third of RunnerConfig.LeaseTTL. Exclusive
	// always returns the same value.
	Exclusive() bool

	// StartTx is like Start, but inside tx. Any part of the program may have started tx in the store's database. If the ID
	// exists, tx must remain usable. For example, a failed statement aborts tx on PostgreSQL, so an INSERT must not fail
	// there.
	StartTx(ctx context.Context, tx *sql.Tx, req StartRequest) (rec Record, created bool, err error)

	// PostTx is like Post, but inside tx. PostTx sees the earlier writes of tx, such as a StartTx. After ErrNotFound or an
	// error of Admit, tx must remain usable. Until tx ends, PostTx may prevent the saga's owner from committing.
	PostTx(ctx context.Context, tx *sql.Tx, req PostRequest) (Record, error)

	// CommitTx is like Commit, but inside tx, and is the last statement of tx. CommitTx must fail if another owner has
	// claimed the saga after tx started, even if tx reads from a snapshot that is older than the claim. Otherwise, a slow
	// owner could commit its rows after another owner has done the step. After another owner's claim, CommitTx returns
	// ErrFenced. Under snapshot isolation, CommitTx may return the database's serialization failure instead. On
	// PostgreSQL, the isolation level READ COMMITTED suffices. If CommitTx or the commit of tx fails, the runner loads the
	// record as it does after a failed Commit.
	CommitTx(ctx context.Context, tx *sql.Tx, req CommitRequest) (Receipt, error)
}
