package console_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/console"
)

func TestAgo(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0 s", 0: "0 s", 1: "1 ms", 999 * time.Millisecond: "999 ms",
		time.Second: "1 s", 1990 * time.Millisecond: "1.9 s", 10*time.Second - 1: "9.9 s", 10 * time.Second: "10 s",
		10500 * time.Millisecond: "10 s", 119 * time.Second: "119 s", 2 * time.Minute: "2 min", 119 * time.Minute: "119 min",
		2 * time.Hour: "2 h", 47 * time.Hour: "47 h", 48 * time.Hour: "2 days", 100 * time.Hour: "4 days",
	} {
		require.Equal(t, want, console.Ago(d), d)
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.009: "< 0.01", 0.01: "0.01", 0.126: "0.13", 9.994: "9.99", 10: "10", 12.34: "12.3", -12.34: "-12.3",
		99.94: "99.9",
		100:   "100", 123.4: "123", 9999: "9999", 10_000: "10 k", 12_340: "12.3 k", 999_900: "999.9 k", 1e6: "1 M",
		12_340_000: "12.3 M",
	} {
		require.Equal(t, want, console.Number(v), v)
	}
}

func TestPercent(t *testing.T) {
	for share, want := range map[float64]string{
		0: "0%", 0.0009: "< 0.1%", 0.001: "0.1%", 0.0123: "1.2%", 0.0999: "10%", 0.1234: "12%", 0.99: "99%",
		0.996: "> 99%", 1: "100%",
	} {
		require.Equal(t, want, console.Percent(share), share)
	}
}

func TestFailedShareInWords(t *testing.T) {
	for _, c := range []struct {
		calls, failed, refused float64
		never                  bool
		want                   string
	}{
		{0, 0, 0, false, "idle"},
		{10, 0, 0, false, "0% failed"},
		{10, 0, 0, true, "0% refused"},
		{10, 1, 0, false, "10% failed"},
		{10, 0, 1, false, "10% refused"},
		{10, 1, 1, false, "20% failed or refused"},
	} {
		require.Equal(t, c.want, console.Bad(c.calls, c.failed, c.refused, c.never), c)
	}
}
