package benchmarks

import "testing"

func BenchmarkBulkhead(b *testing.B) { benchmark(b, bulkheadCases) }

var bulkheadCases = []comparison{}
