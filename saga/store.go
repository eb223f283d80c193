package saga

import (
	"context"
	"database/sql"
	"errors"
	"time"
)

// A Store keeps sagas and their logs. [NewMemory] keeps them in the process, package
// sqlstore in PostgreSQL or SQLite. Package storetest tests the rules below.
//
//   - Each method is one atomic write or one consistent read, except that List and
//     Unregistered may read each definition at a time of its own. A write that returned
//     nil survives a crash of the process and of the database.
//   - The store has one clock. Every time in a [Record] or an [Entry] is of that clock,
//     and every duration in a request counts from its now.
//   - [ErrFenced] means that nothing was written and nothing will be. Any other error of
//     a write leaves open whether the write happened. The caller then reads the record,
//     or repeats the write.
//   - Strings and bytes come back as they were given; nil bytes may come back empty.
//
// A Store is safe for concurrent use by many runners in many processes. Data and Steps
// are opaque to it.
type Store interface {
	// Start inserts a saga and its log. If the ID exists already, Start changes nothing
	// and returns the saga that has it. created reports which.
	//
	// The new record has the request's ID, Saga, Version, Status, Data, Steps and
	// Nonce, Seq len(Log), CompleteBy now + CompleteIn (none if that is zero), and
	// CreatedAt and UpdatedAt now. If the request has an Owner, the record is claimed
	// from the start: Owner, Epoch 1, WakeAt now + Lease. Otherwise it has Owner "",
	// Epoch 0 and WakeAt now. Everything else is zero. Start costs one commit.
	Start(ctx context.Context, req StartRequest) (rec Record, created bool, err error)

	// Claim claims up to Limit due sagas for Owner and returns them as they are
	// afterwards, in any order. A saga is due if its Status is Running or Compensating,
	// its WakeAt is not after now, and its Saga and Version are among Definitions.
	// Sagas of crashed owners (Owner is not "") come before the others; among equals
	// the earliest WakeAt comes first. Rows that another claim has locked are skipped,
	// not waited for.
	//
	// In each claimed record, Previous is the Owner before, Epoch is one higher, Owner
	// is the request's, and WakeAt is now + Lease. Takeovers is one higher if Previous
	// is neither "" nor the request's Owner, which has not crashed. Seq, UpdatedAt and
	// the log do not change. No saga is claimed twice in one epoch.
	Claim(ctx context.Context, req ClaimRequest) ([]Record, error)

	// Heartbeat sets WakeAt to now + Lease for each saga of Held whose Owner and Epoch
	// are still as given, and returns those sagas. It is one statement for all of them.
	// It does not wait for a row that another transaction has locked: such a saga is
	// returned with Locked set, and keeps its WakeAt.
	Heartbeat(ctx context.Context, req HeartbeatRequest) ([]Renewed, error)

	// Commit writes the next state of one saga and appends to its log, if and only if
	// the record's Epoch and Seq are still the request's. Otherwise, and if there is no
	// such saga, it returns ErrFenced.
	//
	// Status, Data, Steps, Failures, Takeovers, LastError and Nonce become the
	// request's. Seq grows by len(Log), UpdatedAt is now, and Reported is false. Only
	// Start and Commit change Nonce. WakeAt and Owner stay, unless Release is set: then
	// Owner is "" and WakeAt is now + WakeIn. Entry i of Log is stored with Seq
	// req.Seq + 1 + i, Epoch req.Epoch and At now. Commit costs one round trip and at
	// most one commit; concurrent commits of several sagas may share one.
	Commit(ctx context.Context, req CommitRequest) (Receipt, error)

	// Cancel asks the owner of a running saga to turn back. If Status is Running and no
	// cancellation was requested before, it sets CancelRequested, CancelNote and
	// UpdatedAt, and WakeAt to now if Owner is "". Epoch, Seq and the log stay, so that the owner's
	// next commit does not fail. Cancel returns the record as it is afterwards, or
	// ErrNotFound.
	Cancel(ctx context.Context, id, note string) (Record, error)

	// Load returns one record, or ErrNotFound. It sees every write that returned before
	// Load was called.
	Load(ctx context.Context, id string) (Record, error)

	// List returns the records that the filter admits, by ascending ID in byte order,
	// up to its Limit.
	List(ctx context.Context, f Filter) ([]Record, error)

	// History returns the log of one saga by ascending Seq, from 1 to the record's Seq
	// without a gap. A saga that does not exist has no log.
	History(ctx context.Context, id string) ([]Entry, error)

	// Reported sets Reported of a stuck saga whose Seq is still seq. It changes nothing
	// else, and nothing of any other saga.
	Reported(ctx context.Context, id string, seq int64) error

	// Unregistered counts the due sagas (see Claim) whose Saga and Version are not
	// among registered, by Saga and Version.
	Unregistered(ctx context.Context, registered []Definition) ([]Unregistered, error)
}

// ErrNotMigrated is returned by the Check of a store whose tables are missing or have
// another version.
var ErrNotMigrated = errors.New("saga: the store is not migrated")

// A Checker is a Store that reports whether it is ready for use. [Runner.Run] returns
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
// step can commit, in one transaction with the user's own rows. [StartTx] and sagas with
// DoTx or UndoTx need one.
type TxStore interface {
	Store

	// Begin begins the transaction of one DoTx or UndoTx. In SQLite it takes the write
	// lock immediately (BEGIN IMMEDIATE).
	Begin(ctx context.Context) (*sql.Tx, error)

	// Exclusive reports whether a transaction of Begin excludes all other writers,
	// heartbeats included, as in SQLite. A runner then ends the transaction after half
	// a lease.
	Exclusive() bool

	// StartTx is Start inside tx. It neither commits tx nor rolls it back. An ID that
	// exists already must leave tx usable.
	StartTx(ctx context.Context, tx *sql.Tx, req StartRequest) (rec Record, created bool, err error)

	// CommitTx is Commit inside tx. It neither commits tx nor rolls it back. It is the
	// last statement of tx. If another owner has claimed the saga in a newer epoch, it
	// matches no row and returns ErrFenced, even if that claim was committed after tx
	// began. (READ COMMITTED has this effect on PostgreSQL. Under snapshot isolation
	// the database's serialization failure is as good.)
	CommitTx(ctx context.Context, tx *sql.Tx, req CommitRequest) (Receipt, error)
}

// A Record is one saga as a [Store] keeps it.
type Record struct {
	ID      string
	Saga    string // the definition's Name
	Version int    // the definition's Version
	Status  Status
	Data    []byte // the state, encoded by the definition's Codec
	Steps   []byte // every step's progress, a short JSON text; opaque to the store

	Seq      int64  // the number of entries in the log; with Epoch the fence of every write
	Nonce    int64  // of the last Start or Commit
	Owner    string // the runner that holds the saga; "" for none
	Previous string // the Owner before Claim; "" from every other method
	Epoch    int64  // the fencing token: grows with each claim

	WakeAt     time.Time // when the owner's lease ends; without an owner, when it is due
	CompleteBy time.Time // when the saga turns back if its pivot is not done; zero means never

	Failures        int    // attempts that failed since a step last succeeded
	Takeovers       int    // claims from another owner that had not released the saga, since a step last succeeded
	LastError       string // text of the latest failure
	CancelRequested bool
	CancelNote      string // why; "" unless CancelRequested
	Reported        bool   // OnStuck was called for this stuck saga

	CreatedAt time.Time
	UpdatedAt time.Time // of the latest Start, Commit or Cancel
	Now       time.Time // the store's clock when the record was read
}

// A StartRequest asks a Store to insert a saga.
type StartRequest struct {
	ID         string
	Saga       string // the definition's Name
	Version    int    // the definition's Version
	Status     Status
	Data       []byte
	Steps      []byte
	Nonce      int64         // random; see CommitRequest
	CompleteIn time.Duration // zero means no deadline
	Owner      string        // "" leaves the saga to be claimed
	Lease      time.Duration // of Owner
	Log        []Entry       // never empty; the store sets Seq, Epoch and At
}

// A ClaimRequest asks a Store for sagas that are due.
type ClaimRequest struct {
	Owner       string
	Lease       time.Duration
	Limit       int
	Definitions []Definition
}

// A Definition identifies one version of one definition.
type Definition struct {
	Saga    string // the definition's Name
	Version int
}

// A HeartbeatRequest extends the leases of the sagas that an owner holds.
type HeartbeatRequest struct {
	Owner string
	Lease time.Duration
	Held  []Held
}

// Held identifies a saga and the epoch in which its owner claimed it.
type Held struct {
	ID    string
	Epoch int64
}

// Renewed is a saga that still belongs to its owner.
type Renewed struct {
	ID              string
	Epoch           int64
	Locked          bool // the lease was not extended: its row was locked
	CancelRequested bool
	CancelNote      string
}

// A CommitRequest is the next state of one saga, fenced by Epoch and Seq.
type CommitRequest struct {
	ID    string
	Epoch int64 // the record's must still be this
	Seq   int64 // the record's must still be this
	// Nonce is a random number. A caller whose answer was lost recognizes its own write
	// by it. Seq and Epoch do not tell that write from another one of the same owner,
	// such as a transaction whose COMMIT arrives late.
	Nonce int64

	Status    Status
	Data      []byte
	Steps     []byte
	Failures  int
	Takeovers int
	LastError string
	Log       []Entry // never empty; the store sets Seq, Epoch and At

	Release bool          // the owner gives the saga up: it is parked, handed over or ended
	WakeIn  time.Duration // when it is due again after a Release
}

// After returns the Seq of the record after the commit.
func (c CommitRequest) After() int64 { return c.Seq + int64(len(c.Log)) }

// A Receipt is the result of a Commit.
type Receipt struct {
	CancelRequested bool
	CancelNote      string
}

// An Entry is one entry in the log of a saga.
type Entry struct {
	Seq     int64
	Kind    EventKind
	Step    string // the step or alternative; "" for the saga itself
	Op      Op
	Attempt int // the number of the attempt of Op; zero if the entry is not about an attempt
	Epoch   int64
	Error   string // the reason, or an operator's note
	At      time.Time
}

// A Filter selects sagas for List. The zero Filter admits all.
type Filter struct {
	Saga   string   // the definition's Name; "" means every definition
	Status []Status // empty means every status
	After  string   // only greater ids: the last id of the page before

	Unreported bool // only sagas that are not Reported
	Limit      int  // zero means 100
}

// Unregistered counts the due sagas of a definition that is not registered with a
// runner.
type Unregistered struct {
	Definition
	Count  int
	Oldest time.Time // the earliest WakeAt among them
	Now    time.Time // the store's clock
}
