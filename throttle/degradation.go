package throttle

import "github.com/go-resilience/resilience/throttle/internal/bucket"

// Degradation returns the least important level whose features should be on. With it an
// application switches off nonessential features before essential calls are refused:
// a feature of level p is on while p <= Degradation().
//
//	if limit.Degradation() >= 2 {
//		page.Recommendations = recommend(ctx, user)
//	}
//
// A level goes off when only the tokens that are reserved for more important levels are
// left, of the burst or of a quota. It goes on again when the burst has refilled by a
// quarter of the way from there to full, so that features do not flicker. Level 0 is
// always on. A level changes only in a call of Degradation or Stats: if the tokens run out
// and come back between two calls, the level stays on.
func (l *Limiter) Degradation() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	m, now := l.measure(), present()
	for i := range m.quotas {
		l.windows[i] = m.quotas[i].at(l.windows[i], now)
	}
	l.degraded = m.degradation(l.windows, l.degraded)
	return l.degraded
}

// degradation returns the Degradation after that was the last one.
func (m measure) degradation(windows []window, was int) int {
	used, level := m.ahead(), was
	for level > 0 && (m.reaches(used, level) || m.windowsReach(windows, level, 1)) {
		level--
	}
	for level < m.least {
		room := m.room[level+1]
		quarter := bucket.Time{NS: room.NS - room.NS/4, Part: room.Part}
		if m.reaches(used, level+1) || !quarter.Reaches(used) || m.windowsReach(windows, level+1, 0.75) {
			break
		}
		level++
	}
	return level
}

// reaches reports whether a level has no token left of the burst.
func (m measure) reaches(used bucket.Time, level int) bool {
	return !m.rate.IsUnlimited() && used.Reaches(m.room[level])
}

// windowsReach reports whether a share of the tokens that a level may spend of a quota
// has been spent.
func (m measure) windowsReach(windows []window, level int, share float64) bool {
	for i, w := range windows {
		if float64(w.used) >= share*float64(m.quotas[i].room[level]) {
			return true
		}
	}
	return false
}
