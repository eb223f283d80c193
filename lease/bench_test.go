package lease_test

import (
	"context"
	"testing"

	"github.com/go-resilience/resilience/lease"
)

// BenchmarkRun is one term: the lease is asked for, got, and given up.
func BenchmarkRun(b *testing.B) {
	c := lease.New(lease.NewMemory(), lease.Config{Name: "a"})
	b.ReportAllocs()
	for b.Loop() {
		if err := c.Run(b.Context(), func(context.Context, lease.Term) error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkErr is a look at whether the term holds.
func BenchmarkErr(b *testing.B) {
	term, err := lease.New(lease.NewMemory(), lease.Config{Name: "a"}).Campaign(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if term.Err() != nil {
			b.Fatal(term.Err())
		}
	}
}
