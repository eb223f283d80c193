package throttle

import (
	"context"
	"fmt"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Level returns the least important level whose features are to be on, so that
// an application can switch off what it can do without before essential calls
// are refused: a feature of level p is on while p <= Level().
//
//	if limit.Level() >= 2 {
//		page.Recommendations = recommend(ctx, user)
//	}
//
// A level goes off when no more of Burst is left than it has to leave to those
// above, and on again when the burst has refilled by a quarter of the way from
// there to full, so that it does not flicker. Level 0 is always on. Whether a level
// is on is decided when Level is called: what came and went in between leaves no
// trace.
func (l *Limiter) Level() int {
	m := l.measure()
	used := max(m.tat-m.now, 0)
	for {
		was := l.level.Load()
		level := was
		for level > 0 && used >= m.room[level] {
			level--
		}
		for int(level) < l.cfg.Levels-1 {
			if room := m.room[level+1]; used >= room || used > room-room/4 {
				break
			}
			level++
		}
		if l.level.CompareAndSwap(was, level) {
			return int(level)
		}
	}
}

// checkLevels records what is wrong with levels and what belongs to them.
func checkLevels(f *invalid.Fields, levels int, priority func(context.Context) int, reserve []float64) {
	f.Need(levels >= 0 && levels <= 1000, "Levels", levels, "0 (for 1) to 1000")
	f.Need(levels < 2 || priority != nil, "Levels", levels, "0 or 1 where Priority is nil")
	f.Need(levels > 1 || priority == nil, "Levels", levels, "2 or more where Priority is set")
	if len(reserve) == 0 {
		return
	}
	f.Need(len(reserve) == max(levels, 1), "Reserve", reserve, fmt.Sprintf("one for each of the %d Levels", max(levels, 1)))
	least := 0.0
	for level, share := range reserve {
		field := fmt.Sprintf("Reserve[%d]", level)
		if level == 0 {
			f.Need(share == 0, field, share, "0: there is no level above")
			continue
		}
		f.Need(share >= least && share < 1, field, share, fmt.Sprintf("at least %v, as that of the level above, and less than 1", least))
		least = max(least, share)
	}
}

// reserveOf returns what each level leaves to those above.
func reserveOf(levels int, reserve []float64) []float64 {
	shares := make([]float64, levels)
	for i := range shares {
		shares[i] = float64(i) / float64(levels)
	}
	copy(shares, reserve)
	return shares
}

// reserved returns a share of burst in whole tokens.
func reserved(burst int, share float64) int {
	return int(float64(burst)*share + 1e-9) // what is meant as a whole number may fall short of it
}
