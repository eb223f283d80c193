package benchmarks

import "testing"

func BenchmarkBreaker(b *testing.B) { benchmark(b, breakerCases) }

var breakerCases = []comparison{}
