package sqlstore

import (
	"encoding/hex"
	"strconv"
	"strings"
)

// An array is an array of PostgreSQL as text, which every driver can send.
type array struct{ b strings.Builder }

// element begins an element of about so many bytes. The first makes room for some more.
func (a *array) element(size int) {
	if a.b.Len() == 0 {
		a.b.Grow(min((size+4)*maxBatch/4, 4096))
		a.b.WriteByte('{')
	} else {
		a.b.WriteByte(',')
	}
}

func (a *array) null() {
	a.element(len("NULL"))
	a.b.WriteString("NULL")
}

func (a *array) number(n int64) {
	var text [20]byte
	digits := strconv.AppendInt(text[:0], n, 10)
	a.element(len(digits))
	a.b.Write(digits)
}

func (a *array) text(s string) {
	a.element(len(s))
	a.b.WriteByte('"')
	start := 0
	for i := range len(s) {
		if c := s[i]; c == '"' || c == '\\' {
			a.b.WriteString(s[start:i])
			a.b.WriteByte('\\')
			start = i
		}
	}
	a.b.WriteString(s[start:])
	a.b.WriteByte('"')
}

// bytes adds a bytea, or NULL if b is nil.
func (a *array) bytes(b []byte) {
	if b == nil {
		a.null()
		return
	}
	a.element(2 * len(b))
	a.b.WriteString(`"\\x`)
	var text [64]byte
	for len(b) > 0 {
		n := min(len(b), len(text)/2)
		a.b.Write(text[:hex.Encode(text[:], b[:n])])
		b = b[n:]
	}
	a.b.WriteByte('"')
}

// String returns the array's text. Nothing can be added afterwards.
func (a *array) String() string {
	if a.b.Len() == 0 {
		return "{}"
	}
	a.b.WriteByte('}')
	return a.b.String()
}
