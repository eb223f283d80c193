// Package sagahttp sends the commands of a saga's steps over HTTP, and applies each command once in the participant
// that receives it. See [saga.Apply] for other participants.
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

// Send sends req as the command of a saga's step, and returns the result as [Result] does. The ctx of req is the ctx of
// the step.
//
//	Do: func(ctx context.Context, s *Trip) error {
//		req, err := http.NewRequestWithContext(ctx, "POST", hotel+"/bookings", s.body())
//		if err != nil {
//			return err
//		}
//		return sagahttp.Send(client, req, s.readBooking)
//	},
//
// Send sets the field Idempotency-Key to the command ID unless req has one. A server that applies each key once, such
// as a [Handler], is safe from repetition. HTTP sends no control characters and no space at the start of a field, so
// the saga's ID must have none.
//
// If a policy in client refuses the request, the error is a refusal. If it refuses a redirect, the first request was
// sent, and the error is a [saga.MaybeApplied].
//
// Send calls read for a status of 2xx and returns its error unchanged. Nil means that the body is not read. Send closes
// the body.
func Send(client *http.Client, req *http.Request, read func(*http.Response) error) error {
	var sent atomic.Int64 // counted before the write, since the response may arrive before the write returns
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

// Result returns the result of a request as the error of a saga's Do or Undo:
//
//   - Status 2xx is nil, even if a redirect turned the request into a GET. Set CheckRedirect if the server redirects
//     for another reason, such as to a login page.
//   - Status 404 and 410 are nil in an Undo. The ctx of the response's Request shows whether it is one.
//   - Status 408, 409, 425, 429, and 5xx except 501 and 505, are retried after the Retry-After of the response. The
//     step may have taken effect. Status 409 means that another request with the same Idempotency-Key is in progress.
//   - Any other status is a [saga.Permanent]: the step may have taken effect. With the field "Saga-Command: declined",
//     4xx, 501 and 505 are a [saga.Declined]: the server declined every attempt of this command and has recorded that.
//   - err is returned unchanged. It may be a refusal of a policy. After an answer the step is not retried (see
//     [saga.Permanent]), and after any other error it may have taken effect.
//
// The error of a status is a [*resiliencehttp.StatusError]. If the server uses a status differently, check it before
// Result: if a bank repeats its 402 for the same Idempotency-Key, the 402 is a Declined error.
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

// A Handler is the participant's side of [Send]. It applies the command of each request once.
type Handler struct {
	// DB is the participant's database, which has a [saga.BarrierTable].
	DB *sql.DB
	// Apply makes the changes of a command in tx. It is called again if tx was not committed. It
	// must not be nil.
	Apply func(tx *sql.Tx, r *http.Request) error
	// Reply answers a command that was applied, now or earlier. It finds the result, such as a booking number, by the
	// ID of the command, which [saga.CommandFrom] returns for the ctx of r. Nil means status 204.
	Reply http.HandlerFunc
}

// ServeHTTP applies the command whose ID is in the field Idempotency-Key, as [saga.Apply] does. It reports errors in
// the form that [Result] expects:
//
//   - 400 if the field is missing or has no command ID, or if the body ends early;
//   - 410 and "Saga-Command: declined" if the Do arrives after its Undo;
//   - 413 if the body exceeds the limit of an [http.MaxBytesReader];
//   - 422, with the text of the error, if Apply returns an answer ([saga.Permanent], resilience.Answer). If the error
//     is a [saga.Declined], now or when the command arrived before, "Saga-Command: declined" is set;
//   - 422 if the command arrived before with another body. The [saga.BarrierTable] has a fingerprint of the body. Of a
//     body of more than 1 MiB, it covers the beginning and the Content-Length. It does not cover the boundary of a
//     multipart body;
//   - 503, with its Retry-After, if Apply returns a refusal of a policy;
//   - 500 if Apply returns any other error, such as an answer with Retryable() true, or the transaction fails.
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
	defer func() { outer.MultipartForm = r.MultipartForm }() // net/http removes the files of the form
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
