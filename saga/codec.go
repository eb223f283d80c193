package saga

import (
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
)

// A Codec encodes the state of a saga as bytes, and decodes it.
type Codec[S any] interface {
	Encode(s *S) ([]byte, error)
	Decode(data []byte, s *S) error
}

type jsonCodec[S any] struct{}

func (jsonCodec[S]) Encode(s *S) ([]byte, error)    { return json.Marshal(s) }
func (jsonCodec[S]) Decode(data []byte, s *S) error { return json.Unmarshal(data, s) }

var (
	jsonMarshaler = reflect.TypeFor[json.Marshaler]()
	textMarshaler = reflect.TypeFor[encoding.TextMarshaler]()
)

// unkept returns the first field of a state of type t that JSON does not keep, or "".
// Such a field keeps its value while one process runs the saga, and loses it when another
// takes the saga over.
func unkept(t reflect.Type) string { return unkeptIn(t, "", make(map[reflect.Type]bool)) }

func unkeptIn(t reflect.Type, path string, seen map[reflect.Type]bool) string {
	if seen[t] || marshals(t) {
		return ""
	}
	seen[t] = true
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return unkeptIn(t.Elem(), path, seen)
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			name := path + "." + f.Name
			// JSON keeps the exported fields of an embedded struct whose type is not exported.
			embedded := f.Anonymous && f.Type.Kind() == reflect.Struct
			if f.Tag.Get("json") == "-" || !f.IsExported() && !embedded {
				if f.Type.Size() == 0 {
					continue // it has no value
				}
				return name
			}
			if found := unkeptIn(f.Type, name, seen); found != "" {
				return found
			}
		}
	}
	return ""
}

// marshals reports whether values of type t marshal themselves.
func marshals(t reflect.Type) bool {
	for _, m := range []reflect.Type{jsonMarshaler, textMarshaler} {
		if t.Implements(m) || reflect.PointerTo(t).Implements(m) {
			return true
		}
	}
	return false
}

// checkState returns an error if the default Codec does not keep the whole state.
func (t *typed[S]) checkState() error {
	if _, ok := t.codec.(jsonCodec[S]); !ok {
		return nil
	}
	if field := unkept(reflect.TypeFor[S]()); field != "" {
		return fmt.Errorf("saga: %s: s%s is not kept by JSON and would be lost when a saga is taken over: export it without the tag \"-\", or set Codec",
			t.plan.name, field)
	}
	return nil
}
