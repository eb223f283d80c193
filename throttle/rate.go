package throttle

import "time"

// PerMinute returns the [Config] Rate of n tokens a minute.
func PerMinute(n float64) float64 { return n / 60 }

// PerHour returns the [Config] Rate of n tokens an hour.
func PerHour(n float64) float64 { return n / 3600 }

// Every returns the [Config] Rate of one token each d: Every(100*time.Millisecond)
// is 10. A d of 0 or less makes a Rate that Validate refuses.
func Every(d time.Duration) float64 { return float64(time.Second) / float64(d) }
