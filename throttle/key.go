package throttle

import (
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"
)

// maxKeyText is how many bytes of a key an error shows.
const maxKeyText = 100

// keyText returns a key as errors show it.
func keyText[K any](key K) string {
	if text, ok := any(key).(string); ok {
		return shorten(text)
	}
	return shorten(fmt.Sprint(key))
}

func shorten(text string) string {
	if len(text) <= maxKeyText {
		return text
	}
	end := maxKeyText
	for end > maxKeyText-utf8.UTFMax && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + "..."
}

// ownText returns a copy of a string key, so that the Group does not keep alive the
// larger text that the key may be part of. It returns any other key as it is.
func ownText[K comparable](key K) K {
	if v := reflect.ValueOf(&key).Elem(); v.Kind() == reflect.String {
		v.SetString(strings.Clone(v.String()))
	}
	return key
}
