package shared

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/notify"
)

// outages holds the hash slots for which Redis has not answered. The Redis Cluster
// specification defines 16384 slots: all keys of a slot are on one server, and the
// memory is bounded whatever the number of keys.
type outages struct {
	heard  func() bool                  // whether anybody hears of events
	hear   func(context.Context, Event) // tells them
	events notify.Queue[Event]          // added under mu

	mu     sync.Mutex
	slots  map[uint16]*Outage
	down   int       // of slots, the outages that have begun
	begun  int64     // outages so far
	looked time.Time // for slots that no call tries
}

// An Event is an outage that began or ended.
type Event struct {
	Began bool
	Key   string // of the call that noticed it
	Cause error
}

// An Outage is what is wrong with a slot. One answer that is late is not an outage yet: it
// begins when no answer came in time between two that were late, or with an error. It does not
// change.
type Outage struct {
	begun bool
	key   string // of the call that noticed it
	Cause error
	Until time.Time // when a call may try the slot again
}

// of returns the outage of a key's slot, or nil. To one call each RetryEvery it returns
// nil although there is an outage: that call tries the slot.
func (o *outages) of(key string, every time.Duration) *Outage {
	o.mu.Lock()
	defer o.mu.Unlock()
	known := o.at(key)
	if known == nil || !known.begun {
		return nil
	}
	if now := time.Now(); !now.Before(known.Until) {
		next := *known
		next.Until = now.Add(every)
		o.slots[SlotOf(key)] = &next
		return nil
	}
	return known
}

// at returns what is wrong with a key's slot, or nil. o.mu is held.
func (o *outages) at(key string) *Outage {
	if len(o.slots) == 0 {
		return nil
	}
	return o.slots[SlotOf(key)]
}

// well reports whether there is no outage of a key's slot.
func (o *outages) well(key string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	known := o.at(key)
	return known == nil || !known.begun
}

// late records that Redis did not answer in time for a call. The caller calls deliver.
func (o *outages) late(t *Terms, c Call, cause error) *Outage {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.note(t, c, cause, o.at(c.Full) != nil)
}

// began records that Redis did not answer for a call. The caller calls deliver.
func (o *outages) began(t *Terms, c Call, cause error) *Outage {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.note(t, c, cause, true)
}

// lost records that an answer that was late did not come at all. That says nothing if Redis
// has answered another call since.
func (o *outages) lost(t *Terms, c Call, cause error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if known := o.at(c.Full); known != nil && !known.begun {
		o.note(t, c, cause, true)
	}
}

// note records what is wrong with a slot. o.mu is held.
func (o *outages) note(t *Terms, c Call, cause error, begins bool) *Outage {
	next := &Outage{begun: begins, key: keyed.Text(c.Key), Cause: cause, Until: time.Now().Add(t.RetryEvery)}
	if before := o.at(c.Full); begins && (before == nil || !before.begun) {
		o.begun++
		o.down++
		o.add(Event{Began: true, Key: next.key, Cause: cause})
	}
	if o.slots == nil {
		o.slots = make(map[uint16]*Outage)
	}
	o.slots[SlotOf(c.Full)] = next
	return next
}

// ended records that Redis answered for a call. The caller calls deliver.
func (o *outages) ended(t *Terms, c Call) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.slots) == 0 {
		return
	}
	if slot := SlotOf(c.Full); o.slots[slot] != nil {
		o.over(slot, keyed.Text(c.Key))
	}
	now := time.Now()
	if now.Sub(o.looked) < t.RetryEvery {
		return
	}
	o.looked = now
	for slot, known := range o.slots {
		if !now.Before(known.Until.Add(t.RetryEvery)) { // no call has tried it since it could
			o.over(slot, known.key)
		}
	}
}

// over ends the outage of a slot. o.mu is held.
func (o *outages) over(slot uint16, key string) {
	begun := o.slots[slot].begun
	delete(o.slots, slot)
	if !begun {
		return
	}
	o.down--
	o.add(Event{Key: key})
}

func (o *outages) add(e Event) {
	if o.heard() {
		o.events.Add(e)
	}
}

// deliver tells the observers of outages that began and ended. The caller holds no lock.
func (o *outages) deliver(ctx context.Context) { o.events.Deliver(ctx, o.hear) }

// SlotOf returns the hash slot of a key: CRC16 (XMODEM) of it, or of the first part
// in braces, modulo 16384.
func SlotOf(key string) uint16 {
	if _, tagged, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(tagged, "}"); ok && tag != "" {
			key = tag
		}
	}
	var crc uint16
	for i := range len(key) {
		crc ^= uint16(key[i]) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return crc % 16384
}
