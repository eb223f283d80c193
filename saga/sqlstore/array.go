package sqlstore

import (
	"encoding/hex"
	"strconv"
)

// An array is an array of PostgreSQL as text, which every driver can send.
type array struct{ buf []byte }

func (a *array) next() {
	if a.buf == nil {
		a.buf = append(make([]byte, 0, 256), '{')
	} else {
		a.buf = append(a.buf, ',')
	}
}

func (a *array) null() {
	a.next()
	a.buf = append(a.buf, "NULL"...)
}

func (a *array) number(n int64) {
	a.next()
	a.buf = strconv.AppendInt(a.buf, n, 10)
}

func (a *array) text(s string) {
	a.next()
	a.buf = append(a.buf, '"')
	for i := range len(s) {
		if c := s[i]; c == '"' || c == '\\' {
			a.buf = append(a.buf, '\\')
		}
		a.buf = append(a.buf, s[i])
	}
	a.buf = append(a.buf, '"')
}

// bytes adds a bytea, or NULL if b is nil.
func (a *array) bytes(b []byte) {
	if b == nil {
		a.null()
		return
	}
	a.next()
	a.buf = append(a.buf, `"\\x`...)
	a.buf = hex.AppendEncode(a.buf, b)
	a.buf = append(a.buf, '"')
}

// String returns the array's text.
func (a *array) String() string {
	if a.buf == nil {
		return "{}"
	}
	return string(append(a.buf, '}'))
}
