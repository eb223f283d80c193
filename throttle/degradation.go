package throttle

import "slices"

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
	m := l.measure()
	var windows []window
	if m.quotas != nil {
		m, windows = l.presentWindows()
	}
	used := max(m.tat-m.now, 0)
	for {
		was := l.degraded.Load()
		level := was
		for level > 0 && (used >= m.room[level] || m.windowsReach(windows, int(level), 1)) {
			level--
		}
		for int(level) < m.least {
			room := m.room[level+1]
			if used >= room || used > room-room/4 || m.windowsReach(windows, int(level)+1, 0.75) {
				break
			}
			level++
		}
		if l.degraded.CompareAndSwap(was, level) {
			return int(level)
		}
	}
}

// presentWindows returns the windows of the quotas as they are now.
func (l *Limiter) presentWindows() (measure, []window) {
	l.queue.mu.Lock()
	defer l.queue.mu.Unlock()
	m, now := l.measureLocked(), l.watch.now()
	windows := slices.Clone(l.windows)
	for i := range m.quotas {
		windows[i] = m.quotas[i].at(windows[i], now)
	}
	return m, windows
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
