package lease

import (
	"sync/atomic"
	"time"
)

// Stats is a snapshot of the figures of a [Candidate]. The counters never go back.
type Stats struct {
	Elected     int64 // terms begun
	Lost        int64 // terms lost
	Resigned    int64 // terms given up
	Refused     int64 // calls of TryCampaign that found the lease held
	Asked       int64 // times that the store was asked for the lease
	Renewed     int64 // renewals that have succeeded
	StoreErrors int64 // calls of the store that have failed
	HookPanics  int64 // of OnEvent, OnStoreError and observers

	WaitTime time.Duration // sum over all waits of Run and Campaign that have ended
	LeadTime time.Duration // sum over all terms that have ended

	Queued  int // calls of Run and Campaign that wait
	Leading int // terms that hold
}

type counters struct {
	elected, lost, resigned, refused, asked, renewed, storeErrors atomic.Int64
	waitTime, leadTime, queued, leading                           atomic.Int64
}

// Stats returns a snapshot.
func (c *Candidate) Stats() Stats {
	n := &c.count
	return Stats{
		Elected: n.elected.Load(), Lost: n.lost.Load(), Resigned: n.resigned.Load(), Refused: n.refused.Load(),
		Asked: n.asked.Load(), Renewed: n.renewed.Load(), StoreErrors: n.storeErrors.Load(),
		HookPanics: c.panics.Count(),
		WaitTime:   time.Duration(n.waitTime.Load()), LeadTime: time.Duration(n.leadTime.Load()),
		Queued: int(n.queued.Load()), Leading: int(n.leading.Load()),
	}
}
