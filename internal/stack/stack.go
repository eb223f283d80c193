// Package stack grows the stack of a goroutine at once.
//
// A new goroutine has 2 KiB. To double that again and again, with ever more frames
// to move, can take longer than what a short-lived goroutine is there for.
package stack

// To8K gives a goroutine that has just begun a stack of 8 KiB.
func To8K() { to8K(false) }

// To16K gives a goroutine that has just begun a stack of 16 KiB.
func To16K() { to16K(false) }

// The frame of a function is made room for when it is called. What is in it is not
// touched, and so not cleared, unless never is true.

//go:noinline
func to8K(never bool) {
	if never {
		var room [6 << 10]byte
		occupy(room[:])
	}
}

//go:noinline
func to16K(never bool) {
	if never {
		var room [12 << 10]byte
		occupy(room[:])
	}
}

//go:noinline
func occupy(room []byte) { room[0] = 1 }
