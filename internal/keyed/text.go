package keyed

import (
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"
)

// Other is the text for the overflow where members have the text of their key.
const Other = "(other keys)"

const maxText = 100 // bytes

// Text returns the text of a key for errors, events and metrics. The text has at most 100 bytes. If a longer
// text is cut within a character, the character is omitted.
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

// detach returns a copy of a string key, and any other key unchanged. Without the copy, if the key is a part
// of a larger string, the table would keep the larger string in memory.
func detach[K comparable](key K) K {
	if v := reflect.ValueOf(&key).Elem(); v.Kind() == reflect.String {
		v.SetString(strings.Clone(v.String()))
	}
	return key
}
