package redisstore

// Each key has a Redis hash. For each Version of the values, the hash has the following fields. The name of a field is
// its letter, followed by the number of the Version. Times are in microseconds since 1970, measured by Redis's clock.
//
//	v           the value
//	f           the time until which the value is fresh
//	k           the time until which the value may be served
//	e           the epoch in which the value was stored
//	g           the generation that may be filled: <epoch>:<time>:<token>
//	d           the last generation that was filled
//	t           the token of the lease's holder
//	l           the time when the lease expires
//	b           the time when a load last failed
//
// Field w, which has no number, has the fences: <expires>:<token>; for a fence that is in place, and -<until>:<token>;
// for a fence that was removed before it arrived, and must not be set until then. While a fence is in place, there is
// neither a value nor a generation.
//
// A generation protects a key from values that were loaded before an invalidation. Each holder of the lease gets the
// current generation. An invalidation deletes the generation, and so every holder loses the right to store its value.
// The first fill also deletes the generation. Later fills with the same generation change nothing, and return that
// nothing was invalidated. The right to store a value does not belong to the lease, because the value of a load that
// takes longer than its lease would then never be stored: each process that takes over the lease would end the right of
// the previous process.
//
// An epoch identifies the period since the last InvalidateAll of a bucket. It is a time, and is stored under the
// bucket's own Redis key. A value or a generation of another epoch counts as absent.
//
// Invalid data, such as a key of another type or a time that is not a number, counts as absent and is replaced.

// Each script contains only the functions that it calls, because Redis creates the functions again in each run of the
// script.

const preamble = `
local now
local function clock()
	local t = redis.call('TIME')
	now = t[1] * 1000000 + t[2]
end
local function us(x) return string.format('%.0f', x) end
local function number(x) return x and tonumber(x) or 0 end
`

const hashes = `
local function fields(key, ...)
	local h = redis.pcall('HMGET', key, ...)
	if h.err then
		redis.call('DEL', key)
		return {}
	end
	return h
end
`

const epochs = `
local function outlast(key, ms, longer)
	if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, us(longer or ms)) end
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
`

// The function fences returns all fences, including expired fences. It also returns the time when the last fence that
// was not removed expires.
const fenced = `
local function fences(w)
	local all, last = {}, 0
	if not w or w == '' then return all, last end
	for sign, at, token in string.gmatch(w, '(%-?)(%d+):([^;]*);') do
		all[token] = sign .. at
		if sign == '' then last = math.max(last, tonumber(at)) end
	end
	return all, last
end
`

// KEYS: the hashes, then the epoch. ARGV: lease (us), hold (ms); for each hash: version, token, refresh ("1"), when the
// caller started to wait (us), pause (us). The script returns for each hash: the state, the value, the time for which
// the value is still fresh (us), the time for which the lease still lasts (us), and the generation or, if the state is
// busy, the current time (us).
const acquire = preamble + hashes + epochs + fenced + `
clock()
local epochKey, hold = KEYS[#KEYS], tonumber(ARGV[2])
local epoch = epochOf(epochKey)
local function look(key, n, token, refresh, waits, pause)
	-- While a fence is in place there is no value, so a hit need not read the fences.
	local h = fields(key, 'v' .. n, 'f' .. n, 'e' .. n)
	local value, fresh = '', 0
	local current = h[1] and epoch and h[3] == epoch
	if current then
		value, fresh = h[1], number(h[2]) - now
		if fresh > 0 and refresh ~= '1' then return {'hit', value, fresh, 0, ''} end
	end
	h = fields(key, 'k' .. n, 'g' .. n, 't' .. n, 'l' .. n, 'b' .. n, 'w')
	local _, last = fences(h[6])
	if last > now then return {'fenced', '', 0, 0, ''} end
	local failed = number(h[5])
	if failed > now then failed = 0 end -- the clock was set back: otherwise the failure would count until that time
	if not current or number(h[1]) <= now then
		value, fresh = '', 0
	elseif failed > 0 and failed + number(pause) > now then
		return {fresh > 0 and 'hit' or 'failed', value, fresh, 0, ''}
	end
	if waits ~= '' and failed >= number(waits) and failed > 0 then return {'failed', value, fresh, 0, ''} end
	local generation = h[2]
	if not of(epoch, generation) then
		generation = nil
	elseif h[3] and h[3] ~= '' and h[3] ~= token and number(h[4]) > now then
		return {'busy', value, fresh, number(h[4]) - now, us(now)}
	end
	if not epoch then
		epoch = us(now)
		redis.call('SET', epochKey, epoch, 'PX', us(2 * hold))
	end
	generation = generation or epoch .. ':' .. us(now) .. ':' .. token
	redis.call('HSET', key, 'g' .. n, generation, 't' .. n, token, 'l' .. n, us(now + ARGV[1]))
	outlast(key, hold)
	return {'leased', value, fresh, 0, generation}
end
local answers = {}
for i = 1, #KEYS - 1 do
	local a = 5 * i - 2
	answers[i] = look(KEYS[i], ARGV[a], ARGV[a+1], ARGV[a+2], ARGV[a+3], ARGV[a+4])
end
return answers
`

// KEYS: the hashes, then the epoch. ARGV, for each hash: version, generation, value, the times for which the value is
// fresh (us) and kept (us). The script returns for each hash 1 if nothing was invalidated, and otherwise 0.
const fill = preamble + hashes + epochs + `
clock()
local epochKey = KEYS[#KEYS]
local epoch = epochOf(epochKey)
local function store(key, n, generation, value, fresh, keep)
	if not of(epoch, generation) then return 0 end
	local h = fields(key, 'g' .. n, 'd' .. n)
	if h[1] ~= generation then return h[2] == generation and 1 or 0 end
	redis.call('HSET', key, 'v' .. n, value, 'f' .. n, us(now + math.min(fresh, keep)), 'k' .. n, us(now + keep),
		'e' .. n, epoch, 'd' .. n, generation, 'g' .. n, '', 't' .. n, '')
	local ms = math.ceil(keep / 1000)
	outlast(key, ms)
	outlast(epochKey, ms, 2 * ms) -- twice as long, so that few fills need it
	return 1
end
local answers = {}
for i = 1, #KEYS - 1 do
	local a = 5 * i - 4
	answers[i] = store(KEYS[i], ARGV[a], ARGV[a+1], ARGV[a+2], ARGV[a+3], ARGV[a+4])
end
return answers
`

// KEYS: hash. ARGV: version, token, failed ("1").
const release = preamble + hashes + `
local t, b = 't' .. ARGV[1], 'b' .. ARGV[1]
if fields(KEYS[1], t)[1] ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], t, '')
if ARGV[3] == '1' then
	clock()
	redis.call('HSET', KEYS[1], b, us(now))
end
return 0
`

const (
	invalidate = "local does = 'invalidate'\n" + change
	fence      = "local does = 'fence'\n" + change
	unfence    = "local does = 'unfence'\n" + change
)

// KEYS: hashes. ARGV: channel; for each hash: message; for fence and unfence also: token, the time for which the fence
// is in place or may arrive late (us).
const change = preamble + fenced + `
local token, long = ARGV[#KEYS+2], ARGV[#KEYS+3]
for i = 1, #KEYS do
	local w = redis.pcall('HGET', KEYS[i], 'w')
	redis.call('DEL', KEYS[i])
	local all = fences(type(w) == 'string' and w)
	if does == 'unfence' and all[token] then
		all[token] = nil
	elseif token then
		clock()
		if does == 'unfence' then
			all[token] = '-' .. us(now + long)
		elseif math.abs(number(all[token])) <= now then
			all[token] = us(now + long)
		end
	end
	if next(all) and not now then clock() end
	local left, last = '', now
	for other, at in pairs(all) do
		local ends = math.abs(at)
		if ends > now then
			left = left .. at .. ':' .. other .. ';'
			last = math.max(last, ends)
		end
	end
	if left ~= '' then
		redis.call('HSET', KEYS[i], 'w', left)
		redis.call('PEXPIRE', KEYS[i], us(math.ceil((last - now) / 1000)))
	end
	redis.call('PUBLISH', ARGV[1], ARGV[i+1])
end
return 0
`

// KEYS: hashes. ARGV: channel; for each hash: message.
const expire = preamble + `
clock()
for i = 1, #KEYS do
	local h = redis.pcall('HGETALL', KEYS[i])
	if h.err then
		redis.call('DEL', KEYS[i])
		h = {}
	end
	redis.call('HDEL', KEYS[i], '') -- first, or a Redis whose memory is full would refuse HSET
	for j = 1, #h, 2 do
		local kind = string.sub(h[j], 1, 1)
		if kind == 'f' then
			if number(h[j+1]) > now then redis.call('HSET', KEYS[i], h[j], us(now)) end
		elseif string.find('gdtlb', kind, 1, true) then
			redis.call('HDEL', KEYS[i], h[j])
		end
	end
	redis.call('PUBLISH', ARGV[1], ARGV[i+1])
end
return 0
`

// KEYS: epoch. ARGV: channel, message ("" for none), hold (ms).
const raise = preamble + epochs + `
clock()
local epoch = math.max(now, number(epochOf(KEYS[1])) + 1)
local ms = math.max(redis.call('PTTL', KEYS[1]), tonumber(ARGV[3]))
redis.call('DEL', KEYS[1]) -- first, or a Redis whose memory is full would refuse SET
redis.call('SET', KEYS[1], us(epoch), 'PX', us(ms))
if ARGV[2] ~= '' then redis.call('PUBLISH', ARGV[1], ARGV[2]) end
return 0
`

// KEYS: any, for its slot. ARGV: channel, message.
const beat = `
redis.call('PUBLISH', ARGV[1], ARGV[2])
return 0
`
