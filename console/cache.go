package console

import (
	"context"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
)

// cacheOf returns a function that applies an operation to a cacheaside.Cache with keys of any type. It returns nil
// if p is not a cache.
func cacheOf(p any) func(context.Context, Operation) error {
	all, ok := p.(interface {
		InvalidateAll(ctx context.Context) error
	})
	invalidate, expire := reflect.ValueOf(p).MethodByName("Invalidate"), reflect.ValueOf(p).MethodByName("Expire")
	if !ok || !byKeys(invalidate) || !byKeys(expire) {
		return nil
	}
	return func(ctx context.Context, op Operation) (err error) {
		f := invalidate
		switch op.Action {
		case InvalidateAll:
			return ofStore(all.InvalidateAll(ctx))
		case Expire:
			f = expire
		}
		key, err := keyOf(f.Type().In(1).Elem(), op.Key)
		if err != nil {
			return err
		}
		err, _ = f.Call([]reflect.Value{reflect.ValueOf(ctx), key})[0].Interface().(error)
		return ofStore(err)
	}
}

// byKeys reports whether f is a func(context.Context, ...K) error.
func byKeys(f reflect.Value) bool {
	if !f.IsValid() {
		return false
	}
	t := f.Type()
	return t.IsVariadic() && t.NumIn() == 2 && t.In(0) == reflect.TypeFor[context.Context]() &&
		t.NumOut() == 1 && t.Out(0) == reflect.TypeFor[error]()
}

// keyOf parses a key of type t. If t is an encoding.TextUnmarshaler, keyOf calls its method UnmarshalText. A string is
// used unchanged. A key of any other type is parsed as JSON.
func keyOf(t reflect.Type, text string) (reflect.Value, error) {
	key := reflect.New(t)
	var err error
	switch u, isText := key.Interface().(encoding.TextUnmarshaler); {
	case text == "":
		err = errors.New("is empty")
	case isText:
		err = u.UnmarshalText([]byte(text))
	case t.Kind() == reflect.String:
		key.Elem().SetString(text)
	case json.Unmarshal([]byte(text), key.Interface()) != nil:
		err = fmt.Errorf("is %q: must be JSON of type %s", text, t)
	}
	if err != nil {
		return key, fmt.Errorf("key: %w", err)
	}
	return key.Elem(), nil
}
