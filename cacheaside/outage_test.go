package cacheaside

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	outagePause = time.Second
	outageHang  = 250 * time.Millisecond
)

// An outageRun calls shards one after the other, and advances its clock.
type outageRun struct {
	outage
	now   time.Duration
	takes func(shard uint8) time.Duration // duration of a call that fails; 0 if the call succeeds
}

// call reports whether the outage admits a call, and whether the call hangs.
func (r *outageRun) call(shard uint8, change bool) (admitted, hangs bool) {
	if !r.admit(shard, change, r.now, outagePause) {
		return false, false
	}
	began, takes := r.now, r.takes(shard)
	if takes > 0 {
		r.now += takes
		r.fail(shard, began, r.now, outagePause)
		return true, takes >= slowFailure
	}
	r.now += time.Millisecond
	r.succeed(shard, r.now)
	return true, false
}

// In each pause, at most two calls wait for shards that hang, even if the shards have refused calls before. After the
// outage, all shards are called again.
func TestOutageWaitsTwiceInEachPause(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		from := uint8(random.IntN(64)) // shards from here on fail
		r := outageRun{now: time.Hour, takes: func(shard uint8) time.Duration {
			if shard >= from {
				return time.Millisecond
			}
			return 0
		}}
		for range random.IntN(200) {
			r.call(uint8(random.IntN(64)), random.IntN(2) == 0)
		}
		r.takes = func(shard uint8) time.Duration {
			if shard >= from {
				return outageHang
			}
			return 0
		}
		var waits []time.Duration
		for range 2000 {
			if _, hangs := r.call(uint8(random.IntN(64)), random.IntN(2) == 0); hangs {
				waits = append(waits, r.now)
			}
			r.now += time.Duration(random.Int64N(int64(20 * time.Millisecond)))
		}
		for i := 2; i < len(waits); i++ {
			require.GreaterOrEqual(t, waits[i]-waits[i-2], outagePause, "seed %d", seed)
		}
		for shard := range from {
			up := r.shards[shard].state == shardUp
			admitted, _ := r.call(shard, false)
			require.True(t, admitted || !up, "seed %d shard %d", seed, shard)
		}
		r.takes = func(uint8) time.Duration { return 0 }
		r.now += 2 * outagePause
		for shard := range uint8(64) {
			admitted, _ := r.call(shard, false)
			require.True(t, admitted, "seed %d shard %d", seed, shard)
		}
		require.Zero(t, r.down)
	}
}

func TestOutageTransitions(t *testing.T) {
	const at = time.Hour
	one := func(f func(o *outage)) *outage { o := new(outage); f(o); return o }
	slow := func(o *outage) { o.fail(1, at, at+outageHang, outagePause) }
	for name, test := range map[string]struct {
		o        *outage
		shard    uint8
		want     shardState
		admitted time.Duration // relative to at; 0 if always
	}{
		"up":              {one(func(*outage) {}), 1, shardUp, 0},
		"slow failure":    {one(slow), 1, shardDown, outageHang + outagePause},
		"its neighbor":    {one(slow), 2, shardSuspect, 0},
		"fast failure":    {one(func(o *outage) { o.fail(1, at, at, outagePause) }), 2, shardUp, 0},
		"just hung":       {one(func(o *outage) { o.fail(1, at, at+slowFailure, outagePause) }), 2, shardSuspect, 0},
		"answered before": {one(func(o *outage) { o.succeed(2, at+1); slow(o) }), 2, shardSuspect, 0},
		"answered midway": {one(func(o *outage) { o.succeed(2, at+outageHang/2); slow(o) }), 2, shardSuspect, 0},
		"answered since":  {one(func(o *outage) { o.succeed(2, at+outageHang-1); slow(o) }), 2, shardUp, 0},
		"suspect fails": {
			one(func(o *outage) {
				slow(o)
				o.admit(2, false, at+outageHang, outagePause)
				o.fail(2, at+outageHang, at+2*outageHang, outagePause)
			}), 3, shardSuspect, outageHang + outagePause,
		},
		"suspect answers": {one(func(o *outage) { slow(o); o.admit(2, false, at+outageHang, outagePause); o.succeed(2, at) }),
			3, shardSuspect, 0},
		"refused before": {
			one(func(o *outage) { o.fail(2, at-1, at-1, outagePause); slow(o) }), 2, shardDown, outageHang + outagePause,
		},
		"up while it hangs again": {
			one(func(o *outage) {
				slow(o)
				o.succeed(2, at+outageHang)
				o.fail(1, at+outagePause, at+outagePause+outageHang, outagePause)
				o.fail(3, at+outagePause, at+outagePause+outageHang, outagePause)
			}), 2, shardUp, 0,
		},
	} {
		require.Equal(t, test.want, test.o.shards[test.shard].state, name)
		if test.admitted > 0 {
			require.False(t, test.o.admit(test.shard, true, at+test.admitted-1, outagePause), name)
		}
		require.True(t, test.o.admit(test.shard, true, at+test.admitted, outagePause), name)
	}
}
