package saga

import (
	"bytes"
	"encoding"
	"encoding/json"
	"iter"
	"maps"
	"reflect"
	"slices"
	"strings"
	"unicode"
)

// keepUnknown returns now, the JSON of a value of type t, with those fields of was that t does not have. was is the
// JSON from which the value was decoded before it changed.
//
// An object in now receives the unknown fields of the corresponding object in was. Two objects correspond if they are
// the same field of a struct, or have the same key in a map. If an element of a slice has not changed, it corresponds
// to the element from which it was decoded, even if it was moved. If it has changed, it corresponds to the old element
// at the same index, unless the slice has become shorter. Types that marshal or unmarshal themselves are opaque.
func keepUnknown(t reflect.Type, now, was json.RawMessage) json.RawMessage {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if isOpaque(t) {
		return now
	}
	switch t.Kind() {
	case reflect.Struct:
		return keepInStruct(t, now, was)
	case reflect.Map:
		return keepInMap(t.Elem(), now, was)
	case reflect.Slice, reflect.Array:
		return keepInSlice(t.Elem(), now, was)
	}
	return now
}

// isOpaque reports whether values of type t marshal or unmarshal themselves.
func isOpaque(t reflect.Type) bool {
	p := reflect.PointerTo(t)
	return marshals(t) || p.Implements(reflect.TypeFor[json.Unmarshaler]()) ||
		p.Implements(reflect.TypeFor[encoding.TextUnmarshaler]())
}

func keepInStruct(t reflect.Type, now, was json.RawMessage) json.RawMessage {
	list, isObject := members(now)
	before, wasObject := members(was)
	if !isObject || !wasObject {
		return now
	}
	fields := make(map[string]reflect.Type)
	for name, f := range jsonFields(t) {
		fields[name] = f.Type
	}
	unknown := make(map[string]json.RawMessage)
	for _, m := range before {
		name, known := knownAs(fields, m.name)
		if !known {
			unknown[m.name] = m.value
			continue
		}
		i := slices.IndexFunc(list, func(n member) bool { return n.name == name })
		if i >= 0 {
			list[i].value = keepUnknown(fields[name], list[i].value, m.value)
			continue
		}
		// The struct may be omitted because all fields that t knows are zero. It may still have unknown fields.
		if ft := fields[name]; ft.Kind() == reflect.Struct && !isOpaque(ft) {
			if kept := keepInStruct(ft, json.RawMessage("{}"), m.value); string(kept) != "{}" {
				list = append(list, member{name, kept})
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(unknown)) {
		list = append(list, member{name, unknown[name]})
	}
	return object(list)
}

// knownAs returns the name of the field into which package json decodes a member. An exact match has priority.
func knownAs(fields map[string]reflect.Type, name string) (field string, known bool) {
	if _, known = fields[name]; known {
		return name, true
	}
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		if strings.EqualFold(field, name) {
			return field, true
		}
	}
	return "", false
}

func keepInMap(elem reflect.Type, now, was json.RawMessage) json.RawMessage {
	list, isObject := members(now)
	before, wasObject := members(was)
	if !isObject || !wasObject {
		return now
	}
	old := make(map[string]json.RawMessage, len(before))
	for _, m := range before {
		old[m.name] = m.value
	}
	for i, m := range list {
		if v, is := old[m.name]; is {
			list[i].value = keepUnknown(elem, m.value, v)
		}
	}
	return object(list)
}

func keepInSlice(elem reflect.Type, now, was json.RawMessage) json.RawMessage {
	var list, old []json.RawMessage
	if json.Unmarshal(now, &list) != nil || json.Unmarshal(was, &old) != nil || len(list) == 0 {
		return now
	}
	from, taken := make([]int, len(list)), make([]bool, len(old))
	places := make(map[string][]int, len(old)) // indices in old, by the JSON that this program writes for the element
	for i, v := range old {
		written := rewritten(elem, v)
		if i < len(list) && written == string(list[i]) {
			from[i], taken[i] = i+1, true
		} else {
			places[written] = append(places[written], i)
		}
	}
	for i, v := range list {
		if at := places[string(v)]; from[i] == 0 && len(at) > 0 {
			from[i], taken[at[0]], places[string(v)] = at[0]+1, true, at[1:]
		}
	}
	for i := range list {
		if from[i] == 0 && len(list) >= len(old) && i < len(old) && !taken[i] {
			from[i] = i + 1
		}
		if from[i] > 0 {
			list[i] = keepUnknown(elem, list[i], old[from[i]-1])
		}
	}
	return slices.Concat([]byte{'['}, bytes.Join(toBytes(list), []byte{','}), []byte{']'})
}

// rewritten returns the JSON that this program writes for data, after it has decoded data as a value of type t.
func rewritten(t reflect.Type, data json.RawMessage) string {
	v := reflect.New(t)
	if json.Unmarshal(data, v.Interface()) != nil {
		return string(data)
	}
	again, err := json.Marshal(v.Interface())
	if err != nil {
		return string(data)
	}
	return string(again)
}

func toBytes(list []json.RawMessage) [][]byte {
	all := make([][]byte, len(list))
	for i := range list {
		all[i] = list[i]
	}
	return all
}

// A member is a name and a value in a JSON object.
type member struct {
	name  string
	value json.RawMessage
}

// members returns the members of a JSON object, in their order. ok is false if data is not a JSON object.
func members(data []byte) (list []member, ok bool) {
	d := json.NewDecoder(bytes.NewReader(data))
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return nil, false
	}
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil, false
		}
		m := member{name: name.(string)}
		if err := d.Decode(&m.value); err != nil {
			return nil, false
		}
		list = append(list, m)
	}
	if end, err := d.Token(); err != nil || end != json.Delim('}') {
		return nil, false
	}
	return list, true
}

// object returns a JSON object with the members.
func object(list []member) json.RawMessage {
	out := []byte{'{'}
	for i, m := range list {
		if i > 0 {
			out = append(out, ',')
		}
		name, _ := json.Marshal(m.name) // a string can be encoded
		out = append(append(append(out, name...), ':'), m.value...)
	}
	return append(out, '}')
}

// jsonFields yields the fields of a struct that package json sees, each with its name in JSON. It also yields the
// fields of embedded structs. If two fields have the same name, JSON has only one of them, or none.
func jsonFields(t reflect.Type) iter.Seq2[string, reflect.StructField] {
	return func(yield func(string, reflect.StructField) bool) {
		eachJSONField(t, map[reflect.Type]bool{}, yield)
	}
}

func eachJSONField(
	t reflect.Type, outer map[reflect.Type]bool, yield func(string, reflect.StructField) bool,
) (more bool) {
	if outer[t] {
		return true // a type that embeds a pointer to itself
	}
	outer[t] = true
	defer delete(outer, t)
	for i := range t.NumField() {
		f := t.Field(i)
		tag := f.Tag.Get("json")
		if tag == "-" {
			continue
		}
		name, _, _ := strings.Cut(tag, ",")
		if !isTagName(name) {
			name = ""
		}
		embedded := f.Type
		if embedded.Kind() == reflect.Pointer {
			embedded = embedded.Elem()
		}
		isStruct := f.Anonymous && embedded.Kind() == reflect.Struct
		switch {
		case isStruct && name == "":
			if !eachJSONField(embedded, outer, yield) {
				return false
			}
			continue
		case !f.IsExported() && !isStruct:
			continue
		case name == "":
			name = f.Name
		}
		if !yield(name, f) {
			return false
		}
	}
	return true
}

// isTagName reports whether package json accepts s, from a tag, as the name of a field. Otherwise package json uses the
// name of the field in Go.
func isTagName(s string) bool {
	return !strings.ContainsFunc(s, func(c rune) bool {
		return !strings.ContainsRune("!#$%&()*+-./:;<=>?@[]^_{|}~ ", c) && !unicode.IsLetter(c) && !unicode.IsDigit(c)
	})
}
