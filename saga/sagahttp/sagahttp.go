// Package sagahttp sends the commands of a saga's steps over HTTP, and applies each of them
// once in the participant that gets them. See [saga.Apply] for participants of other kinds.
package sagahttp

import (
	"bytes"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"mime"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"sync/atomic"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/internal/participant"
)

// Send sends req as the command of the saga's step whose ctx it has, and returns
// what the answer means to the step, as [Result] does.
//
//	Do: func(ctx context.Context, s *Trip) error {
//		req, err := http.NewRequestWithContext(ctx, "POST", hotel+"/bookings", s.body())
//		if err != nil {
//			return err
//		}
//		return sagahttp.Send(client, req, s.readBooking)
//	},
//
// The field Idempotency-Key gets the id of the command, unless req has one: a server that applies
// each key once, such as a [Handler], is safe from repetition. HTTP sends no control characters and
// no space at the start of a field, so the id of the saga must have none.
//
// A refusal of a policy in client is an attempt that was not made, unless it refused a redirect: then
// the request was sent, and the error is a [saga.MaybeApplied].
//
// read is called for a status of 2xx, and its error is returned as it is. Nil means that the
// body is not read. Send closes the body.
func Send(client *http.Client, req *http.Request, read func(*http.Response) error) error {
	var sent atomic.Int64 // counted before the write, which an answer may overtake
	ctx := httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) { sent.Add(1) },
	})
	req = req.Clone(ctx)
	if id := saga.CommandFrom(ctx).ID; id != "" && req.Header.Get(idempotencyKey) == "" {
		if req.Header == nil {
			req.Header = make(http.Header)
		}
		req.Header.Set(idempotencyKey, id)
	}
	resp, err := client.Do(req)
	if sent.Load() > 0 && behavior.IsRefused(err) {
		return saga.MaybeApplied(err) // what was refused is a redirect
	}
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := Result(resp, nil); err != nil || read == nil || resp.StatusCode >= 300 {
		return err
	}
	return read(resp)
}

const (
	idempotencyKey = "Idempotency-Key"
	sagaCommand    = "Saga-Command"
	declined       = "declined"
)

// Result returns the result of a request as the error of a saga's Do or Undo:
//
//   - Status 2xx is nil: done, also if a redirect has made a GET of the request. Set
//     CheckRedirect if the server redirects for another reason, such as to a login.
//   - Status 404 and 410 are nil in an Undo, which the ctx of the response's Request tells.
//   - Status 408, 409, 425, 429, and 5xx except 501 and 505, leave the step in doubt and are
//     tried again, after the Retry-After of the response. By 409 a server says that another
//     request with the same Idempotency-Key is under way.
//   - Any other status is a [saga.Permanent]: the step may have taken effect. With the field
//     "Saga-Command: declined", 4xx, 501 and 505 are a [saga.Declined]: the server declined every
//     attempt of this command, and has recorded that.
//   - err is returned as it is. A refusal of a policy remains one, an answer aborts (see
//     [saga.Permanent]), and any other error leaves the step in doubt.
//
// The error of a status is a [*resiliencehttp.StatusError]. If the server uses a status in another
// way, look at it before Result: the 402 of a bank that repeats its answer to an Idempotency-Key is
// a Declined error.
func Result(resp *http.Response, err error) error {
	if err != nil {
		return err
	}
	e := &resiliencehttp.StatusError{StatusCode: resp.StatusCode, Header: resp.Header}
	undo := false
	if req := resp.Request; req != nil {
		e.Method = req.Method
		if req.URL != nil {
			e.Host = req.URL.Host
		}
		cmd := saga.CommandFrom(req.Context())
		do := cmd.DoID()
		undo = do != "" && do != cmd.ID
	}
	switch code := resp.StatusCode; {
	case code >= 200 && code < 300:
		return nil
	case undo && (code == http.StatusNotFound || code == http.StatusGone):
		return nil
	case code == http.StatusConflict:
		return saga.MaybeApplied(e)
	case code == http.StatusRequestTimeout, code == http.StatusTooEarly, code == http.StatusTooManyRequests:
		return e
	case code == http.StatusNotImplemented, code == http.StatusHTTPVersionNotSupported, code >= 400 && code < 500:
		if resp.Header.Get(sagaCommand) == declined {
			return saga.Declined(e)
		}
	case code >= 500:
		return e
	}
	return saga.Permanent(e)
}

// A Handler is the participant's side of [Send]: it applies the command of
// each request once.
type Handler struct {
	// DB is the participant's own database, with a [saga.BarrierTable].
	DB *sql.DB
	// Apply makes the changes of a command in tx. It is called again if tx was not committed. It
	// must not be nil.
	Apply func(tx *sql.Tx, r *http.Request) error
	// Reply answers a command that was applied, now or before. Look for the result, such as the
	// number of a booking, under the id of the command, which [saga.CommandFrom] returns for the
	// ctx of r. Nil means status 204.
	Reply http.HandlerFunc
}

// ServeHTTP applies the command whose id is in the field Idempotency-Key, as [saga.Apply] does.
// Otherwise it answers as [Result] reads it:
//
//   - 400 if there is no such field, it has no id of a command, or the body breaks off;
//   - 413 if a limit of [http.MaxBytesReader] ends the body;
//   - 410 and "Saga-Command: declined" if the Do comes after its Undo;
//   - 422, with the text of the error, if Apply returns an error that is an answer
//     ([saga.Permanent], resilience.Answer), and "Saga-Command: declined" with it
//     if the error is a [saga.Declined], now or when the command came before;
//   - 422 if the command came before with another body, which the [saga.BarrierTable] has a
//     fingerprint of: of a larger body than a mebibyte, the beginning and the Content-Length count; the boundary of
//     a multipart body does not;
//   - 503, with its Retry-After, if Apply returns a refusal of a policy;
//   - 500 if Apply returns any other error, such as an answer with Retryable() true, or the
//     transaction fails.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	cmd := saga.Command{ID: r.Header.Get(idempotencyKey)}
	if cmd.DoID() == "" {
		http.Error(w, "the field Idempotency-Key must be the id of a command", http.StatusBadRequest)
		return
	}
	outer := r
	print, err := fingerprint(r)
	if tooLarge, ok := errors.AsType[*http.MaxBytesError](err); ok {
		http.Error(w, tooLarge.Error(), http.StatusRequestEntityTooLarge)
		return
	}
	if err != nil {
		http.Error(w, "the body of the request has broken off", http.StatusBadRequest)
		return
	}
	r = r.WithContext(participant.WithFingerprint(saga.WithCommand(r.Context(), cmd), print))
	defer func() { outer.MultipartForm = r.MultipartForm }() // net/http removes its files
	err = saga.Apply(r.Context(), h.DB, func(tx *sql.Tx) error { return h.Apply(tx, r) })
	if saga.IsDeclined(err) {
		w.Header().Set(sagaCommand, declined)
	}
	switch end := behavior.Read(err); {
	case err == nil && h.Reply != nil:
		h.Reply(w, r)
	case err == nil:
		w.WriteHeader(http.StatusNoContent)
	case errors.Is(err, participant.ErrUndone):
		http.Error(w, "undone already", http.StatusGone)
	case end.Kind == behavior.Refused:
		if end.RetryAfter > 0 {
			w.Header().Set("Retry-After", strconv.FormatFloat(math.Ceil(end.RetryAfter.Seconds()), 'f', 0, 64))
		}
		http.Error(w, http.StatusText(http.StatusServiceUnavailable), http.StatusServiceUnavailable)
	case end.Kind == behavior.Answered && !end.Retryable:
		http.Error(w, err.Error(), http.StatusUnprocessableEntity)
	default:
		http.Error(w, http.StatusText(http.StatusInternalServerError), http.StatusInternalServerError)
	}
}

// maxPrinted limits what the handler holds of a body. What follows streams to Apply.
const maxPrinted = 1 << 20

// fingerprint returns a fingerprint of the body, and leaves the whole body in the request.
func fingerprint(r *http.Request) (string, error) {
	body := r.Body
	if body == nil {
		body = http.NoBody
	}
	head, err := io.ReadAll(io.LimitReader(body, maxPrinted))
	if err != nil {
		return "", err
	}
	r.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(head), body), body}
	// A client makes up a new boundary for each attempt.
	if _, params, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err == nil && params["boundary"] != "" {
		head = bytes.ReplaceAll(head, []byte(params["boundary"]), nil)
	}
	sum := sha256.New()
	sum.Write(head)
	if len(head) == maxPrinted {
		fmt.Fprint(sum, r.ContentLength)
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}
