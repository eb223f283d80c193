package registry

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// patience is how long a method of a policy of other origin is waited for.
const patience = 5 * time.Second

// A foreigner is a policy of other origin, which must neither hold nor end the program: its
// methods may hang, panic, and end their goroutine.
type foreigner struct {
	hanging atomic.Int64 // calls that were given up, and have not returned
}

// ask returns what f returns, or an error if it does not within patience. While such a call
// hangs there is no other.
func ask[T any](p *foreigner, f func() T) (T, error) {
	type answer struct {
		value T
		err   error
	}
	if p.hanging.Load() > 0 {
		return answer{}.value, errors.New("it does not answer")
	}
	answers := make(chan answer, 1)
	go func() {
		a := answer{err: errors.New("it has ended its goroutine")}
		defer func() {
			if v := recover(); v != nil {
				a.err = fmt.Errorf("it has panicked: %v", v)
			}
			answers <- a
		}()
		a = answer{value: f()}
	}()
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case a := <-answers:
		return a.value, a.err
	case <-late.C:
		p.hanging.Add(1)
		go func() {
			<-answers
			p.hanging.Add(-1)
		}()
		return answer{}.value, fmt.Errorf("it has not answered for %v", patience)
	}
}
