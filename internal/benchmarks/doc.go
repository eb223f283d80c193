// Package benchmarks measures the patterns beside their peers, doing the same
// work in one process. make bench writes the tables of docs/BENCHMARKS.md.
package benchmarks
