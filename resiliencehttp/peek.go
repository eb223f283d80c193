package resiliencehttp

import (
	"bytes"
	"cmp"
	"io"
	"net/http"
)

// peek returns the beginning of the response's body, for RetryBody, and puts it back. An
// error is that of the body: it has broken off.
func (t *Transport) peek(resp *http.Response) ([]byte, error) {
	limit := cmp.Or(t.MaxRetryBody, 64<<10)
	begin, err := io.ReadAll(io.LimitReader(resp.Body, limit))
	if err != nil {
		return nil, err
	}
	if resp.Body == http.NoBody { // the caller may look for it, and need not close it
		return begin, nil
	}
	resp.Body = &peeked{io.MultiReader(bytes.NewReader(begin), resp.Body), resp.Body}
	return begin, nil
}

// A peeked body is one whose beginning was read and put back.
type peeked struct {
	io.Reader
	io.Closer
}
