package policy

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// A Metric is one measured value of a policy.
//
// A metric's Name starts with the kind of the policy. The name of a duration ends in "_seconds", and the name
// of a ratio ends in "_ratio". The name of a count has no unit. Attributes may follow the name in braces.
// Examples are "breaker.calls{outcome=failure}" and "bulkhead.wait.time_seconds".
type Metric struct {
	Name    string
	Counter bool // whether the metric is a counter, whose Value never decreases
	Value   float64
}

// Parse splits the Name of m into the measured quantity, the unit and the attributes. The unit is "s" for a
// duration, "1" for a ratio, and "" for a count.
func (m Metric) Parse() (what, unit string, attrs []Attr) {
	what, braces, _ := strings.Cut(m.Name, "{")
	for part := range strings.SplitSeq(strings.TrimSuffix(braces, "}"), ",") {
		key, value, ok := strings.Cut(part, "=")
		switch {
		case ok:
			attrs = append(attrs, Attr{key, value})
		case len(attrs) > 0: // part continues the previous value, which contains a comma
			attrs[len(attrs)-1].Value += "," + part
		}
	}
	if s, ok := strings.CutSuffix(what, "_seconds"); ok {
		return s, "s", attrs
	}
	if s, ok := strings.CutSuffix(what, "_ratio"); ok {
		return s, "1", attrs
	}
	return what, "", attrs
}

// An Attr is an attribute of a [Metric].
type Attr struct{ Key, Value string }

// Metrics returns the metrics of a policy. It creates them from the fields of stats that have a struct tag. kind
// is the kind of the policy. An example of stats:
//
//	type Stats struct {
//		Admitted int64            `counter:"calls{outcome=admitted}"`
//		Refusals map[Reason]int64 `counter:"calls{outcome=refused,reason=*}"`
//		WaitTime time.Duration    `counter:"wait.time_seconds"`
//		InFlight int              `gauge:"in_flight"`
//		State    State            `gauge:"state{state=closed|open}"`
//	}
//
// A duration is converted to seconds, and a bool is converted to 0 or 1. A map, slice or array yields one metric
// for each element. The key or index of the element replaces the asterisk in the tag. The metrics of a map are
// sorted by name. The tag of a string lists the possible values of the string. The string yields one metric for
// each of these values. The metric of the current value is 1, and the other metrics are 0. A nil pointer yields
// no metric. The fields of embedded structs are included. Fields without a tag are ignored.
//
// Metrics panics if stats is not a struct or a non-nil pointer to a struct. Metrics also panics if a field with a
// tag is unexported or cannot be converted to a number, if a field has both tags, or if the tag of a string lists
// no values.
func Metrics(kind string, stats any) []Metric {
	v := reflect.Indirect(reflect.ValueOf(stats))
	if v.Kind() != reflect.Struct {
		panic(fmt.Sprintf("policy: Metrics of a %T, which is not a struct", stats))
	}
	fields := fieldsOf(kind, v.Type())
	all := make([]Metric, 0, len(fields)+8)
	for _, f := range fields {
		if field, err := v.FieldByIndexErr(f.index); err == nil { // otherwise the field is in an embedded nil pointer
			all = f.appendTo(all, f.name, field)
		}
	}
	return all
}

// A taggedField is a field of a Stats type that has a tag.
type taggedField struct {
	index   []int  // path of the field, for reflect.Value.FieldByIndex
	name    string // name of the metric, with the kind; for a string, only the part before the listed values
	counter bool
	values  []string // the listed values of a string; each value has a metric
}

// tagged caches the tagged fields of each kind and type, because reading struct tags is the slowest part of
// Metrics.
var tagged sync.Map // the keys are taggedKey, the values []taggedField

type taggedKey struct {
	kind  string
	stats reflect.Type
}

func fieldsOf(kind string, stats reflect.Type) []taggedField {
	key := taggedKey{kind, stats}
	if fields, ok := tagged.Load(key); ok {
		return fields.([]taggedField)
	}
	fields := readTags(kind, stats)
	tagged.Store(key, fields)
	return fields
}

// readTags returns the tagged fields of a struct type, in order. If an embedded struct has no tag, its fields
// are inserted at its position.
func readTags(kind string, stats reflect.Type) (fields []taggedField) {
	for i := range stats.NumField() {
		f := stats.Field(i)
		tag, counter := f.Tag.Lookup("counter")
		gauge, isGauge := f.Tag.Lookup("gauge")
		switch {
		case counter && isGauge:
			panic(fmt.Sprintf("policy: %s.%s is tagged as a counter and as a gauge", stats, f.Name))
		case counter || isGauge:
			leaf := elementOf(f.Type)
			if !f.IsExported() || !measurable(leaf) {
				panic(fmt.Sprintf("policy: %s.%s cannot be a metric: its type is %s", stats, f.Name, f.Type))
			}
			t := taggedField{index: f.Index, name: kind + "." + cmp.Or(tag, gauge), counter: counter}
			if leaf.Kind() == reflect.String {
				if t.name, t.values = listedValues(t.name); t.values == nil {
					panic(fmt.Sprintf("policy: tag of %s.%s lists no values", stats, f.Name))
				}
			}
			fields = append(fields, t)
		case f.Anonymous && indirect(f.Type).Kind() == reflect.Struct:
			for _, t := range readTags(kind, indirect(f.Type)) {
				t.index = append([]int{i}, t.index...)
				fields = append(fields, t)
			}
		}
	}
	return fields
}

// listedValues splits "state{state=closed|open}" into "state{state=" and the values. If name has no list,
// listedValues returns name and nil.
func listedValues(name string) (prefix string, values []string) {
	at := strings.LastIndex(name, "=") + 1
	list, ok := strings.CutSuffix(name[at:], "}")
	if at == 0 || !ok {
		return name, nil
	}
	return name[:at], strings.Split(list, "|")
}

func indirect(t reflect.Type) reflect.Type {
	if t.Kind() == reflect.Pointer {
		return t.Elem()
	}
	return t
}

// elementOf returns the innermost type of the elements of maps, slices, arrays and pointers. It returns any
// other type unchanged.
func elementOf(t reflect.Type) reflect.Type {
	for {
		switch t.Kind() {
		case reflect.Map, reflect.Slice, reflect.Array, reflect.Pointer:
			t = t.Elem()
		default:
			return t
		}
	}
}

func measurable(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.String, reflect.Bool:
		return true
	}
	return t.ConvertibleTo(reflect.TypeFor[float64]())
}

var durationType = reflect.TypeFor[time.Duration]()

// appendTo appends the metrics of v to all. The keys or indexes of v's elements replace the asterisks in
// name.
func (f taggedField) appendTo(all []Metric, name string, v reflect.Value) []Metric {
	m := Metric{Name: name, Counter: f.counter}
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return all
		}
		return f.appendTo(all, name, v.Elem())
	case reflect.Map:
		type element struct {
			name string
			v    reflect.Value
		}
		elements := make([]element, 0, v.Len())
		for i := v.MapRange(); i.Next(); {
			elements = append(elements, element{strings.Replace(name, "*", keyText(i.Key()), 1), i.Value()})
		}
		slices.SortFunc(elements, func(a, b element) int { return cmp.Compare(a.name, b.name) })
		for _, e := range elements {
			all = f.appendTo(all, e.name, e.v)
		}
		return all
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			all = f.appendTo(all, strings.Replace(name, "*", strconv.Itoa(i), 1), v.Index(i))
		}
		return all
	case reflect.String:
		for _, value := range f.values {
			m.Name, m.Value = name+value+"}", 0
			if value == v.String() {
				m.Value = 1
			}
			all = append(all, m)
		}
		return all
	case reflect.Bool:
		if v.Bool() {
			m.Value = 1
		}
	case reflect.Float32, reflect.Float64:
		m.Value = v.Float()
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Uintptr:
		m.Value = float64(v.Uint())
	default: // a signed integer: readTags accepts no other kind
		m.Value = float64(v.Int())
		if v.Type() == durationType {
			m.Value = time.Duration(v.Int()).Seconds()
		}
	}
	return append(all, m)
}

// keyText returns the text of a map's key. If the kind of the key is string, the text is the key itself, even
// if its type has a method String.
func keyText(key reflect.Value) string {
	if key.Kind() == reflect.String {
		return key.String()
	}
	return fmt.Sprint(key.Interface())
}
