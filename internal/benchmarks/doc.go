// Package benchmarks compares the policies of this module with other libraries, which do the same work in the
// same process. make bench writes the tables of docs/BENCHMARKS.md.
package benchmarks
