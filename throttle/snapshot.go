package throttle

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"reflect"
	"unicode/utf8"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/throttle/internal/bucket"
)

const snapshotFormat = "throttle.Group 1"

// A snapshot is text: a line of JSON with snapshotHead, one with a snapshotKey for each key
// of which something has been spent or that has a limit by Set, and one with snapshotTail.
type snapshotHead struct {
	Format string
	Rate   float64 // of the Config
}

type snapshotKey struct {
	Key    json.RawMessage         `json:",omitempty"`
	Raw    []byte                  `json:",omitempty"` // a key that is a string but no text
	Others bool                    `json:",omitempty"` // whether it is the limit that other keys share
	Limit  *Limit                  `json:",omitempty"` // by Set
	Full   int64                   `json:",omitempty"` // when the burst is full again, in nanoseconds of Unix time
	Spent  map[string]snapshotSpan `json:",omitempty"` // of the quotas, by their windows
}

type snapshotSpan struct {
	Used int64
	End  int64 // of the window, in nanoseconds of Unix time
}

type snapshotTail struct {
	Keys int
	CRC  uint32 // Castagnoli, of all lines before
}

// Snapshot writes what the keys have spent, and the limits that Set has given them, for a
// Group of the next process to Restore: so a restart does not refill a quota of a month.
// Call it when no more calls come: what they take later may be missing. Calls that wait
// count as admitted.
//
// Keys are written as JSON; strings may hold any bytes. Snapshot returns an error for a key
// that JSON does not keep, and the errors of w.
func (g *Group[K]) Snapshot(w io.Writer) error {
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	out := bufio.NewWriter(w)
	lines := json.NewEncoder(io.MultiWriter(out, sum))
	if err := lines.Encode(snapshotHead{snapshotFormat, g.members.Load().Config.Rate}); err != nil {
		return err
	}
	keys := 0
	write := func(k snapshotKey) error {
		if k.Full == 0 && k.Spent == nil && k.Limit == nil {
			return nil
		}
		keys++
		return lines.Encode(k)
	}
	for key, a := range g.members.All() {
		k := a.snapshot()
		if err := setKey(&k, key); err != nil {
			return err
		}
		if err := write(k); err != nil {
			return err
		}
	}
	others := g.members.Shared().snapshot()
	others.Others = true
	if err := write(others); err != nil {
		return err
	}
	if err := json.NewEncoder(out).Encode(snapshotTail{keys, sum.Sum32()}); err != nil {
		return err
	}
	return out.Flush()
}

func (a *account) snapshot() snapshotKey {
	a.mu.Lock()
	defer a.mu.Unlock()
	m := a.measure()
	var windows []window
	if m.quotas != nil {
		windows = a.more.windows
	}
	k := m.snapshot(windows, present())
	if a.set {
		l := m.cfg.limit()
		k.Limit = &l
	}
	return k
}

func (m measure) snapshot(windows []window, now moment) (k snapshotKey) {
	if left := m.until(m.tat); left > 0 {
		k.Full = now.wall + int64(left)
	}
	for i := range m.quotas {
		q := &m.quotas[i]
		w := q.at(windows[i], now)
		if w.used > 0 {
			if k.Spent == nil {
				k.Spent = make(map[string]snapshotSpan)
			}
			k.Spent[q.window()] = snapshotSpan{w.used, now.wall + w.end - q.clock(now)}
		}
	}
	return k
}

// setKey sets the fields of a key.
func setKey[K comparable](k *snapshotKey, key K) (err error) {
	if v := reflect.ValueOf(&key).Elem(); v.Kind() == reflect.String && !utf8.ValidString(v.String()) {
		k.Raw = []byte(v.String())
		return nil
	}
	if k.Key, err = json.Marshal(key); err != nil {
		return fmt.Errorf("throttle: the key %v cannot be written: %w", key, err)
	}
	var back K
	if err := json.Unmarshal(k.Key, &back); err != nil || back != key {
		return fmt.Errorf("throttle: the key %v cannot be written: JSON does not keep it", key)
	}
	return nil
}

// Restore adds what a snapshot says that keys had spent to what they have spent since.
// Call it once, before the first call. It never gives tokens: what has refilled since, by
// the clock of this system, is left out, and windows that are over; what was spent is
// rounded up to the nanosecond. If a key of the
// snapshot had a limit by Set, and has none now, it gets that limit. What was spent of a
// quota counts for the quota with the same window.
//
// Restore returns an error, and changes nothing, if the snapshot is not complete and
// unchanged, if it is of other keys, or if it has more keys than there is room for.
func (g *Group[K]) Restore(r io.Reader) error {
	head, keys, others, err := readSnapshot[K](r)
	if err != nil {
		return err
	}
	plain := 0
	for _, k := range keys {
		if k.Limit == nil {
			plain++
		}
	}
	if most, need := g.members.Max(), g.members.Len()+plain; need > most {
		f := invalid.Fields{Type: "throttle.GroupConfig"}
		f.Need(false, "MaxKeys", most, fmt.Sprintf("at least %d for the keys of the snapshot", need))
		return f.Err()
	}
	for _, k := range keys {
		g.restore(k, head.Rate)
	}
	g.members.Shared().restore(others, head.Rate)
	return nil
}

// A keySnapshot is a snapshotKey with its key.
type keySnapshot[K comparable] struct {
	key K
	snapshotKey
}

func readSnapshot[K comparable](r io.Reader) (head snapshotHead, keys []keySnapshot[K], others snapshotKey, err error) {
	bad := func(why any) error { return fmt.Errorf("throttle: not a whole snapshot: %v", why) }
	in := bufio.NewReader(r)
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	if err = readLine(in, sum, &head); err != nil {
		return head, nil, others, bad(err)
	}
	if head.Format != snapshotFormat {
		return head, nil, others, bad(fmt.Sprintf("its format is %q: must be %q", head.Format, snapshotFormat))
	}
	for count := 0; ; count++ {
		before := sum.Sum32()
		var line struct {
			snapshotKey
			Keys *int
			CRC  uint32
		}
		if err = readLine(in, sum, &line); err != nil {
			return head, nil, others, bad(err)
		}
		if line.Keys != nil {
			if *line.Keys != count || line.CRC != before {
				return head, nil, others, bad("the checksum is wrong")
			}
			if _, err := in.ReadByte(); err != io.EOF {
				return head, nil, others, bad("it goes on after its end")
			}
			return head, keys, others, nil
		}
		k := keySnapshot[K]{snapshotKey: line.snapshotKey}
		if k.Others {
			others = k.snapshotKey
			continue
		}
		if err := k.read(); err != nil {
			return head, nil, others, bad(err)
		}
		keys = append(keys, k)
	}
}

// readLine decodes a line, adds it to sum, and returns an error if it is not whole.
func readLine(in *bufio.Reader, sum hash.Hash32, to any) error {
	line, err := in.ReadBytes('\n')
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	_, _ = sum.Write(line)
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	return d.Decode(to)
}

// read sets the key.
func (k *keySnapshot[K]) read() error {
	if v := reflect.ValueOf(&k.key).Elem(); k.Raw != nil {
		if v.Kind() != reflect.String {
			return errors.New("a key is not of this type")
		}
		v.SetString(string(k.Raw))
	} else if err := json.Unmarshal(k.Key, &k.key); err != nil {
		return err
	}
	if k.key != k.key {
		return errors.New("a key is not equal to itself")
	}
	if k.Limit != nil {
		return k.Limit.Validate()
	}
	return nil
}

// restore adds what a key has spent. rate is that by which it did, unless it has its own.
func (g *Group[K]) restore(k keySnapshot[K], rate float64) {
	e := g.members.Add(k.key)
	defer e.Unpin()
	if k.Limit != nil {
		rate = k.Limit.Rate
		e.Value.assign(*k.Limit, g.members.Each, false)
	}
	e.Value.restore(k.snapshotKey, rate)
}

func (a *account) restore(k snapshotKey, rate float64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	m, now := a.measure(), present()
	if m.quotas != nil {
		m.restoreWindows(k, a.more.windows, now)
	}
	m.tat = a.tat
	a.tat = m.restore(k, rate, now)
}

// restoreWindows adds what was spent to windows.
func (m measure) restoreWindows(k snapshotKey, windows []window, now moment) {
	for i := range m.quotas {
		q := &m.quotas[i]
		span := k.Spent[q.window()]
		left := span.End - now.wall
		if left <= 0 || span.Used <= 0 {
			continue
		}
		w := q.at(windows[i], now)
		if end := now.steady + min(left, int64(q.Every)); q.calendar == nil && (w.used == 0 || end > w.end) {
			w.end = end
		}
		w.used += min(span.Used, maxQuota)
		windows[i] = w
	}
}

// restore returns the tat with what was spent at a rate, of which no more than a burst is left.
func (m measure) restore(k snapshotKey, rate float64, now moment) (tat bucket.Time) {
	left := k.Full - now.wall
	if k.Full == 0 || left <= 0 || m.rate.IsUnlimited() {
		return m.tat
	}
	from, ok := bucket.NewRate(rate)
	if !ok {
		from = m.rate
	}
	return m.rate.Owed(m.tat, m.now, left, &from, m.rate.Of(m.burst))
}
