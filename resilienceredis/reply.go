package resilienceredis

import "strings"

// replyText returns the text of an error reply. It removes the prefixes that some servers put before the code of the
// reply. If the reply is the error of a script, replyText returns the error reply to the command that failed within the
// script.
func replyText(err string) string {
	err = strings.TrimPrefix(err, "ERR ") // Kvrocks puts ERR before the other codes
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
