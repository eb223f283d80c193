-- Does one thing with the lease KEYS[1], a hash. Times are microseconds of this server's
-- clock. The field w:TOKEN holds since when a token has been waiting.
-- ARGV: what to do, the token; for acquire the holder, the TTL, the grace, and 1 to wait
-- in line; for renew the TTL; for release the channel to tell.
local key, op, me = KEYS[1], ARGV[1], ARGV[2]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local lease, waiting, first = {}, {}, nil
local fields = redis.call('HGETALL', key)
for i = 1, #fields, 2 do
  local name, value = fields[i], fields[i + 1]
  if string.sub(name, 1, 2) == 'w:' then
    local token, place = string.sub(name, 3), tonumber(value)
    waiting[token] = place
    if not first or place < waiting[first] or place == waiting[first] and token < first then
      first = token
    end
  else
    lease[name] = value
  end
end
local token, holder = lease['token'] or '', lease['holder'] or ''
local epoch, since, till = tonumber(lease['epoch'] or 0), tonumber(lease['since'] or 0), tonumber(lease['till'] or 0)
local held, ahead, write = token ~= '' and till > now, 0, false
-- %.0f, as the default format of a number this long loses digits.
local function text(n) return string.format('%.0f', n) end

if op == 'renew' then
  if token ~= me then
    return 0
  end
  till, write = now + ARGV[3], true
elseif op == 'release' then
  redis.call('HDEL', key, 'w:' .. me)
  if token == me then
    token, holder, since, till, write = '', '', now, now, true
    redis.call('PUBLISH', ARGV[3], '')
  end
elseif op == 'acquire' then
  if held and token == me then
    till, write = now + ARGV[4], true
  elseif held or first and first ~= me and now - till < tonumber(ARGV[5]) then
    if not waiting[me] and ARGV[6] == '1' then
      for waiter, place in pairs(waiting) do
        -- A candidate that has died does not leave. One that still waits joins again.
        if place <= now - 86400000000 then
          redis.call('HDEL', key, 'w:' .. waiter)
        end
      end
      redis.call('HSET', key, 'w:' .. me, text(now))
    end
    if first and first ~= me then
      ahead = 1
    end
  else
    for waiter, place in pairs(waiting) do
      -- Those ahead have had their time.
      if waiter == me or first ~= me and place <= till then
        redis.call('HDEL', key, 'w:' .. waiter)
      end
    end
    token, holder, epoch, since = me, ARGV[3], math.max(epoch + 1, now), now
    till, write = now + ARGV[4], true
  end
end
if write then
  redis.call('HSET', key, 'token', token, 'holder', holder, 'epoch', text(epoch), 'since', text(since), 'till', text(till))
end
if op ~= 'load' then
  -- Without the key the next epoch is still higher, as it includes the time.
  redis.call('PEXPIRE', key, text(math.ceil(math.max(till - now, 0) / 1000) + 86400000))
end
if op == 'renew' then
  return 1
end
return {token, holder, epoch, since, till, now, ahead}
