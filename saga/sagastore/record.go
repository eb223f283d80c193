package sagastore

import "time"

// A Record is one saga as a [Store] keeps it.
type Record struct {
	ID       string
	Saga     string // the definition's Name
	Version  int    // the definition's Version
	Status   Status
	State    []byte // encoded by the definition's Codec; opaque to the store
	Progress []byte // of the saga and its steps: JSON, which the store keeps as it is

	Parent     string // the ID of the saga that has started this one; "" for none, or if that is deleted
	ParentStep string // the step of Parent that has started it; "" without Parent
	Tenant     string // on whose behalf the saga runs; "" for none

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
	State      []byte
	Progress   []byte
	Parent     string        // see Record; "" for none
	ParentStep string        // empty if and only if Parent is
	Tenant     string        // up to 100 bytes; "" for none
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
	Definitions []Definition
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

// A CommitRequest is the next state of one saga, fenced by Epoch and Seq. The names in JSON are those of a
// column.
type CommitRequest struct {
	ID    string `json:"id"`
	Epoch int64  `json:"epoch"` // the record's must still be this
	Seq   int64  `json:"seq"`   // the record's must still be this
	// Nonce is a random number. A caller whose answer was lost recognizes its own write
	// by it. Seq and Epoch do not tell that write from another one of the same owner,
	// such as a transaction whose COMMIT arrives late.
	Nonce int64 `json:"nonce"`

	Version   int     `json:"-"` // the definition's version from now on; 0 leaves it as it is
	Status    Status  `json:"status"`
	State     []byte  `json:"data"` // nil if it has not changed
	Progress  []byte  `json:"-"`
	Failures  int     `json:"failures"`
	Takeovers int     `json:"takeovers"`
	LastError string  `json:"last_error"`
	Log       []Entry `json:"-"` // never empty; the store sets Seq, Epoch and At

	Release bool          `json:"-"` // the owner gives the saga up: it is parked, handed over or ended
	WakeIn  time.Duration `json:"-"` // when it is due again after a Release
}

// After returns the Seq of the record after the commit.
func (c CommitRequest) After() int64 { return c.Seq + int64(len(c.Log)) }

// A Receipt is the result of a Commit.
type Receipt struct {
	CancelRequested bool
	CancelNote      string

	// Woken is set if the request's Release was, and the saga is due now although WakeIn says
	// later: a Post has woken it since it was claimed.
	Woken bool
}

// A PostRequest asks a Store to keep a message for a saga, or to wake it.
type PostRequest struct {
	ID      string // the saga's
	Name    string // "" only wakes the saga
	Payload []byte // opaque to the store
	// Cancel makes Payload the note of a request to turn back. It is kept in the Record, not among the
	// messages.
	Cancel bool
	// Admit returns an error if the saga must not have a new message of this name. It changes nothing,
	// does not use the store, and may be called again. Nil admits it.
	Admit func(rec *Record) error
}

// A Message is a signal, which a Store keeps for a saga until the saga is deleted.
type Message struct {
	Name    string
	Payload []byte
}

// An Entry is one entry in the log of a saga. The names in JSON are those of a column.
type Entry struct {
	Seq     int64     `json:"seq"`
	Kind    EventKind `json:"event"`
	Step    string    `json:"step"` // "" for the saga itself
	Op      Op        `json:"op"`
	Attempt int       `json:"attempt"` // the number of the attempt of Op; zero if the entry is not about an attempt
	Epoch   int64     `json:"-"`
	Error   string    `json:"error"` // the reason, or an operator's note
	At      time.Time `json:"-"`
}

// An EventKind is the kind of an entry. It is opaque to the store; package saga has them.
type EventKind string

// An Op is the operation of a step. It is opaque to the store.
type Op string

// The operations of a step.
const (
	OpDo   Op = "do"
	OpUndo Op = "undo"
)
