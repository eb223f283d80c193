// Package examples holds programs that run offline: go run ./examples/<name>.
package examples
