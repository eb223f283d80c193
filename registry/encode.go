package registry

import (
	"bytes"
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"
)

var (
	textType     = reflect.TypeFor[encoding.TextUnmarshaler]()
	durationType = reflect.TypeFor[time.Duration]()
	locationType = reflect.TypeFor[time.Location]()
)

// The values and texts of the constants Unlimited and None, which several packages define.
const (
	unlimited = -1
	none      = -1 << 31

	unlimitedText = "unlimited"
	noneText      = "none"
)

// takesConstants reports whether fields of type t can have the values Unlimited and None.
func takesConstants(t reflect.Type) bool {
	switch t {
	case durationType, reflect.TypeFor[int](), reflect.TypeFor[float64]():
		return true
	}
	return false
}

// constantText returns the text of v if v is Unlimited or None. For any other value, ok is false.
func constantText(v reflect.Value) (text string, ok bool) {
	if !takesConstants(v.Type()) {
		return "", false
	}
	switch v.Convert(reflect.TypeFor[float64]()).Float() {
	case unlimited:
		return unlimitedText, true
	case none:
		return noneText, true
	}
	return "", false
}

// constantOf returns the constant with the given text, as a value of type t. If there is no such constant, ok is false.
func constantOf(text string, t reflect.Type) (value any, ok bool) {
	if !takesConstants(t) {
		return nil, false
	}
	v := reflect.New(t).Elem()
	switch text {
	case unlimitedText:
		v.Set(reflect.ValueOf(unlimited).Convert(t))
	case noneText:
		v.Set(reflect.ValueOf(none).Convert(t))
	default:
		return nil, false
	}
	return v.Interface(), true
}

// encode returns v, a Config or one of its fields, as JSON that Apply accepts. It omits the fields that a
// settings file cannot hold.
func encode(v reflect.Value) []byte {
	if text, ok := constantText(v); ok {
		return quote(text)
	}
	return encodeValue(v)
}

// encodeValue is like encode, but writes the constants Unlimited and None as numbers, because this is how they are
// written in a list.
func encodeValue(v reflect.Value) []byte {
	var all []string
	switch {
	case v.Type() == durationType:
		return quote(time.Duration(v.Int()).String())
	case isText(v.Type()):
		return quote(textOf(v))
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); settable(f) {
				all = append(all, string(quote(f.Name))+": "+string(encode(v.Field(i))))
			}
		}
		return []byte("{" + strings.Join(all, ", ") + "}")
	case v.Kind() == reflect.Pointer && v.IsNil(), v.Kind() == reflect.Slice && v.IsNil():
		return []byte("null")
	case v.Type() == reflect.PointerTo(locationType):
		return quote(fmt.Sprint(v.Interface()))
	case v.Kind() == reflect.Pointer:
		return encode(v.Elem())
	case v.Kind() == reflect.Slice:
		for i := range v.Len() {
			all = append(all, string(encodeValue(v.Index(i))))
		}
		return []byte("[" + strings.Join(all, ", ") + "]")
	}
	return quote(v.Interface())
}

// textOf returns the text that represents v, for which isText is true.
func textOf(v reflect.Value) string {
	p := reflect.New(v.Type())
	p.Elem().Set(v)
	if m, ok := p.Interface().(encoding.TextMarshaler); ok {
		if b, err := m.MarshalText(); err == nil {
			return string(b)
		}
	}
	return fmt.Sprint(v.Interface())
}

// quote returns a text, number or bool as JSON. A number that JSON cannot represent becomes a text, but no valid Config
// contains such a number.
func quote(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return quote(fmt.Sprint(v))
	}
	return bytes.TrimSpace(b.Bytes())
}

// isText reports whether settings files represent values of t as texts. This applies to time zones, and to types that
// implement encoding.TextUnmarshaler.
func isText(t reflect.Type) bool {
	return t == locationType || reflect.PointerTo(t).Implements(textType)
}

// settable reports whether a settings file can set the field f. outer lists the types that contain f.
func settable(f reflect.StructField, outer ...reflect.Type) bool {
	return f.IsExported() && f.Name != "Name" && representable(f.Type, outer...)
}

// representable reports whether a settings file can hold values of t. outer lists the types that contain t.
// If t contains itself, the field of type t inside t is not representable.
func representable(t reflect.Type, outer ...reflect.Type) bool {
	if slices.Contains(outer, t) {
		return false
	}
	outer = append(slices.Clip(outer), t)
	if isText(t) {
		return true
	}
	switch t.Kind() {
	case reflect.Slice, reflect.Pointer:
		return representable(t.Elem(), outer...)
	case reflect.Struct:
		for i := range t.NumField() {
			if settable(t.Field(i), outer...) {
				return true
			}
		}
		return false
	case reflect.Bool, reflect.String:
		return true
	default:
		return t.ConvertibleTo(reflect.TypeFor[float64]())
	}
}
