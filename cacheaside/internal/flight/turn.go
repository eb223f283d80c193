package flight

// A flight that cannot keep its result may only answer calls that began before it: it
// would not hear of changes during its load. Later callers join the next flight, which
// waits until the first has ended. So one such load of a key runs at a time, however
// many callers there are.

// Turn returns what f, which cannot keep its result, does next: it follows another flight
// as one of its callers, waits until another has ended, or, if both are nil, loads.
func (t *Table[K, V]) Turn(f *Flight[K, V]) (follow, wait *Flight[K, V]) {
	f.phase = max(f.phase, passing)
	if other := t.Follow(f); other != nil {
		return other, nil
	}
	if before := t.alone[f.Key]; before != nil && !before.answered() {
		t.stand(f)
		return nil, before
	}
	t.overtake(f.Key)
	if Findable(f.Key) {
		t.alone[f.Key] = f
	}
	return nil, nil
}

// Rest lets callers join f while it waits before it asks the Store again, or makes it
// follow the flight that they join.
func (t *Table[K, V]) Rest(f *Flight[K, V]) (follow *Flight[K, V]) {
	if t.Entries != nil { // callers join it anyway
		return nil
	}
	if follow = t.Follow(f); follow == nil {
		t.stand(f)
	}
	return follow
}

// Rested ends a Rest.
func (t *Table[K, V]) Rested(f *Flight[K, V]) {
	if t.Entries == nil && t.flights[f.Key] == f {
		t.overtake(f.Key)
	}
}

// stand lets callers join f, which may have been overtaken before. No other flight of the
// key may be joined.
func (t *Table[K, V]) stand(f *Flight[K, V]) {
	if Findable(f.Key) && !f.answered() {
		if t.Entries != nil {
			f.old = nil
		}
		t.flights[f.Key] = f
		delete(t.others, f)
	}
}

// Follow makes f a caller of the flight of its key that callers may join, if that is
// another one, and returns that.
func (t *Table[K, V]) Follow(f *Flight[K, V]) *Flight[K, V] {
	other := t.flights[f.Key]
	if other == nil || other == f {
		return nil
	}
	t.Join(other)
	f.phase = max(f.phase, following)
	return other
}
