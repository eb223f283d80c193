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

// outageRun makes calls one after the other against shards that hang, and counts those that wait.
type outageRun struct {
	outage
	now   time.Duration
	hangs func(shard uint8) bool
}

func (r *outageRun) call(shard uint8) (made, waited bool) {
	if !r.admit(shard, r.now, outagePause) {
		return false, false
	}
	began := r.now
	if r.hangs(shard) {
		r.now += outageHang
		r.fail(shard, began, r.now, outagePause)
		return true, true
	}
	r.now += time.Millisecond
	r.succeed(shard, r.now)
	return true, false
}

// Any sequence of calls waits at most twice in each pause, and all shards are used again after the outage.
func TestOutageWaitsTwiceInEachPause(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		from := uint8(random.IntN(64)) // shards from here on hang
		r := outageRun{now: time.Hour, hangs: func(shard uint8) bool { return shard >= from }}
		var waits []time.Duration
		for range 2000 {
			if _, waited := r.call(uint8(random.IntN(64))); waited {
				waits = append(waits, r.now)
			}
			r.now += time.Duration(random.Int64N(int64(20 * time.Millisecond)))
		}
		for i := 2; i < len(waits); i++ {
			require.GreaterOrEqual(t, waits[i]-waits[i-2], outagePause, "seed %d", seed)
		}
		for shard := range from {
			made, _ := r.call(shard)
			if r.shards[shard].state == shardUp {
				require.True(t, made, "seed %d shard %d", seed, shard)
			}
		}
		r.hangs = func(uint8) bool { return false }
		r.now += 2 * outagePause
		for shard := range uint8(64) {
			made, _ := r.call(shard)
			require.True(t, made, "seed %d shard %d", seed, shard)
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
		admitted time.Duration // since at; 0 if always
	}{
		"up":              {one(func(*outage) {}), 1, shardUp, 0},
		"slow failure":    {one(slow), 1, shardDown, outageHang + outagePause},
		"its neighbor":    {one(slow), 2, shardSuspect, 0},
		"fast failure":    {one(func(o *outage) { o.fail(1, at, at, outagePause) }), 2, shardUp, 0},
		"answered before": {one(func(o *outage) { o.succeed(2, at+1); slow(o) }), 2, shardSuspect, 0},
		"answered since":  {one(func(o *outage) { o.succeed(2, at+outageHang-1); slow(o) }), 2, shardUp, 0},
		"suspect fails": {
			one(func(o *outage) {
				slow(o)
				o.admit(2, at+outageHang, outagePause)
				o.fail(2, at+outageHang, at+2*outageHang, outagePause)
			}), 3, shardSuspect, outageHang + outagePause,
		},
		"suspect answers": {one(func(o *outage) { slow(o); o.admit(2, at+outageHang, outagePause); o.succeed(2, at) }),
			3, shardSuspect, 0},
	} {
		require.Equal(t, test.want, test.o.shards[test.shard].state, name)
		if test.admitted > 0 {
			require.False(t, test.o.admit(test.shard, at+test.admitted-1, outagePause), name)
		}
		require.True(t, test.o.admit(test.shard, at+test.admitted, outagePause), name)
	}
}
