package cacheaside_test

import (
	"testing"
	"time"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/storetest"
)

func TestFakeStoreIsAStore(t *testing.T) {
	storetest.Run(t, func(_ *testing.T, lease, write time.Duration) storetest.Backend {
		shared := newFakeStore()
		shared.lease, shared.write = lease, write
		var conns []*fakeConn
		return storetest.Backend{
			Connect: func() cacheaside.Store {
				conn := shared.connect()
				conns = append(conns, conn)
				return conn
			},
			Break: func() (restore func()) {
				for _, conn := range conns {
					conn.fail()
				}
				return func() {
					for _, conn := range conns {
						conn.recover()
					}
				}
			},
		}
	})
}
