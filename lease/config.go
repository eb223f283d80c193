package lease

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-resilience/resilience/internal/invalid"
)

// A Config configures a [Candidate]. All candidates for a lease should have the same TTL and Poll.
type Config struct {
	// Name is the name of the lease, from 1 to 200 bytes of UTF-8 without a zero byte. Required.
	Name string

	// Holder identifies this process to other processes while it holds the lease, for example by its address. Holder has
	// at most 200 bytes of UTF-8 without a zero byte. Empty means the host name and the process id.
	Holder string

	// TTL is the time after which the lease ends unless it is renewed. After a leader has died, no process leads for up
	// to the TTL. Zero means 15 seconds; the minimum is 10 ms.
	TTL time.Duration

	// Margin is the time between the end of the term's ctx and the end of the lease. When the term's ctx ends, the work
	// must stop within Margin. Margin also compensates for clocks that differ in speed. Zero means TTL/10; the maximum is
	// TTL/2.
	Margin time.Duration

	// Poll is the interval at which a waiting candidate checks whether the lease was released. Poll is also the pause
	// between two calls to the function of Run or Loop. Zero means 1 second.
	Poll time.Duration

	// OnError is called with each error of the function that is passed to Loop or Every. Loop and Every continue after
	// such an error. OnError is called on the function's goroutine. With Loop, OnError is not called if the error only
	// reports that the function's ctx is done. Nil means that the errors are logged as warnings with slog.Default.
	OnError func(context.Context, error)
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "lease.Config"}
	f.Need(c.Name != "", "Name", `""`, "set: it names the lease")
	f.Need(isText(c.Name), "Name", fmt.Sprintf("%.40q", c.Name), "up to 200 bytes of UTF-8 without a zero byte")
	f.Need(isText(c.Holder), "Holder", fmt.Sprintf("%.40q", c.Holder), "up to 200 bytes of UTF-8 without a zero byte")
	f.Need(c.TTL == 0 || c.TTL >= 10*time.Millisecond, "TTL", c.TTL, "0 (for 15s), or 10ms or more")
	most := cmp.Or(max(c.TTL, 0), defaultTTL) / 2
	f.Need(c.Margin >= 0 && c.Margin <= most, "Margin", c.Margin, "0 (for TTL/10), or at most TTL/2")
	f.Need(c.Poll >= 0, "Poll", c.Poll, "0 (for 1s) or more")
	return f.Err()
}

const (
	defaultTTL = 15 * time.Second
	longest    = time.Duration(1 << 61) // 73 years, the maximum of all durations; sums must not overflow
)

func isText(s string) bool {
	return len(s) <= 200 && utf8.ValidString(s) && !strings.Contains(s, "\x00")
}

func (c Config) withDefaults() Config {
	c.Holder = cmp.Or(c.Holder, thisProcess())
	c.TTL = min(cmp.Or(c.TTL, defaultTTL), longest)
	c.Margin = cmp.Or(c.Margin, c.TTL/10)
	c.Poll = min(cmp.Or(c.Poll, time.Second), longest)
	return c
}

func thisProcess() string {
	host, _ := os.Hostname()
	return strings.ToValidUTF8(fmt.Sprintf("%.180s/%d", host, os.Getpid()), "")
}
