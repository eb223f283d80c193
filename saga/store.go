package saga

import (
	"context"
	"database/sql"
	"errors"
	"time"
)

// A Store keeps sagas and their logs. [NewMemory] keeps them in the process;
// package sqlstore keeps them in PostgreSQL or SQLite. Package storetest has the
// tests that every Store must pass.
//
// What a store's author guarantees:
//
//   - Each method is one atomic write or one consistent read, and a write that
//     returned nil survives the crash of the process and of the database.
//   - There is one clock, the store's own. Every time in a [Record] or an
//     [Entry] is of that clock, every duration in a request counts from its now.
//   - [ErrFenced] means that nothing was written and nothing will be. Any other
//     error of a write leaves open whether it happened; the caller then reads
//     the record back, or writes the same again.
//   - Strings and bytes come back as they were given, nil bytes perhaps as empty.
//
// A store is safe for concurrent use by many runners in many processes. It does
// not look into Data and Steps.
type Store interface {
	// Start inserts a saga and its log, or, if the ID exists already, changes
	// nothing and returns the saga that has it. created reports which.
	//
	// The new record has the request's ID, Saga, Version, Status, Data, Steps and
	// Nonce, Seq len(Log), CompleteBy now + CompleteIn (none if that is 0), and
	// CreatedAt and UpdatedAt now. With an Owner it is claimed from the start:
	// Owner, Epoch 1, WakeAt now + Lease. Without one: Owner "", Epoch 0, WakeAt
	// now. Everything else is zero. It costs one commit.
	Start(ctx context.Context, req StartRequest) (rec Record, created bool, err error)

	// Claim takes up to Limit due sagas for Owner and returns them as they are
	// afterwards, in any order. Due are those whose Status is Running or
	// Compensating, whose WakeAt is not after now, and whose Saga and Version are
	// among Definitions. Crashed ones (Owner is not "") go before the others;
	// among equals the earliest WakeAt goes first. Rows that another claim
	// has locked are passed over, not waited for.
	//
	// For each: Previous is what Owner was, Takeovers grows by one if that was
	// neither "" nor the request's Owner, which has not crashed, Epoch grows by
	// one, Owner is the request's and WakeAt is now + Lease.
	// Seq, UpdatedAt and the log stay. No saga is ever claimed twice in one epoch.
	Claim(ctx context.Context, req ClaimRequest) ([]Record, error)

	// Heartbeat sets WakeAt to now + Lease for each saga of Held whose Owner and
	// Epoch are still as given, and returns those. One statement for all. It does
	// not wait for a row that another transaction has locked: it returns that with
	// Locked set, and leaves its WakeAt as it is.
	Heartbeat(ctx context.Context, req HeartbeatRequest) ([]Renewed, error)

	// Commit writes the next state of one saga and appends its log, if and only
	// if the record's Epoch and Seq are still the request's; otherwise, also when
	// there is no such saga, it returns ErrFenced.
	//
	// Status, Data, Steps, Failures, Takeovers, LastError and Nonce become the
	// request's, Seq grows by len(Log), UpdatedAt is now, Reported false. No other
	// method but Start changes Nonce. WakeAt and Owner stay,
	// unless Release is set: then Owner is "" and WakeAt is now + WakeIn. The i-th
	// entry of Log is stored with Seq req.Seq + 1 + i, Epoch req.Epoch and At now.
	// It costs one round trip and at most one commit: commits of several sagas
	// that come at the same time may share one.
	Commit(ctx context.Context, req CommitRequest) (Receipt, error)

	// Cancel asks the owner of a running saga to turn back. If Status is Running
	// and no cancellation was asked for yet, it sets CancelRequested and
	// CancelNote, and WakeAt to now if Owner is "". Epoch, Seq and log stay: the
	// owner's next commit must not fail for it. It returns the record as it is
	// afterwards, or ErrNotFound.
	Cancel(ctx context.Context, id, note string) (Record, error)

	// Load returns one record, or ErrNotFound. It sees every write that has
	// returned before it was called.
	Load(ctx context.Context, id string) (Record, error)

	// List returns the records that the filter admits, by ascending ID (in byte
	// order), up to its Limit.
	List(ctx context.Context, f Filter) ([]Record, error)

	// History returns the log of one saga by ascending Seq: 1, 2, 3 and so on to
	// the record's Seq, without a gap. A saga that does not exist has none.
	History(ctx context.Context, id string) ([]Entry, error)

	// Reported sets Reported of a stuck saga whose Seq is still seq. It changes
	// nothing else, and nothing at all of any other saga.
	Reported(ctx context.Context, id string, seq int64) error

	// Unregistered counts the due sagas (as in Claim) whose Saga and Version are
	// not among registered, by Saga and Version.
	Unregistered(ctx context.Context, registered []Definition) ([]Unregistered, error)
}

// ErrNotMigrated is returned by the Check of a store whose tables are missing, or
// of another version.
var ErrNotMigrated = errors.New("saga: the store is not migrated")

// A Checker is a Store that can say whether it is ready for use. A runner that
// finds that it is not does not begin to run.
type Checker interface {
	// Check returns an error that is [ErrNotMigrated] if the store was not set up
	// for this version. Any other error says that it could not find out.
	Check(ctx context.Context) error
}

// A Notifier is a Store that can tell when sagas may have become due, so that
// they need not wait for a runner's next Poll.
type Notifier interface {
	// Listen calls notify, from one goroutine, until ctx ends or it fails. A runner
	// then calls it again after Poll.
	Listen(ctx context.Context, notify func()) error
}

// A TxStore is a Store in a database of package [database/sql], where a saga
// can start, and a step can commit, together with the user's own rows. Sagas
// with DoTx or UndoTx, and [StartTx], need one.
type TxStore interface {
	Store

	// Begin begins the transaction of one DoTx or UndoTx. In SQLite it takes the
	// write lock at once (BEGIN IMMEDIATE).
	Begin(ctx context.Context) (*sql.Tx, error)

	// Exclusive reports whether a transaction of Begin keeps every other writer
	// out, a heartbeat too, as in SQLite. A runner then ends it after half a lease.
	Exclusive() bool

	// StartTx is Start inside tx, and neither commits nor rolls it back. An ID
	// that exists already must leave tx usable.
	StartTx(ctx context.Context, tx *sql.Tx, req StartRequest) (rec Record, created bool, err error)

	// CommitTx is Commit inside tx, and neither commits nor rolls it back. It is
	// the last statement of tx: whoever holds the record's newer epoch must make
	// it match no row (ErrFenced), also when that epoch was committed after tx
	// began. (READ COMMITTED does this on PostgreSQL; under a snapshot the
	// database's serialization failure does, as any other error.)
	CommitTx(ctx context.Context, tx *sql.Tx, req CommitRequest) (Receipt, error)
}

// A Record is one saga as a [Store] keeps it.
type Record struct {
	ID      string
	Saga    string // the definition's Name
	Version int    // the definition's Version
	Status  Status
	Data    []byte // the state, encoded by the definition's Codec
	Steps   []byte // every step's progress; a short text (JSON), opaque to the store

	Seq      int64  // entries in the log; with Epoch the fence of every write
	Nonce    int64  // of the Start or Commit that wrote last
	Owner    string // the runner that holds the saga; "": nobody
	Previous string // what Owner was before Claim; "" from every other method
	Epoch    int64  // the fencing token: grows with each claim

	WakeAt     time.Time // the end of the lease of an owned saga; else when it is due
	CompleteBy time.Time // before the pivot: compensate from then on; zero: never

	Failures        int    // attempts that have failed since the last step that succeeded
	Takeovers       int    // claims from another owner that had not given it up, since the last result of a step
	LastError       string // text of the latest failure
	CancelRequested bool
	CancelNote      string // why; "" unless CancelRequested
	Reported        bool   // of a stuck saga: OnStuck was called

	CreatedAt time.Time
	UpdatedAt time.Time // of the latest Start, Commit or Cancel
	Now       time.Time // the store's clock when the record was read
}

// A StartRequest asks a Store to insert a saga.
type StartRequest struct {
	ID         string
	Saga       string
	Version    int
	Status     Status
	Data       []byte
	Steps      []byte
	Nonce      int64         // random: see CommitRequest
	CompleteIn time.Duration // 0: no deadline
	Owner      string        // "": left to be claimed
	Lease      time.Duration // of Owner
	Log        []Entry       // Seq, Epoch and At are the store's to set; never empty
}

// A ClaimRequest asks a Store for sagas that are due.
type ClaimRequest struct {
	Owner       string
	Lease       time.Duration
	Limit       int
	Definitions []Definition
}

// A Definition names one version of one definition.
type Definition struct {
	Saga    string
	Version int
}

// A HeartbeatRequest extends the leases of the sagas that an owner holds.
type HeartbeatRequest struct {
	Owner string
	Lease time.Duration
	Held  []Held
}

// Held names a saga and the epoch in which its owner claimed it.
type Held struct {
	ID    string
	Epoch int64
}

// Renewed is a saga that is still its owner's.
type Renewed struct {
	ID              string
	Epoch           int64
	Locked          bool // the lease was not extended, and ends when it was to end
	CancelRequested bool
	CancelNote      string
}

// A CommitRequest is the next state of one saga, fenced by Epoch and Seq.
type CommitRequest struct {
	ID    string
	Epoch int64 // the record's must still be this
	Seq   int64 // the record's must still be this
	// Nonce is a random number by which a caller whose answer was lost recognizes
	// its own write in the record. Seq and Epoch do not tell it from another write
	// of this owner, such as a transaction whose COMMIT arrives late.
	Nonce int64

	Status    Status
	Data      []byte
	Steps     []byte
	Failures  int
	Takeovers int
	LastError string
	Log       []Entry // Seq, Epoch and At are the store's to set; never empty

	Release bool          // give the saga up: parked, handed over or ended
	WakeIn  time.Duration // with Release: due again then
}

// After returns the Seq that the record has once the request is committed.
func (c CommitRequest) After() int64 { return c.Seq + int64(len(c.Log)) }

// A Receipt is what a Commit tells the owner besides that it happened.
type Receipt struct {
	CancelRequested bool
	CancelNote      string
}

// An Entry is one line in the log of a saga.
type Entry struct {
	Seq     int64
	Step    string // the step or alternative; "": the saga itself
	Op      Op
	Event   string // what happened: the Event constants
	Attempt int    // which attempt of Op; 0: not of an attempt
	Epoch   int64
	Error   string // why, or an operator's note
	At      time.Time
}

// A Filter chooses the sagas of a List. The zero Filter admits all.
type Filter struct {
	Saga   string   // "": every definition
	Status []Status // empty: every status
	After  string   // only IDs above this one: the last ID of the page before

	Unreported bool // only those that are not Reported
	Limit      int  // at most; 0: 100
}

// Unregistered counts due sagas that a runner leaves alone because their
// definition is not registered with it.
type Unregistered struct {
	Definition
	Count  int
	Oldest time.Time // the earliest WakeAt among them
	Now    time.Time // the store's clock
}
