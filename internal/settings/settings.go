// Package settings changes the configuration of a policy that runs.
package settings

import "reflect"

// Change calls change with a copy of filled, a configuration whose zero fields have
// their defaults, and returns given with the fields that change has set. A field that
// change leaves as it is stays as it was given: if that is zero, its default is computed
// anew, perhaps from another field that did change.
//
// C is a struct. Slices, and structs behind pointers that have exported fields only, are
// copied before change sees them, at any depth. Functions cannot be compared; they are as
// change leaves them.
func Change[C any](given, filled C, change func(*C)) C {
	changed := filled
	detach(reflect.ValueOf(&changed).Elem())
	change(&changed)
	merge(reflect.ValueOf(&given).Elem(), reflect.ValueOf(filled), reflect.ValueOf(changed))
	return given
}

// merge sets the fields of to in which is differs from was.
func merge(to, was, is reflect.Value) {
	for i := range to.NumField() {
		switch {
		case !to.Type().Field(i).IsExported():
		case plain(to.Field(i).Type()):
			merge(to.Field(i), was.Field(i), is.Field(i))
		case to.Field(i).Kind() == reflect.Func || !reflect.DeepEqual(was.Field(i).Interface(), is.Field(i).Interface()):
			to.Field(i).Set(is.Field(i))
		}
	}
}

// detach copies what v shares with other values.
func detach(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				detach(v.Field(i))
			}
		}
	case reflect.Slice:
		if !v.IsNil() {
			s := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
			reflect.Copy(s, v)
			v.Set(s)
		}
		for i := range v.Len() {
			detach(v.Index(i))
		}
	case reflect.Pointer:
		if !v.IsNil() && plain(v.Type().Elem()) {
			p := reflect.New(v.Type().Elem())
			p.Elem().Set(v.Elem())
			detach(p.Elem())
			v.Set(p)
		}
	}
}

// plain reports whether t is a struct whose fields are all exported: a configuration,
// and not a policy or a lock.
func plain(t reflect.Type) bool {
	if t.Kind() != reflect.Struct {
		return false
	}
	for i := range t.NumField() {
		if !t.Field(i).IsExported() {
			return false
		}
	}
	return true
}
