package stack_test

import (
	"testing"

	"github.com/go-resilience/resilience/internal/stack"
)

// deep needs about 5 KiB.
//
//go:noinline
func deep(n int) int {
	var frame [100]byte
	frame[n] = 1
	if n == 0 {
		return int(frame[0])
	}
	return deep(n-1) + int(frame[n])
}

// Benchmark shows what it is good for: a goroutine that goes deep.
func Benchmark(b *testing.B) {
	for name, grow := range map[string]func(){"at once": stack.To8K, "bit by bit": func() {}} {
		b.Run(name, func(b *testing.B) {
			done := make(chan int)
			for b.Loop() {
				go func() {
					grow()
					done <- deep(40)
				}()
				<-done
			}
		})
	}
}
