package main

import (
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestOrders checks that the books of each order are as its end demands, whatever it is.
func TestOrders(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	stdout := os.Stdout
	os.Stdout = w
	main()
	os.Stdout = stdout
	require.NoError(t, w.Close())
	out, err := io.ReadAll(r)
	require.NoError(t, err)
	t.Logf("%s", out)
	for _, name := range []string{"ada", "bob", "eve", "kim", "dan"} {
		require.Contains(t, string(out), name+": ")
	}
	require.Contains(t, string(out), `dan: saga: order "dan": compensated: saga: canceled`)
	books := regexp.MustCompile(`(bank|goods|carrier) (-?\d+) of (-?\d+)`).FindAllStringSubmatch(string(out), -1)
	require.Len(t, books, 15)
	for _, b := range books {
		require.Equal(t, b[3], b[2], strings.Join(b, " "))
	}
}
