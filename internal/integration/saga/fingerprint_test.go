package saga_test

import (
	"database/sql"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sagahttp"
)

// TestKeyWithAnotherBody sends commands again, with the same body and with another one.
func TestKeyWithAnotherBody(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		var applied []string
		handler := &sagahttp.Handler{DB: d.open(t), Apply: func(_ *sql.Tx, r *http.Request) error {
			body, err := io.ReadAll(r.Body)
			applied = append(applied, fmt.Sprintf("%s %.9s", r.Header.Get("Idempotency-Key"), body))
			if string(body) == "decline" {
				return saga.Declined(fmt.Errorf("no rooms"))
			}
			return err
		}}
		send := func(want int, key, body, contentType string) {
			t.Helper()
			r := httptest.NewRequest("POST", "/", strings.NewReader(body))
			r.Header.Set("Idempotency-Key", key)
			r.Header.Set("Content-Type", contentType)
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, r)
			require.Equal(t, want, w.Code, w.Body)
			if want == http.StatusUnprocessableEntity && body != "decline" {
				require.Empty(t, w.Header().Get("Saga-Command"), "the first request may have taken effect")
				require.Contains(t, w.Body.String(), "different request")
			}
		}
		large := strings.Repeat("x", 3<<20)
		for _, c := range []struct {
			want            int
			key, body, kind string
		}{
			{204, "a/room/do", "single", ""}, {204, "a/room/do", "single", ""}, {422, "a/room/do", "double", ""},
			{422, "a/room/do", "", ""}, {204, "a/room/do", "single", "text/plain"},
			{204, "a/room/undo", "cancel", ""}, {204, "a/room/undo", "cancel", ""}, {422, "a/room/undo", "keep", ""},
			{204, "b/room/undo", "cancel", ""}, {410, "b/room/do", "single", ""}, {204, "b/room/undo", "cancel", ""},
			{422, "b/room/undo", "keep", ""},
			{422, "c/room/do", "decline", ""}, {422, "c/room/do", "decline", ""}, {422, "c/room/do", "single", ""},
			{204, "c/room/undo", "cancel", ""},
			{204, "d/room/do", large, ""}, {204, "d/room/do", large, ""}, {422, "d/room/do", large + "x", ""},
			{204, "e/room/do", "--1 a --1", "multipart/form-data; boundary=1"},
			{204, "e/room/do", "--2 a --2", "multipart/form-data; boundary=2"},
			{422, "e/room/do", "--2 b --2", "multipart/form-data; boundary=2"},
		} {
			send(c.want, c.key, c.body, c.kind)
		}
		require.Equal(t, []string{
			"a/room/do single", "a/room/undo cancel", "c/room/do decline", "d/room/do xxxxxxxxx", "e/room/do --1 a --1",
		}, applied)
	})
}
