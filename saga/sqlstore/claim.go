package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/sqldb"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A queue is a list of due sagas with the same definition and version. It has either a tenant's sagas without an owner,
// or the sagas of all tenants whose owners have crashed. The index saga_live has each queue in the order of wake_at.
type queue struct {
	store.Definition
	tenant string // the queue's tenant; "" if the owners have crashed
	owned  int    // 1 if the owners have crashed, otherwise 0
	oldest int64  // the earliest wake_at in the queue
	count  int    // the number of sagas, if they were counted
}

// A source is a queue from which a claim picks sagas.
type source struct {
	queue
	picked int // the number of sagas that the claim has already picked from the queue
	limit  int // the number of sagas that the next statement picks
	found  int // the number of sagas that the statement has found
}

// A tenant is a tenant that has due sagas, with the sources of these sagas.
type tenant struct {
	name    string
	sources []*source // the sources, sorted by oldest
}

func (s *tables) Claim(ctx context.Context, req store.ClaimRequest) (recs []store.Record, err error) {
	defer named("claim", &err)
	if req.Limit <= 0 || len(req.Definitions) == 0 {
		return nil, nil
	}
	if err := s.limitLeases(ctx, req.LeaseTTL); err != nil {
		return nil, err
	}
	queues, err := s.due(ctx, req)
	if err != nil || len(queues) == 0 {
		return nil, err
	}
	err = s.write(ctx, false, func(ctx context.Context, q sqldb.Querier) error {
		recs = nil
		if err := s.lock(ctx, q); err != nil {
			return err
		}
		ids, previous, err := s.pick(ctx, q, queues, req.Limit)
		if err != nil || len(ids) == 0 {
			return err
		}
		term := req.LeaseTTL.Microseconds()
		text, args := s.among(take, ids, req.Owner, req.Owner, term, term)
		if _, err := q.ExecContext(ctx, text, args...); err != nil {
			return err
		}
		text, args = s.among(taken, ids)
		rows, err := q.QueryContext(ctx, text, args...)
		recs, err = collect(rows, err, func(rows *sql.Rows) (store.Record, error) {
			rec, err := scan(rows)
			rec.Previous = previous[rec.ID]
			return rec, err
		})
		return err
	})
	return recs, err
}

// limitLeases shortens the leases that end too late because the database's clock was set back: it makes them end as if
// they started now. Otherwise, if an owner died, its sagas would not be due until the clock has caught up. An owner
// that is alive renews its leases before they end. limitLeases does nothing if it was called within the last interval.
func (s *tables) limitLeases(ctx context.Context, interval time.Duration) error {
	s.leases.Lock()
	recently := time.Since(s.limited) < interval
	if !recently {
		s.limited = time.Now()
	}
	s.leases.Unlock()
	if recently {
		return nil
	}
	rows, err := s.db.QueryContext(ctx, s.sql(tooLong))
	ids, err := collect(rows, err, scanID)
	if err != nil || len(ids) == 0 {
		return err
	}
	return s.write(ctx, false, func(ctx context.Context, q sqldb.Querier) error {
		if err := s.lock(ctx, q); err != nil {
			return err
		}
		rows, err := q.QueryContext(ctx, s.sql(tooLong+"{skip}"))
		ids, err := collect(rows, err, scanID)
		if err != nil || len(ids) == 0 {
			return err
		}
		text, args := s.among(limitLease, ids)
		_, err = q.ExecContext(ctx, text, args...)
		return err
	})
}

// due returns the queues from which the request can claim due sagas. If there are many tenants, it only returns the
// queues of the tenants whose turn is next.
func (s *tables) due(ctx context.Context, req store.ClaimRequest) (queues []queue, err error) {
	known := func(queues []queue) []queue {
		return slices.DeleteFunc(queues, func(q queue) bool { return !slices.Contains(req.Definitions, q.Definition) })
	}
	// Reading all queues of a thousand tenants would take longer than all other parts of a claim.
	if last, many := s.rotation.next(); many {
		limit := 2*req.Limit + 1
		queues, err = s.queuesOfSome(ctx, last, limit)
		if err != nil {
			return nil, err
		}
		free := slices.DeleteFunc(slices.Clone(queues), func(q queue) bool { return q.owned == 1 })
		if len(free) == limit { // the last tenant may have more queues than were read, so omit that tenant
			end := free[limit-1].tenant
			queues = slices.DeleteFunc(queues, func(q queue) bool { return q.owned == 0 && q.tenant == end })
		}
		if queues = known(queues); len(tenantsOf(queues, 0)) >= req.Limit {
			return queues, nil
		}
	}
	queues, err = s.queues(ctx, "0")
	queues = known(queues)
	s.rotation.saw(len(tenantsOf(queues, 0)) > 2*req.Limit)
	return queues, err
}

// pick locks up to limit sagas of the queues, and returns their ids and owners. It first picks sagas of crashed owners,
// and then divides the remaining number equally among the tenants. If a tenant has fewer sagas than its share, another
// statement divides the remaining number among the other tenants.
func (s *tables) pick(ctx context.Context, q sqldb.Querier, queues []queue, limit int) (
	ids []string, owners map[string]string, err error,
) {
	owners = make(map[string]string)
	for _, owned := range []int{1, 0} {
		tenants := tenantsOf(queues, owned)
		if owned == 0 {
			tenants = s.rotation.order(tenants)
		}
		for len(tenants) > 0 && len(ids) < limit {
			sources, last := share(tenants, limit-len(ids))
			if owned == 0 {
				s.rotation.served(last)
			}
			err := s.lockSources(ctx, q, sources, func(id, owner string) {
				// Two statements can find the same row. If an earlier row was locked by another transaction during the first
				// statement and is free now, the offset of the second statement is too small.
				if _, ok := owners[id]; !ok {
					ids, owners[id] = append(ids, id), owner
				}
			})
			if err != nil {
				return nil, nil, err
			}
			tenants = remaining(tenants)
		}
	}
	return ids, owners, nil
}

// tenantsOf returns the tenants of the queues with this value of owned, sorted by name. Each tenant has one source for
// each of its queues.
func tenantsOf(queues []queue, owned int) (tenants []tenant) {
	queues = slices.Clone(queues)
	slices.SortFunc(queues, func(a, b queue) int {
		return cmp.Or(cmp.Compare(a.tenant, b.tenant), cmp.Compare(a.oldest, b.oldest))
	})
	for _, q := range queues {
		if q.owned != owned {
			continue
		}
		if n := len(tenants); n == 0 || tenants[n-1].name != q.tenant {
			tenants = append(tenants, tenant{name: q.tenant})
		}
		t := &tenants[len(tenants)-1]
		t.sources = append(t.sources, &source{queue: q})
	}
	return tenants
}

// share divides the next n sagas among the tenants, and the share of each tenant among its definitions. It returns the
// sources from which the next statement picks sagas, and the tenant that has the last turn.
func share(tenants []tenant, n int) (sources []*source, last string) {
	for i, t := range tenants {
		size := part(n, len(tenants), i)
		for j, src := range t.sources {
			if src.limit = part(size, len(t.sources), j); src.limit > 0 {
				sources = append(sources, src)
			}
		}
	}
	return sources, tenants[(n-1)%len(tenants)].name
}

// part returns the size of part i if n sagas are divided into equal parts. If they cannot be equal, the first parts are
// larger by 1.
func part(n, parts, i int) int {
	size := n / parts
	if i < n%parts {
		size++
	}
	return size
}

// remaining returns the tenants whose sources may have more sagas, and removes the other sources. The tenants that have
// had no turn come first.
func remaining(tenants []tenant) []tenant {
	var waiting, served []tenant
	for _, t := range tenants {
		had := false
		t.sources = slices.DeleteFunc(t.sources, func(src *source) bool {
			had = had || src.limit > 0
			return src.found < src.limit
		})
		for _, src := range t.sources {
			src.picked, src.found = src.picked+src.found, 0
		}
		switch {
		case len(t.sources) == 0:
		case had:
			served = append(served, t)
		default:
			waiting = append(waiting, t)
		}
	}
	return append(waiting, served...)
}

// A rotation remembers which tenant had the last turn, for all claims of a process. A runner that can run only a few
// more sagas claims only a few at a time. Without the rotation, each of these claims would start with the same tenants.
type rotation struct {
	mu    sync.Mutex
	begun bool
	last  string
	many  bool // whether the last claim that read all queues has found many tenants
}

// next returns the tenant that had the last turn, and whether there are too many tenants to read all queues.
func (r *rotation) next() (last string, many bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last, r.many && r.begun
}

func (r *rotation) saw(many bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.many = many
}

// order sorts the tenants, which are sorted by name, in the order of their turns. In the first claim of a process, the
// turns start with the tenant whose saga has waited longest.
func (r *rotation) order(tenants []tenant) []tenant {
	r.mu.Lock()
	defer r.mu.Unlock()
	first := 0
	for i, t := range tenants {
		if r.begun {
			if t.name <= r.last {
				first = i + 1
			}
		} else if t.sources[0].oldest < tenants[first].sources[0].oldest {
			first = i
		}
	}
	return slices.Concat(tenants[first:], tenants[:first])
}

func (r *rotation) served(last string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.begun, r.last = true, last
}

// maxUnion is the maximum number of queues that one statement reads on MySQL or SQLite. SQLite permits up to 500.
const maxUnion = 64

// lockSources locks sagas of each source, and calls picked for each of them. It skips sagas that another transaction
// has locked.
func (s *tables) lockSources(
	ctx context.Context, q sqldb.Querier, sources []*source, picked func(id, owner string),
) error {
	read := func(sources []*source, text string, args ...any) error {
		rows, err := q.QueryContext(ctx, s.sql(text), args...)
		_, err = collect(rows, err, func(rows *sql.Rows) (place int, err error) {
			var id, owner string
			if err = rows.Scan(&id, &owner, &place); err == nil {
				sources[place].found++
				picked(id, owner)
			}
			return place, err
		})
		return err
	}
	if s.d.picks != "" {
		type row struct {
			Place   int    `json:"place"`
			Owned   int    `json:"owned"`
			Tenant  string `json:"turn"`
			Name    string `json:"name"`
			Version int    `json:"version"`
			Limit   int    `json:"most"`
			Picked  int    `json:"picked"`
		}
		rows, total := make([]row, len(sources)), 0
		for i, src := range sources {
			rows[i] = row{i, src.owned, src.tenant, src.Saga, src.Version, src.limit, src.picked}
			total += src.limit
		}
		return read(sources, s.d.picks, jsonOf(rows), total)
	}
	for some := range slices.Chunk(sources, maxUnion) {
		n := 1
		for n < len(some) {
			n *= 2 // a power of two, to limit the number of different statements
		}
		args := make([]any, 0, 6*n)
		for _, src := range some {
			args = append(args, src.owned, src.tenant, src.Saga, src.Version, src.limit, src.picked)
		}
		for len(args) < 6*n {
			args = append(args, 0, "", "", 0, 0, 0)
		}
		if err := read(some, pickOf(n), args...); err != nil {
			return err
		}
	}
	return nil
}

// pickOf returns the statement that picks sagas from n queues.
func pickOf(n int) string {
	one := func(i int) string { return strings.Replace(pickOne, "{place}", strconv.Itoa(i), 1) }
	if n == 1 {
		return one(0)
	}
	text := ""
	for i := range n {
		text = union(text, one(i), i)
	}
	return text
}
