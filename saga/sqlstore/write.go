package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/go-resilience/resilience/internal/sqldb"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

func (s *tables) Start(ctx context.Context, req store.StartRequest) (rec store.Record, created bool, err error) {
	err = s.single(ctx, func(ctx context.Context, q sqldb.Querier) error {
		rec, created, err = s.start(ctx, q, req)
		return err
	})
	if created && err == nil && req.Owner == "" {
		_ = s.notify(ctx, s.db)
	}
	return rec, created, wrap("start", err)
}

func (s *tables) StartTx(ctx context.Context, tx *sql.Tx, req store.StartRequest) (store.Record, bool, error) {
	rec, created, err := s.start(ctx, tx, req)
	if created && err == nil {
		err = s.notify(ctx, tx)
	}
	return rec, created, wrap("start", err)
}

func (s *tables) start(ctx context.Context, q sqldb.Querier, req store.StartRequest) (
	rec store.Record, created bool, err error,
) {
	epoch, due := int64(0), time.Duration(0)
	if req.Owner != "" {
		epoch, due = 1, req.LeaseTTL
	}
	complete := req.CompleteIn.Microseconds()
	args := []any{
		req.ID, req.Saga, req.Version, string(req.Status), nonNil(req.State), string(req.Progress), len(req.Log), req.Nonce,
		req.Parent, req.ParentStep, req.Tenant, req.Owner, epoch, due.Microseconds(), due.Microseconds(),
		complete, complete,
	}
	for {
		if s.d.log == "" {
			rec, err = scan(q.QueryRowContext(ctx, s.sql(s.d.start), append(args, jsonOf(numbered(req.Log, 0)))...))
			if !errors.Is(err, sql.ErrNoRows) {
				return rec, err == nil, err
			}
		} else {
			// An inserted row counts as affected with either value of the MySQL driver's option clientFoundRows.
			if created, err = changes(q.ExecContext(ctx, s.sql(s.d.start), args...)); err != nil {
				return rec, false, err
			}
			if created {
				if err = s.log(ctx, q, req.ID, epoch, 0, req.Log); err != nil {
					return rec, false, err
				}
			}
		}
		if rec, err = s.load(ctx, q, req.ID, "{newest}"); err != store.ErrNotFound {
			return rec, created, err
		} // otherwise, the saga was deleted between the insert and the load
	}
}

// numbered returns a copy of new log entries with their Seq. seq is the Seq of the last existing entry.
func numbered(log []store.Entry, seq int64) []store.Entry {
	log = slices.Clone(log)
	for i := range log {
		log[i].Seq = seq + 1 + int64(i)
	}
	return log
}

func jsonOf(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // v has only strings and numbers, which can always be encoded
	}
	return string(text)
}

// log inserts entries whose first Seq is seq + 1.
func (s *tables) log(ctx context.Context, q sqldb.Querier, id string, epoch, seq int64, log []store.Entry) error {
	for _, e := range numbered(log, seq) {
		_, err := q.ExecContext(ctx, s.sql(s.d.log),
			id, e.Seq, e.Step, string(e.Op), string(e.Kind), e.Attempt, epoch, e.Error)
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *tables) Commit(ctx context.Context, req store.CommitRequest) (rc store.Receipt, err error) {
	if !isText(req.ID) {
		return rc, store.ErrFenced
	}
	if s.batches == nil || req.Version != 0 { // a batch cannot change a version
		rc, err = s.commitAlone(ctx, req)
	} else {
		rc, err = s.batches.commit(ctx, req)
	}
	if err == nil && due(&req, rc) {
		_ = s.notify(ctx, s.db)
	}
	return rc, wrap("commit", err)
}

func (s *tables) commitAlone(ctx context.Context, req store.CommitRequest) (rc store.Receipt, err error) {
	err = s.single(ctx, func(ctx context.Context, q sqldb.Querier) error {
		rc, err = s.commit(ctx, q, req)
		return err
	})
	return rc, err
}

func (s *tables) CommitTx(ctx context.Context, tx *sql.Tx, req store.CommitRequest) (store.Receipt, error) {
	if !isText(req.ID) {
		return store.Receipt{}, store.ErrFenced
	}
	rc, err := s.commit(ctx, tx, req)
	if err == nil && due(&req, rc) {
		err = s.notify(ctx, tx)
	}
	return rc, wrap("commit", err)
}

// due reports whether the saga is due immediately after the commit.
func due(req *store.CommitRequest, rc store.Receipt) bool {
	return req.Release && (req.WakeIn <= 0 || rc.Woken) &&
		(req.Status == store.Running || req.Status == store.Compensating)
}

// wakeIn returns the number of microseconds until the saga is due, or -1 if the commit does not release the saga.
func wakeIn(req *store.CommitRequest) int64 {
	if !req.Release {
		return -1
	}
	return max(req.WakeIn.Microseconds(), 0)
}

// commit executes a commit. If the saga's row is locked, it waits. It returns ErrFenced if the row's epoch or seq does
// not match.
func (s *tables) commit(ctx context.Context, q sqldb.Querier, req store.CommitRequest) (rc store.Receipt, err error) {
	due := wakeIn(&req)
	version := sql.NullInt64{Int64: int64(req.Version), Valid: req.Version != 0}
	args := []any{
		string(req.Status), version, orNull(req.State), string(req.Progress), req.After(), req.Failures,
		req.Takeovers, req.LastError, req.Nonce, due, due, due, req.ID, req.Epoch, req.Seq,
	}
	var row *sql.Row
	if s.d.log == "" {
		row = q.QueryRowContext(ctx, s.sql(s.d.commit), append(args, jsonOf(numbered(req.Log, req.Seq)))...)
	} else {
		switch changed, err := changes(q.ExecContext(ctx, s.sql(s.d.commit), args...)); {
		case err != nil:
			return rc, err
		case !changed:
			return rc, store.ErrFenced
		}
		if err := s.log(ctx, q, req.ID, req.Epoch, req.Seq, req.Log); err != nil {
			return rc, err
		}
		row = q.QueryRowContext(ctx, s.sql(receipt), req.ID)
	}
	err = row.Scan(&rc.CancelRequested, &rc.CancelNote, &rc.Woken)
	if errors.Is(err, sql.ErrNoRows) {
		err = store.ErrFenced
	}
	rc.Woken = rc.Woken && due > 0
	return rc, err
}

// changes reports whether a statement has changed a row.
func changes(res sql.Result, err error) (bool, error) {
	if err != nil {
		return false, err
	}
	n, err := res.RowsAffected()
	return n > 0, err
}

func (s *tables) Heartbeat(ctx context.Context, req store.HeartbeatRequest) (renewed []store.Renewed, err error) {
	defer named("heartbeat", &err)
	req.Held = slices.DeleteFunc(slices.Clone(req.Held), func(h store.Held) bool { return !isText(h.ID) })
	if len(req.Held) == 0 {
		return nil, nil
	}
	err = s.write(ctx, true, func(ctx context.Context, q sqldb.Querier) error {
		if err := s.lock(ctx, q); err != nil {
			return err
		}
		renewed = nil
		epochs := make(map[string]int64, len(req.Held)) // the epochs of the sagas that have not been found yet
		ids := make([]string, len(req.Held))
		for i, h := range req.Held {
			ids[i], epochs[h.ID] = h.ID, h.Epoch
		}
		look := func(how string, ids []string) (found []string, err error) {
			text, args := s.among(held+how, ids, req.Owner)
			rows, err := q.QueryContext(ctx, text, args...)
			_, err = collect(rows, err, func(rows *sql.Rows) (n store.Renewed, err error) {
				err = rows.Scan(&n.ID, &n.Epoch, &n.CancelRequested, &n.CancelNote)
				if epoch, ok := epochs[n.ID]; ok && n.Epoch == epoch {
					n.Locked = how == ""
					renewed, found = append(renewed, n), append(found, n.ID)
					delete(epochs, n.ID)
				}
				return n, err
			})
			return found, err
		}
		free, err := look("{skip}", ids)
		if err == nil && len(free) > 0 {
			term := req.LeaseTTL.Microseconds()
			text, args := s.among(renew, free, term, term)
			_, err = q.ExecContext(ctx, text, args...)
		}
		// The remaining rows may be locked. A read without a lock returns their last committed version.
		if err == nil && len(epochs) > 0 && s.d.lock == "" {
			_, err = look("", slices.Collect(maps.Keys(epochs)))
		}
		return err
	})
	return renewed, err
}

func (s *tables) Post(ctx context.Context, req store.PostRequest) (rec store.Record, err error) {
	var refused error
	err = s.write(ctx, false, func(ctx context.Context, q sqldb.Querier) error {
		rec, refused, err = s.post(ctx, q, req)
		return err
	})
	if err == nil && rec.Owner == "" {
		_ = s.notify(ctx, s.db)
	}
	return rec, cmp.Or(wrap("post", err), refused)
}

func (s *tables) PostTx(ctx context.Context, tx *sql.Tx, req store.PostRequest) (store.Record, error) {
	rec, refused, err := s.post(ctx, tx, req)
	if err == nil && rec.Owner == "" {
		err = s.notify(ctx, tx)
	}
	return rec, cmp.Or(wrap("post", err), refused)
}

// post executes a PostRequest. refused is the error of Admit.
func (s *tables) post(ctx context.Context, q sqldb.Querier, req store.PostRequest) (
	rec store.Record, refused, err error,
) {
	switch {
	case !isText(req.ID) && !req.Cancel && req.Name == "":
		return rec, nil, nil
	case !isText(req.ID):
		return rec, nil, store.ErrNotFound
	case req.Cancel:
		rec, err = s.cancel(ctx, q, req.ID, string(req.Payload))
		return rec, nil, err
	case req.Name == "":
		_, err = q.ExecContext(ctx, s.sql(wake+" AND {live}"), req.ID)
		return rec, nil, err
	}
	if err = s.lock(ctx, q); err == nil {
		// The lock prevents the saga's owner and any other Post from changing the saga until tx ends.
		rec, err = s.load(ctx, q, req.ID, "{lock}")
	}
	if err != nil {
		return rec, nil, err
	}
	isNew, err := changes(q.ExecContext(ctx, s.sql(s.d.signal), req.ID, req.Name, nonNil(req.Payload)))
	if err != nil {
		return rec, nil, err
	}
	if isNew && req.Admit != nil {
		if refused = req.Admit(&rec); refused != nil {
			_, err = q.ExecContext(ctx, s.sql(unsignal), req.ID, req.Name)
			return rec, refused, err
		}
	}
	if rec.Status == store.Running {
		if _, err = q.ExecContext(ctx, s.sql(wake), req.ID); err != nil {
			return rec, nil, err
		}
		if rec.Owner == "" && rec.WakeAt.After(rec.Now) {
			rec.WakeAt = rec.Now
		}
	}
	return rec, nil, nil
}

// cancel records a request that a saga turn back.
func (s *tables) cancel(ctx context.Context, q sqldb.Querier, id, note string) (rec store.Record, err error) {
	for {
		if _, err := q.ExecContext(ctx, s.sql(cancel), note, id); err != nil {
			return rec, err
		}
		rec, err = s.load(ctx, q, id, "{lock}")
		if err != nil || rec.CancelRequested || rec.Status != store.Running {
			return rec, err
		} // otherwise, the saga was started between the update and the load
	}
}

func (s *tables) DeleteEnded(ctx context.Context, status store.Status, age time.Duration, limit int) (
	n int, err error,
) {
	if age < 0 || limit < 0 {
		// A negative limit must be rejected, because for SQLite it means no limit.
		return 0, fmt.Errorf("sqlstore: delete: age is %v and limit %d: must not be negative", age, limit)
	}
	err = s.write(ctx, false, func(ctx context.Context, q sqldb.Querier) error {
		if err := s.lock(ctx, q); err != nil {
			return err
		}
		var generations [][]string
		rows, err := q.QueryContext(ctx, s.sql(oldest), string(status), age.Microseconds(), limit)
		ids, err := collect(rows, err, scanID)
		for len(ids) > 0 && err == nil {
			generations = append(generations, ids)
			text, args := s.among(endedChildren, ids)
			rows, err = q.QueryContext(ctx, text, append(args, limit)...)
			ids, err = collect(rows, err, scanID)
		}
		n = 0
		for i := len(generations) - 1; i >= 0 && n < limit && err == nil; i-- {
			for _, text := range removal {
				text, args := s.among(text, generations[i])
				if _, err := q.ExecContext(ctx, text, args...); err != nil {
					return err
				}
			}
			n += len(generations[i])
		}
		return err
	})
	if err != nil {
		n = 0
	}
	return n, wrap("delete", err)
}
