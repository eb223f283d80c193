-- Takes tokens of the limit KEYS[1] by the generic cell rate algorithm. Times are
-- microseconds of this server's clock, as a whole part and 2^-32ths of one.
-- ARGV: the longest debt, the debt up to which this call may go, and then one or
-- more amounts to try, each as its tokens and their time.
-- Returns the tokens taken, the wait until the last amount could be, and the debt.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local tat, part = now, 0
local held = redis.call('GET', KEYS[1])
if held then
  local whole, rest = string.match(held, '^(%d+) (%d+)$')
  if not whole then
    return redis.error_reply('ERR throttle: the key holds something else')
  end
  whole = tonumber(whole)
  if whole - now > tonumber(ARGV[1]) then -- the clock has been set back
    tat, part = now + ARGV[1], tonumber(ARGV[2])
  elseif whole >= now then
    tat, part = whole, tonumber(rest)
  end
end
local wait = 0
for i = 5, #ARGV, 3 do
  local t, p = tat + ARGV[i + 1], part + ARGV[i + 2]
  if p >= 4294967296 then
    t, p = t + 1, p - 4294967296
  end
  local over, rest = t - now - ARGV[3], p - ARGV[4]
  if over < 0 or over == 0 and rest <= 0 then
    -- %.0f, as the default format of a number this long loses digits.
    redis.call('SET', KEYS[1], string.format('%.0f %.0f', t, p), 'PX', string.format('%.0f', math.ceil((t - now) / 1000) + 1))
    return {tonumber(ARGV[i]), 0, t - now + (p > 0 and 1 or 0)}
  end
  wait = over + (rest > 0 and 1 or 0)
end
return {0, wait, tat - now + (part > 0 and 1 or 0)}
