package cacheaside

import (
	"encoding"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"reflect"
	"time"
)

// A Codec writes values for a [Store] and reads them back. It is used by several
// goroutines at once.
type Codec[V any] interface {
	Encode(value V) ([]byte, error)
	Decode(data []byte) (V, error)
}

type jsonCodec[V any] struct{}

func (jsonCodec[V]) Encode(value V) ([]byte, error) { return json.Marshal(value) }

func (jsonCodec[V]) Decode(data []byte) (value V, err error) {
	err = json.Unmarshal(data, &value)
	return value, err
}

var (
	jsonMarshaler = reflect.TypeFor[json.Marshaler]()
	textMarshaler = reflect.TypeFor[encoding.TextMarshaler]()
)

// survivesJSON reports whether JSON can give back a t: it has no type of its own
// for an interface, cannot write a function, and leaves unexported fields out.
func survivesJSON(t reflect.Type) bool {
	for t.Kind() == reflect.Pointer && !marshals(t) {
		t = t.Elem()
	}
	if marshals(t) || marshals(reflect.PointerTo(t)) {
		return true
	}
	switch t.Kind() {
	case reflect.Interface, reflect.Func, reflect.Chan, reflect.Complex64, reflect.Complex128, reflect.UnsafePointer:
		return false
	case reflect.Slice, reflect.Array:
		return survivesJSON(t.Elem())
	case reflect.Struct:
		for i := range t.NumField() {
			if f := t.Field(i); f.IsExported() || f.Anonymous {
				return true
			}
		}
		return t.NumField() == 0
	}
	return true
}

func marshals(t reflect.Type) bool {
	return t.Kind() != reflect.Interface && (t.Implements(jsonMarshaler) || t.Implements(textMarshaler))
}

// An envelope is how a value lies in a Store: a version, whether the key exists
// at all, the fingerprint of its key, how long its load took, what it costs, and what
// the Codec wrote.
const envelopeVersion = 1

var errEnvelope = errors.New("not an envelope of this version")

func (c *Cache[K, V]) seal(key K, e *entry[V]) ([]byte, error) {
	absent := byte(0)
	var body []byte
	if e.absent {
		absent = 1
	} else {
		var err error
		if body, err = c.cfg.Codec.Encode(e.value); err != nil {
			return nil, fmt.Errorf("encode: %w", err)
		}
	}
	data := make([]byte, 0, 2+8+2*binary.MaxVarintLen64+len(body))
	data = append(data, envelopeVersion, absent)
	data = binary.BigEndian.AppendUint64(data, c.fingerprint(key))
	data = binary.AppendUvarint(data, uint64(e.took))
	data = binary.AppendUvarint(data, uint64(e.cost))
	return append(data, body...), nil
}

func (c *Cache[K, V]) open(key K, data []byte) (*entry[V], error) {
	if len(data) < 10 || data[0] != envelopeVersion || data[1] > 1 {
		return nil, errEnvelope
	}
	e := &entry[V]{absent: data[1] == 1}
	mark := binary.BigEndian.Uint64(data[2:])
	data = data[10:]
	took, n := binary.Uvarint(data)
	if n <= 0 {
		return nil, errEnvelope
	}
	data = data[n:]
	cost, n := binary.Uvarint(data)
	if n <= 0 {
		return nil, errEnvelope
	}
	if mark != c.fingerprint(key) {
		return nil, ErrKeyCollision
	}
	e.took, e.cost = max(0, time.Duration(took)), uint32(min(cost, maxCost))
	if e.absent {
		return e, nil
	}
	value, err := c.cfg.Codec.Decode(data[n:])
	if err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	e.value = value
	return e, nil
}

// fingerprint tells keys apart that Config.Key writes alike, where a key can be printed
// without the addresses it may hold.
func (c *Cache[K, V]) fingerprint(key K) uint64 {
	if !c.printable {
		return 0
	}
	h := fnv.New64a()
	fmt.Fprintf(h, "%v", bare(reflect.ValueOf(key)))
	return h.Sum64()
}

// bare hides the methods of a string or an integer, which may print it as they like.
func bare(v reflect.Value) any {
	switch {
	case v.Kind() == reflect.String:
		return v.String()
	case v.CanInt():
		return v.Int()
	case v.CanUint():
		return v.Uint()
	}
	return v.Interface()
}

// printable reports whether %v of a t is the same in every process.
func printable(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.UnsafePointer, reflect.Chan, reflect.Interface, reflect.Uintptr:
		return false
	case reflect.Array:
		return printable(t.Elem())
	case reflect.Struct:
		for i := range t.NumField() {
			if !printable(t.Field(i).Type) {
				return false
			}
		}
	}
	return true
}
