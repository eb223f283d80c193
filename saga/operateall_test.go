package saga_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/store"
)

// A listing store has the pages that it is given, of sagas that are no longer there.
type listing struct {
	store.Store
	pages [][]store.Record
	asked []saga.Filter
	load  error

	mu        sync.Mutex
	now, most int // calls of Load under way
}

func (l *listing) List(_ context.Context, f saga.Filter) (page []store.Record, next string, err error) {
	l.asked = append(l.asked, f)
	page, l.pages = l.pages[0], l.pages[1:]
	if page != nil && len(l.pages) > 0 {
		next = fmt.Sprint("page ", len(l.asked))
	} else if page == nil {
		err = errDown
	}
	return page, next, err
}

func (l *listing) Load(context.Context, string) (store.Record, error) {
	under := func(n int) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.now += n
		l.most = max(l.most, l.now)
	}
	under(1)
	defer under(-1)
	time.Sleep(time.Second)
	if l.load != nil {
		return store.Record{}, l.load
	}
	return store.Record{}, saga.ErrNotFound
}

// TestOperateAllAsksForPages of the sagas that were there at the first.
func TestOperateAllAsksForPages(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(d time.Duration, n int) []store.Record {
		page := make([]store.Record, n)
		for i := range page {
			page[i] = store.Record{ID: fmt.Sprint("trip-", i), Now: now.Add(d)}
		}
		return page
	}
	bound := now.Add(time.Millisecond)
	for name, tt := range map[string]struct {
		before time.Time // the CreatedBefore of the caller
		pages  [][]store.Record
		load   error
		asked  []time.Time // the CreatedBefore of each page
		left   []int       // how many sagas were counted after each page
		err    error
	}{
		"one page":             {pages: [][]store.Record{at(0, 1)}, asked: []time.Time{{}}, left: []int{1}},
		"none":                 {pages: [][]store.Record{at(0, 0)}, asked: []time.Time{{}}, left: []int{0}},
		"many on a page":       {pages: [][]store.Record{at(0, 20)}, asked: []time.Time{{}}, left: []int{20}},
		"the clock goes on":    {pages: [][]store.Record{at(0, 1), at(time.Hour, 2), at(time.Hour, 1)}, asked: []time.Time{{}, bound, bound}, left: []int{1, 3, 4}},
		"the clock goes back":  {pages: [][]store.Record{at(0, 1), at(-time.Hour, 1), at(0, 1)}, asked: []time.Time{{}, bound, bound}, left: []int{1, 2, 3}},
		"an empty page":        {pages: [][]store.Record{at(0, 0), at(0, 1), at(0, 1)}, asked: []time.Time{{}, {}, bound}, left: []int{0, 1, 2}},
		"the bound is earlier": {before: now, pages: [][]store.Record{at(0, 1), at(0, 1)}, asked: []time.Time{now, now}, left: []int{1, 2}},
		"the bound is later":   {before: now.Add(time.Hour), pages: [][]store.Record{at(0, 1), at(0, 1)}, asked: []time.Time{now.Add(time.Hour), bound}, left: []int{1, 2}},
		"a page fails":         {pages: [][]store.Record{at(0, 1), nil, at(0, 1)}, asked: []time.Time{{}, bound}, left: []int{1, 1}, err: errDown},
		"an operation fails":   {pages: [][]store.Record{at(0, 1), at(0, 1)}, load: errDown, asked: []time.Time{{}}, left: []int{0}, err: errDown},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &listing{Store: saga.NewMemory(), pages: tt.pages, load: tt.load}
				r := saga.NewRunner(l, saga.RunnerConfig{OnEvent: silent})
				var left []int
				var last error
				for done, err := range r.OperateAll(t.Context(), saga.Filter{CreatedBefore: tt.before}, saga.Operation{Action: saga.ActionRetry}) {
					left, last = append(left, done.NotAllowed), err
				}
				require.ErrorIs(t, last, tt.err)
				require.Equal(t, tt.left, left)
				require.Len(t, l.asked, len(tt.asked))
				for i, f := range l.asked {
					require.Equal(t, tt.asked[i], f.CreatedBefore)
					require.True(t, f.WithoutState)
					require.Equal(t, i > 0, f.After != "")
				}
				require.LessOrEqual(t, l.most, 8, "under way at a time")
			})
		})
	}
}
