package settings

import "reflect"

// Change calls change with a copy of filled, a configuration whose zero fields have
// their defaults, and returns given with the fields that change has set. A field that
// change leaves as it is stays as it was given: if that is zero, its default is computed
// anew, perhaps from another field that did change.
//
// C is a struct. All of this holds for the structs in it too, and for those behind pointers,
// if their fields are all exported. They, and slices, are copied before change sees them.
// Functions cannot be compared; they are as change leaves them.
//
// If change panics with a [*Trial], Change puts the result there before it lets the
// panic go on.
func Change[C any](given, filled C, change func(*C)) C {
	changed := filled
	detach(reflect.ValueOf(&changed).Elem())
	defer func() {
		switch p := recover().(type) {
		case nil:
		case *Trial:
			merge(reflect.ValueOf(&given).Elem(), reflect.ValueOf(filled), reflect.ValueOf(changed))
			p.Result = given
			panic(p)
		default:
			panic(p)
		}
	}()
	change(&changed)
	merge(reflect.ValueOf(&given).Elem(), reflect.ValueOf(filled), reflect.ValueOf(changed))
	return given
}

// A Trial is the panic of a change that is not to take effect. Try makes one.
type Trial struct{ Result any }

// Try calls update, the Update method of a policy, with a function that calls change, and
// returns the configuration that change would result in, defaults not filled in. Nothing
// changes. It returns nil if update did not call the function, or does not use [Change].
func Try(update func(stop func()), change func()) (result any) {
	t := &Trial{}
	defer func() {
		switch p := recover(); p {
		case nil:
		case t:
			result = t.Result
		default:
			panic(p)
		}
	}()
	update(func() {
		change()
		panic(t)
	})
	return nil
}

// merge sets the fields of to in which is differs from was.
func merge(to, was, is reflect.Value) {
	for i := range to.NumField() {
		switch {
		case !to.Type().Field(i).IsExported():
		case isPart(to.Field(i).Type()):
			merge(to.Field(i), was.Field(i), is.Field(i))
		case pointToParts(to.Field(i), was.Field(i), is.Field(i)):
			p := reflect.New(to.Field(i).Type().Elem())
			p.Elem().Set(to.Field(i).Elem())
			merge(p.Elem(), was.Field(i).Elem(), is.Field(i).Elem())
			to.Field(i).Set(p)
		case !same(was.Field(i), is.Field(i)):
			to.Field(i).Set(is.Field(i))
		}
	}
}
