package cacheaside

import (
	"encoding"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/fnv"
	"reflect"
	"time"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
)

// A Codec converts values for a [Store]. Several goroutines use it at once.
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

// survivesJSON reports whether JSON can restore a t. It cannot restore the type in an
// interface, write a function, or see unexported fields. seen holds the types visited: a
// type may contain itself.
func survivesJSON(t reflect.Type, seen map[reflect.Type]bool) bool {
	if marshals(reflect.PointerTo(t)) || seen[t] { // a *t has the methods of a t
		return true
	}
	if seen == nil {
		seen = make(map[reflect.Type]bool)
	}
	seen[t] = true
	switch t.Kind() {
	case reflect.Interface, reflect.Func, reflect.Chan, reflect.Complex64, reflect.Complex128, reflect.UnsafePointer:
		return false
	case reflect.Pointer, reflect.Slice, reflect.Array:
		return survivesJSON(t.Elem(), seen)
	case reflect.Map:
		return (plainKey(t.Key()) || marshals(t.Key())) && survivesJSON(t.Elem(), seen)
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			// JSON writes the exported fields of an embedded struct whose type is not exported.
			written := f.IsExported() || f.Anonymous && f.Type.Kind() == reflect.Struct
			switch {
			case f.Tag.Get("json") == "-": // left out on purpose
			case !written && f.Type.Size() > 0, written && !survivesJSON(f.Type, seen):
				return false
			}
		}
		return true
	}
	return true
}

func marshals(t reflect.Type) bool {
	return t.Kind() != reflect.Interface && (t.Implements(jsonMarshaler) || t.Implements(textMarshaler))
}

// An envelope is the form of a value in a Store: a version of this form, a checksum of
// the rest, whether the key exists, the fingerprint of the key, Config.Version, the
// duration of the load, the cost, and the output of the Codec.
const (
	envelopeVersion = 3
	envelopeHead    = 1 + 4 // version and checksum
	envelopeLeast   = envelopeHead + 1 + 8 + 4
)

var (
	errEnvelope = errors.New("not an envelope of this version")
	errVersion  = errors.New("stored under another Config.Version")
	errDamaged  = errors.New("damaged: the checksum is wrong")
	checksums   = crc32.MakeTable(crc32.Castagnoli)
)

func (c *Cache[K, V]) seal(key K, e *entry.Entry[V]) ([]byte, error) {
	absent := byte(0)
	var body []byte
	if e.Absent {
		absent = 1
	} else {
		var err error
		if body, err = guarded(func() ([]byte, error) { return c.cfg().Codec.Encode(e.Value) }); err != nil {
			return nil, fmt.Errorf("encode: %w", err)
		}
	}
	data := make([]byte, envelopeHead, envelopeLeast+2*binary.MaxVarintLen64+len(body))
	data = append(data, absent)
	data = binary.BigEndian.AppendUint64(data, c.fingerprint(key))
	data = binary.BigEndian.AppendUint32(data, c.cfg().Version)
	data = binary.AppendUvarint(data, uint64(e.Took))
	data = binary.AppendUvarint(data, uint64(e.Cost))
	data = append(data, body...)
	data[0] = envelopeVersion
	binary.BigEndian.PutUint32(data[1:], crc32.Checksum(data[envelopeHead:], checksums))
	return data, nil
}

func (c *Cache[K, V]) open(key K, data []byte) (*entry.Entry[V], error) {
	if len(data) < envelopeLeast || data[0] != envelopeVersion {
		return nil, errEnvelope
	}
	if crc32.Checksum(data[envelopeHead:], checksums) != binary.BigEndian.Uint32(data[1:]) {
		return nil, errDamaged
	}
	e := &entry.Entry[V]{Absent: data[envelopeHead] == 1}
	mark := binary.BigEndian.Uint64(data[envelopeHead+1:])
	version := binary.BigEndian.Uint32(data[envelopeHead+1+8:])
	data = data[envelopeLeast:]
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
	if version != c.cfg().Version {
		return nil, errVersion
	}
	e.Took, e.Cost = max(0, time.Duration(took)), uint32(min(cost, entry.MaxCost))
	if e.Absent {
		return e, nil
	}
	value, err := guarded(func() (V, error) { return c.cfg().Codec.Decode(data[n:]) })
	if err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	e.Value = value
	return e, nil
}

// guarded turns a panic of a Codec into an error. An unreadable value is loaded again.
func guarded[T any](do func() (T, error)) (t T, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("the codec panicked: %v", v)
		}
	}()
	return do()
}

// fingerprint distinguishes keys that Config.Key converts to the same string. It is 0 if
// formatting the key would include addresses.
func (c *Cache[K, V]) fingerprint(key K) uint64 {
	if !c.printable {
		return 0
	}
	h := fnv.New64a()
	fmt.Fprintf(h, "%v", bare(reflect.ValueOf(key)))
	return h.Sum64()
}

// bare drops the methods of a string or an integer, which may format it in any way.
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
