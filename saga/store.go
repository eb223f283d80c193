package saga

import (
	"context"
	"database/sql"
	"errors"
	"time"
)

// A Store keeps sagas and their logs. [NewMemory] keeps them in the process, package
// sqlstore in PostgreSQL, MySQL, MariaDB or SQLite. Package storetest tests the rules below.
//
//   - Each method is one atomic write or one consistent read, except that List, Counts
//     and Unregistered may read each definition at a time of its own. A write that
//     returned nil survives a crash of the process and of the database.
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
	// The new record has the request's ID, Saga, Version, Parent, ParentStep, Status, Data,
	// Steps and Nonce, Seq len(Log), CompleteBy now + CompleteIn (none if that is zero), and
	// CreatedAt and UpdatedAt now. If the request has an Owner, the record is claimed
	// from the start: Owner, Epoch 1, WakeAt now + LeaseTTL. Otherwise it has Owner "",
	// Epoch 0 and WakeAt now. Everything else is zero. Start costs one commit.
	Start(ctx context.Context, req StartRequest) (rec Record, created bool, err error)

	// Claim claims up to Limit due sagas for Owner and returns them as they are
	// afterwards, in any order. A saga is due if its Status is Running or Compensating,
	// its WakeAt is not after now, and its Saga and Version are among Definitions.
	// The definitions that have due sagas take turns, in the order of the request: of the
	// first eight of them, or of all if they are fewer, none gets more than an equal part
	// of Limit, rounded up, before the others have what they need. No more sagas of a
	// definition are claimed than Limits says, if it has the definition. Of one definition,
	// sagas of crashed owners (Owner is not "") come before the others, and those by
	// ascending WakeAt. Rows that another claim has locked are skipped, not waited for.
	//
	// In each claimed record, Previous is the Owner before, Epoch is one higher, Owner
	// is the request's, and WakeAt is now + LeaseTTL. Takeovers is one higher if Previous
	// is neither "" nor the request's Owner, which has not crashed. Seq, UpdatedAt and
	// the log do not change. No saga is claimed twice in one epoch.
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
	// Status, Data, Steps, Failures, Takeovers, LastError and Nonce become the
	// request's, except that nil Data leaves Data as it is. Seq grows by len(Log),
	// UpdatedAt is now, and Reported is false. Only Start and Commit change Nonce. WakeAt
	// and Owner stay, unless Release is set: then Owner is "" and WakeAt is now + WakeIn.
	// Entry i of Log is stored with Seq req.Seq + 1 + i, Epoch req.Epoch and At now. Commit
	// costs one round trip and at most one commit; concurrent commits of several sagas may
	// share one.
	Commit(ctx context.Context, req CommitRequest) (Receipt, error)

	// Cancel asks the owner of a running saga to turn back. If Status is Running and no
	// cancellation was requested before, it sets CancelRequested, CancelNote and
	// UpdatedAt, and WakeAt to now if Owner is "". Epoch, Seq and the log stay, so that the owner's
	// next commit does not fail. Cancel returns the record as it is afterwards, or
	// ErrNotFound.
	Cancel(ctx context.Context, id, note string) (Record, error)

	// Signal keeps a signal for a saga, unless it has one of that name already: the first
	// payload remains. Before it keeps a new one, Signal calls req.Admit, if that is not nil,
	// with the record. It returns the error of Admit as it is, and then keeps nothing. A
	// Commit of the saga comes before the call of Admit, or after the signal is kept. If the
	// saga's Status is Running, its Owner "" and its WakeAt after now, WakeAt becomes now, even
	// if the signal was kept before. Epoch, Seq, UpdatedAt and the log stay. Signal returns
	// the record as it is afterwards, or ErrNotFound.
	Signal(ctx context.Context, req SignalRequest) (Record, error)

	// Signals returns the signals of one saga, by ascending name in byte order. A saga
	// that does not exist has none. Signals sees every Signal that returned before
	// Signals was called.
	Signals(ctx context.Context, id string) ([]Signal, error)

	// Hasten makes a saga due: if its Status is Running or Compensating, its Owner "" and
	// its WakeAt after now, WakeAt becomes now. It changes nothing else, and nothing of
	// any other saga. That the saga does not exist is no error.
	Hasten(ctx context.Context, id string) error

	// Load returns one record, or ErrNotFound. It sees every write that returned before
	// Load was called.
	Load(ctx context.Context, id string) (Record, error)

	// List returns a page of the records that the filter admits, in its Order. next is
	// the After of the following page, or "" if this is the last. A store may bound how
	// many records it reads for a page: a page then holds fewer records than Limit, or
	// none, and has a next. List returns an error if the filter's Order is invalid, and
	// may if its After is not the next of a page in that order.
	List(ctx context.Context, f Filter) (recs []Record, next string, err error)

	// Counts counts the sagas of each definition that has any, by ascending name. A
	// number that is CountLimit stands for so many or more.
	Counts(ctx context.Context) (Counts, error)

	// History returns up to limit entries of the log of one saga, by ascending Seq,
	// from the first after the Seq given. The log has no gap from 1 to the record's
	// Seq. A saga that does not exist has no log. A limit of zero means no limit.
	History(ctx context.Context, id string, after int64, limit int) ([]Entry, error)

	// Reported sets Reported of a stuck saga whose Seq is still seq. It changes nothing
	// else, and nothing of any other saga.
	Reported(ctx context.Context, id string, seq int64) error

	// Children returns up to Limit sagas that have the Parent and ParentStep of the request,
	// and one of its Status if that is not empty, in any order. A limit of zero means no
	// limit. Children sees every write that returned before Children was called. Its cost
	// does not grow with the number of sagas that the request does not admit.
	Children(ctx context.Context, req ChildrenRequest) ([]ChildRecord, error)

	// DeleteEnded deletes sagas with their logs and signals, and returns how many: those that
	// have no Parent and that ended in status at least age ago, up to limit, the oldest first;
	// and before them, up to limit of each generation, their children that have ended, in
	// whichever status. If it has deleted limit sagas or more, a later call goes on with the
	// parents. The Parent and ParentStep of a child that has not ended become "" when its
	// parent is deleted. DeleteEnded skips sagas without Parent whose rows are locked. It
	// returns an error if age or limit is negative, and deletes nothing if status is not
	// Completed, Compensated or Abandoned.
	DeleteEnded(ctx context.Context, status Status, age time.Duration, limit int) (int, error)

	// Unregistered counts the due sagas (see Claim) whose Saga and Version are not
	// among registered, by Saga and Version. A number that is CountLimit stands for so many
	// or more.
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

	// SignalTx is Signal inside tx. It neither commits tx nor rolls it back, and sees what
	// tx has written. Until tx ends it may keep the owner of the saga from committing.
	SignalTx(ctx context.Context, tx *sql.Tx, req SignalRequest) (Record, error)

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
	Steps   []byte // the progress of the saga and its steps, and what it carries, a JSON text; opaque to the store

	Parent     string // the ID of the saga that has started this one; "" for none, or if that is deleted
	ParentStep string // the step of Parent that has started it; "" without Parent

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
	Parent     string        // see Record; "" for none
	ParentStep string        // empty if and only if Parent is
	Nonce      int64         // random; see CommitRequest
	CompleteIn time.Duration // zero means no deadline
	Owner      string        // "" leaves the saga to be claimed
	LeaseTTL   time.Duration // of Owner
	Log        []Entry       // never empty; the store sets Seq, Epoch and At
}

// A ChildrenRequest asks a Store for the children of a step.
type ChildrenRequest struct {
	Parent string   // never ""
	Step   string   // the ParentStep of the children
	Status []Status // empty means every status
	Limit  int      // zero means no limit
}

// A ChildRecord is a part of the [Record] of a child.
type ChildRecord struct {
	ID              string
	Status          Status
	CancelRequested bool
}

// A ClaimRequest asks a Store for sagas that are due.
type ClaimRequest struct {
	Owner       string
	LeaseTTL    time.Duration
	Limit       int
	Definitions []Definition // in the order of their turns

	// Limits are the most sagas of each definition that has a limit of its own, 1 or more.
	Limits map[Definition]int
}

// A Definition identifies one version of one definition.
type Definition struct {
	Saga    string // the definition's Name
	Version int
}

// A HeartbeatRequest extends the leases of the sagas that an owner holds.
type HeartbeatRequest struct {
	Owner    string
	LeaseTTL time.Duration
	Held     []Held
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
	Data      []byte // nil if it has not changed
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

// A SignalRequest asks a Store to keep a signal.
type SignalRequest struct {
	ID      string // the saga's
	Name    string
	Payload []byte // opaque to the store
	// Admit returns an error if the saga must not take a new signal of this name. It
	// changes nothing, does not use the store, and may be called again. Nil admits it.
	Admit func(rec *Record) error
}

// A Signal is a signal that a Store keeps for a saga, until the saga is deleted.
type Signal struct {
	Name    string
	Payload []byte
	At      time.Time // when it was kept, by the store's clock
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

// A Filter selects sagas, and the order in which they are listed. A saga must meet all of
// its conditions. The zero Filter admits all sagas.
type Filter struct {
	Saga    string   // the definition's Name; "" means every definition
	Status  []Status // empty means every status
	Text    string   // a part of the ID or of the LastError, in the same case; "" means any
	Failing bool     // only running or compensating sagas with Failures

	// TextInID means that Text is a part of the ID, whatever the LastError is: for a reader
	// from whom errors are hidden.
	TextInID bool

	// The times at which the saga was started and last written: not before From, and
	// before Before. They are of the store's clock. The zero time means no bound.
	CreatedFrom, CreatedBefore time.Time
	UpdatedFrom, UpdatedBefore time.Time

	Unreported bool // only sagas that are not Reported

	Order Order  // zero means ByID
	After string // the Next of the page before; "" means the first page
	Limit int    // of a page; zero means 100

	WithoutState bool // leave out the Data of records, the State of instances
}

// An Order is the order of a list.
type Order string

// The orders.
const (
	ByID        Order = "id"     // by ascending ID, in byte order
	OldestFirst Order = "oldest" // by the time of the start
	NewestFirst Order = "newest"
)

// CountLimit is the highest number of a [Count]. It stands for so many or more: a store
// that has kept a million sagas does not read them all to count them.
const CountLimit = 10_000

// Counts are the numbers of the sagas in a store, at Now.
type Counts struct {
	Sagas []Count   // by definition, in the order of their names
	Now   time.Time // the store's clock
}

// A Count has the numbers of the sagas of a definition, in all its versions. A number that
// is [CountLimit] means so many or more.
type Count struct {
	Saga         string // the definition's Name
	Running      int
	Compensating int
	Stuck        int
	Completed    int
	Compensated  int
	Abandoned    int

	Due       int       // running or compensating sagas that a runner may claim
	OldestDue time.Time // when the first of them became due; zero if there is none
}

// Of returns the number of the sagas that have a status.
func (c *Count) Of(s Status) int {
	if n := c.of(s); n != nil {
		return *n
	}
	return 0
}

func (c *Count) of(s Status) *int {
	switch s {
	case Running:
		return &c.Running
	case Compensating:
		return &c.Compensating
	case Stuck:
		return &c.Stuck
	case Completed:
		return &c.Completed
	case Compensated:
		return &c.Compensated
	case Abandoned:
		return &c.Abandoned
	}
	return nil
}

// Unregistered counts the due sagas of a definition that is not registered with a
// runner.
type Unregistered struct {
	Definition
	Count  int
	Oldest time.Time // the earliest WakeAt among them
	Now    time.Time // the store's clock
}
