// Package history records the operations of processes on real servers under faults, and checks whether they keep the
// promises of the library.
//
//	go test ./history -history.for 60s -history.seed 7 -run Cacheaside -v
//
// Several processes, each a copy of the test's program, record a history: they write every operation, with the times of
// its call and its return, into files. A seed determines the faults: networks fail, servers restart, and processes are
// stopped and killed. The linearizability checker github.com/anishathalye/porcupine then compares the history with a
// model. A history that violates a promise is shortened as far as possible, printed, and drawn as a page in
// -history.out. The seed determines settings, operations and faults, but not the order of concurrent operations: it
// usually finds a violation again, but not with each run.
//
// TestMutants shows that the checkers work: they find mistakes in copies of the library.
package history
