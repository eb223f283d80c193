// Package sagahttp sends the commands of a saga's steps over HTTP with [Send]. The participant receives the commands
// with a [Handler], which applies each command once. See [saga.Apply] for participants without HTTP.
package sagahttp

import (
	"bytes"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
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

// Send sends req as the command of a saga's step, and returns the result as [Result] does. The ctx of req must be the
// step's ctx.
//
//	Do: func(ctx context.Context, s *Trip) error {
//		req, err := http.NewRequestWithContext(ctx, "POST", hotel+"/bookings", s.body())
//		if err != nil {
//			return err
//		}
//		return sagahttp.Send(client, req, s.readBooking)
//	},
//
// Send sets the header field Idempotency-Key to the command ID, unless req already has this field. If the server
// applies each key once, as a [Handler] does, a repeated request has no further effect. The saga's ID must not contain
// control characters or start with a space, because the header field contains the ID.
//
// If a policy in client refuses the request, Send returns the refusal. If a policy refuses a redirect after the first
// request was sent, Send returns a [saga.MaybeApplied].
//
// If the status is 2xx, Send calls read and returns read's error unchanged. If read is nil, the body is not read. Send
// closes the body.
func Send(client *http.Client, req *http.Request, read func(*http.Response) error) error {
	// sent counts the connections that the client has used. It does not count writes, because the response may arrive
	// before a write returns.
	var sent atomic.Int64
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
		return saga.MaybeApplied(err) // a policy refused the redirect
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

// Result converts the response resp of an HTTP request, or the request's error err, into the error that a saga's Do or
// Undo returns:
//
//   - For status 2xx, the result is nil, even after a redirect that has changed the request into a GET. If the server
//     may redirect a request without processing it, for example to a login page, set the client's CheckRedirect.
//   - For status 404 and 410, the result of an Undo is nil. Result reads the command from the ctx of the response's
//     Request to find out whether the command is an Undo.
//   - For status 408, 409, 425, 429, and 5xx except 501 and 505, the step may have taken effect. The step is retried
//     after the time in the response's Retry-After. Status 409 means that another request with the same Idempotency-Key
//     is in progress.
//   - For any other 4xx, and for 501 and 505, the result is a [saga.Declined] if the response has the header field
//     "Saga-Command: declined", and a [saga.Permanent] otherwise. A server that sends this header field has recorded
//     that it declines every attempt of the command.
//   - For any other status, the result is a Permanent. After a Permanent, the step is not retried, but it may have
//     taken effect.
//   - If err is not nil, Result returns err unchanged. The error err may be a policy's refusal. If err is an answer
//     (see [saga.Permanent]), the step is not retried. After an err that is neither a refusal nor an answer, the step
//     may have taken effect.
//
// The error for a status matches a [*resiliencehttp.StatusError] by [errors.As]. If the server gives a status another
// meaning, check the status before you call Result. For example, if a bank always repeats its 402 for the same
// Idempotency-Key, return a saga.Declined for 402.
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

// A Handler is the participant's side of [Send]. A Handler applies the command of each request once.
type Handler struct {
	// DB is the participant's database, which has a [saga.BarrierTable].
	DB *sql.DB
	// Apply makes the changes of a command in tx. If tx was not committed, Apply is called again for the same command.
	// Apply must not be nil.
	Apply func(tx *sql.Tx, r *http.Request) error
	// Reply answers the request for a command that was applied, either now or earlier. [saga.CommandFrom] returns the
	// command from the request's ctx. Reply can use the command's ID to find the result, such as a booking number. A nil
	// Reply answers with status 204.
	Reply http.HandlerFunc
}

// ServeHTTP applies the command whose ID is in the header field Idempotency-Key, as [saga.Apply] does. ServeHTTP
// reports errors in the form that [Result] expects. The status of an error is:
//
//   - 400 if the header field is missing or is not a command ID, or if the request's body ends early;
//   - 410 and "Saga-Command: declined" if the Do arrives after its Undo;
//   - 413 if the body exceeds the limit of an [http.MaxBytesReader];
//   - 422, with the text of the error, if Apply returns an answer, such as a [saga.Permanent] or a resilience.Answer.
//     If Apply returns a [saga.Declined], or has returned one for an earlier request with the same command, the
//     response has "Saga-Command: declined";
//   - 422 if an earlier request with the same command had another body. The bodies are compared by a fingerprint, which
//     is stored in the [saga.BarrierTable]. If a body is larger than 1 MiB, the fingerprint covers only its first 1 MiB
//     and the Content-Length. The fingerprint ignores the boundary of a multipart body. If the boundaries of two bodies
//     have different lengths, the Content-Lengths are not compared;
//   - 503, with the Retry-After of the error, if Apply returns a refusal of a policy;
//   - 500 if Apply returns any other error, such as an answer whose Retryable method returns true, or if the
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
	// After the request, net/http removes the temporary files of outer's form.
	defer func() { outer.MultipartForm = r.MultipartForm }()
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

// maxPrinted is the maximum number of bytes of a body that are read into memory for the fingerprint. Apply reads the
// remaining body as a stream. If the body is multipart, boundaries more bytes are read: about 1,000 boundaries.
const (
	maxPrinted = 1 << 20
	boundaries = 64 << 10
)

// fingerprint returns a fingerprint of the body. The whole body can still be read from the request. The fingerprint
// does not depend on the boundary of a multipart body, because a client generates a new one for each attempt.
func fingerprint(r *http.Request) (string, error) {
	body := r.Body
	if body == nil {
		body = http.NoBody
	}
	limit, boundary := maxPrinted, ""
	if _, params, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err == nil && params["boundary"] != "" {
		limit, boundary = maxPrinted+boundaries, params["boundary"]
	}
	head, err := io.ReadAll(io.LimitReader(body, int64(limit)))
	if err != nil {
		return "", err
	}
	r.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(head), body), body}
	printed := head
	if boundary != "" {
		printed = bytes.ReplaceAll(head, []byte(boundary), nil)
		if len(head) == limit { // head may end within a boundary
			printed = printed[:max(len(printed)-len(boundary), 0)]
		}
	}
	sum := sha256.Sum256(printed[:min(len(printed), maxPrinted)])
	print := hex.EncodeToString(sum[:])
	if len(head) == limit || len(printed) >= maxPrinted {
		print = participant.WithLength(print, len(boundary), r.ContentLength)
	}
	return print, nil
}
