package registry

import (
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
)

// decode sets fields of cfg, which is a pointer to a Config. The keys of values are field names. The error lists every
// value that is invalid for its field.
func decode(cfg any, values map[string]any) error {
	var errs []error
	valid := make(map[string]any, len(values)) // the values for which prepare returns no error
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if failed := prepare(reflect.ValueOf(cfg).Elem(), map[string]any{name: values[name]}); failed != nil {
			errs = append(errs, failed...)
			continue
		}
		valid[name] = values[name]
	}
	d, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		Result: cfg, ErrorUnused: true, ZeroFields: true,
		MatchName:  func(key, field string) bool { return key == field },
		DecodeHook: convert,
	})
	if err != nil {
		return err
	}
	err = d.Decode(valid)
	if all, ok := errors.AsType[interface {
		error
		Unwrap() []error
	}](err); ok { // drop the text that mapstructure adds around the joined errors
		err = all
	}
	for _, err := range split(err) {
		if field, ok := errors.AsType[*mapstructure.DecodeError](err); ok {
			err = fmt.Errorf("%s: %w", field.Name(), field.Unwrap())
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// prepare returns an error for each value whose field cannot be set. If a value is null, prepare sets the field to
// zero. If a field is a pointer to a struct, prepare replaces the struct by a copy, because decoding writes to the
// struct, and other Configs may share it.
func prepare(config reflect.Value, values map[string]any) (errs []error) {
	for _, name := range slices.Sorted(maps.Keys(values)) {
		f, ok := config.Type().FieldByName(name)
		switch {
		case !ok || !f.IsExported() || len(f.Index) > 1:
			errs = append(errs, fmt.Errorf("%s: %s has no such field", name, config.Type()))
			continue
		case name == "Name":
			errs = append(errs, fmt.Errorf("%s: policy cannot change its name", name))
			continue
		case !settable(f):
			errs = append(errs, fmt.Errorf("%s: file cannot hold a value of type %s", name, f.Type))
			continue
		}
		field := config.FieldByIndex(f.Index)
		switch {
		case values[name] == nil:
			field.SetZero()
		case field.Kind() == reflect.Pointer:
			p := reflect.New(f.Type.Elem())
			if !field.IsNil() {
				p.Elem().Set(field.Elem())
			}
			field.Set(p)
			field = p.Elem()
		}
		if inner, _ := values[name].(map[string]any); field.Kind() == reflect.Struct && !isText(field.Type()) {
			for _, err := range prepare(field, inner) {
				errs = append(errs, fmt.Errorf("%s.%w", name, err))
			}
		}
	}
	return errs
}

// convert is the decode hook of mapstructure. It converts texts to the values that settings files represent as texts:
// the constants Unlimited and None, durations, time zones, and types that implement encoding.TextUnmarshaler. It
// returns an error for a number that does not fit in its field.
func convert(_, to reflect.Type, value any) (any, error) {
	text, ok := value.(string)
	if ok {
		if constant, ok := constantOf(text, to); ok {
			return constant, nil
		}
	}
	switch {
	case to == durationType:
		if n, _ := value.(json.Number); n == "0" {
			return time.Duration(0), nil
		}
		if d, err := time.ParseDuration(text); err == nil {
			return d, nil
		}
		return nil, fmt.Errorf(`is %v: must be a duration in quotes, such as "1.5s"`, value)
	case isText(to):
		if !ok {
			return nil, fmt.Errorf("is %v: must be a text", value)
		}
		if to == locationType {
			zone, err := time.LoadLocation(text)
			_ = zone.String() // initializes time.Local, which must be initialized before it is copied
			return zone, err
		}
		v := reflect.New(to)
		err := v.Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(text))
		return v.Elem().Interface(), err
	case to.Kind() == reflect.String && !ok:
		return nil, fmt.Errorf("is %v: must be a text", value)
	}
	if n, _ := value.(json.Number); !fits(string(n), to) {
		return nil, fmt.Errorf("is %s: must be in the range of %s", n, to)
	}
	return value, nil
}

// fits reports whether a number is in the range of t. mapstructure does not check this: for an int8, it makes 256 a 0.
func fits(number string, t reflect.Type) bool {
	var err error
	switch v := reflect.Zero(t); {
	case v.CanInt():
		_, err = strconv.ParseInt(number, 10, t.Bits())
	case v.CanUint():
		_, err = strconv.ParseUint(number, 10, t.Bits())
	case v.CanFloat():
		_, err = strconv.ParseFloat(number, t.Bits())
	}
	return !errors.Is(err, strconv.ErrRange)
}

// duplicates returns an error for each name that occurs twice in an object, at any depth. Without this check,
// encoding/json would silently use the last value. The input of d must be valid JSON.
func duplicates(d *json.Decoder, path string) (errs []error) {
	start, _ := d.Token()
	if _, nested := start.(json.Delim); !nested {
		return nil
	}
	seen := map[string]bool{}
	for d.More() {
		at := path
		if start == json.Delim('{') {
			name, _ := d.Token()
			at = strings.TrimPrefix(fmt.Sprint(path, ".", name), ".")
			if seen[at] {
				errs = append(errs, fmt.Errorf("%s: occurs twice", at))
			}
			seen[at] = true
		}
		errs = append(errs, duplicates(d, at)...)
	}
	_, _ = d.Token() // the closing delimiter
	return errs
}

// prefixed puts path in front of each of the errors that are joined in err.
func prefixed(path string, err error) error {
	var errs []error
	for _, e := range split(err) {
		errs = append(errs, fmt.Errorf("%s: %w", path, e))
	}
	return errors.Join(errs...)
}

// split returns the errors that are joined in err, at any depth.
func split(err error) []error {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	var all []error
	for _, e := range joined.Unwrap() {
		all = append(all, split(e)...)
	}
	return all
}
