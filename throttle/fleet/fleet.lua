-- Decides about several meters together: takes from all of them, or from none. Times are microseconds of this
-- server's clock. A rate counts millionths of tokens.
--
-- ARGV[1] is the operation:
--   take    ARGV: id, ticket (0: the call does not wait; 1: a new waiter), then kind, limit, x and cost of each
--           meter. KEYS: the states of the meters, their cooldowns, and then the waiters and the polls of each
--           meter that has slots.
--           Returns {1, now} and the number of each meter's window if all was taken. Otherwise it returns
--           {0, now, ticket, poll} and, for each meter, the tokens left, the time until it could give what was
--           requested (-1: it could now), and whether it is cooling down. {-1, now} requests the times of a
--           calendar at now.
--   settle  ARGV: id, time of the settlement, horizon, then kind, limit, x, the tokens beyond those taken, and the
--           number of the window (-1: the current one) of each meter. KEYS: the id's key, then the meters' states.
--           Returns {1, or 2 if it was applied before, or 0 if it came too late; now; tokens forgiven}.
--   free    ARGV: id. KEYS: states, waiters and polls of slots, from which the id is removed. Returns {1, now}.
--   renew   ARGV: id and lease of each slot. KEYS: their states. Returns now, and 1 for each slot still held.
--   cool    ARGV: a duration. KEYS: the cooldown. Returns {1, now}.
--   ping    Like cool, for no time. It writes, because a server that only reads cannot decide about calls.
--
-- Kinds: r is a rate (limit: its burst, x: tokens a second), with the state "debt written". q is a quota (x: the
-- length of its windows or, of a calendar, the times between its periods), with the state "used end written
-- number". s is slots (x: the lease), whose state is a set of holders by the end of their lease; the id of a holder
-- ends with its lease, which may differ from x. A cooldown is "end written".
--
-- A state that cannot be read counts as absent: an operator may have written it, and the error would hit every
-- call of that tenant.
--
-- If the clock is set back, nothing is forgiven or prolonged: a state that was written later than now is written
-- again with its times moved back, or it would not change until the clock has caught up; and no lease or poll is
-- longer than it can be.
--
-- On a server without memory, a script may write only after it has removed something, even if that was nothing.
-- So what frees slots or renews them, and settlements, start with a removal.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local op, most = ARGV[1], 9e15 -- more than any count or duration: 285 years

local function put(key, value, us)
  redis.call('SET', key, value, 'PX', math.max(1, math.ceil(math.min(us, most) / 1000)))
end
local function get(key) -- nil if the key is absent or has another type
  local value = redis.pcall('GET', key)
  return type(value) == 'string' and value or nil
end
local function set(command, key, ...) -- a command for a sorted set; a key of another type is deleted first
  local reply = redis.pcall(command, key, ...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if string.find(reply.err, 'WRONGTYPE', 1, true) then redis.call('DEL', key) end
  return redis.call(command, key, ...)
end
local function mayWrite(key) redis.pcall('ZREM', key, '') end -- even without memory
local function putState(kind, key, is, x, ends, number)
  if kind == 'r' then return put(key, string.format('%.0f %.0f', is, now), is / x) end
  put(key, string.format('%.0f %.0f %.0f %.0f', is, ends, now, number), ends - now)
end
local function putCool(key, ends) put(key, string.format('%.0f %.0f', ends, now), ends - now) end
local function expire(key, us) -- never sooner than before: other members may have a longer lease
  local ms = math.ceil(us / 1000) + 1000
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, ms) end
end

local function debtOf(key, value, perSecond)
  local debt, written = string.match(value or '', '^(%d+) (%d+)$')
  debt, written = tonumber(debt), tonumber(written)
  if not debt or debt > most then return 0 end
  if now < written then putState('r', key, debt, perSecond) end
  return math.max(0, debt - math.floor(math.max(0, now - written) * perSecond))
end

local function windowOf(key, value, times) -- used, end, number; nil if the times do not enclose now
  local used, ends, written, number = string.match(value or '', '^(%d+) (%d+) (%d+) (%d+)$')
  local length = tonumber(times)
  used, ends, written, number = tonumber(used), tonumber(ends), tonumber(written), tonumber(number)
  if not used or used > most then used, ends, written, number = 0, 0, 0, 0 end
  if length then
    local back = math.max(0, written - now)
    ends = math.min(ends - back, now + length)
    if used == 0 or ends <= now then return 0, now + length, now + length end
    if back > 0 then putState('q', key, used, times, ends, number) end
    return used, ends, number
  end
  local begin, last, same
  for time in string.gmatch(times, '%d+') do
    time = tonumber(time)
    if time <= now then begin = time elseif not last then last = time end
    same = same or time == ends
  end
  if not begin or not last then return nil end
  if ends <= now then return 0, last, last end
  return used, same and ends or last, number -- if the clock was set back over its start, the window ends later
end

local function stateOf(kind, key, value, x)
  if kind == 'r' then return debtOf(key, value, x) end
  return windowOf(key, value, x)
end

local function coolOf(key, value)
  local ends, written = string.match(value or '', '^(%d+) (%d+)$')
  ends, written = tonumber(ends), tonumber(written)
  if not ends or ends > now + most then return 0 end
  local back = math.max(0, written - now)
  if back > 0 then putCool(key, ends - back) end
  return ends - back
end

if op == 'ping' or op == 'cool' then
  putCool(KEYS[1], math.max(now + (ARGV[2] or 0), coolOf(KEYS[1], get(KEYS[1]))))
  return {1, now}
elseif op == 'free' then
  for _, key in ipairs(KEYS) do set('ZREM', key, ARGV[2]) end
  return {1, now}
elseif op == 'renew' then
  local held = {now}
  for i, key in ipairs(KEYS) do
    local id, lease = ARGV[2 * i], ARGV[2 * i + 1]
    local ends = tonumber(set('ZSCORE', key, id) or 0)
    held[i + 1] = ends > now and 1 or 0
    if ends > now then
      mayWrite(key)
      redis.call('ZADD', key, now + lease, id)
      expire(key, lease)
    end
  end
  return held
elseif op == 'settle' then
  for i = 2, #KEYS do
    if ARGV[5 * i - 5] == 's' then set('ZREM', KEYS[i], ARGV[2]) end
  end
  mayWrite(KEYS[1])
  local late, forgiven = now - ARGV[3] > tonumber(ARGV[4]), 0
  local again = not late and not redis.call('SET', KEYS[1], 1, 'NX', 'PX', math.ceil(ARGV[4] / 1000))
  for i = 2, #KEYS do
    local a = 5 * i - 5
    local kind, limit, x, more, key = ARGV[a], tonumber(ARGV[a + 1]), ARGV[a + 2], tonumber(ARGV[a + 3]), KEYS[i]
    if kind ~= 's' and not late and not again and more ~= 0 then
      local was, ends, number = stateOf(kind, key, get(key), x)
      -- Without was, the clock was set back over the periods around the settlement, so there is no window to correct.
      if was and (kind == 'r' or number == tonumber(ARGV[a + 4]) or ARGV[a + 4] == '-1') then
        local limits = math.max(was, 2 * limit)
        local is = math.max(0, math.min(was + more, limits))
        forgiven = math.max(forgiven, (was + more - limits) / (kind == 'r' and 1000000 or 1))
        putState(kind, key, is, x, ends, number)
      end
    end
  end
  return {late and 0 or again and 2 or 1, now, math.ceil(forgiven)}
end

local function leave(m, id) for _, key in ipairs({m.waiters, m.polls}) do set('ZREM', key, id) end end

local function bound(key, us, leases) -- no time in a set is later than in us or, with leases, in the lease of its id
  local late = set('ZRANGEBYSCORE', key, string.format('(%.0f', now + us), '+inf', 'WITHSCORES')
  for i = 1, #late, 2 do
    local longest = leases and tonumber(string.match(late[i], ':(%d+)$')) or us
    if tonumber(late[i + 1]) > now + longest then redis.call('ZADD', key, now + longest, late[i]) end
  end
end

-- The longest pause before a poll, and the time that the poll may then take to arrive. Until both have passed, the
-- waiter keeps its place. So a waiter that has died delays the others for this time.
local longest, grace = 250000, 1000000

local id, ticket, count = ARGV[2], tonumber(ARGV[3]), (#ARGV - 3) / 4
local states = redis.call('MGET', unpack(KEYS, 1, 2 * count)) -- none of slots, whose state is a set
local meters, fits, last, poll, lines = {}, true, 1, 0, 2 * count
for i = 1, count do
  local a = 4 * i
  local kind, limit, x, cost, key = ARGV[a], tonumber(ARGV[a + 1]), ARGV[a + 2], tonumber(ARGV[a + 3]), KEYS[i]
  local m = {kind = kind, key = key, x = x, cost = cost, left = 0, wait = -1, cool = 0}
  local cool, ok = coolOf(KEYS[count + i], states[count + i])
  if kind == 's' then
    m.waiters, m.polls, lines = KEYS[lines + 1], KEYS[lines + 2], lines + 2
    set('ZREMRANGEBYSCORE', key, '-inf', now)
    bound(key, x, true)
    bound(m.polls, longest + grace)
    for _, other in ipairs(redis.call('ZRANGEBYSCORE', m.polls, '-inf', now)) do leave(m, other) end
    if ticket > 1 then set('ZADD', m.waiters, 'NX', ticket, id) end
    last = math.max(last, set('ZRANGE', m.waiters, -1, -1, 'WITHSCORES')[2] or 1)
    local place = redis.call('ZRANK', m.waiters, id) or redis.call('ZCARD', m.waiters)
    m.left = limit - redis.call('ZCARD', key)
    ok = place < m.left
    poll = math.max(poll, math.min(longest, 10000 * (place + 1)))
  else
    m.was, m.ends, m.number = stateOf(kind, key, states[i], x)
    if not m.was then return {-1, now} end
    m.left = math.floor((limit - m.was) / (kind == 'r' and 1000000 or 1))
    ok = m.was + cost <= limit or cost == 0
  end
  if not ok then
    m.wait = kind == 'r' and math.min(most, math.ceil((m.was + cost - limit) / x)) or (m.ends or now) - now
  end
  if cool > now then m.wait, m.cool, ok = cool - now, 1, false end
  if not ok and (kind == 'q' or cool > now) then ticket = 0 end -- no call waits for these
  meters[i], fits = m, fits and ok
end

if not fits and ticket == 1 then ticket = last + 1 end -- behind all that wait for any of its slots
local answer = fits and {1, now} or {0, now, ticket, poll}
for i, m in ipairs(meters) do
  if m.kind == 's' and not fits and ticket > 0 then
    redis.call('ZADD', m.waiters, 'NX', ticket, id)
    redis.call('ZADD', m.polls, now + poll + grace, id)
    expire(m.waiters, poll + grace)
    expire(m.polls, poll + grace)
  elseif m.kind == 's' then
    leave(m, id)
    if fits then
      redis.call('ZADD', m.key, now + m.x, id)
      expire(m.key, m.x)
    end
  elseif fits and m.cost > 0 then
    putState(m.kind, m.key, m.was + m.cost, m.x, m.ends, m.number)
  end
  if fits then
    answer[2 + i] = m.number or 0
  else
    answer[3 * i + 2], answer[3 * i + 3], answer[3 * i + 4] = math.max(0, m.left), m.wait, m.cool
  end
end
return answer
