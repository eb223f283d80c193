package sagastore

import "time"

// A Filter selects sagas for [Store].List. A selected saga meets all conditions of the Filter. The zero Filter selects
// all sagas. Texts are compared byte by byte.
type Filter struct {
	Saga   string   // the definition's Name; "" means every definition
	Status []Status // the saga has one of these statuses; empty means every status
	ID     string   // the saga's ID or a prefix of the ID, without wildcards; "" means every ID

	CreatedBefore time.Time // only sagas whose CreatedAt is before this time; zero means no bound

	After string // the value next that List returned for the previous page of this filter; "" means the first page
	Limit int    // the maximum number of records in a page; zero or less means 100

	// WithoutState is the option to omit State. If WithoutState is true, the State of all returned records is nil or
	// empty, and List need not read State.
	WithoutState bool
}

// CountLimit is the highest number in a [Count]. A number that equals CountLimit means "CountLimit or more". The limit
// bounds the cost of [Store].Counts. Even if a store has a million sagas, Counts does not read all of them.
const CountLimit = 10_000

// Counts has the numbers of a store's sagas that have not ended.
type Counts struct {
	Sagas []Count   // one Count for each definition that has sagas, in byte order of Count.Saga
	Now   time.Time // the time of the counts, according to the store's clock; never zero
}

// A Count has the numbers of a definition's sagas that have not ended. All versions of the definition are counted
// together. A number that equals [CountLimit] means "CountLimit or more".
type Count struct {
	Saga         string // the definition's Name
	Running      int    // the number of sagas whose Status is Running
	Compensating int    // the number of sagas whose Status is Compensating
	Stuck        int    // the number of sagas whose Status is Stuck

	Due       int       // the number of due sagas, including sagas of crashed owners; see [Store].Claim
	OldestDue time.Time // the earliest WakeAt of the due sagas; zero if no saga is due
}

// Of returns a pointer to the field that counts the sagas with status s. Of returns nil if s is final or unknown.
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
