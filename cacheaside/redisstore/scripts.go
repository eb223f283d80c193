package redisstore

// The hash of a key has these fields. Times are in microseconds since 1970, by the clock
// of Redis.
//
//	v           the value
//	f, k, e     when it ceases to be fresh and to be kept, and the epoch it counts in
//	g           the generation that may be filled: <epoch>:<time>:<token>
//	d           the last generation that was filled
//	t, l        the token of the lease, and when the lease ends
//	w           when the last of the fences falls
//	w:<token>   when the fence of this token falls
//	x:<token>   until when a fence of this token is too late
//
// While a fence stands, there is neither a value nor a generation.
//
// A generation guards the loads of a key. Each holder of the lease gets the current one.
// An invalidation deletes it, and with it the right to fill of every holder. The first
// fill deletes it too: later fills learn that nothing was invalidated, and change
// nothing. If the lease itself were the guard, a load that takes longer than its lease
// would never be kept, because each process that takes the lease over would revoke the
// right of the previous one.
//
// Invalid data, such as a key of another type or a time that is not a number, counts as
// absent and is replaced.

const preamble = `
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local function us(x) return string.format('%.0f', x) end
local function number(x) return x and tonumber(x) or 0 end
local function live(x) return number(x) > now end
local function outlast(key, ms)
	if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, us(2 * ms)) end
end
local function fields(key, ...)
	local h = redis.pcall('HMGET', key, ...)
	if h.err then
		redis.call('DEL', key)
		return {}
	end
	return h
end
local function epochOf(key)
	local epoch = redis.pcall('GET', key)
	if type(epoch) == 'table' then
		redis.call('DEL', key)
		return false
	end
	return epoch
end
local function of(epoch, generation)
	return epoch and generation and string.sub(generation, 1, #epoch + 1) == epoch .. ':'
end
local function forget(key)
	local gone = redis.pcall('HDEL', key, 'v', 'f', 'k', 'e', 'g', 'd', 't', 'l')
	if type(gone) == 'table' then redis.call('DEL', key) end
end
`

// KEYS: hashes, epoch. ARGV: lease (us), hold (ms); for each hash: token ("" only
// looks), refresh ("1"). Returns for each hash the state, the value, how long it is fresh,
// how long the lease lasts, and the generation.
const acquire = preamble + `
local epochKey, hold = KEYS[#KEYS], tonumber(ARGV[2])
local epoch = epochOf(epochKey)
local function look(key, token, refresh)
	local h = fields(key, 'v', 'f', 'k', 'e', 'g', 't', 'l', 'w')
	if live(h[8]) then return {'fenced', '', 0, 0, ''} end
	local value, fresh = '', 0
	if h[1] and epoch and h[4] == epoch and live(h[3]) then
		value, fresh = h[1], number(h[2]) - now
		if fresh > 0 and refresh ~= '1' then return {'hit', value, fresh, 0, ''} end
	end
	if token == '' then return {'missed', value, fresh, 0, ''} end
	local generation = h[5]
	if not of(epoch, generation) then
		generation = nil
	elseif h[6] and h[6] ~= token and live(h[7]) then
		return {'busy', value, fresh, number(h[7]) - now, ''}
	end
	if not epoch then
		epoch = us(now)
		redis.call('SET', epochKey, epoch)
	end
	generation = generation or epoch .. ':' .. us(now) .. ':' .. token
	redis.call('HSET', key, 'g', generation, 't', token, 'l', us(now + ARGV[1]))
	outlast(key, hold)
	outlast(epochKey, hold)
	return {'leased', value, fresh, 0, generation}
end
local answers = {}
for i = 1, #KEYS - 1 do answers[i] = look(KEYS[i], ARGV[2*i+1], ARGV[2*i+2]) end
return answers
`

// KEYS: hashes, epoch. ARGV, for each hash: generation, value, fresh for (us), keep for
// (us). Returns for each hash 1 if nothing was invalidated, otherwise 0.
const fill = preamble + `
local epochKey = KEYS[#KEYS]
local epoch = epochOf(epochKey)
local function store(key, generation, value, fresh, keep)
	if not of(epoch, generation) then return 0 end
	local h = fields(key, 'g', 'd')
	if h[1] ~= generation then return h[2] == generation and 1 or 0 end
	redis.call('HDEL', key, 'g', 't', 'l')
	redis.call('HSET', key, 'v', value, 'f', us(now + fresh), 'k', us(now + keep), 'e', epoch, 'd', generation)
	local ms = math.ceil(keep / 1000)
	redis.call('PEXPIRE', key, us(ms))
	outlast(epochKey, ms)
	return 1
end
local answers = {}
for i = 1, #KEYS - 1 do answers[i] = store(KEYS[i], ARGV[4*i-3], ARGV[4*i-2], ARGV[4*i-1], ARGV[4*i]) end
return answers
`

// KEYS: hash. ARGV: token.
const release = preamble + `
if fields(KEYS[1], 't')[1] == ARGV[1] then redis.call('HDEL', KEYS[1], 't', 'l') end
return 0
`

// KEYS: hashes. ARGV: channel; for each hash: message.
const invalidate = preamble + `
for i = 1, #KEYS do
	forget(KEYS[i])
	redis.call('PUBLISH', ARGV[1], ARGV[i+1])
end
return 0
`

// KEYS: hashes. ARGV: channel; for each hash: message.
const expire = preamble + `
for i = 1, #KEYS do
	if live(fields(KEYS[i], 'f')[1]) then redis.call('HSET', KEYS[i], 'f', us(now)) end
	redis.call('HDEL', KEYS[i], 'g', 'd', 't', 'l')
	redis.call('PUBLISH', ARGV[1], ARGV[i+1])
end
return 0
`

// KEYS: hash. ARGV: channel, message, token, duration (us).
const fence = preamble + `
forget(KEYS[1])
local h = fields(KEYS[1], 'w', 'x:' .. ARGV[3])
if live(h[2]) then return 0 end
local falls = now + ARGV[4]
local last = math.max(falls, number(h[1]))
redis.call('HSET', KEYS[1], 'w:' .. ARGV[3], us(falls), 'w', us(last))
redis.call('PEXPIRE', KEYS[1], us(math.ceil((last - now) / 1000)))
redis.call('PUBLISH', ARGV[1], ARGV[2])
return 0
`

// KEYS: hash. ARGV: channel, message, token, how long a fence may arrive too late (us).
const unfence = preamble + `
forget(KEYS[1])
if redis.call('HDEL', KEYS[1], 'w:' .. ARGV[3]) == 0 then
	redis.call('HSET', KEYS[1], 'x:' .. ARGV[3], us(now + ARGV[4]))
	outlast(KEYS[1], math.ceil(ARGV[4] / 1000))
end
local h = redis.call('HGETALL', KEYS[1])
local last = 0
for i = 1, #h, 2 do
	local kind = string.sub(h[i], 1, 2)
	if kind == 'w:' or kind == 'x:' then
		if not live(h[i+1]) then
			redis.call('HDEL', KEYS[1], h[i])
		elseif kind == 'w:' then
			last = math.max(last, number(h[i+1]))
		end
	end
end
if last > 0 then redis.call('HSET', KEYS[1], 'w', us(last)) else redis.call('HDEL', KEYS[1], 'w') end
redis.call('PUBLISH', ARGV[1], ARGV[2])
return 0
`

// KEYS: epoch. ARGV: channel, message ("" for none), hold (ms).
const raise = preamble + `
local epoch = math.max(now, number(epochOf(KEYS[1])) + 1)
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
