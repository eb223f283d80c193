// Package panics provides the error that represents a panic in the user's code.
package panics

// An Error represents a panic. [errors.As] finds it by its method Stack.
type Error struct {
	text  string
	value any
	stack []byte
}

// New returns an Error with a text, which names the function that panicked, and the value and stack of the panic.
func New(text string, value any, stack []byte) *Error { return &Error{text, value, stack} }

func (e *Error) Error() string { return e.text }

// Stack returns the stack of the goroutine that panicked.
func (e *Error) Stack() []byte { return e.stack }

// Unwrap returns the value of the panic if that is an error, otherwise nil.
func (e *Error) Unwrap() error {
	err, _ := e.value.(error)
	return err
}

// Retryable returns false: a panic is a bug in the program.
func (e *Error) Retryable() bool { return false }

// Refused returns false even if the value of the panic is a refusal: the call was made.
func (e *Error) Refused() bool { return false }

// Answered returns false: the value of a panic is no answer of a dependency.
func (e *Error) Answered() bool { return false }
