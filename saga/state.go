package saga

import (
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
)

var (
	jsonMarshaler = reflect.TypeFor[json.Marshaler]()
	textMarshaler = reflect.TypeFor[encoding.TextMarshaler]()
)

// lost returns the first field of a state of type t that JSON does not keep, or "".
// Such a field would be there as long as one process runs the saga, and be gone when
// another takes it over.
func lost(t reflect.Type) string { return lostIn(t, "", make(map[reflect.Type]bool)) }

func lostIn(t reflect.Type, path string, seen map[reflect.Type]bool) string {
	if seen[t] || marshals(t) {
		return ""
	}
	seen[t] = true
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return lostIn(t.Elem(), path, seen)
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			name := path + "." + f.Name
			// JSON keeps the exported fields of an embedded struct, whatever its name.
			embedded := f.Anonymous && f.Type.Kind() == reflect.Struct
			if f.Tag.Get("json") == "-" || !f.IsExported() && !embedded {
				if f.Type.Size() == 0 {
					continue // there is nothing to lose
				}
				return name
			}
			if found := lostIn(f.Type, name, seen); found != "" {
				return found
			}
		}
	}
	return ""
}

// marshals reports whether values of type t decide themselves what is kept of them.
func marshals(t reflect.Type) bool {
	for _, m := range []reflect.Type{jsonMarshaler, textMarshaler} {
		if t.Implements(m) || reflect.PointerTo(t).Implements(m) {
			return true
		}
	}
	return false
}

// checkState reports that a runner would lose part of the saga's state.
func (t *typed[S]) checkState() error {
	if _, ok := t.codec.(jsonCodec[S]); !ok {
		return nil
	}
	if field := lost(reflect.TypeFor[S]()); field != "" {
		return fmt.Errorf("saga: %s: s%s is not kept by JSON, and would be lost when a saga is taken over: export it without the tag \"-\", or set Codec",
			t.plan.name, field)
	}
	return nil
}
