package saga_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sagahttp"
)

// TestParticipantOverHTTP sends the commands of a step to a participant whose replies are lost,
// and a Do that comes after its Undo: each is applied once, or not at all.
func TestParticipantOverHTTP(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		db := d.open(t)
		_, err := db.Exec(`CREATE TABLE booked (id varchar(300), n integer)`)
		require.NoError(t, err)
		count := func() (n int) {
			require.NoError(t, db.QueryRow(`SELECT coalesce(sum(n), 0) FROM booked`).Scan(&n))
			return n
		}
		var full error
		var applied, given atomic.Int32 // given: the uploads that net/http is to remove
		upload := new(multipart.Form)
		bookings := &sagahttp.Handler{
			DB: db,
			Apply: func(tx *sql.Tx, r *http.Request) error {
				applied.Add(1)
				r.MultipartForm = upload
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
			if r.MultipartForm == upload {
				given.Add(1)
			}
			if served.Add(1) == 1 {
				panic(http.ErrAbortHandler) // the reply is lost
			}
			maps.Copy(w.Header(), rec.Header())
			w.WriteHeader(rec.Code)
			_, _ = w.Write(rec.Body.Bytes())
		}))
		defer server.Close()
		var last string
		send := func(ctx context.Context, method string) error {
			req, err := http.NewRequestWithContext(ctx, method, server.URL, nil)
			require.NoError(t, err)
			return sagahttp.Send(server.Client(), req, func(resp *http.Response) error {
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
		require.Equal(t, int32(2), given.Load())
		require.Zero(t, count())
		status := func(err error) int {
			e, ok := errors.AsType[*resiliencehttp.StatusError](err)
			require.True(t, ok, "%v", err)
			return e.StatusCode
		}
		require.NoError(t, send(as("trip/car/car/undo"), http.MethodDelete), "there is nothing to undo")
		undone := send(as("trip/car/car/do"), http.MethodPost)
		require.Equal(t, http.StatusGone, status(undone))
		require.True(t, saga.IsDeclined(undone))
		require.Equal(t, int32(2), applied.Load())

		for want, err := range map[int]error{
			422: saga.Permanent(errors.New("full")), 500: errors.New("oops"), 503: refused{},
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

// TestPivotDeclinedAfterLostReply: the reply to a charge is lost, before or after the bank
// has heard of it, and the next attempt is declined. The saga turns back, and an attempt
// that comes late takes nothing from a card that is good by then.
func TestPivotDeclinedAfterLostReply(t *testing.T) {
	for _, heard := range []bool{false, true} {
		t.Run(map[bool]string{false: "late", true: "heard"}[heard], func(t *testing.T) {
			onEach(t, func(t *testing.T, d database) {
				db := d.open(t)
				_, err := db.Exec(`CREATE TABLE card (cents integer)`)
				require.NoError(t, err)
				_, err = db.Exec(`INSERT INTO card VALUES (100)`)
				require.NoError(t, err)
				bank := &sagahttp.Handler{DB: db, Apply: func(tx *sql.Tx, _ *http.Request) error {
					var cents int
					if _, err := tx.Exec(`UPDATE card SET cents = cents - 300`); err != nil {
						return err
					}
					if err := tx.QueryRow(`SELECT cents FROM card`).Scan(&cents); err != nil {
						return err
					}
					if cents < 0 {
						return saga.Declined(errors.New("declined: \x00 and \xff"))
					}
					return nil
				}}
				var lost []*http.Request
				answer := func(r *http.Request) *httptest.ResponseRecorder {
					w := httptest.NewRecorder()
					bank.ServeHTTP(w, r)
					return w
				}
				server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if len(lost) == 0 {
						lost = append(lost, r.Clone(context.WithoutCancel(r.Context())))
						if heard {
							bank.ServeHTTP(httptest.NewRecorder(), r)
						}
						panic(http.ErrAbortHandler)
					}
					bank.ServeHTTP(w, r)
				}))
				defer server.Close()
				held := 0
				order := &saga.Saga[nothing]{Name: "order", Steps: []saga.Step[nothing]{{
					Name: "stock",
					Do:   func(context.Context, *nothing) error { held++; return nil },
					Undo: func(context.Context, *nothing) error { held--; return nil },
				}, {
					Name: "charge", Pivot: true,
					Do: func(ctx context.Context, _ *nothing) error {
						req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL, nil)
						require.NoError(t, err)
						return sagahttp.Send(server.Client(), req, nil)
					},
				}}}
				require.ErrorIs(t, saga.Run(t.Context(), order, new(nothing)), saga.ErrCompensated)
				require.Zero(t, held)

				_, err = db.Exec(`UPDATE card SET cents = 1000`)
				require.NoError(t, err)
				w := answer(lost[0])
				require.Equal(t, http.StatusUnprocessableEntity, w.Code)
				require.Equal(t, "declined", w.Header().Get("Saga-Command"))
				require.Equal(t, "declined: \uFFFD and \uFFFD\n", w.Body.String())
				var cents int
				require.NoError(t, db.QueryRow(`SELECT cents FROM card`).Scan(&cents))
				require.Equal(t, 1000, cents)
			})
		})
	}
}

// TestParticipantAppliesNothingAfterARefusal: attempts of one command run beside each
// other, and some find a card that is not good enough.
func TestParticipantAppliesNothingAfterARefusal(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		db := d.open(t)
		_, err := db.Exec(`CREATE TABLE charge (id integer)`)
		require.NoError(t, err)
		voids := 0
		for i := range 20 {
			ctx := saga.WithCommand(t.Context(), saga.Command{ID: fmt.Sprintf("order-%d/charge/do", i)})
			var done, void atomic.Int32
			var wg sync.WaitGroup
			for range 6 {
				wg.Go(func() {
					declined := rand.IntN(4) > 0
					err := saga.Apply(ctx, db, func(tx *sql.Tx) error {
						if _, err := tx.Exec(fmt.Sprintf(`INSERT INTO charge VALUES (%d)`, i)); err != nil {
							return err
						}
						if declined {
							return saga.Declined(errors.New("declined"))
						}
						return nil
					})
					switch {
					case err == nil:
						done.Add(1)
					case saga.IsDeclined(err):
						void.Add(1)
					}
				})
			}
			wg.Wait()
			var n int
			require.NoError(t, db.QueryRow(fmt.Sprintf(`SELECT count(*) FROM charge WHERE id = %d`, i)).Scan(&n))
			if void.Load() > 0 {
				voids++
				require.Zero(t, n)
				require.Zero(t, done.Load())
			} else if done.Load() > 0 {
				require.Equal(t, 1, n)
			}
		}
		require.NotZero(t, voids)
	})
}

type refused struct{}

func (refused) Error() string { return "refused" }
func (refused) Refused() bool { return true }
