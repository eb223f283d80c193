package benchmarks

import "testing"

func BenchmarkRetry(b *testing.B) { benchmark(b, retryCases) }

var retryCases = []comparison{}
