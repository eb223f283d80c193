package throttle

import (
	"reflect"
	"strings"
)

// ownText returns a copy of a string key, so that the Group does not keep alive the
// larger text that the key may be part of. It returns any other key as it is.
func ownText[K comparable](key K) K {
	if v := reflect.ValueOf(&key).Elem(); v.Kind() == reflect.String {
		v.SetString(strings.Clone(v.String()))
	}
	return key
}
