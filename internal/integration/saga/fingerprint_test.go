package saga_test

import (
	"crypto/rand"
	"database/sql"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sagahttp"
	"github.com/go-resilience/resilience/saga/sqlstore"
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

// form returns a multipart body with files of these contents. The boundary is new, or of the length n.
func form(t *testing.T, n int, files ...string) (body, kind string) {
	var b strings.Builder
	w := multipart.NewWriter(&b)
	if n > 0 {
		require.NoError(t, w.SetBoundary(rand.Text()[:n]))
	}
	for _, content := range files {
		p, err := w.CreateFormFile("file", "file")
		require.NoError(t, err)
		_, err = io.WriteString(p, content)
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	return b.String(), w.FormDataContentType()
}

// TestLargeFormComparedWithoutBoundary sends forms larger than 1 MiB again, with a new boundary.
func TestLargeFormComparedWithoutBoundary(t *testing.T) {
	db := newDatabase(t, sqlstore.SQLite).open(t)
	handler := &sagahttp.Handler{DB: db, Apply: func(_ *sql.Tx, r *http.Request) error {
		_, err := io.Copy(io.Discard, r.Body)
		return err
	}}
	send := func(key string, boundary int, files ...string) int {
		body, kind := form(t, boundary, files...)
		r := httptest.NewRequest("POST", "/", strings.NewReader(body))
		r.Header.Set("Idempotency-Key", key+"/room/do")
		r.Header.Set("Content-Type", kind)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w.Code
	}
	x, y := strings.Repeat("x", 2<<20), strings.Repeat("y", 100)
	// The first 1 MiB, and the bytes that are read for the boundaries, end before, within and after a boundary.
	for _, end := range []int{1 << 20, 1<<20 + 64<<10} {
		for first := end - 400; first < end+100; first += 20 {
			key := fmt.Sprint(first)
			require.Equal(t, 204, send(key, 0, x[:first], y), first)
			require.Equal(t, 204, send(key, 0, x[:first], y), first)
		}
	}
	many := slices.Repeat([]string{strings.Repeat("z", 500)}, 4000)
	require.Equal(t, 204, send("many", 0, many...))
	require.Equal(t, 204, send("many", 0, many...))
	require.Equal(t, 422, send("many", 0, many[1:]...))

	require.Equal(t, 204, send("longer", 0, x, y))
	require.Equal(t, 422, send("longer", 0, x, y+"y"), "it differs after 1 MiB, by its length")
	require.Equal(t, 204, send("variable", 20, x, y, y))
	require.Equal(t, 204, send("variable", 25, x, y, y), "the boundaries have changed the length")
	require.Equal(t, 422, send("variable", 25, "y"+x, y, y))
}
