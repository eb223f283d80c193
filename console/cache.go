package console

import (
	"context"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"

	"github.com/go-resilience/resilience/registry"
)

// A cache is what an operator does to a cacheaside.Cache, whatever the type of its keys.
type cache struct {
	invalidateAll      func(context.Context) error
	invalidate, expire reflect.Value // of func(context.Context, ...K) error
}

// cacheOf returns a policy as a cache, if it is one.
func cacheOf(p registry.Policy) (cache, bool) {
	all, ok := p.(interface {
		InvalidateAll(ctx context.Context) error
	})
	if !ok {
		return cache{}, false
	}
	v := reflect.ValueOf(p)
	c := cache{all.InvalidateAll, v.MethodByName("Invalidate"), v.MethodByName("Expire")}
	return c, byKeys(c.invalidate) && byKeys(c.expire)
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

func (c cache) do(ctx context.Context, op Operation) error {
	f := c.invalidate
	switch op.Action {
	case InvalidateAll:
		return storeError(c.invalidateAll(ctx))
	case Expire:
		f = c.expire
	}
	key, err := keyOf(f.Type().In(1).Elem(), op.Key)
	if err != nil {
		return err
	}
	err, _ = f.Call([]reflect.Value{reflect.ValueOf(ctx), key})[0].Interface().(error)
	return storeError(err)
}

// keyOf reads a key: a text as it is, what reads itself from a text by that, anything else
// as JSON.
func keyOf(t reflect.Type, text string) (reflect.Value, error) {
	key := reflect.New(t)
	if text == "" {
		return key.Elem(), errors.New("key: is empty")
	}
	if u, ok := key.Interface().(encoding.TextUnmarshaler); ok {
		if err := u.UnmarshalText([]byte(text)); err != nil {
			return key.Elem(), fmt.Errorf("key: %w", err)
		}
		return key.Elem(), nil
	}
	if t.Kind() == reflect.String {
		key.Elem().SetString(text)
		return key.Elem(), nil
	}
	if err := json.Unmarshal([]byte(text), key.Interface()); err != nil {
		return key.Elem(), fmt.Errorf("key: is %q: must be JSON of type %s", text, t)
	}
	return key.Elem(), nil
}
