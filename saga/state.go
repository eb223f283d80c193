package saga

import (
	"cmp"
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
)

// A Codec encodes the state of a saga. A Codec must be safe for concurrent use.
type Codec[S any] interface {
	// Encode returns the encoded state, which Decode must be able to read in another process.
	Encode(s *S) ([]byte, error)
	// Decode decodes data into s, which is a zero S.
	Decode(data []byte, s *S) error
}

// unkept returns the path of the first field that JSON loses in a value of type t, or "" if there is none. Such a field
// has its value while one process runs the saga, and loses it when another process takes the saga over. path is the
// path from the state to t. seen has the types that were checked already.
func unkept(t reflect.Type, path string, seen map[reflect.Type]bool) string {
	if seen[t] || marshals(t) {
		return ""
	}
	seen[t] = true
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return unkept(t.Elem(), path, seen)
	case reflect.Chan, reflect.Func, reflect.Complex64, reflect.Complex128, reflect.UnsafePointer:
		return cmp.Or(path, " of type "+t.String())
	case reflect.Interface:
		if t.NumMethod() > 0 { // JSON encodes such a value, for example an error, but cannot decode it
			return cmp.Or(path, " of type "+t.String())
		}
	case reflect.Struct:
		names := make(map[string]bool)
		for name, f := range jsonFields(t) {
			if names[name] { // JSON encodes at most one of several fields with the same name
				return path + "." + f.Name
			}
			names[name] = true
		}
		for i := range t.NumField() {
			f := t.Field(i)
			name := path + "." + f.Name
			// JSON encodes the exported fields of an embedded struct with an unexported type.
			embedded := f.Anonymous && f.Type.Kind() == reflect.Struct
			if f.Tag.Get("json") == "-" || !f.IsExported() && !embedded {
				if f.Type.Size() == 0 {
					continue // a type of size 0 has no value to lose
				}
				return name
			}
			if found := unkept(f.Type, name, seen); found != "" {
				return found
			}
		}
	}
	return ""
}

// marshals reports whether values of type t marshal themselves.
func marshals(t reflect.Type) bool {
	p := reflect.PointerTo(t) // p also has the methods of t
	return p.Implements(reflect.TypeFor[json.Marshaler]()) || p.Implements(reflect.TypeFor[encoding.TextMarshaler]())
}

// mergeState writes the changes of a step into a state. base is the copy of the state that the step received, and
// changed is the same copy after the step. Each field in which the two differ is copied to into. Fields of structs and
// entries of maps are merged one by one, other values as a whole. mergeState returns an error if another step has
// changed the same field of into to a different value. All three arguments are pointers to the same type.
func mergeState(into, base, changed any) error {
	return mergeValue(reflect.ValueOf(into).Elem(), reflect.ValueOf(base).Elem(), reflect.ValueOf(changed).Elem(), "")
}

func mergeValue(into, base, changed reflect.Value, path string) error {
	switch {
	case into.Kind() == reflect.Struct && allExported(into.Type()):
		for i := range into.NumField() {
			field := path + "." + into.Type().Field(i).Name
			if err := mergeValue(into.Field(i), base.Field(i), changed.Field(i), field); err != nil {
				return err
			}
		}
		return nil
	case equal(base, changed):
		return nil
	case into.Kind() == reflect.Map && !into.IsNil() && !changed.IsNil():
		return mergeMap(into, base, changed, path)
	case !equal(into, base) && !equal(into, changed):
		return fmt.Errorf("saga: two steps that run in parallel have both changed s%s", path)
	}
	into.Set(changed)
	return nil
}

func mergeMap(into, base, changed reflect.Value, path string) error {
	for _, keys := range [][]reflect.Value{base.MapKeys(), changed.MapKeys()} {
		for _, k := range keys {
			was, is, now := base.MapIndex(k), changed.MapIndex(k), into.MapIndex(k)
			if sameEntry(was, is) || sameEntry(now, is) {
				continue
			}
			if !sameEntry(now, was) {
				return fmt.Errorf("saga: two steps that run in parallel have both changed s%s[%v]", path, k)
			}
			into.SetMapIndex(k, is) // the zero Value removes the entry
		}
	}
	return nil
}

func sameEntry(a, b reflect.Value) bool {
	if !a.IsValid() || !b.IsValid() {
		return a.IsValid() == b.IsValid()
	}
	return equal(a, b)
}

func equal(a, b reflect.Value) bool { return reflect.DeepEqual(a.Interface(), b.Interface()) }

// allExported reports whether all fields of a struct can be set, including the fields of embedded structs.
func allExported(t reflect.Type) bool {
	for i := range t.NumField() {
		f := t.Field(i)
		if !f.IsExported() && !(f.Anonymous && f.Type.Kind() == reflect.Struct && allExported(f.Type)) {
			return false
		}
	}
	return true
}
