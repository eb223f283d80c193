package guess

import (
	"sync"
	"testing"
)

func TestTell(t *testing.T) {
	r := &Range{Low: 1, High: 9}
	for n, want := range map[int]int{0: -1, 1: 0, 5: 0, 10: 1} {
		if got := r.Tell(n); got != want {
			t.Errorf("%d: %d", n, got)
		}
	}
	if r.Asked() != 4 {
		t.Error(r.Asked())
	}
}

func TestTellsMany(t *testing.T) {
	r := &Range{}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() { r.Tell(0) })
	}
	all.Wait()
}
