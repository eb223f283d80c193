package store

import "time"

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

	CreatedBefore time.Time // only sagas that were started before, by the store's clock; zero means no bound
	Unreported    bool      // only sagas that are not Reported

	Order Order  // zero means OldestFirst
	After string // the Next of the page before; "" means the first page
	Limit int    // of a page; zero means 100

	WithoutState bool // leave out the Data of records, the State of instances
}

// An Order is the order of a list. By the time of the start, a store finds the sagas of a
// definition or a status without reading others; by ID it may read all of them, over many
// pages.
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

// Of returns the field that counts the sagas with a status, or nil if there is none.
func (c *Count) Of(s Status) *int {
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
