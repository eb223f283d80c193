// Temporal is a Temporal server with SQLite in memory, for the tests that make engines runs. It is a module of
// its own, outside of go.work, because it links 1,700 packages.
package main

import (
	"fmt"
	"os"
	"os/signal"

	"go.temporal.io/server/temporaltest"
)

func main() {
	s := temporaltest.NewServer()
	fmt.Println(s.GetFrontendHostPort(), s.GetDefaultNamespace())
	c := make(chan os.Signal, 1)
	signal.Notify(c, os.Interrupt)
	<-c
	s.Stop()
}
