package settings

import (
	"bytes"
	"reflect"
	"slices"
)

// A Patch is the merged result of changes to configurations of one type. It contains the fields that changed, with
// their latest values. It contains each field only once, even after 10,000 changes. A nil Patch is empty. A Patch is
// immutable.
type Patch struct {
	config reflect.Type
	fields []patchedField
}

type patchedField struct {
	path  []int // path of the field, as for reflect.Value.FieldByIndex
	value reflect.Value
}

// A Diff collects the paths of the fields that changes alter. The zero value is ready to use.
type Diff struct{ paths [][]int }

// Record calls change with cfg, which is a pointer to a struct, and returns the error of change. It adds the fields
// that change alters to d.
//
// Nested structs are compared field by field. Slices and maps are compared by their elements, but count as one field.
// Functions count as altered unless they are the same function value: a function that was created again counts as
// altered. Other values are compared by ==.
func (d *Diff) Record(cfg any, change func(cfg any) error) error {
	before := Copy(cfg)
	err := change(cfg)
	if after := reflect.ValueOf(cfg); isConfig(after) {
		d.compare(reflect.ValueOf(before).Elem(), after.Elem(), nil)
	}
	return err
}

func (d *Diff) compare(before, after reflect.Value, path []int) {
	for i := range after.NumField() {
		b, a, path := before.Field(i), after.Field(i), append(slices.Clone(path), i)
		switch {
		case !after.Type().Field(i).IsExported():
		case isOpenStruct(a.Type()):
			d.compare(b, a, path)
		case !same(b, a) && !slices.ContainsFunc(d.paths, func(p []int) bool { return slices.Equal(p, path) }):
			d.paths = append(d.paths, path)
		}
	}
}

// With returns a Patch with the fields of p and the fields of d. The fields of d have their values in cfg, which is a
// pointer to a struct. If the type of cfg is not the type of p, the fields of p are dropped.
func (p *Patch) With(d *Diff, cfg any) *Patch {
	v := reflect.ValueOf(cfg)
	if !isConfig(v) || len(d.paths) == 0 {
		return p
	}
	next := &Patch{config: v.Type()}
	if p != nil && p.config == next.config {
		next.fields = slices.Clone(p.fields)
	}
	for _, path := range d.paths {
		f := patchedField{path, copyOf(v.Elem().FieldByIndex(path))}
		i := slices.IndexFunc(next.fields, func(f patchedField) bool { return slices.Equal(f.path, path) })
		if i < 0 {
			next.fields = append(next.fields, f)
		} else {
			next.fields[i] = f
		}
	}
	return next
}

// ApplyBy applies p with update, which is the Update of a policy.Description. If update rejects all changes
// together, ApplyBy applies each change separately and ignores errors.
func (p *Patch) ApplyBy(update func(dryRun bool, change func(cfg any) error) error) {
	if p == nil || update(false, p.set(p.fields)) == nil {
		return
	}
	for i := range p.fields {
		_ = update(false, p.set(p.fields[i:i+1]))
	}
}

// set returns a change function that sets fields. The function does nothing if the configuration has another type
// than p.
func (p *Patch) set(fields []patchedField) func(cfg any) error {
	return func(cfg any) error {
		if v := reflect.ValueOf(cfg); v.Type() == p.config {
			for _, f := range fields {
				v.Elem().FieldByIndex(f.path).Set(copyOf(f.value))
			}
		}
		return nil
	}
}

func isConfig(v reflect.Value) bool {
	return v.Kind() == reflect.Pointer && !v.IsNil() && v.Elem().Kind() == reflect.Struct
}

// Copy returns a pointer to a copy of the struct that cfg points to, with copies of its slices and maps.
// It returns nil if cfg is not a pointer to a struct.
func Copy(cfg any) any {
	v := reflect.ValueOf(cfg)
	if !isConfig(v) {
		return nil
	}
	return copyOf(v.Elem()).Addr().Interface()
}

// copyOf returns an addressable copy of v, with copies of the slices and maps in it.
func copyOf(v reflect.Value) reflect.Value {
	c := reflect.New(v.Type()).Elem()
	c.Set(v)
	switch {
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				c.Field(i).Set(copyOf(v.Field(i)))
			}
		}
	case v.Kind() == reflect.Slice && !v.IsNil():
		c.Set(reflect.MakeSlice(v.Type(), v.Len(), v.Len()))
		for i := range v.Len() {
			c.Index(i).Set(copyOf(v.Index(i)))
		}
	case v.Kind() == reflect.Map && !v.IsNil():
		c.Set(reflect.MakeMapWithSize(v.Type(), v.Len()))
		for i := v.MapRange(); i.Next(); {
			c.SetMapIndex(i.Key(), copyOf(i.Value()))
		}
	}
	return c
}

// same reports whether a and b are equal. copyOf must have created one of them from the other.
func same(a, b reflect.Value) bool {
	switch {
	case a.Kind() == reflect.Slice:
		if a.IsNil() != b.IsNil() || a.Len() != b.Len() {
			return false
		}
		for i := range a.Len() {
			if !same(a.Index(i), b.Index(i)) {
				return false
			}
		}
		return true
	case a.Kind() == reflect.Map:
		if a.IsNil() != b.IsNil() || a.Len() != b.Len() {
			return false
		}
		for i := a.MapRange(); i.Next(); {
			other := b.MapIndex(i.Key())
			if !other.IsValid() || !same(copyOf(i.Value()), copyOf(other)) {
				return false
			}
		}
		return true
	case isOpenStruct(a.Type()):
		for i := range a.NumField() {
			if !same(a.Field(i), b.Field(i)) {
				return false
			}
		}
		return true
	}
	// A function cannot be compared by ==, and neither can an interface that contains a function. If such a value was
	// not altered, its memory is the same.
	return a.Comparable() && b.Comparable() && a.Equal(b) || bytes.Equal(memory(a), memory(b))
}

// memory returns the bytes of v, which must be addressable.
func memory(v reflect.Value) []byte {
	array := reflect.ArrayOf(int(v.Type().Size()), reflect.TypeFor[byte]())
	return reflect.NewAt(array, v.Addr().UnsafePointer()).Elem().Bytes()
}
