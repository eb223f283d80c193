// Package panics provides the error that represents a panic in the user's code.
package panics

// An Error represents a panic. [errors.As] finds an Error through an interface with the method Stack.
type Error struct {
	text  string
	value any
	stack []byte
}

// New returns an Error. text names the function that panicked. value and stack belong to the panic.
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

// Refused returns false even if the value of the panic is a refusal: the call was made.
func (e *Error) Refused() bool { return false }

// Answered returns false: the dependency did not answer with a panic.
func (e *Error) Answered() bool { return false }
