package saga

import (
	"encoding/json"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

type knownPart struct {
	Street string `json:"street"`
}

// unmarshaledItself is opaque, because it has its own UnmarshalJSON.
type unmarshaledItself struct{ N int }

func (u *unmarshaledItself) UnmarshalJSON(data []byte) error {
	return json.Unmarshal(data, &struct{ N *int }{&u.N})
}

// marshaledItself is opaque, because it has its own MarshalJSON.
type marshaledItself struct{ N int }

func (m marshaledItself) MarshalJSON() ([]byte, error) { return fmt.Appendf(nil, `{"N":%d}`, m.N), nil }

type knownBase struct{ ID string }

type known struct {
	knownBase
	Name   string                `json:"name"`
	Count  int                   `json:"count,omitempty"`
	Home   knownPart             `json:"home,omitzero"`
	Work   *knownPart            `json:"work,omitempty"`
	Parts  []knownPart           `json:"parts,omitempty"`
	ByName map[string]*knownPart `json:"by_name,omitempty"`
	Lists  map[string][][1]knownPart
	Any    any
	Opaque unmarshaledItself
	Writes marshaledItself `json:",omitzero"`
	Outer  struct{ First knownPart }
	At     time.Time `json:"at,omitzero"`
	//lint:ignore SA5008 package json ignores the name, and so must the code
	Odd string `json:"\"odd\",omitempty"`
}

func TestUnknownFieldsAreKept(t *testing.T) {
	for name, c := range map[string]struct {
		was    string
		change func(*known)
		want   string // the fields that the change concerns
	}{
		"at the top": {
			`{"x":{"y":[1.0,null]},"name":"a"}`, func(k *known) { k.Name = "b" }, `{"name":"b","x":{"y":[1.0,null]}}`,
		},
		"nothing to keep": {`{"ID":"1"}`, func(k *known) { k.ID = "2" }, `{"ID":"2"}`},
		"in another case": {`{"NAME":"a","id":"1"}`, func(k *known) { k.Name = "b" }, `{"name":"b","ID":"1"}`},
		"a zeroed field":  {`{"count":1,"x":1}`, func(k *known) { k.Count = 0 }, `{"x":1}`},
		"an invalid tag":  {`{"Odd":"1","x":1}`, func(k *known) { k.Odd = "" }, `{"x":1}`},
		"a large number":  {`{"x":9007199254740993}`, nil, `{"x":9007199254740993}`},
		"in a struct": {
			`{"home":{"street":"a","zip":"1"}}`, func(k *known) { k.Home.Street = "b" }, `{"home":{"street":"b","zip":"1"}}`,
		},
		"in a zero struct": {`{"home":{"zip":"1"}}`, func(k *known) { k.Name = "b" }, `{"name":"b","home":{"zip":"1"}}`},
		"an emptied one": {
			`{"home":{"street":"a","zip":"1"}}`, func(k *known) { k.Home = knownPart{} }, `{"home":{"zip":"1"}}`,
		},
		"behind a pointer": {
			`{"work":{"zip":"1"}}`, func(k *known) { k.Work.Street = "b" }, `{"work":{"street":"b","zip":"1"}}`,
		},
		"a nil pointer": {`{"work":{"zip":"1"},"x":1}`, func(k *known) { k.Work = nil }, `{"x":1}`},
		"in a map": {
			`{"by_name":{"a":{"zip":"1"},"b":{"zip":"2"}}}`,
			func(k *known) { delete(k.ByName, "a"); k.ByName["c"] = &knownPart{} },
			`{"by_name":{"b":{"street":"","zip":"2"},"c":{"street":""}}}`,
		},
		"appended": {
			`{"parts":[{"street":"a","zip":"1"}]}`, func(k *known) { k.Parts = append(k.Parts, knownPart{"b"}) },
			`{"parts":[{"street":"a","zip":"1"},{"street":"b"}]}`,
		},
		"an element removed": {
			`{"parts":[{"street":"a","zip":"1"},{"street":"b","zip":"2"}]}`, func(k *known) { k.Parts = k.Parts[1:] },
			`{"parts":[{"street":"b","zip":"2"}]}`,
		},
		"an element changed": {
			`{"parts":[{"street":"a","zip":"1"},{"street":"b","zip":"2"}]}`, func(k *known) { k.Parts[1].Street = "c" },
			`{"parts":[{"street":"a","zip":"1"},{"street":"c","zip":"2"}]}`,
		},
		"elements in another order": {
			`{"parts":[{"street":"a","zip":"1"},{"street":"b","zip":"2"}]}`,
			func(k *known) { k.Parts[0], k.Parts[1] = k.Parts[1], k.Parts[0] },
			`{"parts":[{"street":"b","zip":"2"},{"street":"a","zip":"1"}]}`,
		},
		"one removed, one changed": { // nobody knows which is which
			`{"parts":[{"street":"a","zip":"1"},{"street":"b","zip":"2"}]}`,
			func(k *known) { k.Parts = []knownPart{{"c"}} },
			`{"parts":[{"street":"c"}]}`,
		},
		"deep in arrays": {`{"Lists":{"a":[[{"zip":"1"}]]}}`, nil, `{"Lists":{"a":[[{"street":"","zip":"1"}]]}}`},
		"in an any":      {`{"Any":{"zip":"1"}}`, func(k *known) { k.Any = "b" }, `{"Any":"b"}`},
		"a nil in a map": {
			`{"by_name":{"a":{"zip":"1"}}}`, func(k *known) { k.ByName["a"] = nil }, `{"by_name":{"a":null}}`,
		},
		"reads itself": {
			`{"Opaque":{"N":1,"M":2},"x":1}`, func(k *known) { k.Opaque.N = 3 }, `{"Opaque":{"N":3},"x":1}`,
		},
		"writes itself": {`{"Writes":{"N":1,"M":2}}`, func(k *known) { k.Writes.N = 3 }, `{"Writes":{"N":3}}`},
		"writes itself, emptied": {
			`{"Writes":{"N":1,"M":2},"x":1}`, func(k *known) { k.Writes.N = 0 }, `{"x":1}`,
		},
		"in the first field": {
			`{"Outer":{"First":{"street":"a","zip":"1"}}}`, func(k *known) { k.Outer.First.Street = "b" },
			`{"Outer":{"First":{"street":"b","zip":"1"}}}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var s known
			require.NoError(t, json.Unmarshal([]byte(c.was), &s))
			if c.change != nil {
				c.change(&s)
			}
			p := program{isJSON: true, state: reflect.TypeFor[known]()}
			p.encode, p.decode = coders(&Saga[known]{})
			got, err := p.encodeFrom(&s, []byte(c.was))
			require.NoError(t, err)
			again, err := p.encodeFrom(&s, got)
			require.NoError(t, err)
			require.Equal(t, string(got), string(again), "written again")
			var back known
			require.NoError(t, json.Unmarshal(got, &back))
			require.Equal(t, s, back)
			var all, want map[string]any
			require.NoError(t, json.Unmarshal(got, &all))
			require.NoError(t, json.Unmarshal([]byte(c.want), &want))
			for name, v := range want {
				require.Equal(t, v, all[name], name)
			}
			for _, name := range []string{"x", "NAME", "id", "home", "work", "Odd", "Writes"} {
				require.Equal(t, want[name] != nil, all[name] != nil, name)
			}
			require.Contains(t, string(got)+"9007199254740993", "9007199254740993")
			if name == "a large number" {
				require.Contains(t, string(got), "9007199254740993")
			}
		})
	}
}

// FuzzKeepUnknown decodes any JSON as a known, and encodes it. What that has of JSON must not change, and all that it
// has not must be there.
func FuzzKeepUnknown(f *testing.F) {
	f.Add(`{"x":1,"name":"a","parts":[{"zip":1},{"street":"b"}],"by_name":{"a":{"zip":2}},"home":{"zip":3}}`)
	f.Add(`{"work":{"street":"\u003c","<>":null},"Lists":{"":[[{"a":[]}],null]},"Any":[{"b":1e400}]}`)
	f.Add(`{"x":1,"X":2,"x":3,"NAME":"a","name":"b","Name":5}`)
	f.Fuzz(func(t *testing.T, was string) {
		var s, back known
		if json.Unmarshal([]byte(was), &s) != nil {
			return
		}
		now, err := json.Marshal(&s)
		if err != nil {
			return // a time that cannot be written
		}
		kept := keepUnknown(reflect.TypeFor[known](), now, []byte(was))
		require.NoError(t, json.Unmarshal(kept, &back), "%s", kept)
		again, err := json.Marshal(&back)
		require.NoError(t, err)
		require.Equal(t, string(now), string(again), "what the program knows")
		require.Equal(t, string(kept), string(keepUnknown(reflect.TypeFor[known](), again, kept)), "written again")
		list, _ := members([]byte(was))
		all, _ := members(kept)
		last := make(map[string]string)
		for _, m := range list {
			last[m.name] = string(m.value)
		}
		fields := make(map[string]reflect.Type)
		for name, f := range jsonFields(reflect.TypeFor[known]()) {
			fields[name] = f.Type
		}
		for _, m := range all {
			if _, is := knownAs(fields, m.name); !is {
				require.Equal(t, last[m.name], string(m.value))
				delete(last, m.name)
			}
		}
		for name := range last {
			if _, is := knownAs(fields, name); !is {
				t.Errorf("%q is lost: %s", name, kept)
			}
		}
	})
}
