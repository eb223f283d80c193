// Package reply converts the replies that Redis clients return for a script.
package reply

import (
	"strconv"
	"strings"
)

// Int returns the integer in a reply. Some clients return an integer as a number, others as text. Int returns false
// if v is not an integer.
func Int(v any) (int64, bool) {
	switch v := v.(type) {
	case int64:
		return v, true
	case int:
		return int64(v), true
	case string:
		n, err := strconv.ParseInt(v, 10, 64)
		return n, err == nil
	case []byte:
		n, err := strconv.ParseInt(string(v), 10, 64)
		return n, err == nil
	}
	return 0, false
}

// Text returns the text of an error reply without the prefixes that some servers add before the error code. If a
// command within a script failed, Text returns the reply to that command.
func Text(err string) string {
	err = strings.TrimPrefix(err, "ERR ") // Kvrocks adds "ERR " before other codes
	for _, prefix := range []string{"EXECABORT Transaction discarded because of: ", "Error running script"} {
		rest, ok := strings.CutPrefix(err, prefix)
		if !ok {
			continue
		}
		if at := strings.LastIndex(rest, ": -"); at >= 0 { // the format of Redis before version 7
			rest = rest[at+len(": -"):]
		}
		return rest
	}
	return err
}

// Code returns the first word of the result of [Text].
func Code(err string) string {
	code, _, _ := strings.Cut(Text(err), " ")
	return code
}
