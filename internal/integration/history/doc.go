// Package history records the operations of several processes on real servers while faults occur. Then it checks
// whether the operations kept the promises of the library.
//
//	go test ./history -history.for 60s -history.seed 7 -run Cacheaside -v
//
// Several processes, each of which is a copy of the test's program, record a history: they write each operation to a
// file, with the times of its call and its return. At the same time, networks fail, servers restart, and processes
// are stopped and killed. The linearizability checker github.com/anishathalye/porcupine then compares the history
// with a model. A history that violates a promise is shortened as far as possible, printed, and drawn as a page in
// -history.out.
//
// A seed determines the settings, the operations and the faults, but not the order of concurrent operations.
// Therefore the same seed usually finds a violation again, but not in every run.
//
// TestMutants shows that the checkers work: they find bugs that were added to copies of the library.
package history
