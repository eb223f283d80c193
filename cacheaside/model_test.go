package cacheaside_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// modelEntry is the state of a key in the model.
type modelEntry struct {
	value              int
	absent             bool
	fresh, stale, keep time.Time
}

// model is the documented behavior of the Cache for one caller at a time and loads that
// take no time.
type model struct {
	ttl, staleFor, onError, notFound time.Duration
	source                           map[int]int // 0 is not found
	failing                          bool
	entries                          map[int]*modelEntry
}

var errModel = errors.New("load")

func (m *model) load(key int) (int, error) {
	switch {
	case m.failing:
		return 0, errModel
	case m.source[key] == 0:
		return 0, cacheaside.ErrNotFound
	}
	return m.source[key], nil
}

// reload loads a key into the model.
func (m *model) reload(key int) (int, error) {
	v, err := m.load(key)
	switch {
	case err == nil:
		fresh := time.Now().Add(m.ttl)
		m.entries[key] = &modelEntry{value: v, fresh: fresh, stale: fresh.Add(m.staleFor),
			keep: fresh.Add(max(m.staleFor, m.onError))}
	case errors.Is(err, cacheaside.ErrNotFound):
		delete(m.entries, key)
		if m.notFound > 0 {
			until := time.Now().Add(m.notFound)
			m.entries[key] = &modelEntry{absent: true, fresh: until, stale: until, keep: until}
		}
	}
	return v, err
}

// get also reports whether it has started a refresh.
func (m *model) get(key int) (v int, refreshes bool, err error) {
	e, now := m.entries[key], time.Now()
	switch {
	case e == nil || !now.Before(e.keep):
		v, err = m.reload(key)
		return v, false, err
	case now.Before(e.fresh) && e.absent:
		return 0, false, cacheaside.ErrNotFound
	case now.Before(e.fresh):
		return e.value, false, nil
	case now.Before(e.stale):
		_, _ = m.reload(key)
		return e.value, true, nil
	}
	v, err = m.reload(key)
	if errors.Is(err, errModel) {
		return e.value, false, nil
	}
	return v, false, err
}

func (m *model) expire(key int) {
	if e := m.entries[key]; e != nil {
		now := time.Now()
		e.fresh = earlier(e.fresh, now)
		if e.absent {
			delete(m.entries, key)
			return
		}
		e.stale = earlier(e.stale, e.fresh.Add(m.staleFor))
		e.keep = earlier(e.keep, e.fresh.Add(max(m.staleFor, m.onError)))
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// FuzzCacheIsItsModel runs operations, one byte each, against a Cache and the
// model. The first byte chooses the configuration.
func FuzzCacheIsItsModel(f *testing.F) {
	f.Add([]byte("\x00 0 @ 1 2 3"))
	f.Add([]byte{0x0f, 0x00, 0x20, 0x00, 0x6c, 0x00, 0x82, 0x6f, 0x00, 0x40, 0x00, 0x82, 0x7f, 0x00})
	f.Add([]byte{0x17, 0x20, 0x00, 0x66, 0x00, 0x01, 0xa0, 0x00, 0x60, 0x83, 0x00, 0x7f, 0x7f, 0x00, 0xc0, 0x00})
	f.Fuzz(func(t *testing.T, ops []byte) {
		if len(ops) == 0 || len(ops) > 200 {
			return
		}
		synctest.Test(t, func(t *testing.T) { runModel(t, ops) })
	})
}

func TestCacheIsItsModel(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		ops := make([]byte, 1+random.IntN(60))
		for i := range ops {
			ops[i] = byte(random.Uint32())
		}
		synctest.Test(t, func(t *testing.T) { runModel(t, ops) })
	}
}

func runModel(t *testing.T, ops []byte) {
	options := ops[0]
	m := &model{ttl: 10 * time.Second, source: map[int]int{0: 1, 1: 1}, entries: map[int]*modelEntry{}}
	if options&1 > 0 {
		m.staleFor = 5 * time.Second
	}
	if options&2 > 0 {
		m.onError = 20 * time.Second
	}
	if options&4 > 0 {
		m.notFound = 3 * time.Second
	}
	cfg := cacheaside.Config[int, int]{
		TTL: m.ttl, Jitter: cacheaside.None, StaleWhileRevalidate: m.staleFor, StaleIfError: m.onError,
		NotFoundTTL: m.notFound, ErrorPause: cacheaside.None,
		Load: func(_ context.Context, key int) (int, error) { return m.load(key) },
	}
	if options&24 > 0 {
		cfg.Store = newFakeStore().connect()
	}
	if options&16 > 0 {
		cfg.Store = newFakeStore().connect()
		cfg.Store = unwatched{cfg.Store}
	}
	c := newCache(t, cfg)
	synctest.Wait()
	for i, op := range ops[1:] {
		key := int(op & 3)
		switch op >> 5 {
		case 0, 1:
			v, err := c.Get(t.Context(), key)
			synctest.Wait() // a background refresh has ended
			want, refreshes, wantErr := m.get(key)
			if loaded, fault := m.load(key); refreshes && v == loaded && errors.Is(err, fault) {
				break // the refresh was as quick as its caller
			}
			require.ErrorIs(t, err, wantErr, "operation %d", i)
			require.Equal(t, want, v, "operation %d", i)
		case 2: // a write with invalidation
			require.NoError(t, c.Write(t.Context(), key, func(context.Context) error {
				m.source[key] = int(op>>2) & 7
				return nil
			}))
			delete(m.entries, key)
		case 3:
			time.Sleep(time.Duration(op&31) * time.Second)
		case 4: // a write without
			m.source[key] = int(op>>2) & 7
		case 5:
			m.failing = op&4 > 0
		case 6:
			if op&4 > 0 {
				require.NoError(t, c.InvalidateAll(t.Context()))
				clear(m.entries)
			} else {
				require.NoError(t, c.Invalidate(t.Context(), key))
				delete(m.entries, key)
			}
		case 7:
			require.NoError(t, c.Expire(t.Context(), key))
			m.expire(key)
		}
	}
}

// FuzzPayload puts arbitrary bytes into the Store. Reading them must be a miss and
// nothing worse.
func FuzzPayload(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("\x01\x00"))
	f.Add([]byte("\x01\x01........\x80\x80\x80"))
	f.Add([]byte("\x01\x00........\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x02{}"))
	f.Add([]byte("\x03\x00............\x01\x01{}"))
	f.Fuzz(func(t *testing.T, payload []byte) {
		synctest.Test(t, func(t *testing.T) {
			shared := newFakeStore()
			type point struct{ X int }
			c := newCache(t, cacheaside.Config[point, int]{
				Load:  func(context.Context, point) (int, error) { return 42, nil },
				Store: unwatched{shared.connect()}, Key: func(p point) string { return "k" },
			})
			_, err := c.Get(t.Context(), point{1})
			require.NoError(t, err)
			shared.items["k"].of(0).value = payload
			v, err := c.Get(t.Context(), point{1})
			switch {
			case errors.Is(err, cacheaside.ErrNotFound):
			case err != nil:
				t.Fatalf("%q: %v", payload, err)
			case v != 42 && (len(payload) < 17 || payload[0] != 1):
				t.Fatalf("%q: %d", payload, v)
			}
		})
	})
}
