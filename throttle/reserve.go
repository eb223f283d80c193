package throttle

import (
	"context"
	"fmt"
	"slices"

	"github.com/go-resilience/resilience/internal/invalid"
)

// checkLevels records what is wrong with Levels and Priority.
func checkLevels(f *invalid.Fields, levels int, priority func(context.Context) int) {
	f.Need(levels >= 0 && levels <= 1000, "Levels", levels, "0 (for 1) to 1000")
	f.Need(levels < 2 || priority != nil, "Levels", levels, "0 or 1 where Priority is nil")
	f.Need(levels > 1 || priority == nil, "Levels", levels, "2 or more where Priority is set")
}

// checkReserve records what is wrong with Reserve.
func checkReserve(f *invalid.Fields, levels int, reserve []float64) {
	levels = max(levels, 1)
	f.Need(len(reserve) < levels, "Reserve", reserve, fmt.Sprintf("at most %d long, one less than Levels", levels-1))
	sum := 0.0
	for level, share := range reserve {
		f.Need(share >= 0 && share < 1, fmt.Sprintf("Reserve[%d]", level), share, "at least 0 and less than 1")
		sum += share
	}
	f.Need(!(sum >= 1), "Reserve", reserve, "shares whose sum is less than 1")
}

// reserveOf returns a Reserve with its default filled in. It shares no memory with
// reserve.
func reserveOf(levels int, reserve []float64) []float64 {
	if reserve != nil || levels == 1 {
		return slices.Clone(reserve)
	}
	return slices.Repeat([]float64{1 / float64(2*levels)}, levels-1)
}

// roomOf returns how many tokens of burst a level may spend at once, at least one: those
// that are not kept for the levels above it.
func roomOf(burst int, reserve []float64, level int) int {
	sum := 0.0
	for _, share := range reserve[:min(level, len(reserve))] {
		sum += share
	}
	const rounding = 1e-9 // a share of a whole number of tokens may fall short of it
	return burst - min(int(float64(burst)*sum+rounding), burst-1)
}
