package cacheaside

// BreakLease makes flights store what they loaded whether they were overtaken or
// not, until the function that it returns is called.
func BreakLease() (restore func()) {
	kept := holdsLease
	holdsLease = func(bool) bool { return true }
	return func() { holdsLease = kept }
}
