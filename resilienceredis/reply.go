package resilienceredis

import "strings"

// replyText returns the text of an error reply without the prefixes that some servers put before its code. For a
// script, it is the reply to the command that failed within it.
func replyText(err string) string {
	err = strings.TrimPrefix(err, "ERR ") // Kvrocks puts it before the other codes
	for _, prefix := range []string{"EXECABORT Transaction discarded because of: ", "Error running script"} {
		rest, ok := strings.CutPrefix(err, prefix)
		if !ok {
			continue
		}
		if at := strings.LastIndex(rest, ": -"); at >= 0 { // before Redis 7
			rest = rest[at+len(": -"):]
		}
		return rest
	}
	return err
}
