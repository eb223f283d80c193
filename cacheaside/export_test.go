package cacheaside

// BreakLease makes flights store what they loaded whether they were overtaken or
// not, until the function that it returns is called.
func BreakLease() (restore func()) {
	kept := holdsLease
	holdsLease = func(bool) bool { return true }
	return func() { holdsLease = kept }
}

// BreakOrder makes invalidations tell memory before the Store, until the function
// that it returns is called.
func BreakOrder() (restore func()) {
	kept := inOrder
	inOrder = func(there func() error, here func()) error {
		here()
		return there()
	}
	return func() { inOrder = kept }
}
