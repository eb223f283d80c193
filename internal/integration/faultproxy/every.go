package faultproxy

import "time"

// A Fault is one way in which a network, or a server, fails.
type Fault struct {
	Name string

	// Begin makes a Proxy fail so. Proxy.Heal ends it.
	Begin func(*Proxy)

	// Brief reports whether only the connections that are open are affected, so that
	// a client that makes new ones recovers without Heal.
	Brief bool
}

// Every returns the faults that leave a client without an answer for longer than
// patience, each in the direction to the server, where the server does not hear of
// the request or hears of it later, and to the client, where it has done what it was
// asked to.
func Every(patience time.Duration) []Fault {
	delay := func([]byte) time.Duration { return 2 * patience }
	reset := func(p *Proxy) func([]byte) time.Duration {
		return func([]byte) time.Duration { p.Reset(); return time.Hour }
	}
	// A call of a client is more than 100 bytes long.
	slow := max(1, int(100*time.Second/max(2*patience, 1)))
	return []Fault{
		{Name: "requests delayed", Begin: func(p *Proxy) { p.Delay(ToServer, delay) }},
		{Name: "answers delayed", Begin: func(p *Proxy) { p.Delay(ToClient, delay) }},
		{Name: "requests held back", Begin: func(p *Proxy) { p.Hold(ToServer) }},
		{Name: "answers held back", Begin: func(p *Proxy) { p.Hold(ToClient) }},
		{Name: "hanging", Begin: (*Proxy).Hang},
		{Name: "requests lost", Begin: func(p *Proxy) { p.Cut(ToServer) }, Brief: true},
		{Name: "answers lost", Begin: func(p *Proxy) { p.Cut(ToClient) }, Brief: true},
		{Name: "reset by requests", Begin: func(p *Proxy) { p.Delay(ToServer, reset(p)) }},
		{Name: "reset by answers", Begin: func(p *Proxy) { p.Delay(ToClient, reset(p)) }},
		{Name: "refused", Begin: func(p *Proxy) { p.Refuse(); p.Reset() }},
		{Name: "slow", Begin: func(p *Proxy) { p.Slow(ToServer, slow) }},
	}
}
