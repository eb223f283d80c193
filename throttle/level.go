package throttle

// Level returns the least important level whose features should be on. With it an
// application switches off nonessential features before essential calls are refused:
// a feature of level p is on while p <= Level().
//
//	if limit.Level() >= 2 {
//		page.Recommendations = recommend(ctx, user)
//	}
//
// A level goes off when only the tokens that are reserved for the levels above it are
// left. It goes on again when the burst has refilled by a quarter of the way from
// there to full, so that features do not flicker. Level 0 is always on. A level
// changes only in a call of Level or Stats: if the tokens run out and come back between two
// calls, the level stays on.
func (l *Limiter) Level() int {
	m := l.measure()
	used := max(m.tat-m.now, 0)
	for {
		was := l.level.Load()
		level := min(was, int32(m.least)) // there may be fewer levels now
		for level > 0 && used >= m.room[level] {
			level--
		}
		for int(level) < m.least {
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
