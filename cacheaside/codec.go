package cacheaside

import (
	"encoding"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"reflect"
	"runtime/debug"
	"time"

	"github.com/go-resilience/resilience/internal/panics"
)

// A Codec encodes and decodes values for a [Store]. It must be safe for concurrent use.
type Codec[V any] interface {
	// Encode returns the encoded value.
	Encode(value V) ([]byte, error)
	// Decode decodes data, a result of Encode, and returns the value.
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

	jsonUnmarshaler = reflect.TypeFor[json.Unmarshaler]()
	textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// survivesJSON reports whether JSON can restore a value of type t. JSON cannot restore the type of an interface's
// value, encode a function, or read unexported fields. seen has the types that have been visited, because a type may
// contain itself.
func survivesJSON(t reflect.Type, seen map[reflect.Type]bool) bool {
	if p := reflect.PointerTo(t); marshals(p) { // a *t has the methods of a t
		return p.Implements(jsonUnmarshaler) || !p.Implements(jsonMarshaler) && p.Implements(textUnmarshaler)
	}
	if seen[t] {
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
		return (plainKey(t.Key()) || marshals(t.Key())) && survivesJSON(t.Key(), seen) && survivesJSON(t.Elem(), seen)
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			// JSON encodes the exported fields of an embedded struct even if its type is not exported.
			encoded := f.IsExported() || f.Anonymous && f.Type.Kind() == reflect.Struct
			switch {
			case f.Tag.Get("json") == "-": // omitted deliberately
			case !encoded && f.Type.Size() > 0, encoded && !survivesJSON(f.Type, seen):
				return false
			}
		}
		return true
	}
	return true
}

// marshals reports whether t has a method that encodes it, as JSON or as text.
func marshals(t reflect.Type) bool {
	return t.Kind() != reflect.Interface && (t.Implements(jsonMarshaler) || t.Implements(textMarshaler))
}

// An envelope is the encoding of an entry for a Store. It consists of the version of this format, a checksum of all
// bytes that follow, flags, the duration of the load, and the output of the Codec.
const (
	envelopeVersion = 5
	envelopeHead    = 1 + 4 // bytes of the version and the checksum
	envelopeLeast   = envelopeHead + 1 + 8

	flagAbsent = 1
	flagLagged = 2
)

var (
	errEnvelope = errors.New("not an envelope of this version")
	errDamaged  = errors.New("damaged: checksum is wrong")
	checksums   = crc32.MakeTable(crc32.Castagnoli)
)

// recovered converts a panic of a Codec to an error. Without it, the panic would fail the load, for all its keys. It
// would then also fail each further load of the key, until the value that causes the panic has expired in the Store.
func recovered(err *error) {
	if v := recover(); v != nil {
		*err = panics.New(fmt.Sprintf("Codec panicked: %v", v), v, debug.Stack())
	}
}

// seal encodes an entry as an envelope.
func (cfg *Config[K, V]) seal(e *entry[V]) (_ []byte, err error) {
	defer recovered(&err)
	data := make([]byte, envelopeLeast)
	data[0] = envelopeVersion
	binary.BigEndian.PutUint64(data[envelopeHead+1:], uint64(e.took))
	if e.lagged {
		data[envelopeHead] = flagLagged
	}
	if e.absent {
		data[envelopeHead] |= flagAbsent
	} else {
		body, err := cfg.Codec.Encode(e.value)
		if err != nil {
			return nil, fmt.Errorf("encode: %w", err)
		}
		data = append(data, body...)
	}
	binary.BigEndian.PutUint32(data[1:], crc32.Checksum(data[envelopeHead:], checksums))
	return data, nil
}

// open decodes an envelope. It does not set the times of the entry.
func (cfg *Config[K, V]) open(data []byte) (_ *entry[V], err error) {
	defer recovered(&err)
	if len(data) < envelopeLeast || data[0] != envelopeVersion {
		return nil, errEnvelope
	}
	if crc32.Checksum(data[envelopeHead:], checksums) != binary.BigEndian.Uint32(data[1:]) {
		return nil, errDamaged
	}
	e := &entry[V]{absent: data[envelopeHead]&flagAbsent != 0, lagged: data[envelopeHead]&flagLagged != 0}
	e.took = max(0, time.Duration(binary.BigEndian.Uint64(data[envelopeHead+1:])))
	if e.absent {
		return e, nil
	}
	if e.value, err = cfg.Codec.Decode(data[envelopeLeast:]); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	return e, nil
}
