package keyed

import (
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"
)

// Other is the text for the overflow, in place of a key.
const Other = "(other keys)"

const maxText = 100 // bytes

// Text returns the text of a key in errors, events and metrics: at most its first 100 bytes, without a
// truncated character at the end.
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

// Label returns the text of a member in errors: "users[tenant 7]". Either part may be empty.
func Label(name, key string) string {
	if key == "" {
		return name
	}
	return name + "[" + key + "]"
}

// detach returns a copy of a string key, and any other key unchanged. A string may be a part of a larger text,
// which a table would otherwise keep in memory.
func detach[K comparable](key K) K {
	if v := reflect.ValueOf(&key).Elem(); v.Kind() == reflect.String {
		v.SetString(strings.Clone(v.String()))
	}
	return key
}
