package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
)

// processes are those that give away: this program, started again.
type processes [4]*exec.Cmd

// start starts a process in the place of another, which it kills.
func (p *processes) start(i int, source string, sharded bool) {
	p.kill(i)
	prefers := 0 // everybody's first choice is the same
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

// kill ends a process with no chance to do anything.
func (p *processes) kill(i int) {
	if p[i] != nil {
		check(p[i].Process.Kill())
		_ = p[i].Wait()
	}
}

// whileParentLives returns a ctx that ends with the pipe to this process.
func whileParentLives() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); cancel() }()
	return ctx
}
