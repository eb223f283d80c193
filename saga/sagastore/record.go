package sagastore

import "time"

// A Record is a saga in a [Store]. Start and Commit change the fields. Another method changes a field only if the
// field's comment names the method.
//
// The store itself uses ID, Saga, Version, Status, Parent, ParentStep, Tenant, Seq, Owner, Epoch, WakeAt,
// CancelRequested and, for List, CreatedAt. The store returns the other fields unchanged. State, Progress, Nonce,
// Failures, LastError and CancelNote are opaque to the store. Takeovers is opaque to the store too, except that Claim
// increases it.
//
// For each saga, a store also has a flag that is not part of the Record: whether the saga was woken since its last
// claim. See Store.Post.
type Record struct {
	ID       string // the saga's ID, unique in the store: 1 to 200 bytes
	Saga     string // the definition's Name: 1 to 100 bytes
	Version  int    // the definition's Version, 0 or more
	Status   Status // the saga's status
	State    []byte // the program's state, encoded by the definition's Codec; arbitrary bytes of any length
	Progress []byte // the progress of the saga and its steps; JSON of any length, which is returned byte for byte

	Parent     string // the ID of the saga that started this saga; "" if there is none or it was deleted by DeleteEnded
	ParentStep string // the step of Parent that started this saga: up to 100 bytes; "" if and only if Parent is ""
	Tenant     string // the tenant for which the saga runs: up to 100 bytes; all sagas without a tenant have the tenant ""

	Seq      int64  // the number of entries in the log; a Commit must have the record's Seq and Epoch
	Nonce    int64  // the Nonce of the last Start or Commit; any int64
	Owner    string // the runner that holds the saga: up to 113 bytes; "" means no runner; also set by Claim
	Previous string // the Owner before the claim; set only in records that Claim returns, and not stored
	Epoch    int64  // the fencing token: the number of claims of the saga, plus 1 if Start had an Owner

	// WakeAt is the time when the Owner's lease ends, if the saga has an Owner. If the saga has no Owner, WakeAt is the
	// time from which the saga is due. If the saga has ended, WakeAt is the time when it ended. Start, Claim, Heartbeat,
	// Commit and Post set WakeAt.
	WakeAt time.Time
	// CompleteBy is the deadline for the saga's pivot (the point of no return). If the pivot is not done at this time, the
	// saga turns back. A zero CompleteBy means no deadline. The store computes CompleteBy in Start, and does not use it
	// elsewhere.
	CompleteBy time.Time

	Failures        int    // the number of failed attempts since a step last succeeded
	Takeovers       int    // the number of times that Claim took the saga from another owner that had not released it
	LastError       string // the text of the latest failure; "" if there is none
	CancelRequested bool   // whether Post has requested that the saga turn back; see [Status]
	CancelNote      string // the reason for the request to turn back, set by Post; may be ""

	CreatedAt time.Time // the time of Start
	UpdatedAt time.Time // the time of the record's last change by Start, Commit, or a Post with Cancel
	Now       time.Time // the time of the store's clock when the record was read or written; not stored
}

// A StartRequest describes the saga that [Store].Start inserts. [Record] documents the fields of the same names.
type StartRequest struct {
	ID         string
	Saga       string        // the definition's Name
	Version    int           // the definition's Version
	Status     Status        // usually Running; for a child that must no longer start, Compensated
	State      []byte        // the encoded state
	Progress   []byte        // the JSON of the progress
	Parent     string        // the ID of the parent saga, which need not exist; "" means no parent
	ParentStep string        // the step of Parent that starts this saga; "" if and only if Parent is ""
	Tenant     string        // the tenant for which the saga runs; "" means no tenant
	Nonce      int64         // a random number; see CommitRequest
	CompleteIn time.Duration // the time from now until CompleteBy; if zero, CompleteBy is zero
	Owner      string        // the runner that holds the new saga; if Owner is "", the saga is due now
	LeaseTTL   time.Duration // the duration of Owner's lease; not used if Owner is ""
	Log        []Entry       // the first entries, at least one; the store sets their Seq, Epoch and At
}

// A ChildrenRequest selects the children of a step for [Store].Children.
type ChildrenRequest struct {
	Parent string   // the Parent of the children; never ""
	Step   string   // the ParentStep of the children; never ""
	Status []Status // the children have one of these statuses; empty means every status
	Limit  int      // the maximum number of children; zero means no limit
}

// A ChildRecord has the fields that a parent needs from the [Record] of its child.
type ChildRecord struct {
	ID              string // the child's ID
	Status          Status // the child's status
	CancelRequested bool   // whether Post has requested that the child turn back
}

// A ClaimRequest is a runner's request for due sagas.
type ClaimRequest struct {
	Owner       string        // the runner that claims the sagas; never ""
	LeaseTTL    time.Duration // the duration of the leases
	Limit       int           // the maximum number of sagas, at most 10,000; zero or less means that no saga is claimed
	Definitions []Definition  // the definitions that the runner knows; empty means that no saga is claimed
}

// A Definition identifies one version of a saga's definition.
type Definition struct {
	Saga    string // the definition's Name
	Version int    // the definition's Version
}

// A HeartbeatRequest is a runner's request to extend its leases.
type HeartbeatRequest struct {
	Owner    string        // the runner that holds the sagas; never ""
	LeaseTTL time.Duration // the new duration of the leases, counted from now
	Held     []Held        // the sagas that the runner believes it holds: at most 10,000, without duplicates
}

// A Held identifies a saga and the epoch in which its owner claimed it.
type Held struct {
	ID    string // the saga's ID
	Epoch int64  // the Epoch of the Record that Start or Claim returned
}

// A Renewed is the result of a [HeartbeatRequest] for one saga. The request's Owner still holds this saga.
type Renewed struct {
	ID              string // the saga's ID
	Epoch           int64  // the epoch in which the owner claimed the saga
	Locked          bool   // whether another transaction had locked the row, so the lease was not extended
	CancelRequested bool   // the record's CancelRequested
	CancelNote      string // the record's CancelNote
}

// A CommitRequest is the next state of a saga. [Store].Commit writes the new state only if the request's Epoch and Seq
// equal the record's. The JSON names are column names of package sqlstore. A field with the JSON name "-" is not part
// of the JSON.
type CommitRequest struct {
	ID    string `json:"id"`    // the saga's ID
	Epoch int64  `json:"epoch"` // the Epoch that the record must have
	Seq   int64  `json:"seq"`   // the Seq that the record must have; After returns the record's Seq after the commit
	// Nonce is a random number. After an error, the caller recognizes its own write by the record's Nonce. Seq and Epoch
	// do not identify a write, because another write of the same owner may have the same Seq and Epoch. An example is a
	// transaction whose COMMIT arrives late.
	Nonce int64 `json:"nonce"`

	Version   int     `json:"-"`          // the record's new Version; zero means that it does not change
	Status    Status  `json:"status"`     // the record's new Status
	State     []byte  `json:"data"`       // the record's new State; nil means that it does not change
	Progress  []byte  `json:"-"`          // the record's new Progress
	Failures  int     `json:"failures"`   // the record's new Failures
	Takeovers int     `json:"takeovers"`  // the record's new Takeovers
	LastError string  `json:"last_error"` // the record's new LastError
	Log       []Entry `json:"-"`          // the new entries, at least one; the store sets their Seq, Epoch and At

	// Release reports whether the owner releases the saga. An owner releases a saga that waits, has ended, is stuck, or is
	// handed over to another runner.
	Release bool          `json:"-"`
	WakeIn  time.Duration `json:"-"` // the time until the saga is due, if Release is set; never negative; zero means now
}

// After returns the Seq of the record after the commit.
func (c CommitRequest) After() int64 { return c.Seq + int64(len(c.Log)) }

// A Receipt is the result of a successful Commit.
type Receipt struct {
	CancelRequested bool   // the record's CancelRequested
	CancelNote      string // the record's CancelNote

	// Woken reports whether a Post has woken the saga since the last claim. If so, the saga is due now instead of after
	// WakeIn. Woken is false unless the request has Release and a WakeIn greater than zero. If Woken is true, the runner
	// claims sagas immediately and does not wait for its next poll.
	Woken bool
}

// A PostRequest is a message for a saga, a request to turn back, or a request to wake the saga. See [Store].Post.
type PostRequest struct {
	ID      string // the saga's ID
	Name    string // the message's name, up to 100 bytes; if Name is "" and Cancel is false, Post only wakes the saga
	Payload []byte // the message's payload, up to 64 KiB, opaque to the store; if Cancel is set, the text of CancelNote
	// Cancel reports whether to request that the saga turn back. If Cancel is set, Payload is the text of the record's
	// CancelNote, and Name and Admit are not used.
	Cancel bool
	// Admit returns an error if the saga must not get a new message with this Name. Admit has no effects and does not use
	// the store. Post calls Admit again if the store repeats a transaction. A nil Admit admits every message, even for a
	// saga that has ended.
	Admit func(rec *Record) error
}

// A Message is a signal for a saga. A message is stored until its saga is deleted.
type Message struct {
	Name    string // the message's name, unique in the saga: 1 to 100 bytes
	Payload []byte // the message's payload
}

// An Entry is an entry in the log of a saga. An Entry never changes. The store sets Seq, Epoch and At; the other fields
// are opaque to the store. The JSON names are column names of package sqlstore. The JSON of an Entry omits Epoch and
// At, so a store that uses this JSON must add both.
type Entry struct {
	Seq     int64     `json:"seq"`     // the entry's position in the log: 1, 2, 3 and so on, without gaps
	Kind    EventKind `json:"event"`   // the kind of the entry
	Step    string    `json:"step"`    // the step's name; "" if the entry is about the saga
	Op      Op        `json:"op"`      // the operation of Step; "" if the entry is about neither OpDo nor OpUndo
	Attempt int       `json:"attempt"` // the number of the attempt of Op; zero if the entry is not about an attempt
	Epoch   int64     `json:"-"`       // the record's Epoch when the entry was written
	Error   string    `json:"error"`   // the reason for the entry, such as an error, or an operator's note; may be ""
	At      time.Time `json:"-"`       // the time of the write, according to the store's clock
}

// An EventKind is the kind of an [Entry], up to 50 bytes. An EventKind is opaque to the store. Package saga defines the
// kinds of entries.
type EventKind string

// An Op is an operation of a step. An Op is opaque to the store.
type Op string

// OpDo and OpUndo are the operations of a step. An [Entry] that is about neither operation has the Op "".
const (
	OpDo   Op = "do"   // the step's action
	OpUndo Op = "undo" // the step's compensation
)
