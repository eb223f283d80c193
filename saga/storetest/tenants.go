package storetest

import (
	"fmt"
	"sync"
	"time"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

// startAll starts the given number of sagas for each tenant. It starts several of them concurrently, because each start
// may cost a commit of the database.
func (s *suite) startAll(tenants map[string]int) {
	s.Helper()
	var wg sync.WaitGroup
	places := make(chan struct{}, 16)
	for tenant, sagas := range tenants {
		for i := range sagas {
			wg.Go(func() {
				places <- struct{}{}
				defer func() { <-places }()
				req := request(fmt.Sprint(tenant, "/", i))
				req.Tenant = tenant
				_, created, err := s.store.Start(s.ctx, req)
				s.check(err == nil && created, "start of %s: %v, error: %v", req.ID, created, err)
			})
		}
	}
	wg.Wait()
}

// claimedOf claims up to limit sagas, and adds the number of each tenant's sagas to counts.
func (s *suite) claimedOf(counts map[string]int, limit int) (claimed int) {
	s.Helper()
	recs := s.claim("me", limit)
	for _, r := range recs {
		counts[r.Tenant]++
	}
	return len(recs)
}

// claimTwoTenants tests that a single saga does not wait for 600 sagas of another tenant that were due earlier.
func claimTwoTenants(s *suite) {
	s.startAll(map[string]int{"flood": 600})
	time.Sleep(3 * time.Millisecond) // because a store may truncate times to milliseconds
	for i, limit := range []int{1, 3, 16} {
		req := request(fmt.Sprint("single-", i))
		req.Tenant = "single"
		s.start(req)
		counts := make(map[string]int)
		for calls := 0; counts["single"] == 0; calls++ {
			s.true(calls < 2, "a claim of %d sagas had none of the tenant that was next: %v", limit, counts)
			s.equal(limit, s.claimedOf(counts, limit), "the other tenant's sagas fill the claim")
		}
	}
	// Even over several small claims, no tenant gets more than its share.
	s.startAll(map[string]int{"another": 600})
	counts := make(map[string]int)
	for range 21 {
		s.equal(3, s.claimedOf(counts, 3))
		s.true(counts["flood"]-counts["another"] <= 1 && counts["another"]-counts["flood"] <= 1, "shares: %v", counts)
	}
}

// claimManyTenants tests that each of 1000 tenants with a due saga has a turn before any tenant has a second turn.
func claimManyTenants(s *suite) {
	const tenants, limit = 1000, 64
	due := map[string]int{"flood": 50}
	for i := range tenants - 1 {
		due[fmt.Sprintf("tenant-%03d", i)] = 1
	}
	s.startAll(due)
	counts := make(map[string]int)
	for claimed := 0; claimed < tenants; {
		n := s.claimedOf(counts, min(limit, tenants-claimed))
		s.true(n > 0, "nothing is due after %d of %d sagas", claimed, tenants)
		claimed += n
	}
	s.len(counts, tenants)
	s.equal(49, s.claimedOf(counts, limit), "the rest")
}

// claimTenantsOfDefinitions tests that a tenant with more definitions does not get a larger share.
func claimTenantsOfDefinitions(s *suite) {
	var all []store.Definition
	start := func(tenant string, definitions, sagas int) {
		for d := range definitions {
			for i := range sagas {
				req := request(fmt.Sprint(tenant, d, "-", i))
				req.Saga, req.Tenant, req.Version = fmt.Sprint("definition-", d), tenant, 0
				s.start(req)
			}
		}
	}
	for d := range 5 {
		all = append(all, store.Definition{Saga: fmt.Sprint("definition-", d)})
	}
	start("large", 5, 4)
	start("small", 1, 10)
	req := store.ClaimRequest{Owner: "me", LeaseTTL: long, Limit: 10, Definitions: all}
	recs, err := s.store.Claim(s.ctx, req)
	s.noError(err)
	counts := make(map[string]int)
	for _, r := range recs {
		counts[r.Tenant]++
		if r.Tenant == "large" {
			counts[r.Saga]++
		}
	}
	want := map[string]int{"large": 5, "small": 5}
	for _, d := range all {
		want[d.Saga] = 1
	}
	s.equal(want, counts)
}
