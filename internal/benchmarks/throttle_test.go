package benchmarks

import "testing"

func BenchmarkThrottle(b *testing.B) { benchmark(b, throttleCases) }

var throttleCases = []comparison{}
