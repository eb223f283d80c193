// Package settings changes the configuration of a policy that runs.
package settings

import "reflect"

// Change calls change with filled, a configuration whose zero fields have their
// defaults, and returns given with the fields that change has set. A field that change
// leaves as it is stays as it was given: if that is zero, its default is computed anew,
// perhaps from another field that did change.
//
// C is a struct. filled must share no memory with the configuration in use where
// change may write to it: slices and structs behind pointers are copied first. Functions
// cannot be compared; they are as change leaves them.
func Change[C any](given, filled C, change func(*C)) C {
	changed := filled
	change(&changed)
	was, is, to := reflect.ValueOf(filled), reflect.ValueOf(changed), reflect.ValueOf(&given).Elem()
	for i := range was.NumField() {
		if f := was.Type().Field(i); !f.IsExported() {
			continue
		}
		if k := was.Field(i).Kind(); k == reflect.Func || !reflect.DeepEqual(was.Field(i).Interface(), is.Field(i).Interface()) {
			to.Field(i).Set(is.Field(i))
		}
	}
	return given
}
