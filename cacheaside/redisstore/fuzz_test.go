package redisstore_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
)

// reply converts data to any reply that a client may return, including an error.
func reply(data *[]byte, depth int) any {
	if len(*data) == 0 {
		return nil
	}
	b := (*data)[0]
	*data = (*data)[1:]
	switch n := int(b >> 4); b % 16 {
	case 0:
		return nil
	case 1:
		return int64(n)
	case 2:
		return int64(-1) << (4 * n)
	case 3:
		return int64(1)<<62 + int64(n)
	case 4:
		return n%2 == 0
	case 5:
		return float64(n)
	case 6, 7, 8:
		return []string{"hit", "leased", "fenced", "busy", "fresh", "stale", "", "1"}[n%8]
	case 9:
		n = min(n, len(*data))
		text := (*data)[:n]
		*data = (*data)[n:]
		return text
	case 10:
		return context.DeadlineExceeded
	default:
		if depth == 0 {
			return []any{}
		}
		n = []int{0, 1, 2, 5}[n%4]
		list := make([]any, n)
		for i := range list {
			list[i] = reply(data, depth-1)
		}
		return list
	}
}

// Whatever a server, a proxy or a client answers, a Get has the value of the source, in
// bounded time.
func FuzzReplies(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0x1b, 0x3b, 0x16, 0x19, 'x', 0x31, 0x01, 0x66})
	f.Add([]byte{0x1b, 0x3b, 0x06, 0x29, 0, 0, 0x33, 0x33, 0x66})
	f.Fuzz(func(t *testing.T, data []byte) {
		synctest.Test(t, func(t *testing.T) {
			answer := func(context.Context, string, []string, ...any) (any, error) {
				r := reply(&data, 3)
				if err, ok := r.(error); ok {
					return nil, err
				}
				return r, nil
			}
			c := cacheaside.New(cacheaside.Config[string, int]{
				Load:  func(context.Context, string) (int, error) { return 7, nil },
				Store: redisstore.New(redisstore.Config{Prefix: "p", Eval: answer}),
				TTL:   time.Second,
			})
			defer c.Close()
			began := time.Now()
			for range 3 {
				v, _, err := c.GetWith(t.Context(), "k", cacheaside.GetOptions{SkipMemory: true})
				require.NoError(t, err)
				require.Equal(t, 7, v)
			}
			_ = c.Invalidate(t.Context(), "k")
			_ = c.Write(t.Context(), "k", func(context.Context) error { return nil })
			require.Less(t, time.Since(began), time.Minute)
		})
	})
}
