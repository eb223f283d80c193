package saga

import "time"

// SetChance replaces the source of the pauses by chance between two calls of the store.
func (r *Runner) SetChance(f func(below time.Duration) time.Duration) { r.chance = f }
