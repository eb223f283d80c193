// Package participant has the common parts of the participants of sagas and of the stores: the ids of commands, and the
// table of saga.Apply.
package participant

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

// ID returns the id of the command for an operation of a saga's step.
func ID(saga, step string, op store.Op) string { return saga + "/" + step + "/" + string(op) }

// Do returns the id of the Do that belongs to a command. For the command of a Do, that is id itself; for the command of
// an Undo, it is the id of the Do to undo. If id is not the id of a command, Do returns "".
func Do(id string) string {
	switch _, _, op, err := Split(id); {
	case err != nil:
		return ""
	case op == store.OpUndo:
		return strings.TrimSuffix(id, string(store.OpUndo)) + string(store.OpDo)
	}
	return id
}

// Split returns the parts of a command's id: the saga's id, the step's name and the operation.
func Split(id string) (saga, step string, op store.Op, err error) {
	parts := strings.Split(id, "/")
	n := len(parts)
	if n < 3 || (parts[n-1] != string(store.OpDo) && parts[n-1] != string(store.OpUndo)) {
		if id == "" {
			return "", "", "", errors.New("saga: ctx carries no command")
		}
		return "", "", "", fmt.Errorf("saga: %q is not the id of a command", id)
	}
	saga = strings.Join(parts[:n-2], "/")
	if len(saga) > MaxID || len(parts[n-2]) > maxName {
		// MySQL would truncate the id, and might treat two commands as the same.
		return "", "", "", fmt.Errorf("saga: %.40q... is not the id of a command: it is too long", id)
	}
	return saga, parts[n-2], store.Op(parts[n-1]), nil
}

const (
	MaxID   = 200 // the maximum length of a saga's id, in bytes
	maxName = 100 // the maximum length of a step's name, in bytes
)

// CheckID returns an error if id is not valid as the id of a saga.
func CheckID(id string) error {
	if id == "" || len(id) > MaxID || !utf8.ValidString(id) || strings.Contains(id, "\x00") {
		said := strconv.Quote(id)
		if len(id) > MaxID {
			said = fmt.Sprintf("%d bytes long", len(id))
		}
		return fmt.Errorf("saga: id is %s: must be 1 to %d bytes of UTF-8 without NUL", said, MaxID)
	}
	return nil
}

// Child returns the id of child number n of a step; see saga.ChildID.
func Child(id, step string, n int) string {
	child := id + "/" + step + "/" + strconv.Itoa(n)
	if len(child) <= MaxID {
		return child
	}
	sum := sha256.Sum256([]byte(child))
	hash := "~" + base32.HexEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:])
	cut := MaxID - len(hash)
	for !utf8.RuneStart(child[cut]) {
		cut--
	}
	return child[:cut] + hash
}

// Table and TableMySQL are statements that create the table of saga.Apply; see saga.BarrierTable.
const Table = `CREATE TABLE IF NOT EXISTS saga_barrier (
	saga_id text NOT NULL,
	step text NOT NULL,
	op text NOT NULL,
	reason text NOT NULL,
	fingerprint text NOT NULL DEFAULT '',
	at timestamptz NOT NULL DEFAULT CURRENT_TIMESTAMP,
	PRIMARY KEY (saga_id, step, op)
)`

const TableMySQL = `CREATE TABLE IF NOT EXISTS saga_barrier (
	saga_id varbinary(200) NOT NULL,
	step varbinary(210) NOT NULL,
	op varbinary(20) NOT NULL,
	reason blob NOT NULL,
	fingerprint varbinary(100) NOT NULL DEFAULT '',
	at timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
	PRIMARY KEY (saga_id, step, op)
) ENGINE = InnoDB`

// ErrUndone means that a Do was not applied because its Undo arrived first.
var ErrUndone = errors.New("saga: command not applied: its undo came first")

// ErrOtherRequest means that an earlier request with the same command had another fingerprint.
var ErrOtherRequest = errors.New("saga: command not applied: a different request had the same command before")

type fingerprintKey struct{}

// WithFingerprint returns a ctx for saga.Apply with a fingerprint of the request. A fingerprint has up to 100 bytes of
// ASCII.
func WithFingerprint(ctx context.Context, fingerprint string) context.Context {
	return context.WithValue(ctx, fingerprintKey{}, fingerprint)
}

// Fingerprint returns the fingerprint in ctx, or "" if there is none.
func Fingerprint(ctx context.Context) string {
	fingerprint, _ := ctx.Value(fingerprintKey{}).(string)
	return fingerprint
}

// WithLength returns a fingerprint that also has the length of the body. That length depends on the length of the
// boundary, which is 0 if the body is not multipart.
func WithLength(fingerprint string, boundary int, length int64) string {
	return fmt.Sprint(fingerprint, " ", boundary, " ", length)
}

// SameRequest reports whether two fingerprints may belong to the same request. Lengths are compared only if the
// boundaries have the same length.
func SameRequest(a, b string) bool {
	x, y := strings.Fields(a), strings.Fields(b)
	if len(x) == 3 && len(y) == 3 && x[1] != y[1] {
		return x[0] == y[0]
	}
	return a == b
}
