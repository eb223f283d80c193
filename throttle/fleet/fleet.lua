-- Decides about several meters at once: takes from all of them, or from none. Times are
-- microseconds of this server's clock. A rate counts millionths of tokens.
--
-- ARGV[1] says what to do:
--   take    ARGV: id, ticket (0: does not wait; 1: a new waiter), then for each meter kind, limit,
--           x and cost. KEYS: the states of the meters, their cooldowns, and then of those that
--           are slots their waiters and the polls of these.
--           Returns {1, now}, then the number of each meter's window, if all was taken. Else
--           {0, now, ticket, poll}, then for each meter what is left, the time until it could give (-1:
--           it could now), and whether it is cooling down. {-1, now} asks for the times of a calendar at now.
--   settle  ARGV: id, time of the settlement, horizon, then for each meter kind, limit, x, the
--           tokens more than were taken, and the number of the window, or -1 for the present one.
--           KEYS: the id's, then of each meter its state. Returns {1, or 2 if that was done before,
--           or 0 if it comes too late; now; tokens forgiven}.
--   renew   ARGV: for each slot its id and lease. KEYS: their states. Returns now, then 1 for
--           each that is still held.
--   cool    ARGV: for how long. KEYS: the cooldown. Returns {1, now}.
--   ping    The same for no time. It writes, since a server that can only read can decide about no call.
--
-- A kind is r: a rate (limit: its burst, x: tokens a second), with the state "debt written"; q: a
-- quota (x: the length of its windows or, of a calendar, the times between its periods), with the
-- state "used end written number"; s: slots (x: the lease), whose state are holders by the end
-- of their lease; the id of one ends with its lease, which may be another than x. A cooldown is "end written".
-- A clock that has been set back neither forgives nor prolongs: a state that was written later than now
-- is written anew, with its times moved back, or it would stand still until the clock has caught up; and
-- no lease or poll is longer than it can be.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local op, most = ARGV[1], 9e15 -- microseconds of a wait: 285 years

local function put(key, value, us)
  redis.call('SET', key, value, 'PX', math.max(1, math.ceil(math.min(us, most) / 1000)))
end
local function putState(kind, key, is, x, ends, number)
  if kind == 'r' then return put(key, string.format('%.0f %.0f', is, now), is / x) end
  put(key, string.format('%.0f %.0f %.0f %.0f', is, ends, now, number), ends - now)
end
local function putCool(key, ends) put(key, string.format('%.0f %.0f', ends, now), ends - now) end
local function expire(key, us) -- never sooner: others in the set may have a longer lease
  local ms = math.ceil(us / 1000) + 1000
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, ms) end
end

local function debtOf(key, value, perSecond)
  if not value then return 0 end
  local debt, written = string.match(value, '^(%d+) (%d+)$')
  if now < tonumber(written) then putState('r', key, debt, perSecond) end
  return math.max(0, debt - math.floor(math.max(0, now - written) * perSecond))
end

local function windowOf(key, value, times) -- used, end, number; nil if the times lie elsewhere
  local used, ends, written, number = string.match(value or '0 0 0 0', '^(%d+) (%d+) (%d+) (%d+)$')
  local length = tonumber(times)
  used, ends, number = tonumber(used), tonumber(ends), tonumber(number)
  if length then
    local back = math.max(0, written - now)
    ends = ends - back
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
  return used, same and ends or last, number -- it ends later than now's if the clock was set back over its beginning
end

local function stateOf(kind, key, value, x)
  if kind == 'r' then return debtOf(key, value, x) end
  return windowOf(key, value, x)
end

local function coolOf(key, value)
  if not value then return 0 end
  local ends, written = string.match(value, '^(%d+) (%d+)$')
  local back = math.max(0, written - now)
  if back > 0 then putCool(key, ends - back) end
  return ends - back
end

if op == 'ping' or op == 'cool' then
  putCool(KEYS[1], math.max(now + (ARGV[2] or 0), coolOf(KEYS[1], redis.call('GET', KEYS[1]))))
  return {1, now}
elseif op == 'renew' then
  local held = {now}
  for i, key in ipairs(KEYS) do
    local id, lease = ARGV[2 * i], ARGV[2 * i + 1]
    local ends = tonumber(redis.call('ZSCORE', key, id) or 0)
    held[i + 1] = ends > now and 1 or 0
    if ends > now then
      redis.call('ZADD', key, now + lease, id)
      expire(key, lease)
    end
  end
  return held
elseif op == 'settle' then
  local late, forgiven = now - ARGV[3] > tonumber(ARGV[4]), 0
  local again = not late and not redis.call('SET', KEYS[1], 1, 'NX', 'PX', math.ceil(ARGV[4] / 1000))
  for i = 2, #KEYS do
    local a = 5 * i - 5
    local kind, limit, x, more, key = ARGV[a], tonumber(ARGV[a + 1]), ARGV[a + 2], tonumber(ARGV[a + 3]), KEYS[i]
    if kind == 's' then
      redis.call('ZREM', key, ARGV[2])
    elseif not late and not again and more ~= 0 then
      local was, ends, number = stateOf(kind, key, redis.call('GET', key), x)
      if kind == 'r' or number == tonumber(ARGV[a + 4]) or ARGV[a + 4] == '-1' then
        local limits = math.max(was, 2 * limit)
        local is = math.max(0, math.min(was + more, limits))
        forgiven = math.max(forgiven, (was + more - limits) / (kind == 'r' and 1000000 or 1))
        putState(kind, key, is, x, ends, number)
      end
    end
  end
  return {late and 0 or again and 2 or 1, now, math.ceil(forgiven)}
end

local function leave(m, id) for _, key in ipairs({m.waiters, m.polls}) do redis.call('ZREM', key, id) end end

local function bound(key, us, leases) -- no time in a set is later than in us or, with leases, in that of its id
  local late = redis.call('ZRANGEBYSCORE', key, string.format('(%.0f', now + us), '+inf', 'WITHSCORES')
  for i = 1, #late, 2 do
    local longest = leases and tonumber(string.match(late[i], ':(%d+)$')) or us
    if tonumber(late[i + 1]) > now + longest then redis.call('ZADD', key, now + longest, late[i]) end
  end
end

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
    redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
    bound(key, x, true)
    bound(m.polls, 500000)
    for _, other in ipairs(redis.call('ZRANGEBYSCORE', m.polls, '-inf', now)) do leave(m, other) end
    if ticket > 1 then redis.call('ZADD', m.waiters, 'NX', ticket, id) end
    last = math.max(last, redis.call('ZRANGE', m.waiters, -1, -1, 'WITHSCORES')[2] or 1)
    local place = redis.call('ZRANK', m.waiters, id) or redis.call('ZCARD', m.waiters)
    m.left = limit - redis.call('ZCARD', key)
    ok = place < m.left
    poll = math.max(poll, math.min(250000, 10000 * (place + 1)))
  else
    m.was, m.ends, m.number = stateOf(kind, key, states[i], x)
    if not m.was then return {-1, now} end
    m.left = math.floor((limit - m.was) / (kind == 'r' and 1000000 or 1))
    ok = m.was + cost <= limit or cost == 0
  end
  if not ok then m.wait = kind == 'r' and math.min(most, math.ceil((m.was + cost - limit) / x)) or (m.ends or now) - now end
  if cool > now then m.wait, m.cool, ok = cool - now, 1, false end
  if not ok and (kind == 'q' or cool > now) then ticket = 0 end -- no call waits for these
  meters[i], fits = m, fits and ok
end

if not fits and ticket == 1 then ticket = last + 1 end -- behind all that wait for any of its slots
local answer = fits and {1, now} or {0, now, ticket, poll}
for i, m in ipairs(meters) do
  if m.kind == 's' and not fits and ticket > 0 then
    redis.call('ZADD', m.waiters, 'NX', ticket, id)
    redis.call('ZADD', m.polls, now + 2 * poll, id)
    expire(m.waiters, 2 * poll)
    expire(m.polls, 2 * poll)
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
