package console

// What a page says of a time, a number, a share, and of the calls of a policy.
var (
	Ago     = ago
	Number  = number
	Percent = percent
)

// Bad returns which share of the calls failed or was refused; never: they are only refused.
func Bad(calls, failed, refused float64, never bool) string {
	return status{calls: calls, failed: failed, refused: refused, never: never}.bad()
}
