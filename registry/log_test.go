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
		time.Sleep(10 * time.Second)
		refuse("full")
		refuse("full")
		time.Sleep(10 * time.Second)
		refuse("full")
		require.Equal(t, `level=WARN msg="fake refused" name=users reason=full
level=WARN msg="fake refused" name=users reason="too late"
level=INFO msg="fake changed" name=users key="tenant 7" err=boom
level=WARN msg="fake refused" name=users reason=full suppressed=99
level=WARN msg="fake refused" name=users reason=full suppressed=1
`, lines.String())
	})
}
