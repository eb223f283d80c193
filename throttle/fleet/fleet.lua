-- Decides about several meters at once: takes from all of them, or from none. Times are
-- microseconds of this server's clock. A rate counts millionths of tokens.
--
-- ARGV[1] says what to do:
--   take    ARGV: id, ticket (0: does not wait; 1: a new waiter), then for each meter kind, limit,
--           x and cost. KEYS: of each meter its state and its cooldown; of slots, then its
--           waiters and their polls.
--           Returns {1 if taken, now, ticket, poll}, then of each meter what is left, the time
--           until it could be taken, and the number of its window. {-1, now} asks for the
--           times of a calendar at now.
--   settle  ARGV: id, time of the settlement, horizon, then for each meter kind, limit, x, the
--           tokens more than were taken, and the number of the window. KEYS: the id's, then of
--           each meter its state. Returns {1, now, tokens forgiven}, {2, now} if that was done
--           before, or {0, now} if it comes too late.
--   renew   ARGV: for each slot its id and lease. KEYS: their states. Returns now, then 1 for
--           each that is still held.
--   cool    ARGV: for how long. KEYS: the cooldown.
--   ping    Returns {1, now}.
--
-- A kind is r: a rate (limit: its burst, x: tokens a second), with the state "debt written"; q: a
-- quota (x: the length of its windows or, of a calendar, the times between its periods), with the
-- state "used end written number"; s: slots (x: the lease), whose state are holders by the end
-- of their lease. A clock that has been set back neither forgives nor prolongs: the time of
-- writing shows it, and no lease is longer than a lease.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local op = ARGV[1]

local function text(n) return string.format('%.0f', n) end
local function put(key, value, us)
  redis.call('SET', key, value, 'PX', text(math.max(1, math.ceil(us / 1000))))
end
local function keep(key, us) redis.call('PEXPIRE', key, text(math.ceil(us / 1000) + 1000)) end

local function debtOf(value, perSecond)
  local debt, at = string.match(value or '', '^(%d+) (%d+)$')
  if not debt then return 0 end
  return math.max(0, debt - math.floor(math.max(0, now - at) * perSecond))
end

local function windowOf(value, times) -- used, end, number; nil if the times lie elsewhere
  local used, ends, at, number = string.match(value or '', '^(%d+) (%d+) (%d+) (%d+)$')
  used, ends, number = tonumber(used or 0), tonumber(ends or 0), tonumber(number or 0)
  local length = tonumber(times)
  if length then
    ends = ends - math.max(0, (at or now) - now)
    if used == 0 or ends <= now then return 0, now + length, now + length end
    return used, ends, number
  end
  local begin, last
  for time in string.gmatch(times, '%d+') do
    time = tonumber(time)
    if time <= now then begin = time elseif not last then last = time end
  end
  if not begin or not last then return nil end
  if ends <= now then return 0, last, last end
  return used, last, number
end

local function putRate(key, debt, perSecond) put(key, text(debt) .. ' ' .. text(now), debt / perSecond) end
local function putWindow(key, used, ends, number)
  put(key, text(used) .. ' ' .. text(ends) .. ' ' .. text(now) .. ' ' .. text(number), ends - now)
end

if op == 'ping' then
  return {1, now}
elseif op == 'cool' then
  local until_ = now + ARGV[2]
  if until_ > tonumber(redis.call('GET', KEYS[1]) or 0) then put(KEYS[1], text(until_), ARGV[2]) end
  return {1, now}
elseif op == 'renew' then
  local held = {now}
  for i, key in ipairs(KEYS) do
    local id, lease = ARGV[2 * i], ARGV[2 * i + 1]
    local ends = redis.call('ZSCORE', key, id)
    held[i + 1] = 0
    if ends and tonumber(ends) > now then
      redis.call('ZADD', key, text(now + lease), id)
      keep(key, lease)
      held[i + 1] = 1
    end
  end
  return held
elseif op == 'settle' then
  local late = now - ARGV[3] > tonumber(ARGV[4])
  local again = not late and not redis.call('SET', KEYS[1], 1, 'NX', 'PX', text(math.ceil(ARGV[4] / 1000)))
  local forgiven = 0
  for i = 2, #KEYS do
    local a = 5 * i - 5
    local kind, limit, x, more, key = ARGV[a], tonumber(ARGV[a + 1]), ARGV[a + 2], tonumber(ARGV[a + 3]), KEYS[i]
    if kind == 's' then
      redis.call('ZREM', key, ARGV[2])
    elseif not late and not again and more ~= 0 then
      local was, ends, number
      if kind == 'r' then was = debtOf(redis.call('GET', key), x) else was, ends, number = windowOf(redis.call('GET', key), x) end
      if kind == 'r' or number == tonumber(ARGV[a + 4]) then
        local most = math.max(was, 2 * limit)
        local is = math.max(0, math.min(was + more, most))
        forgiven = math.max(forgiven, (was + more - most) / (kind == 'r' and 1000000 or 1))
        if kind == 'r' then putRate(key, is, x) else putWindow(key, is, ends, number) end
      end
    end
  end
  if late then return {0, now} end
  if again then return {2, now} end
  return {1, now, math.ceil(forgiven)}
end

local id, ticket, poll, fits = ARGV[2], tonumber(ARGV[3]), 0, true
local answer, meters, k = {0, now, ticket, 0}, {}, 1
for i = 1, (#ARGV - 3) / 4 do
  local a = 4 * i
  local m = {kind = ARGV[a], limit = tonumber(ARGV[a + 1]), x = ARGV[a + 2], cost = tonumber(ARGV[a + 3]), key = KEYS[k]}
  local left, wait, ok
  local cool = tonumber(redis.call('GET', KEYS[k + 1]) or 0)
  if m.kind == 'r' then
    m.was = debtOf(redis.call('GET', m.key), m.x)
    left, wait = math.floor((m.limit - m.was) / 1000000), math.ceil((m.was + m.cost - m.limit) / m.x)
    ok = m.was + m.cost <= m.limit
  elseif m.kind == 'q' then
    m.was, m.ends, m.number = windowOf(redis.call('GET', m.key), m.x)
    if not m.was then return {-1, now} end
    left, wait, ok = m.limit - m.was, m.ends - now, m.was + m.cost <= m.limit
  else
    m.waiters, m.polls = KEYS[k + 2], KEYS[k + 3]
    k = k + 2
    redis.call('ZREMRANGEBYSCORE', m.key, '-inf', text(now))
    for _, other in ipairs(redis.call('ZRANGEBYSCORE', m.key, '(' .. text(now + m.x), '+inf')) do
      redis.call('ZADD', m.key, text(now + m.x), other)
    end
    for _, other in ipairs(redis.call('ZRANGEBYSCORE', m.polls, '-inf', text(now))) do
      redis.call('ZREM', m.waiters, other)
      redis.call('ZREM', m.polls, other)
    end
    if ticket > 1 then redis.call('ZADD', m.waiters, 'NX', text(ticket), id) end
    local place = redis.call('ZRANK', m.waiters, id) or redis.call('ZCARD', m.waiters)
    left, wait = m.limit - redis.call('ZCARD', m.key), 0
    ok = place < left
    poll = math.max(poll, math.min(250000, 10000 * (place + 1)))
  end
  if m.cost == 0 and m.kind ~= 's' then ok = true end
  if cool > now then wait, ok = cool - now, false end
  k = k + 2
  meters[i], fits = m, fits and ok
  answer[3 * i + 2], answer[3 * i + 3], answer[3 * i + 4] = math.max(0, left), ok and -1 or math.max(0, wait), m.number or (cool > now and -1 or 0)
end
for _, m in ipairs(meters) do
  if m.kind == 's' and fits then
    redis.call('ZADD', m.key, text(now + m.x), id)
    keep(m.key, m.x)
    redis.call('ZREM', m.waiters, id)
    redis.call('ZREM', m.polls, id)
  elseif m.kind == 's' and ticket > 0 then
    if ticket == 1 then
      local last = redis.call('ZRANGE', m.waiters, -1, -1, 'WITHSCORES')
      ticket = (tonumber(last[2] or 1)) + 1
    end
    redis.call('ZADD', m.waiters, 'NX', text(ticket), id)
    redis.call('ZADD', m.polls, text(now + 2 * poll), id)
    keep(m.waiters, 2 * poll)
    keep(m.polls, 2 * poll)
  elseif fits and m.cost > 0 and m.kind == 'r' then
    putRate(m.key, m.was + m.cost, m.x)
  elseif fits and m.cost > 0 then
    putWindow(m.key, m.was + m.cost, m.ends, m.number)
  end
end
answer[1], answer[3], answer[4] = fits and 1 or 0, ticket, poll
return answer
