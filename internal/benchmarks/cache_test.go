package benchmarks

import "testing"

func BenchmarkCache(b *testing.B) { benchmark(b, cacheCases) }

var cacheCases = []comparison{}
