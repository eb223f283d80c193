package faultproxy

import "time"

// A Fault is one way in which a network or a server can fail.
type Fault struct {
	Name string

	// Begin starts the fault on a Proxy. Proxy.Heal ends the fault.
	Begin func(*Proxy)

	// Brief reports whether the fault affects only open connections. In this case, a client that opens new connections
	// recovers without Heal.
	Brief bool
}

// Every returns the faults that leave a client without an answer for longer than patience. There is a fault for each
// direction. If the direction is to the server, the server never receives the request, or receives it late. If the
// direction is to the client, the server has executed the request, but the client does not get the answer in time.
func Every(patience time.Duration) []Fault {
	delay := func([]byte) time.Duration { return 2 * patience }
	reset := func(p *Proxy) func([]byte) time.Duration {
		return func([]byte) time.Duration { p.Reset(); return time.Hour }
	}
	// This is slow enough because a request of a client has more than 100 bytes.
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
