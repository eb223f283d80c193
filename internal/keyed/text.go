package keyed

import (
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"
)

// Other is the text, in place of a key, of the one member that all keys without a member
// of their own share.
const Other = "(other keys)"

const maxText = 100

// Text returns the text of a key in errors, events and figures: at most its first 100
// bytes, and no part of a character.
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

// Label returns how an error shows the member of a key: "users[tenant 7]". Either part may
// be empty.
func Label(name, key string) string {
	if key == "" {
		return name
	}
	return name + "[" + key + "]"
}

// detach returns a copy of a string key, so that a group does not keep alive the larger text
// that the key may be part of. It returns any other key as it is.
func detach[K comparable](key K) K {
	if v := reflect.ValueOf(&key).Elem(); v.Kind() == reflect.String {
		v.SetString(strings.Clone(v.String()))
	}
	return key
}
