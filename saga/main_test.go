package saga_test

import (
	"log/slog"
	"os"
	"testing"
)

// TestMain discards the log, because a Runner without observers warns of each failure that the tests inject.
func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}
