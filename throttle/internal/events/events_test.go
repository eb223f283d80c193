package events_test

import (
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle/internal/events"
)

func TestDescribeLevels(t *testing.T) {
	for what, want := range map[string]slog.Level{
		"waited": slog.LevelDebug, "outage_ended": slog.LevelInfo,
		"refused": slog.LevelWarn, "outage_began": slog.LevelWarn,
	} {
		require.Equal(t, want, events.Describe("api", "", what, "", 0, nil).Level, what)
	}
}
