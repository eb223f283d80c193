package sagastore

import "time"

// A Filter selects sagas for [Store].List. A saga must meet all of its conditions. The zero Filter selects all sagas.
// Texts are compared as bytes.
type Filter struct {
	Saga   string   // the definition's Name; "" means every definition
	Status []Status // any of these statuses, which may be repeated; empty means every status
	ID     string   // the saga's ID, or a prefix of it without wildcards; "" means every ID

	CreatedBefore time.Time // only sagas whose CreatedAt is before this time; zero means no bound

	After string // the next of the previous page of the same filter, opaque to the caller; "" means the first page
	Limit int    // the maximum number of records in a page, any positive number; zero or less means 100

	WithoutState bool // whether State is nil or empty in the records, which saves reading it
}

// CountLimit is the highest number in a [Count]. There it means CountLimit or more. The limit bounds the cost of
// [Store].Counts: a store with a million sagas does not read all of them.
const CountLimit = 10_000

// Counts are the numbers of the sagas in a store that have not ended.
type Counts struct {
	Sagas []Count   // one for each definition with sagas that have not ended, in byte order of Count.Saga
	Now   time.Time // the time of the counts, according to the store's clock; never zero
}

// A Count has the numbers of a definition's sagas that have not ended, for all its versions together. A number that
// is [CountLimit] means CountLimit or more.
type Count struct {
	Saga         string // the definition's Name
	Running      int    // the number of sagas whose Status is Running
	Compensating int    // the number of sagas whose Status is Compensating
	Stuck        int    // the number of sagas whose Status is Stuck

	Due       int       // the number of due sagas; see [Store].Claim. Sagas of crashed owners are included.
	OldestDue time.Time // the earliest WakeAt of the due sagas; zero if there is none
}

// Of returns the field that counts the sagas with a status. It returns nil if the status is final or unknown.
func (c *Count) Of(s Status) *int {
	switch s {
	case Running:
		return &c.Running
	case Compensating:
		return &c.Compensating
	case Stuck:
		return &c.Stuck
	}
	return nil
}
