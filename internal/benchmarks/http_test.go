package benchmarks

import "testing"

func BenchmarkHTTP(b *testing.B) { benchmark(b, httpCases) }

var httpCases = []comparison{}
