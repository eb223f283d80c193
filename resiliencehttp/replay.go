package resiliencehttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
)

// replayable reports whether a request does no more when it is sent twice than
// when it is sent once: by its method (RFC 9110, section 9.2.2), or because it
// carries a key by which the server knows a repetition.
func replayable(req *http.Request) bool {
	switch req.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace,
		http.MethodPut, http.MethodDelete:
		return true
	}
	_, key := req.Header["Idempotency-Key"]
	_, xkey := req.Header["X-Idempotency-Key"]
	return key || xkey
}

// neverSent reports whether err proves that nothing of the request has reached
// the server: no connection was made, or a policy further down refused.
func neverSent(err error) bool {
	if refused(err) {
		return true
	}
	op, ok := errors.AsType[*net.OpError](err)
	return ok && (op.Op == "dial" || op.Op == "proxyconnect")
}

// A requestBody provides the caller's body to one attempt after the other.
type requestBody struct {
	req      *http.Request
	max      int64
	used     bool // the caller's own body was taken, and whoever took it closes it
	buffered bool // it is in kept
	kept     []byte
}

func (b *requestBody) none() bool { return b.req.Body == nil || b.req.Body == http.NoBody }

// rewinds reports whether there can be a next one once the first was taken.
func (b *requestBody) rewinds() bool { return b.none() || b.buffered || b.req.GetBody != nil }

// next returns the body for the next attempt.
func (b *requestBody) next(ctx context.Context) (io.ReadCloser, error) {
	switch {
	case b.none():
		return b.req.Body, nil
	case !b.used:
		b.used = true
		if b.req.GetBody == nil && b.req.ContentLength <= b.max && b.max > 0 {
			return b.buffer(ctx)
		}
		return b.req.Body, nil
	case b.buffered:
		return b.copy()
	}
	body, err := b.req.GetBody()
	if err != nil {
		return nil, fmt.Errorf("resiliencehttp: rewinding the request's body: %w", err)
	}
	return body, nil
}

// buffer reads the caller's body into memory, unless it is too long for that.
func (b *requestBody) buffer(ctx context.Context) (io.ReadCloser, error) {
	body := b.req.Body
	// A Read that waits for something else does not know of ctx.
	stop := context.AfterFunc(ctx, func() { _ = body.Close() })
	returned := false
	defer func() {
		if !returned && stop() {
			_ = body.Close()
		}
	}()
	read, err := io.ReadAll(io.LimitReader(body, b.max+1))
	returned = true
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	switch {
	case err != nil:
		_ = body.Close()
		return nil, fmt.Errorf("resiliencehttp: reading the request's body: %w", err)
	case int64(len(read)) > b.max:
		return struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(read), body), body}, nil
	}
	_ = body.Close()
	b.kept, b.buffered = read, true
	return b.copy()
}

func (b *requestBody) copy() (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(b.kept)), nil
}

// getBody returns the GetBody of what is sent, for Base to rewind by itself.
func (b *requestBody) getBody() func() (io.ReadCloser, error) {
	if b.buffered {
		return b.copy
	}
	return b.req.GetBody
}

// close closes the caller's body if no attempt took it.
func (b *requestBody) close() {
	if !b.used {
		b.used = true
		closeBody(b.req)
	}
}
