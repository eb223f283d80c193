// Package benchmarks measures the patterns beside their peers, doing the same
// work in one process. make bench writes the README's table from it.
package benchmarks
