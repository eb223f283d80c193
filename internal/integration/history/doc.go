// Package history records what processes do to real servers under faults, and has
// machines judge whether it keeps the promises of the library.
//
//	go test ./history -history.for 60s -history.seed 7 -run Cacheaside -v
//
// A history is made by several processes, each a copy of the test's program, which
// write every operation with the times of its call and its return into files. Networks
// that fail, servers that restart, and processes that are stopped and killed come by a
// seed. Then a model decides: the linearizability checker
// github.com/anishathalye/porcupine. What violates
// a promise is made as short as it can be, printed, and drawn as a page in
// -history.out. The seed decides about settings, operations and faults, not about what
// the processes do at the same time: it finds a violation again, soon, but not at once.
//
// TestMutants shows that the checkers work: each finds, in copies of the library,
// mistakes that were made or could be.
package history
