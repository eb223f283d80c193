package console

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"net/http"
	"slices"
	"strconv"
	"time"
)

// A viewer is a page that is live. Its stream is closed if it is too slow.
type viewer struct {
	path    string // of the policy that it shows; "" for the overview
	stream  chan []byte
	dropped bool // stream is closed
}

const (
	backlog   = 8                // messages that wait for a viewer
	writeTime = 10 * time.Second // for one message
)

// events streams what has changed to one page, once a second, as server-sent events.
func (c *Console) events(w http.ResponseWriter, r *http.Request) {
	c.sampler.look()
	v := &viewer{stream: make(chan []byte, backlog)}
	if q := r.URL.Query(); q.Has("kind") {
		v.path = q.Get("kind") + "/" + q.Get("name")
	}
	if !c.join(v) {
		w.Header().Set("Retry-After", "10")
		c.fail(w, r, http.StatusServiceUnavailable, fmt.Errorf("%d pages are live already", c.cfg.MaxViewers))
		return
	}
	defer c.leave(v)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // nginx would hold the events back
	out := http.NewResponseController(w)
	// A stream outlives the server's WriteTimeout, but no single write is waited for long.
	_ = out.SetReadDeadline(time.Time{})
	if r.Method == http.MethodHead {
		return
	}
	c.sampler.mu.RLock()
	first := c.message(v.path, true)
	c.sampler.mu.RUnlock()
	for msg := first; ; {
		_ = out.SetWriteDeadline(time.Now().Add(writeTime))
		if _, err := w.Write(msg); err != nil {
			return
		}
		if err := out.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
			return
		}
		var more bool
		select {
		case msg, more = <-v.stream:
			if !more {
				return
			}
		case <-r.Context().Done():
			return
		case <-c.closed:
			return
		}
	}
}

func (c *Console) join(v *viewer) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.viewers) >= c.cfg.MaxViewers {
		return false
	}
	c.viewers[v] = struct{}{}
	c.sampler.watched(+1)
	return true
}

func (c *Console) leave(v *viewer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.viewers, v)
	c.sampler.watched(-1)
}

// tick tells each viewer of the latest sample. A message is made once for all that show the
// same page.
func (c *Console) tick() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sampler.mu.RLock()
	messages := map[string][]byte{}
	for v := range c.viewers {
		if _, made := messages[v.path]; !made {
			messages[v.path] = c.message(v.path, false)
		}
	}
	c.sampler.mu.RUnlock()
	for v := range c.viewers {
		if v.dropped {
			continue
		}
		select {
		case v.stream <- messages[v.path]:
		default: // it reads too slowly, and counts until its handler has left
			v.dropped = true
			close(v.stream)
		}
	}
}

// A policyMessage is what changes on the page of a policy: the latest sample of each figure.
type policyMessage struct {
	Shape  uint64    `json:"shape"`
	Rate   string    `json:"rate"`
	Share  string    `json:"share"`
	Detail string    `json:"detail,omitempty"`
	At     int       `json:"at"`
	Points []float64 `json:"points"`
	Values []float64 `json:"values"`
}

// message returns the event for the viewers of a page. The sampler's lock is held.
func (c *Console) message(path string, all bool) []byte {
	return slices.Concat([]byte("data: "), c.data(path, all), []byte("\n\n"))
}

func (c *Console) data(path string, all bool) []byte {
	s := &c.sampler
	if path == "" {
		return s.cards(all)
	}
	t := s.byPath[path]
	if t == nil {
		return encode(policyMessage{Shape: 0})
	}
	m := policyMessage{Shape: t.shape(), Rate: t.status.rate(), Share: t.status.bad(), Detail: t.status.detail, At: s.now}
	for _, sr := range t.series {
		m.Points = append(m.Points, round(sr.at(s.now)))
		m.Values = append(m.Values, finite(sr.Value))
	}
	return encode(m)
}

// cards returns what changes on the overview from second to second, as JSON: for each card
// its rate and its share as texts, the calls of the latest second, those that failed or
// were refused, and the detail of the state. Cards that are not there have had no calls,
// unless all are there. A page with another shape must be loaded anew. It is made every
// second, perhaps of a thousand policies, and therefore by hand.
func (s *sampler) cards(all bool) []byte {
	m := append(make([]byte, 0, 64*len(s.tracks)+64), `{"shape":`...)
	m = strconv.AppendUint(m, shape(s.tracks), 10)
	m = append(m, `,"at":`...)
	m = strconv.AppendInt(m, int64(s.now), 10)
	m = append(m, `,"cards":{`...)
	first := true
	for _, t := range s.tracks {
		calls := rate(t.traffic.calls, s.now, 1)
		bad := rate(t.traffic.failed, s.now, 1) + rate(t.traffic.refused, s.now, 1)
		if !all && calls == 0 && bad == 0 && t.status.calls == 0 && t.status.detail == "" {
			continue
		}
		if !first {
			m = append(m, ',')
		}
		first = false
		m = append(m, t.quoted...)
		m = append(m, `:["`...)
		m = append(m, t.status.rate()...)
		m = append(m, `","`...)
		m = append(m, t.status.bad()...)
		m = append(m, `",`...)
		m = strconv.AppendFloat(m, round(calls), 'f', -1, 64)
		m = append(m, ',')
		m = strconv.AppendFloat(m, round(bad), 'f', -1, 64)
		if t.status.detail != "" {
			m = append(m, ',')
			m = append(m, encode(t.status.detail)...)
		}
		m = append(m, ']')
	}
	return append(m, "}}"...)
}

// shape returns a number that changes when the cards, their order or their states do.
func shape(tracks []*track) uint64 {
	h := fnv.New32a()
	for _, t := range tracks {
		for _, s := range [...]string{t.path, string(t.status.tone), t.status.state} {
			_, _ = h.Write([]byte(s))
			_, _ = h.Write([]byte{0})
		}
	}
	return uint64(h.Sum32()) // a number that a script can hold
}

// shape returns a number that changes when the state does, or when there are more figures.
func (t *track) shape() uint64 { return shape([]*track{t}) + uint64(len(t.series)) }

func encode(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err) // there are only texts and finite numbers
	}
	return data
}
