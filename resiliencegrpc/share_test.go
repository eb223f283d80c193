package resiliencegrpc_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/resiliencegrpc/internal/testpb"
)

func tenantOf(ctx context.Context) string {
	return strings.Join(metadata.ValueFromIncomingContext(ctx, "tenant"), "")
}

func TestCallsHaveTheShareThatShareByNames(t *testing.T) {
	for _, streams := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			slots := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1})
			other := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1})
			var mu sync.Mutex
			served := ""
			serve := func(ctx context.Context) {
				time.Sleep(time.Second)
				mu.Lock()
				defer mu.Unlock()
				served += tenantOf(ctx)
			}
			s := &service{
				unary: func(ctx context.Context, _ int64, m *testpb.Message) (*testpb.Message, error) {
					serve(ctx)
					return m, nil
				},
				list: func(_ int64, _ *testpb.Message, s grpc.ServerStreamingServer[testpb.Message]) error {
					serve(s.Context())
					return nil
				},
			}
			server := resiliencegrpc.Server{ShareBy: tenantOf, Slots: slots}
			if streams {
				server.Slots, server.StreamSlots = other, slots
			}
			client := inBubble(t, s, resiliencegrpc.Client{}, server.Options()...)
			var calls sync.WaitGroup
			for _, tenant := range []string{"a", "a", "a", "a", "b", "b", strings.Repeat("c", 300)} {
				ctx := metadata.AppendToOutgoingContext(t.Context(), "tenant", tenant)
				calls.Go(func() {
					if !streams {
						_, _ = client.Get(ctx, hello)
						return
					}
					if stream, err := client.List(ctx, hello); err == nil {
						_, _ = stream.Recv()
					}
				})
				synctest.Wait()
			}
			shares := slots.Stats().Shares
			require.Equal(t, []bulkhead.ShareStats{{Share: "a", InFlight: 1, Queued: 3}, {Share: "b", Queued: 2}}, shares[:2])
			require.True(t, strings.HasPrefix(shares[2].Share, "sha256:"))
			calls.Wait()
			require.Equal(t, "aabcaba", strings.ReplaceAll(served, strings.Repeat("c", 300), "c"))
			require.Empty(t, other.Stats().Shares)
		})
	}
}

func TestShareByNeedsSlots(t *testing.T) {
	require.PanicsWithError(t, "resiliencegrpc: ShareBy is set: must be nil, or Slots or StreamSlots be set", func() {
		resiliencegrpc.Server{ShareBy: tenantOf}.Options()
	})
	own := bulkhead.New(bulkhead.Config{Name: "own", Limit: 1, MaxWait: 1, Share: func(context.Context) string { return "own" }})
	resiliencegrpc.Server{ShareBy: tenantOf, Slots: own}.Options()
	require.Equal(t, "own", own.Config().Share(t.Context()), "what is no call of a server")
	slots := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1})
	for range 2 {
		resiliencegrpc.Server{ShareBy: tenantOf, Slots: slots, StreamSlots: slots}.Options()
	}
	_, lis := serve(t, &service{}, resiliencegrpc.Server{Slots: slots}.Options()...)
	_, err := dial(t, lis.Addr().String(), resiliencegrpc.Client{}).Get(t.Context(), hello)
	require.NoError(t, err, "a server without shares")
	require.NotNil(t, slots.Config().Share)
	require.Empty(t, slots.Config().Share(t.Context()))
}
