package registry_test

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
)

func TestLogSuppressesRepeatedRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines strings.Builder
		reg, f := newFakes("users")
		defer reg.Observe(registry.Log(newLogger(&lines)))()
		refuse := func(reason string) {
			f[0].notify(policy.Event{What: "refused", Level: slog.LevelWarn, Attrs: []slog.Attr{slog.String("reason", reason)}})
		}
		for range 100 {
			refuse("full")
		}
		refuse("too_late")
		f[0].notify(policy.Event{What: "changed", Key: "tenant 7", Err: errors.New("boom")})
		for range 2 { // not frequent
			f[0].notify(policy.Event{What: "changed", Level: slog.LevelWarn})
		}
		time.Sleep(10 * time.Second)
		refuse("full")
		refuse("full")
		time.Sleep(10 * time.Second)
		refuse("full")
		require.Equal(t, `level=WARN msg="fake refused" name=users reason=full
level=WARN msg="fake refused" name=users reason=too_late
level=INFO msg="fake changed" name=users key="tenant 7" err=boom
level=WARN msg="fake changed" name=users
level=WARN msg="fake changed" name=users
level=WARN msg="fake refused" name=users reason=full suppressed=99
level=WARN msg="fake refused" name=users reason=full suppressed=1
`, lines.String())
	})
}

// The last line must not report the end of an outage while an outage goes on.
func TestLogEndsWithTheStateOfAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines strings.Builder
		reg, f := newFakes("users")
		defer reg.Observe(registry.Log(newLogger(&lines)))()
		began := func(node string) {
			f[0].notify(policy.Event{What: "outage_began", Key: node, Level: slog.LevelWarn})
		}
		began("a")
		f[0].notify(policy.Event{What: "outage_ended", Key: "a", Level: slog.LevelInfo})
		began("a")
		began("b") // another node
		require.Equal(t, `level=WARN msg="fake outage_began" name=users key=a
level=INFO msg="fake outage_ended" name=users key=a
level=WARN msg="fake outage_began" name=users key=a
level=WARN msg="fake outage_began" name=users key=b
`, lines.String())
	})
}

// A logger that omits the end of an outage must not hide the start of the next outage.
func TestLogOfWarningsReportsEachOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines strings.Builder
		logger := slog.New(slog.NewTextHandler(&lines, &slog.HandlerOptions{Level: slog.LevelWarn}))
		reg, f := newFakes("users")
		defer reg.Observe(registry.Log(logger))()
		for range 2 {
			f[0].notify(policy.Event{What: "outage_began", Level: slog.LevelWarn})
			f[0].notify(policy.Event{What: "outage_began", Level: slog.LevelWarn}) // suppressed
			f[0].notify(policy.Event{What: "outage_ended", Level: slog.LevelInfo})
		}
		require.Equal(t, 2, strings.Count(lines.String(), "\n"), lines.String())
		require.Contains(t, lines.String(), "suppressed=1")
	})
}

// During an outage of a store, each poll, write and tenant may cause an event.
func TestLogSuppressesEventsOfAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines strings.Builder
		reg, f := newFakes("users")
		defer reg.Observe(registry.Log(newLogger(&lines)))()
		notify := func(what string) {
			level := slog.LevelWarn
			if what == "outage_ended" {
				level = slog.LevelInfo
			}
			f[0].notify(policy.Event{What: what, Level: level})
		}
		for _, what := range []string{"store_failed", "fence_failed", "not_propagated", "codec_failed", "outage_began"} {
			for range 50 {
				notify(what)
			}
		}
		time.Sleep(time.Second)
		for range 50 {
			notify("outage_ended")
		}
		notify("outage_began") // another outage, which may be long
		notify("outage_ended")
		time.Sleep(10 * time.Second)
		notify("store_failed")
		require.Equal(t, `level=WARN msg="fake store_failed" name=users
level=WARN msg="fake fence_failed" name=users
level=WARN msg="fake not_propagated" name=users
level=WARN msg="fake codec_failed" name=users
level=WARN msg="fake outage_began" name=users
level=INFO msg="fake outage_ended" name=users suppressed=49
level=WARN msg="fake outage_began" name=users suppressed=49
level=INFO msg="fake outage_ended" name=users
level=WARN msg="fake store_failed" name=users suppressed=49
`, lines.String())
	})
}

// Successful calls are not suppressed, and each other outcome is logged.
func TestLogSeparatesOutcomes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines strings.Builder
		before := slog.Default()
		slog.SetDefault(newLogger(&lines))
		defer slog.SetDefault(before)
		reg, f := newFakes("users")
		defer reg.Observe(registry.Log(nil))()
		for range 2 {
			for _, outcome := range []string{"exhausted", "deadline"} {
				f[0].notify(policy.Event{What: "ended", Level: slog.LevelWarn, Attrs: []slog.Attr{slog.String("outcome", outcome)}})
			}
			f[0].notify(policy.Event{What: "ended"})
		}
		require.Equal(t, `level=WARN msg="fake ended" name=users outcome=exhausted
level=WARN msg="fake ended" name=users outcome=deadline
level=INFO msg="fake ended" name=users
level=INFO msg="fake ended" name=users
`, lines.String())
	})
}
