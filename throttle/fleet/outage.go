package fleet

import (
	"context"
	"fmt"
	"log"
	"runtime/debug"
	"time"

	"github.com/go-resilience/resilience/throttle"
)

// A node records the trouble of a Redis node. There is no record for a healthy node.
type node struct {
	trouble trouble
	err     error
	key     string    // the key of a cooldown on the node, which a ping may write
	began   time.Time // the time when the trouble started
	next    time.Time // the time of the next ping
}

// firstRetry is the time between the start of a node's trouble and the first scheduled ping.
const firstRetry = 100 * time.Millisecond

// nextTry returns the time after now at which a node is pinged again. began is the time when the node's trouble
// started. The pauses grow with the duration of the trouble, from firstRetry to RetryEvery: the node is pinged 100, 200
// and 400ms after began, and so on.
func nextTry(began, now time.Time, retryEvery time.Duration) time.Time {
	return now.Add(min(retryEvery, max(firstRetry, now.Sub(began))))
}

// outageOf returns the error of the current outage of r's node, or nil. lasts is false if the outage is so young that
// only one answer may have been lost.
func (l *Limits) outageOf(r *Reservation) (lasts bool, err error) {
	name := r.cfg.Node(r.cooldown())
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tryAll(r.cfg)
	if n := l.nodes[name]; n != nil && n.trouble.isOutage() {
		return time.Since(n.began) >= firstRetry, n.err
	}
	return false, nil
}

// retryAfter returns the time until r's node is pinged again, at least firstRetry.
func (l *Limits) retryAfter(r *Reservation) time.Duration {
	name := r.cfg.Node(r.cooldown())
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := l.nodes[name]; n != nil {
		return max(firstRetry, time.Until(n.next))
	}
	return firstRetry
}

// tryAll pings all nodes in trouble whose next ping is due. The pings run in the background, so no call waits for a
// ping. tryAll does not ping only the node of the current call: after a failover, another node has the keys of the
// call, but the outage of the old node must end as well. The caller holds l.mu.
func (l *Limits) tryAll(cfg *Config) {
	for name, n := range l.nodes {
		if now := time.Now(); !now.Before(n.next) {
			n.next = nextTry(n.began, now, cfg.RetryEvery)
			go l.try(cfg, name, n.key)
		}
	}
}

// failed records an error that Eval returned for a key, and returns the trouble that the error indicates. If an outage
// starts, failed pings the node of the key immediately. Thus, an outage that started with a single lost answer ends
// with the first ping.
func (l *Limits) failed(ctx context.Context, cfg *Config, key string, err error) trouble {
	t := troubleOf(err)
	l.mu.Lock()
	l.stats.Failed++
	l.mu.Unlock()
	if t == callOnly {
		return t
	}
	name := cfg.Node(key)
	if event := l.setTrouble(cfg, name, key, t, err); event != "" {
		l.observers.Tell(ctx, throttle.Event{Kind: event, Name: cfg.Name, Key: name, Err: err})
		if event == throttle.EventOutageBegan {
			go l.try(cfg, name, key)
		}
	}
	return t
}

// setTrouble records the trouble t of a node. If t is empty, the node is healthy. If an outage starts or ends,
// setTrouble returns the event.
func (l *Limits) setTrouble(cfg *Config, name, key string, t trouble, err error) throttle.EventKind {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, now := l.nodes[name], time.Now()
	was := n != nil && n.trouble.isOutage()
	switch {
	case t == "":
		delete(l.nodes, name)
	case n == nil || !was && t.isOutage():
		l.nodes[name] = &node{trouble: t, err: err, key: key, began: now, next: now.Add(min(firstRetry, cfg.RetryEvery))}
	default:
		n.trouble, n.err = t, err
	}
	switch {
	case !was && t.isOutage():
		return throttle.EventOutageBegan
	case was && !t.isOutage():
		l.purgeLocal()
		return throttle.EventOutageEnded
	}
	return ""
}

// try pings a node and records the result. If the node answers, its outage ends.
func (l *Limits) try(cfg *Config, name, key string) {
	err := callUser("Eval", func() error {
		_, err := l.eval(context.Background(), cfg, []string{key}, "ping")
		return err
	})
	t := trouble("")
	if err != nil {
		t = troubleOf(err)
	}
	if t == callOnly { // the node works
		t = ""
	}
	l.mu.Lock()
	ended := l.nodes[name] == nil // another try has ended the trouble
	l.mu.Unlock()
	if ended {
		return
	}
	if event := l.setTrouble(cfg, name, key, t, err); event != "" {
		_ = callUser("an observer", func() error {
			l.observers.Tell(context.Background(), throttle.Event{Kind: event, Name: cfg.Name, Key: name, Err: err})
			return nil
		})
	}
}

// callUser calls f, a function of the user, on a goroutine of this package. A panic there would end the process, so
// callUser logs the panic and returns it as an error.
func callUser(what string, f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			log.Printf("fleet: %s panicked: %v\n\n%s", what, v, debug.Stack())
			err = fmt.Errorf("fleet: %s panicked: %v", what, v)
		}
	}()
	return f()
}
