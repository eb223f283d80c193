// Temporal is a Temporal server with SQLite in memory, for the tests that make engines runs. It prints its address and
// its namespace, and runs until its standard input ends. It is a separate module, outside of go.work, because it links
// 1,700 packages.
package main

import (
	"fmt"
	"io"
	"os"

	"go.temporal.io/server/temporaltest"
)

func main() {
	s := temporaltest.NewServer()
	fmt.Println(s.GetFrontendHostPort(), s.GetDefaultNamespace())
	_, _ = io.Copy(io.Discard, os.Stdin)
}
