//go:build !race

package saga_test

const raced = false
