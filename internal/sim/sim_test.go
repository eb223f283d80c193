package sim

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// lostUpdate has clients that read a number and write the next one, and what they lose.
func lostUpdate(w *World) {
	var all sync.WaitGroup
	defer all.Wait()
	defer w.End()
	w.Trouble, w.Meddle = 10, 20
	value, done, clients := 0, 0, 0
	w.Acts = []Act{{Name: "a client", Do: func() {
		clients++
		name := fmt.Sprint("client ", clients)
		all.Go(func() {
			_, _ = w.Call(context.Background(), name+" reads")
			read := value
			if fault, _ := w.Call(context.Background(), fmt.Sprintf("%s writes %d", name, read+1), "fails"); fault == "" {
				value = read + 1
				done++
			}
		})
	}}}
	w.Drive(20*time.Second, func() bool {
		if value != done {
			w.Fail("lost", "%d of %d", value, done)
		}
		return false
	})
}

func TestSeedMakesTheSameRunAndAFailureIsMadeShort(t *testing.T) {
	s := Simulation{Name: "toy", Run: lostUpdate}
	found := 0
	for seed := range uint64(50) {
		if repeated > 0 {
			s.repeats(t, seed)
		}
		o := s.run(t, &tape{rng: source(seed)}, false)
		if o.kind == "" {
			continue
		}
		found++
		small := shrink(o.drawn, time.Now().Add(time.Hour), func(d draws) bool {
			return s.run(t, &tape{given: d}, false).kind == "lost"
		})
		again, err := read(write(small))
		require.NoError(t, err)
		last := s.run(t, &tape{given: again}, true)
		require.Equal(t, "lost", last.kind)
		require.LessOrEqual(t, last.count.Calls, 6, last.trace)
		require.LessOrEqual(t, last.count.Faults, 1, last.trace)
	}
	require.Positive(t, found)
}

func TestCorpusThatCannotBeReadIsAnError(t *testing.T) {
	for _, text := range []string{"", "1 / 2", "1 / x / / ", "1 / -1 / / ", "1*0 / / / ", "1*9999999 / / / "} {
		_, err := read(text)
		require.Error(t, err, text)
	}
}
