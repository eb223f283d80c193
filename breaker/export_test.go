package breaker

// Open times are exact in the tests but for those of their spread.
func init() { spread = func() float64 { return 0 } }

// Spread sets the share by which open times are longer.
func Spread(f func() float64) (restore func()) {
	was := spread
	spread = f
	return func() { spread = was }
}
