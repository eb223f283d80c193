package registry_test

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/registry"
)

func TestLogWritesOneLineForABurstOfRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines strings.Builder
		reg, f := newFakes("users")
		defer reg.Observe(registry.Log(newLogger(&lines)))()
		refuse := func(reason string) {
			f[0].tell(registry.Event{What: "refused", Level: slog.LevelWarn, Attrs: []slog.Attr{slog.String("reason", reason)}})
		}
		for range 100 {
			refuse("full")
		}
		refuse("too late")
		f[0].tell(registry.Event{What: "changed", Key: "tenant 7", Err: errors.New("boom")})
		for range 2 { // each is news
			f[0].tell(registry.Event{What: "state changed", Level: slog.LevelWarn})
		}
		time.Sleep(10 * time.Second)
		refuse("full")
		refuse("full")
		time.Sleep(10 * time.Second)
		refuse("full")
		require.Equal(t, `level=WARN msg="fake refused" name=users reason=full
level=WARN msg="fake refused" name=users reason="too late"
level=INFO msg="fake changed" name=users key="tenant 7" err=boom
level=WARN msg="fake state changed" name=users
level=WARN msg="fake state changed" name=users
level=WARN msg="fake refused" name=users reason=full suppressed=99
level=WARN msg="fake refused" name=users reason=full suppressed=1
`, lines.String())
	})
}

// In an outage of a database or a Redis, a line a poll, a write or a tenant tells nobody
// anything new.
func TestLogWritesOneLineForWhatAnOutageRepeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines strings.Builder
		reg, f := newFakes("users")
		defer reg.Observe(registry.Log(newLogger(&lines)))()
		tell := func(what string) { f[0].tell(registry.Event{What: what, Level: slog.LevelWarn}) }
		for _, what := range []string{"store failed", "fence failed", "not invalidated", "codec failed", "outage began"} {
			for range 50 {
				tell(what)
			}
		}
		time.Sleep(time.Second)
		for range 50 {
			tell("recovered")
		}
		tell("outage began") // another outage, which may be long
		tell("recovered")
		time.Sleep(10 * time.Second)
		tell("store failed")
		require.Equal(t, `level=WARN msg="fake store failed" name=users
level=WARN msg="fake fence failed" name=users
level=WARN msg="fake not invalidated" name=users
level=WARN msg="fake codec failed" name=users
level=WARN msg="fake outage began" name=users
level=WARN msg="fake recovered" name=users suppressed=49
level=WARN msg="fake outage began" name=users suppressed=49
level=WARN msg="fake recovered" name=users
level=WARN msg="fake store failed" name=users suppressed=49
`, lines.String())
	})
}

// Calls that end well are no burst, and those that end in another way are news.
func TestLogTellsCallsApartByTheirOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines strings.Builder
		before := slog.Default()
		slog.SetDefault(newLogger(&lines))
		defer slog.SetDefault(before)
		reg, f := newFakes("users")
		defer reg.Observe(registry.Log(nil))()
		for range 2 {
			for _, outcome := range []string{"exhausted", "deadline"} {
				f[0].tell(registry.Event{What: "ended", Level: slog.LevelWarn, Attrs: []slog.Attr{slog.String("outcome", outcome)}})
			}
			f[0].tell(registry.Event{What: "ended"})
		}
		require.Equal(t, `level=WARN msg="fake ended" name=users outcome=exhausted
level=WARN msg="fake ended" name=users outcome=deadline
level=INFO msg="fake ended" name=users
level=INFO msg="fake ended" name=users
`, lines.String())
	})
}
