// Package panics has the error that stands for a panic of the user's code.
package panics

// An Error stands for a panic. errors.As finds it by its method Stack.
type Error struct {
	text  string
	value any
	stack []byte
}

// New returns an Error for a panic with value, whose text says whose it was.
func New(text string, value any, stack []byte) *Error { return &Error{text, value, stack} }

func (e *Error) Error() string { return e.text }

// Stack returns the stack of the goroutine that panicked.
func (e *Error) Stack() []byte { return e.stack }

// Unwrap returns the value of the panic if it is an error.
func (e *Error) Unwrap() error {
	err, _ := e.value.(error)
	return err
}

// Retryable reports false: a panic is a bug in the program.
func (e *Error) Retryable() bool { return false }

// Refused reports false: the call was made, whatever the value of the panic says.
func (e *Error) Refused() bool { return false }

// Answered reports false: the value of the panic is no answer of a dependency.
func (e *Error) Answered() bool { return false }
