package fleet

import (
	"errors"
	"strings"

	"github.com/go-resilience/resilience/internal/reply"
)

// A trouble specifies how an error of Eval affects other calls.
type trouble string

const (
	nodeDown  trouble = "store_down"     // the node cannot admit or refuse any call
	nodeFull  trouble = "store_full"     // the node has no memory, so it admits no call
	nodeWrong trouble = "store_rejects"  // the node rejects the script until its configuration is changed
	callOnly  trouble = "call_undecided" // the error does not affect other calls
)

// isOutage reports whether no call may use the node.
func (t trouble) isOutage() bool { return t == nodeDown || t == nodeFull }

// troubleOf classifies an error of Eval. An error is a reply of the server if the error has the method RedisError, as
// the errors of go-redis have, or if its text starts with a known code. Every other error means that the node is down.
func troubleOf(err error) trouble {
	text := err.Error()
	replied, isReply := errors.AsType[interface {
		error
		RedisError()
	}](err)
	if isReply {
		text = replied.Error()
	}
	message := strings.ToLower(reply.Text(text))
	switch reply.Code(text) {
	case "OOM":
		return nodeFull
	case "CLUSTERDOWN":
		if strings.Contains(message, "hash slot not served") { // the node may serve other hash slots
			return callOnly
		}
		return nodeDown
	case "LOADING", "BUSY", "MISCONF", "READONLY", "NOREPLICAS", "MASTERDOWN", "NOMASTERLINK", "UNBLOCKED":
		return nodeDown
	case "NOAUTH", "NOPERM", "WRONGPASS":
		return nodeWrong
	case "TRYAGAIN", "MOVED", "ASK", "CROSSSLOT", "WRONGTYPE":
		return callOnly
	}
	switch {
	case strings.HasPrefix(message, "max number of clients"), strings.HasPrefix(message, "write commands are not allowed"):
		return nodeDown
	case strings.HasPrefix(message, "unknown command"), strings.HasPrefix(message, "error compiling script"):
		return nodeWrong
	case isReply, strings.HasPrefix(message, "user_script:"), strings.Contains(message, "@user_script"):
		return callOnly
	}
	return nodeDown
}
