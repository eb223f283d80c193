package settings

// What the groups of package keyed need until they are replaced. Their members share a Version.

// NewVersion returns a Version. It panics with the error of Validate, if there is one.
func NewVersion[C config](given C, fill func(C) C) *Version[C] {
	var s Setting[C]
	s.Init(given, fill)
	return s.now.Load()
}

// Filled returns the configuration with its defaults. It must not be written to.
func (v *Version[C]) Filled() *C { return &v.filled }

// Adopt makes v, which was filled by fill, the configuration, and then calls follow, if it is
// not nil.
func (s *Setting[C]) Adopt(v *Version[C], fill func(C) C, follow func(*C)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fill = fill
	s.now.Store(v)
	if follow != nil {
		follow(&v.filled)
	}
}
