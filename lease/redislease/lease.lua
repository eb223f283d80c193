-- Does one operation on the lease KEYS[1], a hash. Times are microseconds of this server's clock.
-- ARGV: the operation, the token; for acquire the holder and the TTL; for renew the TTL, the run that starts or 0, and
-- the ID of the call. A client may run the script again if the reply was lost. Then the ID shows that the call itself
-- has recorded the run.
-- Returns the lease as it is afterwards, with the time that is left, and 1 if the operation has changed it.
local key, op, me = KEYS[1], ARGV[1], ARGV[2]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local lease = {}
local fields = redis.call('HGETALL', key)
for i = 1, #fields, 2 do
  lease[fields[i]] = fields[i + 1]
end
local token, holder, epoch = lease['token'] or '', lease['holder'] or '', tonumber(lease['epoch'] or 0)
local till, run = tonumber(lease['till'] or 0), tonumber(lease['run'] or 0)
local by = lease['by'] or '' -- the ID of the call that recorded the run
local held, write = token ~= '' and till > now, 0
-- The default format of a number this long would lose digits.
local function text(n) return string.format('%.0f', n) end

if op == 'renew' and token == me then
  local starts = tonumber(ARGV[4])
  if starts == 0 or starts > run or by == ARGV[5] then
    till, write = now + ARGV[3], 1
    if starts ~= 0 then
      run, by = starts, ARGV[5]
    end
  end
elseif op == 'release' and token == me then
  token, holder, till, write = '', '', now, 1
elseif op == 'acquire' and (not held or token == me) then
  if not held then
    token, holder, epoch = me, ARGV[3], math.max(epoch + 1, now)
  end
  till, write = now + ARGV[4], 1
end
if write == 1 then
  redis.call('HSET', key, 'token', token, 'holder', holder, 'epoch', text(epoch), 'till', text(till), 'run', text(run),
    'by', by)
  if run ~= 0 then
    redis.call('PERSIST', key) -- otherwise a run that is due each month would be repeated
  else
    -- Without the key the next epoch is still greater, because it includes the time.
    redis.call('PEXPIRE', key, text(math.ceil((till - now) / 1000) + 86400000))
  end
end
return {token, holder, epoch, math.max(till - now, 0), run, write}
