-- Takes tokens of the limit KEYS[1]: from its rate, by the generic cell rate algorithm,
-- and from all of its quotas, or from none of them. Times are microseconds of this
-- server's clock; those of the rate have a whole part and 2^-32ths of one.
--
-- The value is "tat part written token", and for each window of a quota that has begun "|id
-- used end". Windows of quotas that this call does not know, but other instances may, are
-- kept. The time of writing shows a clock that has been set back. The token is the time of
-- one, by which a call with another rate knows how many tokens are owed.
--
-- ARGV: the time in which the burst refills, the debt up to which this call may go, what to
-- do (take or reset), and the number of quotas. For each quota its id, the tokens that this
-- call may use up, and the length of its windows or, of a calendar, the times between its
-- periods. Then the tokens to take and their time. Then the tokens that the caller has spent
-- before without asking, and their time less what has refilled since; less than 0 for tokens
-- that it gives back. Then the time of one token.
--
-- Tokens spent before raise the debt to at most twice the time in which the burst refills.
--
-- Returns the tokens taken, the wait until they could be taken from the rate, and its debt;
-- then for each quota what is used, the time until its window ends, and the length of the
-- window. Returns -1 and the time if the times between the periods of a calendar lie
-- elsewhere.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
if ARGV[5] == 'reset' then
  redis.call('DEL', KEYS[1])
end
local first = 7 + 3 * ARGV[6] -- the tokens to take; before are the quotas
local owed, token = tonumber(ARGV[first + 3]), ARGV[first + 6]
local changed = false
local tat, part = now, 0
local others -- the tat and part that calls with a rate have left, if only quotas limit this one
local windows, ids -- of the quotas; nil if there are none
local held = redis.call('GET', KEYS[1])
if held then
  local whole, rest, written, was, more = string.match(held, '^(%d+) (%d+) (%d+) ([%d.e+-]+)(.*)$')
  if not whole then
    return redis.error_reply('ERR throttle: the key holds something else')
  end
  whole, rest = tonumber(whole), tonumber(rest)
  local back = math.max(0, tonumber(written) - now) -- by which the clock has been set back
  if back > 0 then
    whole, changed = whole - back, true
  end
  if token == '0' then
    others, token = {whole, rest}, was
  elseif whole >= now and was ~= token and was ~= '0' then
    local debt = (whole - now + rest / 4294967296) / was * token
    whole, rest, changed = now + math.min(math.ceil(debt), 2 ^ 51), 0, true -- 71 years
  end
  if whole >= now and not others then
    tat, part = whole, rest
  end
  if more ~= '' then
    windows, ids = {}, {}
    for id, used, ends in string.gmatch(more, '|(%S+) (%d+) (%d+)') do
      if tonumber(ends) > now then
        local calendar = string.find(id, '^%a') -- which goes by the clock
        windows[id] = {used = tonumber(used), ends = ends - (calendar and 0 or back)}
        ids[#ids + 1] = id
      end
    end
  end
end

local quotas = {}
if ARGV[6] ~= '0' then
  windows, ids = windows or {}, ids or {}
  for i = 1, tonumber(ARGV[6]) do
    local at = 4 + 3 * i
    local id, times = ARGV[at], ARGV[at + 2]
    local q = windows[id]
    if not q then
      q = {used = 0, ends = 0}
      windows[id] = q
      ids[#ids + 1] = id
    end
    q.room = tonumber(ARGV[at + 1])
    q.length = tonumber(times)
    if q.length then
      if q.used == 0 then
        q.ends = now + q.length
      end
    else
      local begin, ends
      for time in string.gmatch(times, '%d+') do
        time = tonumber(time)
        if time <= now then
          begin = time
        elseif not ends then
          ends = time
        end
      end
      if not begin or not ends then
        return {-1, now}
      end
      q.ends, q.length = ends, ends - begin
    end
    quotas[i] = q
  end
end

local function add(whole, rest) -- to the tat
  local t, p = tat + whole, part + rest
  if p >= 4294967296 then
    return t + 1, p - 4294967296
  elseif p < 0 then
    return t - 1, p + 4294967296
  end
  return t, p
end

if owed ~= 0 then
  changed = changed or held or owed > 0
  local longest = 2 * ARGV[1] + 1
  local t, p = add(ARGV[first + 4], ARGV[first + 5])
  if t <= tat or t - now <= longest then
    tat, part = t, p
  elseif tat - now < longest then
    tat, part = now + longest, 0
  end
  for i = 1, #quotas do
    quotas[i].used = math.max(0, quotas[i].used + owed)
  end
end
if tat < now then
  tat, part = now, 0
end

local done, wait = 0, 0
local n = tonumber(ARGV[first])
if n > 0 then
  local t, p = add(ARGV[first + 1], ARGV[first + 2])
  local over, rest = t - now - ARGV[3], p - ARGV[4]
  local fits = over < 0 or over == 0 and rest <= 0
  wait = fits and 0 or over + (rest > 0 and 1 or 0)
  for i = 1, #quotas do
    fits = fits and quotas[i].used + n <= quotas[i].room
  end
  if fits then
    tat, part, done, changed = t, p, n, true
    for i = 1, #quotas do
      quotas[i].used = quotas[i].used + n
    end
  end
end

local answer = {done, wait, tat - now + (part > 0 and 1 or 0)}
for i = 1, #quotas do
  local q = quotas[i]
  answer[3 * i + 1], answer[3 * i + 2], answer[3 * i + 3] = q.used, q.ends - now, q.length
end
if changed then
  if others then
    tat, part = unpack(others)
  end
  -- %.0f, as the default format of a number this long loses digits.
  local text, last = string.format('%.0f %.0f %.0f %s', tat, part, now, token), math.max(tat, now)
  for i = 1, ids and #ids or 0 do
    local q = windows[ids[i]]
    if q.used > 0 then
      text = text .. string.format('|%s %.0f %.0f', ids[i], q.used, q.ends)
      last = math.max(last, q.ends)
    end
  end
  redis.call('SET', KEYS[1], text, 'PX', string.format('%.0f', math.ceil((last - now) / 1000) + 1))
end
return answer
