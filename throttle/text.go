package throttle

import (
	"fmt"
	"slices"
	"strings"
)

var (
	overflowWords = []string{ShareOne: "share one", RefuseNew: "refuse new"}
	outageWords   = []string{LimitLocally: "limit locally", RefuseAll: "refuse all", AdmitAll: "admit all"}
)

// String returns "share one" or "refuse new".
func (o Overflow) String() string { return toWords("Overflow", overflowWords, o) }

// MarshalText returns the text of String. It returns an error for any other value than
// the constants.
func (o Overflow) MarshalText() ([]byte, error) { return marshal("Overflow", overflowWords, o) }

// UnmarshalText accepts the texts of String.
func (o *Overflow) UnmarshalText(text []byte) error {
	return unmarshal("Overflow", overflowWords, o, text)
}

// String returns "limit locally", "refuse all" or "admit all".
func (p OutagePolicy) String() string { return toWords("OutagePolicy", outageWords, p) }

// MarshalText returns the text of String. It returns an error for any other value than
// the constants.
func (p OutagePolicy) MarshalText() ([]byte, error) { return marshal("OutagePolicy", outageWords, p) }

// UnmarshalText accepts the texts of String.
func (p *OutagePolicy) UnmarshalText(text []byte) error {
	return unmarshal("OutagePolicy", outageWords, p, text)
}

func toWords[T ~int](name string, words []string, v T) string {
	if v < 0 || int(v) >= len(words) {
		return fmt.Sprintf("throttle.%s(%d)", name, int(v))
	}
	return words[v]
}

func marshal[T ~int](name string, words []string, v T) ([]byte, error) {
	if v < 0 || int(v) >= len(words) {
		return nil, fmt.Errorf("throttle.%s is %d: must be %s", name, int(v), orList(words))
	}
	return []byte(words[v]), nil
}

func unmarshal[T ~int](name string, words []string, v *T, text []byte) error {
	i := slices.Index(words, string(text))
	if i < 0 {
		return fmt.Errorf("throttle.%s is %q: must be %s", name, text, orList(words))
	}
	*v = T(i)
	return nil
}

// orList returns `"a", "b" or "c"`.
func orList(words []string) string {
	last := len(words) - 1
	return `"` + strings.Join(words[:last], `", "`) + `" or "` + words[last] + `"`
}
