package saga_test

import (
	"context"
	"database/sql"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/saga"
)

// TestCommandHandler sends the commands of a step to a participant whose replies are lost,
// and a Do that comes after its Undo: each is applied once, or not at all.
func TestCommandHandler(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		db := d.open(t)
		_, err := db.Exec(`CREATE TABLE booked (id varchar(300), n integer)`)
		require.NoError(t, err)
		count := func() (n int) {
			require.NoError(t, db.QueryRow(`SELECT coalesce(sum(n), 0) FROM booked`).Scan(&n))
			return n
		}
		var full error
		var applied atomic.Int32
		bookings := &resiliencehttp.CommandHandler{
			DB: db,
			Apply: func(tx *sql.Tx, r *http.Request) error {
				applied.Add(1)
				by := map[string]string{http.MethodPost: "1", http.MethodDelete: "-1"}[r.Method]
				if _, err := tx.Exec(`INSERT INTO booked VALUES ('x', ` + by + `)`); err != nil {
					return err
				}
				return full
			},
			Reply: func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.WriteString(w, saga.CommandFrom(r.Context()).DoID())
			},
		}
		var served atomic.Int32
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			rec := httptest.NewRecorder()
			bookings.ServeHTTP(rec, r)
			if served.Add(1) == 1 {
				panic(http.ErrAbortHandler) // the reply is lost
			}
			w.WriteHeader(rec.Code)
			_, _ = w.Write(rec.Body.Bytes())
		}))
		defer server.Close()
		var last string
		send := func(ctx context.Context, method string) error {
			req, err := http.NewRequestWithContext(ctx, method, server.URL, nil)
			require.NoError(t, err)
			return resiliencehttp.SendCommand(server.Client(), req, func(resp *http.Response) error {
				body, err := io.ReadAll(resp.Body)
				last = string(body)
				return err
			})
		}
		as := func(id string) context.Context { return saga.WithCommand(t.Context(), saga.Command{ID: id}) }

		require.Error(t, send(as("trip/hotel/hotel/do"), http.MethodPost), "the reply is lost")
		require.NoError(t, send(as("trip/hotel/hotel/do"), http.MethodPost))
		require.Equal(t, "trip/hotel/hotel/do", last)
		require.Equal(t, int32(1), applied.Load())
		require.Equal(t, 1, count())
		for range 2 {
			require.NoError(t, send(as("trip/hotel/hotel/undo"), http.MethodDelete))
		}
		require.Equal(t, int32(2), applied.Load())
		require.Zero(t, count())
		status := func(err error) int {
			e, ok := errors.AsType[*resiliencehttp.StatusError](err)
			require.True(t, ok, "%v", err)
			return e.StatusCode
		}
		require.NoError(t, send(as("trip/car/car/undo"), http.MethodDelete), "there is nothing to undo")
		require.Equal(t, http.StatusGone, status(send(as("trip/car/car/do"), http.MethodPost)))
		require.Equal(t, int32(2), applied.Load())

		for want, err := range map[int]error{
			422: saga.NoEffect(errors.New("full")), 500: errors.New("oops"), 503: refused{},
		} {
			full = err
			require.Equal(t, want, status(send(as("trip/inn/inn/do"), http.MethodPost)))
			require.Zero(t, count(), "rolled back")
		}
		full = nil
		require.NoError(t, send(as("trip/inn/inn/do"), http.MethodPost), "what was rolled back is applied later")
		require.Equal(t, 1, count())
	})
}

type refused struct{}

func (refused) Error() string { return "refused" }
func (refused) Refused() bool { return true }
