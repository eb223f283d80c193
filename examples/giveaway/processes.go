package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
)

// processes has the worker processes. Each of them runs this program with the flag -worker.
type processes [4]*exec.Cmd

// start kills worker i, if it runs, and starts it again.
func (p *processes) start(i int, source string, sharded bool) {
	p.kill(i)
	prefers := 0 // all workers prefer the same divisions
	if sharded {
		prefers = i
	}
	cmd := exec.Command(os.Args[0], "-dsn", source, "-batch", fmt.Sprint(*batch), "-worker", fmt.Sprint(prefers))
	cmd.Stderr = os.Stderr
	_, err := cmd.StdinPipe()
	check(err)
	check(cmd.Start())
	p[i] = cmd
}

// kill kills worker i without a chance to clean up.
func (p *processes) kill(i int) {
	if p[i] != nil {
		check(p[i].Process.Kill())
		_ = p[i].Wait()
	}
}

// whileParentLives returns a ctx that is canceled when the parent process ends.
func whileParentLives() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); cancel() }()
	return ctx
}
