package resilienceredis

import "strings"

// replyText returns the text of an error reply, without the prefixes that some servers put before the reply's code.
// For a script, replyText returns the reply to the command that failed within the script.
func replyText(err string) string {
	err = strings.TrimPrefix(err, "ERR ") // Kvrocks puts ERR before the other codes
	for _, prefix := range []string{"EXECABORT Transaction discarded because of: ", "Error running script"} {
		rest, ok := strings.CutPrefix(err, prefix)
		if !ok {
			continue
		}
		if at := strings.LastIndex(rest, ": -"); at >= 0 { // as in Redis before version 7
			rest = rest[at+len(": -"):]
		}
		return rest
	}
	return err
}
