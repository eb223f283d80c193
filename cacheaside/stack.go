package cacheaside

// growStack gives a goroutine that has just begun a stack of 16 KiB. A new one has
// 2 KiB; to double that again and again, with ever more frames to move, can take
// longer than what a short-lived goroutine is there for.
func growStack() { growStackIf(false) }

// The frame of a function is made room for when it is called. What is in it is not
// touched, and so not cleared, unless never is true.
//
//go:noinline
func growStackIf(never bool) {
	if never {
		var room [12 << 10]byte
		occupy(room[:])
	}
}

//go:noinline
func occupy(room []byte) { room[0] = 1 }
