-- Decides about several meters at once: takes from all of them, or from none. Times are
-- microseconds of this server's clock. A rate counts millionths of tokens.
--
-- ARGV[1] says what to do:
--   take    ARGV: id, ticket (0: does not wait; 1: a new waiter), then for each meter kind, limit,
--           x and cost. KEYS: the states of the meters, their cooldowns, and then of those that
--           are slots their waiters and the polls of these.
--           Returns {1 if taken, now, ticket, poll}, then of each meter what is left, the time
--           until it could be taken, and the number of its window. {-1, now} asks for the
--           times of a calendar at now.
--   settle  ARGV: id, time of the settlement, horizon, then for each meter kind, limit, x, the
--           tokens more than were taken, and the number of the window. KEYS: the id's, then of
--           each meter its state. Returns {1, or 2 if that was done before, or 0 if it comes too
--           late; now; tokens forgiven}.
--   renew   ARGV: for each slot its id and lease. KEYS: their states. Returns now, then 1 for
--           each that is still held.
--   cool    ARGV: for how long. KEYS: the cooldown.
--   ping    Returns {1, now}.
--
-- A kind is r: a rate (limit: its burst, x: tokens a second), with the state "debt written"; q: a
-- quota (x: the length of its windows or, of a calendar, the times between its periods), with the
-- state "used end written number"; s: slots (x: the lease), whose state are holders by the end
-- of their lease; the id of one ends with its lease, which may be another than x. A cooldown is "end written". A clock that has been set back neither forgives nor
-- prolongs: a state that was written later than now is written anew, with its times moved back, or it
-- would stand still until the clock has caught up; and no lease or poll is longer than it can be.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local op, most = ARGV[1], 9e15 -- microseconds of a wait: 285 years

local function text(n) return string.format('%.0f', n) end
local function put(key, value, us)
  redis.call('SET', key, value, 'PX', text(math.max(1, math.ceil(math.min(us, most) / 1000))))
end
local function expire(key, us) redis.call('PEXPIRE', key, text(math.ceil(us / 1000) + 1000)) end

local function putRate(key, debt, perSecond) put(key, string.format('%.0f %.0f', debt, now), debt / perSecond) end
local function putWindow(key, used, ends, number)
  put(key, string.format('%.0f %.0f %.0f %.0f', used, ends, now, number), ends - now)
end
local function putCool(key, ends) put(key, string.format('%.0f %.0f', ends, now), ends - now) end

local function read(key, fields) -- how far the clock has been set back since a state was written, and its numbers
  local value = redis.call('GET', key)
  if not value then return 0, 0, 0, 0, 0 end
  local a, b, c, d = string.match(value, '^(%d+) (%d+) ?(%d*) ?(%d*)$')
  a, b, c, d = tonumber(a) or 0, tonumber(b) or 0, tonumber(c) or 0, tonumber(d) or 0
  return math.max(0, (fields == 2 and b or c) - now), a, b, c, d
end

local function debtOf(key, perSecond)
  local back, debt, written = read(key, 2)
  if back > 0 then putRate(key, debt, perSecond) end
  return math.max(0, debt - math.floor(math.max(0, now - written) * perSecond))
end

local function windowOf(key, times) -- used, end, number; nil if the times lie elsewhere
  local length, back, used, ends, _, number = tonumber(times), read(key, 4)
  if length then
    ends = ends - back
    if used == 0 or ends <= now then return 0, now + length, now + length end
    if back > 0 then putWindow(key, used, ends, number) end
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

local function coolOf(key)
  local back, ends = read(key, 2)
  if back > 0 then putCool(key, ends - back) end
  return ends - back
end

local function leave(m, id) for _, key in ipairs({m.waiters, m.polls}) do redis.call('ZREM', key, id) end end

local function bound(key, us, leases) -- no time in a set is later than in us or, with leases, in that of its id
  local late = redis.call('ZRANGEBYSCORE', key, '(' .. text(now + us), '+inf', 'WITHSCORES')
  for i = 1, #late, 2 do
    local most = leases and tonumber(string.match(late[i], ':(%d+)$')) or us
    if tonumber(late[i + 1]) > now + most then redis.call('ZADD', key, text(now + most), late[i]) end
  end
end

if op == 'ping' then
  return {1, now}
elseif op == 'cool' then
  if now + ARGV[2] > coolOf(KEYS[1]) then putCool(KEYS[1], now + ARGV[2]) end
  return {1, now}
elseif op == 'renew' then
  local held = {now}
  for i, key in ipairs(KEYS) do
    local id, lease = ARGV[2 * i], ARGV[2 * i + 1]
    local ends = tonumber(redis.call('ZSCORE', key, id) or 0)
    held[i + 1] = ends > now and 1 or 0
    if ends > now then
      redis.call('ZADD', key, text(now + lease), id)
      expire(key, lease)
    end
  end
  return held
elseif op == 'settle' then
  local late, forgiven = now - ARGV[3] > tonumber(ARGV[4]), 0
  local again = not late and not redis.call('SET', KEYS[1], 1, 'NX', 'PX', text(math.ceil(ARGV[4] / 1000)))
  for i = 2, #KEYS do
    local a = 5 * i - 5
    local kind, limit, x, more, key = ARGV[a], tonumber(ARGV[a + 1]), ARGV[a + 2], tonumber(ARGV[a + 3]), KEYS[i]
    if kind == 's' then
      redis.call('ZREM', key, ARGV[2])
    elseif not late and not again and more ~= 0 then
      local was, ends, number
      if kind == 'r' then was = debtOf(key, x) else was, ends, number = windowOf(key, x) end
      if kind == 'r' or number == tonumber(ARGV[a + 4]) then
        local limits = math.max(was, 2 * limit)
        local is = math.max(0, math.min(was + more, limits))
        forgiven = math.max(forgiven, (was + more - limits) / (kind == 'r' and 1000000 or 1))
        if kind == 'r' then putRate(key, is, x) else putWindow(key, is, ends, number) end
      end
    end
  end
  return {late and 0 or again and 2 or 1, now, math.ceil(forgiven)}
end

local id, ticket, last, poll, fits = ARGV[2], tonumber(ARGV[3]), 1, 0, true
local count = (#ARGV - 3) / 4
local answer, meters, k = {0, now, ticket, 0}, {}, 2 * count
for i = 1, count do
  local a = 4 * i
  local m = {kind = ARGV[a], limit = tonumber(ARGV[a + 1]), x = ARGV[a + 2], cost = tonumber(ARGV[a + 3]), key = KEYS[i]}
  local left, wait, ok
  local cool = coolOf(KEYS[count + i])
  if m.kind == 'r' then
    m.was = debtOf(m.key, m.x)
    left, wait = math.floor((m.limit - m.was) / 1000000), math.min(most, math.ceil((m.was + m.cost - m.limit) / m.x))
    ok = m.was + m.cost <= m.limit
  elseif m.kind == 'q' then
    m.was, m.ends, m.number = windowOf(m.key, m.x)
    if not m.was then return {-1, now} end
    left, wait, ok = m.limit - m.was, m.ends - now, m.was + m.cost <= m.limit
  else
    m.waiters, m.polls = KEYS[k + 1], KEYS[k + 2]
    k = k + 2
    redis.call('ZREMRANGEBYSCORE', m.key, '-inf', text(now))
    bound(m.key, m.x, true)
    bound(m.polls, 500000)
    for _, other in ipairs(redis.call('ZRANGEBYSCORE', m.polls, '-inf', text(now))) do leave(m, other) end
    if ticket > 1 then redis.call('ZADD', m.waiters, 'NX', text(ticket), id) end
    last = math.max(last, redis.call('ZRANGE', m.waiters, -1, -1, 'WITHSCORES')[2] or 1)
    local place = redis.call('ZRANK', m.waiters, id) or redis.call('ZCARD', m.waiters)
    left, wait = m.limit - redis.call('ZCARD', m.key), 0
    ok = place < left
    poll = math.max(poll, math.min(250000, 10000 * (place + 1)))
  end
  if m.cost == 0 and m.kind ~= 's' then ok = true end
  if cool > now then wait, ok = cool - now, false end
  if not ok and (m.kind == 'q' or cool > now) then ticket = 0 end -- no call waits for these
  meters[i], fits = m, fits and ok
  answer[3 * i + 2], answer[3 * i + 3], answer[3 * i + 4] = math.max(0, left), ok and -1 or math.max(0, wait), m.number or (cool > now and -1 or 0)
end
for _, m in ipairs(meters) do
  if m.kind == 's' and not fits and ticket > 0 then
    if ticket == 1 then ticket = last + 1 end -- behind all that wait for any of its slots
    redis.call('ZADD', m.waiters, 'NX', text(ticket), id)
    redis.call('ZADD', m.polls, text(now + 2 * poll), id)
    expire(m.waiters, 2 * poll)
    expire(m.polls, 2 * poll)
  elseif m.kind == 's' then
    leave(m, id)
    if fits then
      redis.call('ZADD', m.key, text(now + m.x), id)
      expire(m.key, m.x)
    end
  elseif fits and m.cost > 0 and m.kind == 'r' then
    putRate(m.key, m.was + m.cost, m.x)
  elseif fits and m.cost > 0 then
    putWindow(m.key, m.was + m.cost, m.ends, m.number)
  end
end
answer[1], answer[3], answer[4] = fits and 1 or 0, ticket, poll
return answer
