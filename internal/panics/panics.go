// Package panics provides the error that represents a panic in a function of the user.
package panics

// An Error represents a panic. Other packages can find it with [errors.As] and an interface that has the method
// Stack.
type Error struct {
	text  string
	value any
	stack []byte
}

// New returns an Error. text is the error text, which names the function that panicked. value and stack are the value
// and the stack of the panic.
func New(text string, value any, stack []byte) *Error { return &Error{text, value, stack} }

func (e *Error) Error() string { return e.text }

// Stack returns the stack of the goroutine that panicked.
func (e *Error) Stack() []byte { return e.stack }

// Unwrap returns the value of the panic if the value is an error, and nil otherwise.
func (e *Error) Unwrap() error {
	err, _ := e.value.(error)
	return err
}

// Retryable returns false: a panic is a bug in the program.
func (e *Error) Retryable() bool { return false }

// Refused returns false, because the call was started. The value of the panic may be a refusal, but does not matter.
func (e *Error) Refused() bool { return false }

// Answered returns false, because a panic is not an answer of the dependency.
func (e *Error) Answered() bool { return false }
