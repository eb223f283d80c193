// Package reply converts the replies that Redis clients return for a script.
package reply

import "strconv"

// Int returns an integer reply, which some clients return as a number and others as text. It returns false if v is
// neither.
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
