package console

// Texts for a duration, a number and a share.
var (
	Ago     = ago
	Number  = number
	Percent = percent
)

// Bad returns the text for the share of failed calls.
func Bad(calls, failed, refused float64, never bool) string {
	return status{calls: calls, failed: failed, refused: refused, never: never}.bad()
}
