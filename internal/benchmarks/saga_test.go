package benchmarks

import "testing"

func BenchmarkSaga(b *testing.B) { benchmark(b, sagaCases) }

var sagaCases = []comparison{}
