package sagastore

import "time"

// A Filter selects sagas. A saga must meet all of its conditions. The zero Filter admits all sagas.
type Filter struct {
	Saga   string   // the definition's Name; "" means every definition
	Status []Status // empty means every status
	ID     string   // the ID, or its beginning; "" means any

	CreatedBefore time.Time // only sagas that were started before, by the store's clock; zero means no bound

	After string // the Next of the page before; "" means the first page
	Limit int    // of a page; zero means 100

	WithoutState bool // leave out the Data of records, the State of instances
}

// CountLimit is the highest number of a [Count]. It stands for so many or more: a store
// that has kept a million sagas does not read them all to count them.
const CountLimit = 10_000

// Counts are the numbers of the sagas in a store, at Now.
type Counts struct {
	Sagas []Count   // by definition, in the order of their names
	Now   time.Time // the store's clock
}

// A Count has the numbers of the sagas of a definition that have not ended, in all its versions. A number that
// is [CountLimit] means so many or more.
type Count struct {
	Saga         string // the definition's Name
	Running      int
	Compensating int
	Stuck        int

	Due       int       // running or compensating sagas that a runner may claim
	OldestDue time.Time // when the first of them became due; zero if there is none
}

// Of returns the field that counts the sagas with a status, or nil if that is final.
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
