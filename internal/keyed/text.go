package keyed

import (
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"
)

// Other is the text for the overflow, which has no key.
const Other = "(other keys)"

const maxText = 100 // bytes

// Text returns the text of a key for errors, events and metrics. A longer text is cut after at most 100 bytes, at the
// end of a character.
func Text[K any](key K) string {
	text, ok := any(key).(string)
	if !ok {
		text = fmt.Sprint(key)
	}
	if len(text) <= maxText {
		return strings.Clone(text)
	}
	end := maxText
	for end > maxText-utf8.UTFMax && !utf8.RuneStart(text[end]) {
		end--
	}
	return strings.Clone(text[:end])
}

// Label returns the text of a member for errors, such as "users[tenant 7]". name or key may be empty.
func Label(name, key string) string {
	if key == "" {
		return name
	}
	return name + "[" + key + "]"
}

// detach returns a copy of a string key, and any other key unchanged. A string key may be a part of a larger string.
// Without the copy, the larger string would remain in memory with the key.
func detach[K comparable](key K) K {
	if v := reflect.ValueOf(&key).Elem(); v.Kind() == reflect.String {
		v.SetString(strings.Clone(v.String()))
	}
	return key
}
