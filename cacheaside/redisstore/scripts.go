package redisstore

// The hash of a key has these fields. Times are in microseconds since 1970, by the
// clock of Redis.
//
//	v           the value, with
//	f, k, e     when it ceases to be fresh and to be kept, the epoch it counts in
//	t, l, g     the token of the lease, when its time is over, the epoch it was taken in
//	w           when the last of the fences falls
//	w:<token>   when the fence of this writer falls
//
// While a fence stands there is neither a value nor a lease.

const preamble = `
local function us(x) return string.format('%.0f', x) end
local function live(x, now) return x and tonumber(x) > now end
local function outlast(key, ms)
	if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, us(2 * ms)) end
end
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
`

// KEYS: hash, epoch. ARGV: token, lease (us), renew, hold (ms).
// Returns the state, the value, for how long it is fresh, how long the lease lasts.
const acquire = preamble + `
local h = redis.call('HMGET', KEYS[1], 'v', 'f', 'k', 'e', 't', 'l', 'g', 'w')
if live(h[8], now) then return {4, '', 0, 0} end
local epoch = redis.call('GET', KEYS[2])
local value, fresh = '', 0
if h[1] and h[4] == epoch and live(h[3], now) then
	value, fresh = h[1], tonumber(h[2]) - now
	if fresh > 0 and ARGV[3] ~= '1' then return {1, value, fresh, 0} end
end
if h[5] and h[5] ~= ARGV[1] and h[7] == epoch and live(h[6], now) then
	return {3, value, fresh, tonumber(h[6]) - now}
end
if not epoch then
	epoch = us(now)
	redis.call('SET', KEYS[2], epoch, 'PX', ARGV[4])
end
redis.call('HSET', KEYS[1], 't', ARGV[1], 'l', us(now + ARGV[2]), 'g', epoch)
outlast(KEYS[1], tonumber(ARGV[4]))
outlast(KEYS[2], tonumber(ARGV[4]))
return {2, value, fresh, 0}
`

// KEYS: hash, epoch. ARGV: token, value, fresh for (us), keep for (us).
const fill = preamble + `
local h = redis.call('HMGET', KEYS[1], 't', 'g', 'w')
if h[1] ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[1], 't', 'l', 'g')
if h[2] ~= redis.call('GET', KEYS[2]) or live(h[3], now) then return 0 end
redis.call('HSET', KEYS[1], 'v', ARGV[2], 'f', us(now + ARGV[3]), 'k', us(now + ARGV[4]), 'e', h[2])
local ms = math.ceil(ARGV[4] / 1000)
redis.call('PEXPIRE', KEYS[1], us(ms))
outlast(KEYS[2], ms)
return 1
`

// KEYS: hash. ARGV: token.
const release = `
if redis.call('HGET', KEYS[1], 't') == ARGV[1] then redis.call('HDEL', KEYS[1], 't', 'l', 'g') end
return 0
`

// KEYS: hash. ARGV: channel, message.
const invalidate = `
redis.call('HDEL', KEYS[1], 'v', 'f', 'k', 'e', 't', 'l', 'g')
redis.call('PUBLISH', ARGV[1], ARGV[2])
return 0
`

// KEYS: hash. ARGV: channel, message.
const expire = preamble + `
local f = redis.call('HGET', KEYS[1], 'f')
if live(f, now) then redis.call('HSET', KEYS[1], 'f', us(now)) end
redis.call('HDEL', KEYS[1], 't', 'l', 'g')
redis.call('PUBLISH', ARGV[1], ARGV[2])
return 0
`

// KEYS: hash. ARGV: channel, message, token, for how long (us).
const fence = preamble + `
redis.call('HDEL', KEYS[1], 'v', 'f', 'k', 'e', 't', 'l', 'g')
local falls = now + ARGV[4]
local last = math.max(falls, tonumber(redis.call('HGET', KEYS[1], 'w') or 0))
redis.call('HSET', KEYS[1], 'w:' .. ARGV[3], us(falls), 'w', us(last))
redis.call('PEXPIRE', KEYS[1], us(math.ceil((last - now) / 1000)))
redis.call('PUBLISH', ARGV[1], ARGV[2])
return 0
`

// KEYS: hash. ARGV: channel, message, token.
const unfence = preamble + `
redis.call('HDEL', KEYS[1], 'v', 'f', 'k', 'e', 't', 'l', 'g', 'w:' .. ARGV[3])
local h = redis.call('HGETALL', KEYS[1])
local last = 0
for i = 1, #h, 2 do
	if string.sub(h[i], 1, 2) == 'w:' then
		if live(h[i+1], now) then
			last = math.max(last, tonumber(h[i+1]))
		else
			redis.call('HDEL', KEYS[1], h[i])
		end
	end
end
if last > 0 then redis.call('HSET', KEYS[1], 'w', us(last)) else redis.call('HDEL', KEYS[1], 'w') end
redis.call('PUBLISH', ARGV[1], ARGV[2])
return 0
`

// KEYS: epoch. ARGV: channel, message (none: ""), hold (ms).
const raise = preamble + `
local epoch = math.max(now, tonumber(redis.call('GET', KEYS[1]) or 0) + 1)
local ms = math.max(redis.call('PTTL', KEYS[1]), tonumber(ARGV[3]))
redis.call('SET', KEYS[1], us(epoch), 'PX', us(ms))
if ARGV[2] ~= '' then redis.call('PUBLISH', ARGV[1], ARGV[2]) end
return 0
`

// KEYS: any, for its slot. ARGV: channel, message.
const beat = `
redis.call('PUBLISH', ARGV[1], ARGV[2])
return 0
`
