package benchmarks

import "testing"

func BenchmarkChain(b *testing.B) { benchmark(b, chainCases) }

var chainCases = []comparison{}
