-- Does one thing with the lease KEYS[1], a hash. Times are microseconds of this server's clock.
-- ARGV: what to do, the token; for acquire the holder and the TTL; for renew the TTL, and 1 if a
-- run begins. Returns the lease as it is afterwards.
local key, op, me = KEYS[1], ARGV[1], ARGV[2]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local lease = {}
local fields = redis.call('HGETALL', key)
for i = 1, #fields, 2 do
  lease[fields[i]] = fields[i + 1]
end
local token, holder, epoch = lease['token'] or '', lease['holder'] or '', tonumber(lease['epoch'] or 0)
local since, till, ran = tonumber(lease['since'] or 0), tonumber(lease['till'] or 0), tonumber(lease['ran'] or 0)
local held, write = token ~= '' and till > now, false
-- %.0f, as the default format of a number this long loses digits.
local function text(n) return string.format('%.0f', n) end

if op == 'renew' and token == me then
  till, write = now + ARGV[3], true
  if ARGV[4] == '1' then
    ran = now
  end
elseif op == 'release' and token == me then
  token, holder, since, till, write = '', '', now, now, true
elseif op == 'acquire' and (not held or token == me) then
  if not held then
    token, holder, epoch, since = me, ARGV[3], math.max(epoch + 1, now), now
  end
  till, write = now + ARGV[4], true
end
if write then
  redis.call('HSET', key, 'token', token, 'holder', holder, 'epoch', text(epoch), 'since', text(since), 'till', text(till), 'ran', text(ran))
  if ran > 0 then
    redis.call('PERSIST', key) -- or a run that is due each month would be made anew
  else
    -- Without the key the next epoch is still higher, as it includes the time.
    redis.call('PEXPIRE', key, text(math.ceil((till - now) / 1000) + 86400000))
  end
end
return {token, holder, epoch, since, till, now, ran}
