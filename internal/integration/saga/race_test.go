//go:build race

package saga_test

// raced: SQLite, which is C that was translated to Go, is then some 20 times slower.
const raced = true
