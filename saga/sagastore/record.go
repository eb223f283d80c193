package sagastore

import "time"

// A Record is a saga in a [Store]. Unless a field's comment names another method, only Start and Commit change it.
//
// The store itself uses ID, Saga, Version, Status, Parent, ParentStep, Tenant, Seq, Owner, Epoch, WakeAt and
// CancelRequested, and CreatedAt for List. It returns the other fields as it received them: State, Progress, Nonce,
// Failures (Claim only increases Takeovers), LastError and CancelNote are opaque.
//
// A store also needs a flag that no Record has: whether the saga was woken since its last claim. See Store.Post.
type Record struct {
	ID       string // the saga's ID, unique in the store: 1 to 200 bytes
	Saga     string // the definition's Name: 1 to 100 bytes
	Version  int    // the definition's Version, 0 or more
	Status   Status // the saga's status
	State    []byte // the program's state, encoded by the definition's Codec: any bytes of any length
	Progress []byte // the progress of the saga and its steps: JSON of any length, to be returned byte for byte

	Parent     string // the ID of the saga that started this one; "" if there was none, or DeleteEnded has deleted it
	ParentStep string // the step of Parent that started it: up to 100 bytes; "" if and only if Parent is
	Tenant     string // the tenant for which the saga runs: up to 100 bytes; sagas without a tenant have "" in common

	Seq      int64  // the number of entries in the log; together with Epoch the fence of every Commit
	Nonce    int64  // the Nonce of the last Start or Commit; any number, even the smallest and the largest int64
	Owner    string // the runner that holds the saga: up to 113 bytes, also set by Claim; "" means none
	Previous string // the Owner before Claim, which is not stored; "" in the records of all other methods
	Epoch    int64  // the fencing token: the number of times that the saga was claimed, including by Start

	// WakeAt is the time when the lease of Owner ends. Without an Owner, it is the time from which the saga is due, or,
	// if the saga has ended, the time when it ended. Start, Claim, Heartbeat, Commit and Post set it.
	WakeAt time.Time
	// CompleteBy is the time at which the saga turns back if its pivot is not done; zero means never. The store only
	// computes it in Start.
	CompleteBy time.Time

	Failures        int    // the number of failed attempts since a step last succeeded
	Takeovers       int    // the number of claims from another owner that had not released the saga; Claim increases it
	LastError       string // the text of the latest failure; "" if there is none
	CancelRequested bool   // whether Post has requested that the saga turn back
	CancelNote      string // the reason for the request, set by Post; may be ""

	CreatedAt time.Time // the time of the Start
	UpdatedAt time.Time // the time of the latest Start, Commit or Post with Cancel that changed the record
	Now       time.Time // the store's clock when the record was read or written; not stored
}

// A StartRequest is the new saga of [Store].Start. See [Record] for the fields of the same names.
type StartRequest struct {
	ID         string
	Saga       string        // the definition's Name
	Version    int           // the definition's Version
	Status     Status        // usually Running; Compensated for a child that must not be started any more
	State      []byte        // the encoded state
	Progress   []byte        // the JSON of the progress
	Parent     string        // the ID of the saga that starts this one; "" means none. It need not exist.
	ParentStep string        // the step of Parent that starts this saga; "" if and only if Parent is
	Tenant     string        // the tenant for which the saga runs; "" means none
	Nonce      int64         // a random number; see CommitRequest
	CompleteIn time.Duration // the time from now to CompleteBy; zero means no CompleteBy
	Owner      string        // the runner that holds the new saga; "" means none, so the saga is due now
	LeaseTTL   time.Duration // the duration of Owner's lease; unused without Owner
	Log        []Entry       // the first entries, at least one; the store sets their Seq, Epoch and At
}

// A ChildrenRequest selects the children of a step for [Store].Children.
type ChildrenRequest struct {
	Parent string   // the Parent of the children; never ""
	Step   string   // the ParentStep of the children; never ""
	Status []Status // any of these statuses; empty means every status
	Limit  int      // the maximum number of children; zero means no limit
}

// A ChildRecord has the fields of a child's [Record] that its parent needs.
type ChildRecord struct {
	ID              string // the child's ID
	Status          Status // the child's status
	CancelRequested bool   // whether the child was requested to turn back
}

// A ClaimRequest is a request of a runner for due sagas.
type ClaimRequest struct {
	Owner       string        // the runner that claims them; never ""
	LeaseTTL    time.Duration // the duration of the leases
	Limit       int           // the maximum number of sagas, up to 10,000; zero or less means none
	Definitions []Definition  // the definitions that the runner knows; empty means that no saga is claimed
}

// A Definition identifies a version of a definition. Both fields must be equal.
type Definition struct {
	Saga    string // the definition's Name
	Version int    // the definition's Version
}

// A HeartbeatRequest is a request of a runner to extend its leases.
type HeartbeatRequest struct {
	Owner    string        // the runner; never ""
	LeaseTTL time.Duration // the duration of the leases, from now on
	Held     []Held        // the sagas that the runner believes it holds, each once: none to 10,000
}

// A Held identifies a saga and the epoch in which its owner claimed it.
type Held struct {
	ID    string // the saga's ID
	Epoch int64  // the Epoch of the Record that Start or Claim returned
}

// A Renewed is a saga of a [HeartbeatRequest] that still belongs to its owner.
type Renewed struct {
	ID              string // the saga's ID
	Epoch           int64  // the Epoch of the Held
	Locked          bool   // whether the lease was not extended because another transaction had locked the row
	CancelRequested bool   // the record's CancelRequested
	CancelNote      string // the record's CancelNote
}

// A CommitRequest is the next state of a saga. [Store].Commit writes it only if Epoch and Seq are still the record's.
// The names in JSON are those of columns in package sqlstore, which writes the fields without a name in another way.
type CommitRequest struct {
	ID    string `json:"id"`    // the saga's ID
	Epoch int64  `json:"epoch"` // the Epoch that the record must have
	Seq   int64  `json:"seq"`   // the Seq that the record must have; afterwards, the record has After()
	// Nonce is a random number. After an error, the caller recognizes its own write by the record's Nonce. Seq and
	// Epoch cannot distinguish that write from another write of the same owner, such as a transaction whose COMMIT
	// arrives late.
	Nonce int64 `json:"nonce"`

	Version   int     `json:"-"`          // the record's new Version; zero means that it does not change
	Status    Status  `json:"status"`     // the record's new Status
	State     []byte  `json:"data"`       // the record's new State; nil means that it does not change
	Progress  []byte  `json:"-"`          // the record's new Progress
	Failures  int     `json:"failures"`   // the record's new Failures
	Takeovers int     `json:"takeovers"`  // the record's new Takeovers
	LastError string  `json:"last_error"` // the record's new LastError
	Log       []Entry `json:"-"`          // the new entries, at least one; the store sets their Seq, Epoch and At

	// Release ends the ownership: the saga waits, is handed over to another runner, has ended or is stuck.
	Release bool          `json:"-"`
	WakeIn  time.Duration `json:"-"` // the time until the saga is due after a Release, never negative; zero means now
}

// After returns the Seq of the record after the commit.
func (c CommitRequest) After() int64 { return c.Seq + int64(len(c.Log)) }

// A Receipt is the result of a Commit that was written.
type Receipt struct {
	CancelRequested bool   // the record's CancelRequested
	CancelNote      string // the record's CancelNote

	// Woken reports whether the saga is due now instead of after WakeIn, because a Post woke it since it was claimed.
	// Woken is false unless the request has Release and a WakeIn above zero. If it is true, the runner claims sagas
	// without waiting for its next poll.
	Woken bool
}

// A PostRequest is a message for a saga, a request to turn back, or a request to wake the saga. See [Store].Post.
type PostRequest struct {
	ID      string // the saga's ID
	Name    string // the message's name, up to 100 bytes; "" without Cancel means that Post only wakes the saga
	Payload []byte // the message's payload, up to 64 KiB, opaque to the store; with Cancel, the text of CancelNote
	// Cancel reports whether Post requests that the saga turn back. Payload then becomes the record's CancelNote, and
	// is not a message. Name and Admit are not used.
	Cancel bool
	// Admit returns an error if the saga must not get a new message with this Name. It changes nothing, does not use
	// the store, and may be called again if the store repeats a transaction. Nil admits every message, even if the
	// saga has ended.
	Admit func(rec *Record) error
}

// A Message is a signal for a saga. The store has it until the saga is deleted.
type Message struct {
	Name    string // the message's name, unique in the saga: 1 to 100 bytes
	Payload []byte // the message's payload
}

// An Entry is an entry in the log of a saga, which never changes. The store reads no field, and sets Seq, Epoch and
// At. The names in JSON are those of columns in package sqlstore. A store that encodes an Entry as JSON must add
// Epoch and At.
type Entry struct {
	Seq     int64     `json:"seq"`     // the entry's position in the log, from 1 and without gaps
	Kind    EventKind `json:"event"`   // the kind of the entry
	Step    string    `json:"step"`    // the step's name; "" if the entry is about the saga
	Op      Op        `json:"op"`      // the operation of Step; "" if the entry is about neither
	Attempt int       `json:"attempt"` // the number of the attempt of Op; zero if the entry is not about an attempt
	Epoch   int64     `json:"-"`       // the record's Epoch when the entry was written
	Error   string    `json:"error"`   // the reason, or an operator's note; "" if there is none
	At      time.Time `json:"-"`       // the time of the write, according to the store's clock
}

// An EventKind is the kind of an [Entry], up to 50 bytes. It is opaque to the store. Package saga has the constants.
type EventKind string

// An Op is an operation of a step. It is opaque to the store.
type Op string

// The operations of a step. An [Entry] that is about neither has the Op "".
const (
	OpDo   Op = "do"   // the step's action
	OpUndo Op = "undo" // the step's compensation
)
