-- Takes tokens of the limit KEYS[1]: from its rate, by the generic cell rate algorithm,
-- and from all of its quotas, or from none of them. Times are microseconds of this
-- server's clock; those of the rate have a whole part and 2^-32ths of one.
--
-- The value is "tat part", and for each window of a quota that has begun "|id used end".
-- Windows of quotas that this call does not know, but other instances may, are kept.
--
-- ARGV: the longest debt, the debt up to which this call may go, what to do (take, refund
-- or reset), and the number of quotas. For each quota its id, the tokens that this call
-- may use up, and the length of its windows or, of a calendar, the times between its
-- periods. Then the amounts to take, of which the first that is there is taken, or the
-- amount to refund: each as its tokens and their time.
--
-- Returns the tokens taken or given back, the wait until the last amount could be taken
-- from the rate, and its debt; then for each quota what is used, the time until its window
-- ends, and the length of the window. Returns -1 and the time if the times between the
-- periods of a calendar lie elsewhere.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
if ARGV[5] == 'reset' then
  redis.call('DEL', KEYS[1])
end
local tat, part = now, 0
local windows, ids -- of the quotas; nil if there are none
local held = redis.call('GET', KEYS[1])
if held then
  local whole, rest, more = string.match(held, '^(%d+) (%d+)(.*)$')
  if not whole then
    return redis.error_reply('ERR throttle: the key holds something else')
  end
  whole = tonumber(whole)
  if whole - now > tonumber(ARGV[1]) then -- the clock has been set back
    tat, part = now + ARGV[1], tonumber(ARGV[2])
  elseif whole >= now then
    tat, part = whole, tonumber(rest)
  end
  if more ~= '' then
    windows, ids = {}, {}
    for id, used, ends in string.gmatch(more, '|(%S+) (%d+) (%d+)') do
      if tonumber(ends) > now then
        windows[id] = {used = tonumber(used), ends = tonumber(ends)}
        ids[#ids + 1] = id
      end
    end
  end
end

local quotas = {}
local first = 7 -- amount
if ARGV[6] ~= '0' then
  windows, ids = windows or {}, ids or {}
  for i = 1, tonumber(ARGV[6]) do
    local id, times = ARGV[first], ARGV[first + 2]
    local q = windows[id]
    if not q then
      q = {used = 0, ends = 0}
      windows[id] = q
      ids[#ids + 1] = id
    end
    q.room = tonumber(ARGV[first + 1])
    q.length = tonumber(times)
    if q.length then
      if q.used == 0 then
        q.ends = now + q.length
      end
      q.ends = math.min(q.ends, now + q.length) -- the clock has been set back
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
    first = first + 3
  end
end

local done, wait, changed = 0, 0, false
if ARGV[5] == 'refund' then
  done, changed = tonumber(ARGV[first]), held
  tat, part = tat - ARGV[first + 1], part - ARGV[first + 2]
  if part < 0 then
    tat, part = tat - 1, part + 4294967296
  end
  if tat < now then
    tat, part = now, 0
  end
  for i = 1, #quotas do
    quotas[i].used = math.max(0, quotas[i].used - done)
  end
else
  for i = first, #ARGV, 3 do
    local n, t, p = tonumber(ARGV[i]), tat + ARGV[i + 1], part + ARGV[i + 2]
    if p >= 4294967296 then
      t, p = t + 1, p - 4294967296
    end
    local over, rest = t - now - ARGV[3], p - ARGV[4]
    local fits = over < 0 or over == 0 and rest <= 0
    wait = fits and 0 or over + (rest > 0 and 1 or 0)
    for j = 1, #quotas do
      fits = fits and quotas[j].used + n <= quotas[j].room
    end
    if fits then
      tat, part, done, changed = t, p, n, true
      for j = 1, #quotas do
        quotas[j].used = quotas[j].used + n
      end
      break
    end
  end
end

if changed then
  -- %.0f, as the default format of a number this long loses digits.
  local text, last = string.format('%.0f %.0f', tat, part), tat
  for i = 1, ids and #ids or 0 do
    local q = windows[ids[i]]
    if q.used > 0 then
      text = text .. string.format('|%s %.0f %.0f', ids[i], q.used, q.ends)
      last = math.max(last, q.ends)
    end
  end
  redis.call('SET', KEYS[1], text, 'PX', string.format('%.0f', math.ceil((last - now) / 1000) + 1))
end
local answer = {done, wait, tat - now + (part > 0 and 1 or 0)}
for i = 1, #quotas do
  local q = quotas[i]
  answer[3 * i + 1], answer[3 * i + 2], answer[3 * i + 3] = q.used, q.ends - now, q.length
end
return answer
