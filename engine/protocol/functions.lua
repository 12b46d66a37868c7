#!lua name={library}
-- The queue of Sluice as atomic functions. Python callers: functions.py; the same in pure Python: twin.py; prose: docs/protocol.md.
--
-- Every function takes the key prefix first and no KEYS: one primary holds a whole cell, there is no cluster to route by key.
-- Times are milliseconds of the server's clock. Money is integer nano-units; a Lua number is a double, so whole numbers are
-- written with %.0f and fractions with %.17g (tostring would lose digits), and both come back exactly.

local GROUP = 'engines'
local TICK_LEASE_MS = 3000     -- reaping disarms for one lease after nobody reaped for longer than that
local WAKE_LENGTH = 8          -- wake lists only need to be non-empty
local CONTROL_LENGTH = 1024    -- an engine reads its orders at least once a second
local DEAD_LENGTH = 1000
local DEAD_WORK_BYTES = 65536
local SCAN_LIMIT = 256         -- queue entries one pull may look at
local STANDING_MS = 400        -- so long after its last pull an engine is handed requests
local STANDING_LOOKS = 8       -- engines and queue entries one admission may look at to hand a request over
local HANDED_BYTES = 65536     -- a longer work waits for a pull: whoever is slow to read a channel is cut off by the server
local REAP_LIMIT = 256         -- expired requests one reap may end
local RETRY_CAP_S = 60
local DRAIN_WEIGHT = 0.1       -- of the newest gap in the moving average of gaps between pulls
local REMEMBER_REAPED_MS = 3600000
local GRACE_MS = 60000         -- how long a resumable request goes on without a client, and its answer is kept
local KEEP_OPEN_MS = 3600000   -- what a resumable request keeps while it is open

local function wall_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local clock = {now}

local function int(x) return string.format('%.0f', x) end
local function real(x) return string.format('%.17g', x) end

local function record_of(p, request)
  local flat = redis.call('HGETALL', p .. 'req:' .. request)
  if #flat == 0 then return nil end
  local r = {}
  for i = 1, #flat, 2 do r[flat[i]] = flat[i + 1] end
  return r
end

local function save_record(p, request, r)
  local flat = {}
  for field, value in pairs(r) do
    flat[#flat + 1] = field
    flat[#flat + 1] = value
  end
  redis.call('HSET', p .. 'req:' .. request, unpack(flat))
end

local function sorted_members(key)
  local members = redis.call('SMEMBERS', key)
  table.sort(members)
  return members
end

-- {fair}

-- Messages made here. The layouts are those of messages.py (structs are msgpack arrays).

local function wake(p, name)
  local key = p .. 'wake:' .. name
  redis.call('RPUSH', key, '1')
  redis.call('LTRIM', key, -WAKE_LENGTH, -1)
end

local function order(p, engine, kind, argument, reason)
  local control = cmsgpack.pack({kind, argument, reason})
  redis.call('XADD', p .. 'ctl:' .. engine, 'MAXLEN', CONTROL_LENGTH, '*', 'c', control)
  wake(p, engine)
end

-- One last error Delta of the whole request. Built by hand because cmsgpack has no bin type (`vector`) and no nil in the
-- middle of an array. NOMKSTREAM: a dead gateway's stream is not made anew.
local function reply_error(p, request, r, code, detail, start)
  local pack = cmsgpack.pack
  local delta = '\157' .. pack(request) .. pack(0) .. pack(tonumber(r.epoch)) .. pack(start or 0) .. '\144' .. pack('') .. '\144'
    .. pack('error') .. pack(code) .. pack(detail) .. '\196\0' .. '\195' .. '\0'
  redis.call('XADD', p .. 'replies:' .. r.gateway, 'NOMKSTREAM', '*', 'd', '\145' .. delta)
end

-- The Final of a request that lost both its engine and its gateway: the prompt is all that Redis knows of it.
local function final_of_orphan(request, r, now)
  local queued_s = (tonumber(r.pulled) - tonumber(r.admitted)) / 1000
  return cmsgpack.pack({request, tonumber(r.epoch), r.pool, r.tier, r.tenant, r.engine, 'lost', tonumber(r.prompt),
    0, 0, 0, 0, 0, {queued_s}, now, 'engine_lost', 'engine and gateway were lost'})
end

-- Parts of a request's state. Each is written by one function here and nowhere else.

local function count_depth(p, r, by)
  local key = p .. 'depth:' .. r.pool
  for _, field in ipairs({r.tier, r.tier .. ':' .. r.tenant}) do
    if redis.call('HINCRBY', key, field, by) <= 0 then redis.call('HDEL', key, field) end
  end
end

local function unhold(p, r)
  local key = p .. 'acct:' .. r.tenant
  local held = (tonumber(redis.call('HGET', key, 'held')) or 0) - tonumber(r.hold)
  if held > 0 then redis.call('HSET', key, 'held', int(held)) else redis.call('HDEL', key, 'held') end
end

local function settle_claim(p, request, r, finished)
  if not r.claim then return end
  local key = p .. 'idem:' .. r.tenant .. ':' .. r.claim
  if redis.call('HGET', key, 'request') ~= request then return end
  if finished then redis.call('HSET', key, 'state', 'finished') else redis.call('DEL', key) end
end

-- The tenant's queue now starts after entry `arrival`.
local function move_head(p, r, arrival)
  local ready = ready_key(p, r.pool, r.tier, r.member)
  local head = redis.call('XRANGE', r.stream, '(' .. arrival .. '-0', '+', 'COUNT', 1)[1]
  if head then
    redis.call('ZADD', ready, string.match(head[1], '^%d+'), r.member)
  else
    redis.call('ZREM', ready, r.member)
  end
end

local function drop_entry(p, stream, entry)
  redis.call('XACK', stream, GROUP, entry)
  redis.call('XDEL', stream, entry)
  if redis.call('XLEN', stream) == 0 then redis.call('DEL', stream) end
end

-- The entry of a request in its queue. With `passed` it is behind what pulls have read already.
local function add_entry(p, request, r, work, passed)
  r.stream = p .. 'q:' .. r.pool .. ':' .. r.tier .. ':' .. r.member
  r.entry = r.arrival .. '-0'
  if redis.call('EXISTS', r.stream) == 0 then
    redis.call('XGROUP', 'CREATE', r.stream, GROUP, passed and r.entry or '0', 'MKSTREAM')
  elseif passed then
    redis.pcall('XGROUP', 'SETID', r.stream, GROUP, r.entry)  -- a vanished group is made anew by the next pull
  end
  redis.call('XADD', r.stream, r.entry, 'r', request, 'w', work)
  redis.call('ZADD', p .. 'tiers:' .. r.pool, r.rank, r.tier)
end

local function enqueue(p, request, r, work)
  add_entry(p, request, r, work)
  redis.call('ZADD', ready_key(p, r.pool, r.tier, r.member), 'NX', r.arrival, r.member)
  if tonumber(r.expires) > 0 then redis.call('ZADD', p .. 'expiry', r.expires, request) end
  count_depth(p, r, 1)
end

local function free_slots(p, request, r)
  if r.state == 'running' then fair_run(p, r, -1) end
  fair_leave(p, r)
  redis.call('SREM', p .. 'open:' .. r.tenant, request)
  redis.call('SREM', p .. 'gwreq:' .. r.gateway, request)
  if r.engine then redis.call('SREM', p .. 'engreq:' .. r.engine, request) end
  if r.resumable then redis.call('ZREM', p .. 'grace', request) end
end

local function forget_answer(p, request)
  redis.call('DEL', p .. 'resume:' .. request, p .. 'out:' .. request)
end

local function leave_queue(p, request, r)
  local score = redis.call('ZSCORE', ready_key(p, r.pool, r.tier, r.member), r.member)
  if score and tonumber(score) == tonumber(r.arrival) then move_head(p, r, r.arrival) end
  drop_entry(p, r.stream, r.entry)
  redis.call('ZREM', p .. 'expiry', request)
  count_depth(p, r, -1)
end

-- A request that never ran goes as if it had never been: nothing was computed, nothing is charged.
local function unqueue(p, request, r)
  leave_queue(p, request, r)
  free_slots(p, request, r)
  unhold(p, r)
  settle_claim(p, request, r, false)
  if r.resumable then forget_answer(p, request) end
  redis.call('DEL', p .. 'req:' .. request)
end

local function expire(p, request, r)
  reply_error(p, request, r, 'queue_timeout', 'not started before its deadline')
  unqueue(p, request, r)
end

-- A request that ran has ended: its one Final goes to the settlers; the hold stays until they close it.
local function conclude(p, request, r, final, served, now)
  redis.call('XADD', p .. 'usage', '*', 'f', final)
  drop_entry(p, r.stream, r.entry)
  free_slots(p, request, r)
  settle_claim(p, request, r, served)
  if r.resumable then
    for _, name in ipairs({'resume:', 'out:'}) do redis.call('PEXPIRE', p .. name .. request, GRACE_MS) end
  end
  redis.call('HSET', p .. 'req:' .. request, 'state', 'finished', 'finished', int(now))
end

local function gateway_lives(p, gateway, now)
  local lease = redis.call('ZSCORE', p .. 'gateways', gateway)
  return lease and tonumber(lease) > now
end

-- It is handed nothing any more before it asks again.
local function withdraw(p, pool, engine)
  redis.call('ZREM', p .. 'standing:' .. pool, engine)
  redis.call('HDEL', p .. 'credit:' .. pool, engine)
end

-- The requests of an engine that is gone: the raised epoch shuts it out, their gateways are told and now own their end.
local function lose_requests(p, pool, engine, now)
  withdraw(p, pool, engine)
  local lost = {}
  for _, request in ipairs(sorted_members(p .. 'engreq:' .. engine)) do
    local r = record_of(p, request)
    if r and r.state == 'running' and r.engine == engine then
      r.epoch = int(tonumber(r.epoch) + 1)
      r.state = 'lost'
      fair_run(p, r, -1)
      redis.call('HSET', p .. 'req:' .. request, 'state', 'lost', 'epoch', r.epoch)
      if gateway_lives(p, r.gateway, now) then
        reply_error(p, request, r, 'engine_lost', 'the engine that computed this request was lost')
      else
        conclude(p, request, r, final_of_orphan(request, r, now), false, now)
      end
      table.insert(lost, request)
    end
  end
  for _, name in ipairs({'engreq:', 'ctl:', 'wake:', 'engine:'}) do redis.call('DEL', p .. name .. engine) end
  return lost
end

-- Of admit

local function retry_after(p, pool, tier, ahead, now)
  local drain = redis.call('HMGET', p .. 'drain:' .. pool, tier .. ':gap', tier .. ':last')
  if not drain[1] then return nil end
  local gap = math.max(tonumber(drain[1]), now - tonumber(drain[2]))
  return math.max(1, math.min(RETRY_CAP_S, math.ceil(ahead * gap / 1000)))
end

-- Requests that start before a newcomer: tenants are served in turn, so it waits for as many of each as its own has queued, by
-- their weights, and never for more than there are. Where more tenants wait than one choice looks at, for too few.
local function ahead_of(p, a, depth, mine)
  local ahead, tenants, names, seen = 0, {}, {}, {}
  for _, late in ipairs({false, true}) do
    for _, member in ipairs(heads(p, a.pool, a.tier, late)) do
      local tenant = late and string.sub(member, 2) or member
      if kind_of(member) == '~' then
        ahead = ahead + 1
      elseif not seen[tenant] then
        seen[tenant], tenants[#tenants + 1], names[#names + 1] = true, tenant, a.tier .. ':' .. tenant
      end
    end
  end
  if #tenants == 0 then return math.min(depth, ahead) end
  local depths = redis.call('HMGET', p .. 'depth:' .. a.pool, unpack(names))
  local weights = redis.call('HMGET', p .. 'weight:' .. a.pool, unpack(tenants))
  for i = 1, #tenants do
    local turns = math.floor(mine * (tonumber(weights[i]) or UNIT) / thousandths(a.weight))
    ahead = ahead + math.min(tonumber(depths[i]) or 0, turns)
  end
  return math.min(depth, ahead)
end

-- Early refusal: is the deadline of a sheddable tier lost to what waits before it? Only pulls that still go on tell how long
-- that is: what was measured before a pause says nothing.
local function sheds(p, a, depth, mine, now)
  if not a.sheddable or a.ttft_ms <= 0 or mine == 0 then return false end
  local drain = redis.call('HMGET', p .. 'drain:' .. a.pool, a.tier .. ':gap', a.tier .. ':last')
  local gap = tonumber(drain[1])
  return gap and now - tonumber(drain[2]) <= 2 * gap and ahead_of(p, a, depth, mine) * gap > a.ttft_ms
end

local function check_claim(p, a, now)
  if a.claim == cjson.null then return nil end
  local held = redis.call('HMGET', p .. 'idem:' .. a.tenant .. ':' .. a.claim.key, 'digest', 'request', 'state', 'expires')
  if not held[1] or tonumber(held[4]) <= now then return nil end
  if held[1] ~= a.claim.digest then return 'idempotency_conflict', held[2] end
  return held[3] == 'finished' and 'idempotency_replay' or 'idempotency_in_flight', held[2]
end

-- Levels of the tenant's token buckets after this request: rows to answer, values to write, and the first that is short.
local function fill_buckets(p, a, now)
  local rows, levels, short, wait_s = {}, {}, nil, nil
  for i, limit in ipairs(a.limits) do
    local name, capacity, refill, cost = limit[1], limit[2], limit[3], limit[4]
    local was = redis.call('HMGET', p .. 'rl:' .. a.tenant .. ':' .. name, 'level', 'at')
    local level = capacity
    if was[1] then level = math.min(capacity, tonumber(was[1]) + math.max(0, now - tonumber(was[2])) * refill / 60000) end
    if capacity >= 0 then
      if level < cost then
        if not short then
          short = name
          if cost <= capacity and refill > 0 then
            wait_s = math.min(RETRY_CAP_S, math.ceil((cost - level) * 60 / refill))
          end
        end
      else
        level = level - cost
      end
      levels[i] = level
      rows[#rows + 1] = {name, capacity, math.floor(level), refill > 0 and math.ceil((capacity - level) * 60 / refill) or 0}
    end
  end
  return rows, levels, short, wait_s
end

local function check_money(p, a)
  if a.floor_nano == cjson.null then return nil end
  local account = redis.call('HMGET', p .. 'acct:' .. a.tenant, 'balance', 'held')
  if not account[1] then return 'stale_principal', 'balance' end
  if tonumber(account[1]) - (tonumber(account[2]) or 0) - a.hold_nano < a.floor_nano then return 'insufficient_quota', '' end
end

-- Code, detail, retry seconds; nil when nothing speaks against the request.
local function check_all(p, a, depth, short, wait_s, now)
  local generation = tonumber(redis.call('HGET', p .. 'acct:' .. a.tenant, 'generation'))
  if generation and generation > a.generation then return 'stale_principal', '' end
  local code, detail = check_claim(p, a, now)
  if code then return code, detail end
  if redis.call('ZCOUNT', p .. 'engines:' .. a.pool, '(' .. int(now), '+inf') == 0 then return 'no_engine', '' end
  if a.max_concurrent >= 0 and redis.call('SCARD', p .. 'open:' .. a.tenant) >= a.max_concurrent then
    return 'concurrency_limit', '', retry_after(p, a.pool, a.tier, 1, now)
  end
  if short then return 'rate_limit', short, wait_s end
  local mine = tonumber(redis.call('HGET', p .. 'depth:' .. a.pool, a.tier .. ':' .. a.tenant)) or 0
  if a.max_queued_tenant >= 0 and mine >= a.max_queued_tenant then
    return 'tenant_queue_full', '', retry_after(p, a.pool, a.tier, mine, now)
  end
  if a.max_queued_tier >= 0 and depth >= a.max_queued_tier then
    return 'tier_queue_full', '', retry_after(p, a.pool, a.tier, depth, now)
  end
  if sheds(p, a, depth, mine, now) then return 'tier_queue_full', 'deadline', retry_after(p, a.pool, a.tier, mine, now) end
  return check_money(p, a)
end

local function open_gateway(p, gateway, expiry)
  redis.call('ZADD', p .. 'gateways', 'GT', int(expiry), gateway)
  if redis.call('EXISTS', p .. 'replies:' .. gateway) == 0 then
    redis.call('XGROUP', 'CREATE', p .. 'replies:' .. gateway, 'gateway', '$', 'MKSTREAM')
  end
end

local function commit_admission(p, a, levels, now)
  local request = a.request
  local r = {state = 'queued', tenant = a.tenant, tier = a.tier, rank = int(a.tier_rank), pool = a.pool, gateway = a.gateway,
    epoch = '0', hold = int(a.hold_nano), choices = int(a.choices), prompt = int(a.prompt_tokens), admitted = int(now),
    expires = int(a.expires_ms), weight = int(thousandths(a.weight)),
    ttft = int(a.ttft_ms), attempts = '0', member = a.tenant, arrival = int(redis.call('INCR', p .. 'arrivals'))}
  for i, limit in ipairs(a.limits) do
    if levels[i] then
      local key = p .. 'rl:' .. a.tenant .. ':' .. limit[1]
      redis.call('HSET', key, 'level', real(levels[i]), 'at', int(now))
      if limit[3] > 0 then
        -- Written twice a minute, not with every request.
        local full_ms = math.ceil(limit[2] / limit[3] * 60000)
        if redis.call('PTTL', key) < full_ms + 30000 then redis.call('PEXPIRE', key, int(full_ms + 60000)) end
      end
    end
  end
  if a.claim ~= cjson.null then
    r.claim = a.claim.key
    local key = p .. 'idem:' .. a.tenant .. ':' .. a.claim.key
    redis.call('DEL', key)
    redis.call('HSET', key, 'digest', a.claim.digest, 'request', request, 'state', 'in_flight', 'expires', int(now + a.claim.ttl_ms))
    redis.call('PEXPIRE', key, int(a.claim.ttl_ms))
  end
  if a.hold_nano > 0 then redis.call('HINCRBY', p .. 'acct:' .. a.tenant, 'held', r.hold) end
  if a.ask ~= '' then
    r.resumable = '1'
    redis.call('HSET', p .. 'resume:' .. request, 'tenant', a.tenant, 'gateway', a.gateway, 'turn', '0', 'ask', a.ask)
    redis.call('PEXPIRE', p .. 'resume:' .. request, KEEP_OPEN_MS)
  end
  redis.call('SADD', p .. 'open:' .. a.tenant, request)
  redis.call('SADD', p .. 'gwreq:' .. a.gateway, request)
  open_gateway(p, a.gateway, now + a.lease_ms)
  fair_enter(p, r)
  return r
end

-- Of pull

-- The head entry of one queue as (entry id, request, work), now delivered to the engine; nil when there is none.
local function read_head(stream, engine)
  local reply = redis.pcall('XREADGROUP', 'GROUP', GROUP, engine, 'COUNT', 1, 'STREAMS', stream, '>')
  if reply and reply.err then
    if redis.call('EXISTS', stream) == 0 then return nil end
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0')  -- the group had vanished; started entries are skipped by their state
    reply = redis.call('XREADGROUP', 'GROUP', GROUP, engine, 'COUNT', 1, 'STREAMS', stream, '>')
  end
  if not reply then return nil end
  local entry = reply[1][2][1]
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return entry[1], fields.r or '', fields.w
end

-- Mean time between pulls of a tier while it had work; `admit` makes Retry-After of it.
local function measure_drain(p, r, now)
  local key = p .. 'drain:' .. r.pool
  local was = redis.call('HMGET', key, r.tier .. ':gap', r.tier .. ':last')
  local gap = math.max(0, now - math.max(tonumber(was[2]) or 0, tonumber(r.admitted)))
  if was[1] then gap = tonumber(was[1]) + DRAIN_WEIGHT * (gap - tonumber(was[1])) end
  redis.call('HSET', key, r.tier .. ':gap', real(gap), r.tier .. ':last', int(now))
end

local function count_start(p, request, r, engine, now, light, line)
  redis.call('SADD', p .. 'engreq:' .. engine, request)
  fair_run(p, r, 1)
  fair_passed(p, r, light, line)
  measure_drain(p, r, now)
end

local function start(p, request, r, engine, now, light, line)
  redis.call('HSET', p .. 'req:' .. request, 'state', 'running', 'engine', engine, 'pulled', int(now),
    'attempts', int(tonumber(r.attempts) + 1))
  redis.call('ZREM', p .. 'expiry', request)
  count_depth(p, r, -1)
  count_start(p, request, r, engine, now, light, line)
end

-- A head that can hardly be served in time any more goes to its tenant's queue of late ones, out of the way of the others.
local function relegate(p, request, r, work)
  drop_entry(p, r.stream, r.entry)
  count_depth(p, r, -1)  -- enqueue counts it again
  r.member = '!' .. r.tenant
  enqueue(p, request, r, work)
  wake(p, r.pool)
  redis.call('HSET', p .. 'req:' .. request, 'member', r.member, 'stream', r.stream)
end

-- Take the head of one queue. Record and work, or nil when the entry was no startable request.
local function take(p, pool, tier, member, engine, now, light, line)
  local stream = p .. 'q:' .. pool .. ':' .. tier .. ':' .. member
  local entry, request, work = read_head(stream, engine)
  if not entry then
    redis.call('ZREM', ready_key(p, pool, tier, member), member)
    return nil
  end
  local queue = {pool = pool, tier = tier, member = member, stream = stream}
  move_head(p, queue, string.match(entry, '^%d+'))
  local r = record_of(p, request)
  if not r then
    drop_entry(p, stream, entry)
  elseif r.state == 'queued' and r.entry == entry then
    if tonumber(r.expires) > 0 and tonumber(r.expires) <= now then
      expire(p, request, r)
    elseif not light and is_late(r, now) then
      relegate(p, request, r, work)
    else
      start(p, request, r, engine, now, light, line)
      return r, work
    end
  end
end

local function read_controls(p, engine)
  local controls = {}
  for _, entry in ipairs(redis.call('XRANGE', p .. 'ctl:' .. engine, '-', '+')) do controls[#controls + 1] = entry[2][2] end
  if #controls > 0 then redis.call('DEL', p .. 'ctl:' .. engine) end
  return controls
end

-- The tiers' credit is room in the same engine, so each work takes from all, those included that nobody has asked for yet: what
-- is left may stand. A request of more choices than there is credit is still taken: else it would wait for ever at the head.
local function spend(p, r, credit)
  for _, tier in ipairs(redis.call('ZRANGE', p .. 'tiers:' .. r.pool, 0, -1)) do credit[tier] = credit[tier] or 0 end
  for tier, slots in pairs(credit) do
    if kind_of(tier) ~= '+' then credit[tier] = slots - tonumber(r.choices) end
  end
end

-- What the queue serves next, for this credit: false when that was no startable request, nil when credit or queue is used up.
local function take_next(p, pool, engine, credit, lines, now)
  local tier, member, by_floor, express, light = fair_pick(p, pool, credit, lines)
  if not tier then return nil end
  local r, work = take(p, pool, tier, member, engine, now, light, lines[tier])
  if not r then return false end
  if express then credit[express] = credit[express] - tonumber(r.choices) else spend(p, r, credit) end
  if r.attempts == '0' then fair_charge(p, pool, tier, r.tenant, tonumber(r.prompt) * UNIT) end
  return {r = r, work = work, by_floor = by_floor, light = light and 1 or 0}
end

-- The pool's deficits and the counters of those whose requests were taken.
local function accounts_after(p, pool, taken)
  local accounts = {}
  for _, one in ipairs(taken) do
    local account = one.r.tier .. ':' .. one.r.tenant
    accounts[account] = real(counter_of(p, pool, account) / UNIT)
  end
  local deficits = redis.call('HGETALL', p .. 'deficit:' .. pool)
  for i = 1, #deficits, 2 do accounts[deficits[i]] = real(tonumber(deficits[i + 1]) / UNIT) end
  return accounts
end

-- A standing pull: an engine that waits says what it would take, and an admission pulls for it. Its request travels on the
-- engine's channel, and only while that has a listener: a killed engine has none, as it has no blocked read of a wake list.

-- What is left of its credit stands, if it has room for so many tokens more.
local function stand(p, pool, engine, credit, tokens, until_ms, turn)
  local most = 0
  for _, slots in pairs(credit) do most = math.max(most, slots) end
  if most <= 0 or tokens <= 0 then return withdraw(p, pool, engine) end
  redis.call('ZADD', p .. 'standing:' .. pool, turn, engine)
  redis.call('HSET', p .. 'credit:' .. pool, engine, cjson.encode({credit = credit, tokens = tokens, ['until'] = until_ms}))
end

-- The engine whose turn it is, and what it would take.
local function next_standing(p, pool, now)
  for _ = 1, STANDING_LOOKS do
    local engine = redis.call('ZRANGE', p .. 'standing:' .. pool, 0, 0)[1]
    if not engine then return nil end
    local kept = redis.call('HGET', p .. 'credit:' .. pool, engine)
    local standing = kept and cjson.decode(kept)
    if standing and standing['until'] > now and redis.call('PUBSUB', 'NUMSUB', p .. 'hand:' .. engine)[2] > 0 then
      return engine, standing
    end
    withdraw(p, pool, engine)
  end
end

local function hand(p, pool, engine, standing, one)
  local head = {epoch = tonumber(one.r.epoch), by_floor = one.by_floor, light = one.light}
  head.accounts = accounts_after(p, pool, {one})
  redis.call('PUBLISH', p .. 'hand:' .. engine, cjson.encode(head) .. '\n' .. one.work)
  -- The next one is another engine's turn.
  stand(p, pool, engine, standing.credit, standing.tokens - tonumber(one.r.prompt), standing['until'], one.r.arrival)
end

-- Pull for this engine. The request that it was handed, if any.
local function hand_next(p, pool, engine, standing, now)
  local lines = fair_lines(p, pool, standing.credit)
  for _ = 1, STANDING_LOOKS do
    local one = take_next(p, pool, engine, standing.credit, lines, now)
    if one == nil then return nil end
    if one then
      hand(p, pool, engine, standing, one)
      return one.r
    end
  end
end

-- The newcomer is all that waits in its pool, and the engine has a row for its tier: then it is what a pull would bring.
local function is_alone(p, r, standing, now)
  local expired = tonumber(r.expires) > 0 and tonumber(r.expires) <= now
  return (standing.credit[r.tier] or 0) > 0 and not expired and redis.call('HLEN', p .. 'depth:' .. r.pool) == 0
end

-- What queueing it and pulling it at once would come to, in half the time.
local function hand_newcomer(p, request, r, work, engine, standing, now)
  local line = line_of(p, r.pool, r.tier, standing.credit)
  local light, floor = is_light(p, r.pool, r.tier, r.member, line), floor_of(tonumber(r.rank))
  local due = floor > 0 and (tonumber(redis.call('HGET', p .. 'deficit:' .. r.pool, r.tier)) or 0) >= QUANTUM
  add_entry(p, request, r, work, true)
  r.state, r.engine, r.pulled, r.attempts = 'running', engine, int(now), '1'
  save_record(p, request, r)
  count_start(p, request, r, engine, now, light, line)
  spend(p, r, standing.credit)
  fair_charge(p, r.pool, r.tier, r.tenant, tonumber(r.prompt) * UNIT, {})
  hand(p, r.pool, engine, standing, {r = r, work = work, by_floor = due and 1 or 0, light = light and 1 or 0})
end

-- Into the queue, or past it to an engine that waits. How many more are queued in its tier then.
local function place(p, request, r, work, now)
  local engine, standing
  if #work <= HANDED_BYTES then engine, standing = next_standing(p, r.pool, now) end
  if engine and is_alone(p, r, standing, now) then
    hand_newcomer(p, request, r, work, engine, standing, now)
    return 0
  end
  enqueue(p, request, r, work)
  save_record(p, request, r)
  local handed = engine and hand_next(p, r.pool, engine, standing, now)
  if not handed or handed.arrival ~= r.arrival then wake(p, r.pool) end
  return (handed and handed.tier == r.tier) and 0 or 1
end

-- admit(prefix, admission, work)

local function admit(_, args)
  local p, a, work = args[1], cjson.decode(args[2]), args[3]
  local now = clock(p)
  local depth = tonumber(redis.call('HGET', p .. 'depth:' .. a.pool, a.tier)) or 0
  -- The caller's connection broke after the first try was committed: the same answer, nothing twice.
  if redis.call('EXISTS', p .. 'req:' .. a.request) == 1 then return cjson.encode({code = 'ok', depth = depth}) end
  local rows, levels, short, wait_s = fill_buckets(p, a, now)
  local code, detail, retry = check_all(p, a, depth, short, wait_s, now)
  if not code then
    local r = commit_admission(p, a, levels, now)
    code, detail, depth = 'ok', '', depth + place(p, a.request, r, work, now)
  end
  return cjson.encode({code = code, depth = depth, retry_after_s = retry or cjson.null, detail = detail or '', limits = rows})
end

-- Requests that are on their way to an engine were not in its books when it offered this credit. They take its rows from
-- every tier at once, and when that is not enough those under '+'.
local function less_what_comes(p, engine, known, credit)
  local coming, most, express = redis.call('SCARD', p .. 'engreq:' .. engine) - known, 0, credit['+'] or 0
  if coming <= 0 then return end
  for tier, slots in pairs(credit) do
    if kind_of(tier) ~= '+' then credit[tier], most = slots - coming, math.max(most, slots) end
  end
  credit['+'] = math.min(express, math.max(0, most + express - coming))
end

-- pull(prefix, pool, engine, credit, lease_ms, tokens, known)

local function pull(_, args)
  local p, pool, engine, credit, lease_ms = args[1], args[2], args[3], cjson.decode(args[4]), tonumber(args[5])
  local tokens, known = tonumber(args[6] or 0), tonumber(args[7] or -1)
  if not redis.call('ZSCORE', p .. 'engines:' .. pool, engine) then return {{}, {}, ''} end
  local now = clock(p)
  redis.call('ZADD', p .. 'engines:' .. pool, int(now + lease_ms), engine)
  if known >= 0 then less_what_comes(p, engine, known, credit) end
  local taken, works, lines = {}, {}, fair_lines(p, pool, credit)
  for _ = 1, SCAN_LIMIT do
    local one = take_next(p, pool, engine, credit, lines, now)
    if one == nil then break end
    if one then
      taken[#taken + 1], works[#works + 1] = one, {one.work, tonumber(one.r.epoch), one.by_floor, one.light}
      tokens = tokens - tonumber(one.r.prompt)
    end
  end
  if tokens > 0 then
    local turn = redis.call('ZSCORE', p .. 'standing:' .. pool, engine) or redis.call('GET', p .. 'arrivals') or 0
    stand(p, pool, engine, credit, tokens, now + STANDING_MS, turn)
  else
    withdraw(p, pool, engine)
  end
  return {works, read_controls(p, engine), cjson.encode(accounts_after(p, pool, taken))}
end

-- register(prefix, pool, engine, card_hash, card, lease_ms), leave(prefix, pool, engine)

local function register(_, args)
  local p, pool, engine, card_hash, card, lease_ms = args[1], args[2], args[3], args[4], args[5], tonumber(args[6])
  local now = clock(p)
  local key = p .. 'engines:' .. pool
  local live = redis.call('ZCOUNT', key, '(' .. int(now), '+inf')
  local mine = redis.call('ZSCORE', key, engine)
  if mine and tonumber(mine) > now then live = live - 1 end
  if live > 0 and redis.call('HGET', p .. 'pools', pool) ~= card_hash then return 'card_mismatch' end
  -- Whoever had this id before knows nothing of its requests any more: registering is always a fresh start.
  lose_requests(p, pool, engine, now)
  redis.call('SET', p .. 'era', int(now) .. ':' .. engine, 'NX')
  redis.call('HSET', p .. 'pools', pool, card_hash)
  redis.call('SET', p .. 'card:' .. pool, card)
  redis.call('ZADD', key, int(now + lease_ms), engine)
  return 'ok'
end

local function leave(_, args)
  local p, pool, engine = args[1], args[2], args[3]
  redis.call('ZREM', p .. 'engines:' .. pool, engine)
  lose_requests(p, pool, engine, clock(p))
  return 'ok'
end

-- renew(prefix, gateway, lease_ms)

local function renew(_, args)
  local p, gateway, lease_ms = args[1], args[2], tonumber(args[3])
  open_gateway(p, gateway, clock(p) + lease_ms)
  return redis.call('ZREM', p .. 'reaped', gateway) == 1 and 0 or 1
end

-- charge(prefix, pool, charges)

local function charge(_, args)
  local p, pool, charges = args[1], args[2], cjson.decode(args[3])
  for _, c in ipairs(charges) do fair_charge(p, pool, c[1], c[2], math.floor(c[3] * UNIT + 0.5)) end
  return 'ok'
end

-- account(prefix, tenant, generation, balance_nano or '', sequence)

local function set_balance(p, tenant, balance, sequence)
  if balance == '' then return false end
  local key = p .. 'acct:' .. tenant
  local known = redis.call('HGET', key, 'sequence')
  if known and tonumber(known) >= tonumber(sequence) then return false end
  redis.call('HSET', key, 'balance', balance, 'sequence', sequence)
  return true
end

local function account(_, args)
  local p, tenant, generation, balance, sequence = args[1], args[2], args[3], args[4], args[5]
  local key = p .. 'acct:' .. tenant
  local known = redis.call('HGET', key, 'generation')
  if not known or tonumber(known) < tonumber(generation) then redis.call('HSET', key, 'generation', generation) end
  return set_balance(p, tenant, balance, sequence) and 1 or 0
end

-- cancel(prefix, request, reason)

local function cancel(_, args)
  local p, request, reason = args[1], args[2], args[3]
  local r = record_of(p, request)
  if not r then return 'unknown' end
  if r.state == 'queued' and tonumber(r.attempts) > 0 then
    -- Re-queued: it has computed and delivered tokens, so its gateway must end it with a Final.
    leave_queue(p, request, r)
    redis.call('HSET', p .. 'req:' .. request, 'state', 'lost')
    return 'lost'
  elseif r.state == 'queued' then
    unqueue(p, request, r)
    return 'queued'
  elseif r.state == 'running' then
    redis.call('HSET', p .. 'req:' .. request, 'cancel', reason)
    order(p, r.engine, 'cancel', request, reason)
    return 'running'
  end
  return 'unknown'
end

-- finish(prefix, request, epoch, final), declare(prefix, request, final), close(prefix, request, tenant, balance, sequence)

local SERVED = {stop = true, length = true}

local function finish(_, args)
  local p, request, epoch, final = args[1], args[2], tonumber(args[3]), args[4]
  local r = record_of(p, request)
  if not r or (r.state ~= 'running' and r.state ~= 'lost') or tonumber(r.epoch) ~= epoch then return 0 end
  local reason = cmsgpack.unpack(final)[7]
  conclude(p, request, r, final, SERVED[reason] or false, clock(p))
  return 1
end

-- A Final whose record went with a wiped Redis. Settlement is by request id, so telling it twice is harmless.
local function declare(_, args)
  local p, request, final = args[1], args[2], args[3]
  if redis.call('EXISTS', p .. 'req:' .. request) == 1 then return 0 end
  redis.call('XADD', p .. 'usage', '*', 'f', final)
  return 1
end

local function close(_, args)
  local p, request, tenant, balance, sequence = args[1], args[2], args[3], args[4], args[5]
  set_balance(p, tenant, balance, sequence)
  local r = record_of(p, request)
  if not r then return 0 end
  if r.state == 'queued' then
    unqueue(p, request, r)
    return 1
  end
  -- It is settled, so it is over, even where Redis (restored from an older file) still believes that it runs.
  if r.state ~= 'finished' then
    drop_entry(p, r.stream, r.entry)
    free_slots(p, request, r)
    settle_claim(p, request, r, false)
  end
  unhold(p, r)
  redis.call('DEL', p .. 'req:' .. request)
  return 1
end

-- requeue(prefix, request, epoch, work, max_attempts)

-- A lost request goes back to the queue at its old place, in a queue of its own (a stream can't take an old id).
local function requeue(_, args)
  local p, request, epoch, work, max_attempts = args[1], args[2], tonumber(args[3]), args[4], tonumber(args[5])
  local r = record_of(p, request)
  if not r or r.state ~= 'lost' or tonumber(r.epoch) ~= epoch then return 'stale' end
  if tonumber(r.attempts) >= max_attempts then
    local kept = #work <= DEAD_WORK_BYTES and work or ''  -- a thousand works with images would fill the memory
    redis.call('XADD', p .. 'dead', 'MAXLEN', DEAD_LENGTH, '*', 'r', request, 'w', kept, 'engine', r.engine)
    return 'poison'
  end
  drop_entry(p, r.stream, r.entry)
  r.member, r.expires = '~' .. request, '0'
  enqueue(p, request, r, work)
  wake(p, r.pool)
  redis.call('HSET', p .. 'req:' .. request, 'state', 'queued', 'member', r.member, 'stream', r.stream, 'entry', r.entry,
    'expires', '0')
  return 'queued'
end

-- release(prefix, request, gateway, turn, how), adopt(prefix, request, tenant, gateway)

-- The client of a resumable request is gone (`park`), was told the end (`told`), or did not come back (`drop`). Only the
-- owner's word counts: `moved` when another has adopted it since.
local function release(_, args)
  local p, request, gateway, turn, how = args[1], args[2], args[3], args[4], args[5]
  local key = p .. 'resume:' .. request
  local owner = redis.call('HMGET', key, 'gateway', 'turn')
  if not owner[1] then return 'unknown' end
  if owner[1] ~= gateway or owner[2] ~= turn then return 'moved' end
  local r = record_of(p, request)
  if how == 'drop' then
    forget_answer(p, request)
  elseif how == 'told' then
    redis.call('HSET', key, 'told', '1')
  elseif r and r.state ~= 'finished' then
    redis.call('ZADD', p .. 'grace', int(clock(p) + GRACE_MS), request)
  end
  return 'ok'
end

-- The gateway goes on with a resumable request: (turn, what was asked, told); nothing when there is none of that tenant. Who
-- had it before is told. A higher turn is a later owner.
local function adopt(_, args)
  local p, request, tenant, gateway = args[1], args[2], args[3], args[4]
  local key = p .. 'resume:' .. request
  local kept = redis.call('HMGET', key, 'tenant', 'gateway', 'turn', 'ask', 'told')
  local r = record_of(p, request)
  if kept[1] ~= tenant or (r and r.cancel) then return {} end
  local turn = tonumber(kept[3]) + 1
  redis.call('HSET', key, 'gateway', gateway, 'turn', int(turn))
  if kept[2] ~= gateway then
    local old = {gateway = kept[2], epoch = r and r.epoch or '0'}
    reply_error(p, request, old, 'stream_moved', 'another connection goes on with this request', turn)
  end
  if r and (r.state == 'queued' or r.state == 'running') then
    redis.call('SREM', p .. 'gwreq:' .. r.gateway, request)
    redis.call('SADD', p .. 'gwreq:' .. gateway, request)
    redis.call('HSET', p .. 'req:' .. request, 'gateway', gateway)
    redis.call('ZREM', p .. 'grace', request)
  end
  return {turn, kept[4], kept[5] and 1 or 0}
end

-- reap(prefix, max_attempts)

-- Nobody came back for it.
local function end_grace(p, request, now)
  redis.call('ZREM', p .. 'grace', request)
  local r = record_of(p, request)
  if r and r.state == 'queued' and tonumber(r.attempts) == 0 then
    unqueue(p, request, r)
  elseif r and r.state == 'queued' then
    leave_queue(p, request, r)
    conclude(p, request, r, final_of_orphan(request, r, now), false, now)
  elseif r and r.state == 'running' then
    redis.call('HSET', p .. 'req:' .. request, 'cancel', 'client_disconnected')
    order(p, r.engine, 'cancel', request, 'client_disconnected')
  end
  forget_answer(p, request)
end

-- Another gateway may go on with it.
local function orphan(p, request, now)
  redis.call('HSET', p .. 'req:' .. request, 'gateway', '')
  if redis.call('EXISTS', p .. 'resume:' .. request) == 1 then redis.call('HSET', p .. 'resume:' .. request, 'gateway', '') end
  redis.call('ZADD', p .. 'grace', 'NX', int(now + GRACE_MS), request)
end

local function reap_gateway(p, gateway, now)
  local aborted = {}
  for _, request in ipairs(sorted_members(p .. 'gwreq:' .. gateway)) do
    local r = record_of(p, request)
    local waits = r and r.state == 'queued' and tonumber(r.attempts) == 0
    local resumable = r and r.resumable and not r.cancel and (waits or r.state == 'running')
    if resumable then
      orphan(p, request, now)
    elseif waits then
      unqueue(p, request, r)
    elseif r and r.state == 'running' then
      -- No gateway owns it any more, not even one that comes back under the same id.
      redis.call('HSET', p .. 'req:' .. request, 'cancel', 'gateway_lost', 'gateway', '')
      order(p, r.engine, 'cancel', request, 'gateway_lost')
    elseif r and (r.state == 'lost' or r.state == 'queued') then
      if r.state == 'queued' then leave_queue(p, request, r) end
      conclude(p, request, r, final_of_orphan(request, r, now), false, now)
    end
    if r and not resumable then table.insert(aborted, request) end
  end
  redis.call('ZREM', p .. 'gateways', gateway)
  redis.call('ZADD', p .. 'reaped', int(now), gateway)
  redis.call('DEL', p .. 'gwreq:' .. gateway, p .. 'replies:' .. gateway)
  return aborted
end

local function armed(p, now)
  local key = p .. 'tick'
  local tick = redis.call('HMGET', key, 'at', 'armed')
  local since = tonumber(tick[2])
  if not tick[1] or now - tonumber(tick[1]) > TICK_LEASE_MS then since = now + TICK_LEASE_MS end
  redis.call('HSET', key, 'at', int(now), 'armed', int(since))
  return now >= since
end

local function append(target, items)
  for _, item in ipairs(items) do target[#target + 1] = item end
end

local function reap(_, args)
  local p = args[1]
  local now = clock(p)
  local engines, gateways, lost, aborted = {}, {}, {}, {}
  for _, request in ipairs(redis.call('ZRANGE', p .. 'expiry', '-inf', int(now), 'BYSCORE', 'LIMIT', 0, REAP_LIMIT)) do
    local r = record_of(p, request)
    if r and r.state == 'queued' then expire(p, request, r) else redis.call('ZREM', p .. 'expiry', request) end
  end
  for _, request in ipairs(redis.call('ZRANGE', p .. 'grace', '-inf', int(now), 'BYSCORE', 'LIMIT', 0, REAP_LIMIT)) do
    end_grace(p, request, now)
  end
  if not armed(p, now) then return {engines, gateways, lost, aborted} end
  redis.call('ZREMRANGEBYSCORE', p .. 'reaped', '-inf', int(now - REMEMBER_REAPED_MS))
  for _, gateway in ipairs(redis.call('ZRANGE', p .. 'gateways', '-inf', int(now), 'BYSCORE')) do
    gateways[#gateways + 1] = gateway
    append(aborted, reap_gateway(p, gateway, now))
  end
  local pools = redis.call('HKEYS', p .. 'pools')
  table.sort(pools)
  for _, pool in ipairs(pools) do
    for _, engine in ipairs(redis.call('ZRANGE', p .. 'engines:' .. pool, '-inf', int(now), 'BYSCORE')) do
      engines[#engines + 1] = engine
      redis.call('ZREM', p .. 'engines:' .. pool, engine)
      append(lost, lose_requests(p, pool, engine, now))
    end
  end
  return {engines, gateways, lost, aborted}
end

-- Whoever comes first writes which layout the keys under this prefix have; no function of another layout touches them.
-- Keys older than this number have layout 1.
local LAYOUT = '{layout}'

local function guarded(act)
  return function(keys, args)
    local p = args[1]
    local found = redis.call('GET', p .. 'layout')
    if not found then
      found = redis.call('EXISTS', p .. 'pools', p .. 'arrivals') > 0 and '1' or LAYOUT
      redis.call('SET', p .. 'layout', found)
    end
    if found ~= LAYOUT then return redis.error_reply('LAYOUT ' .. found) end
    return act(keys, args)
  end
end

-- What frees memory must also work when memory is short.
local FREEING = {'allow-oom'}

redis.register_function('{library}_admit', guarded(admit))
redis.register_function('{library}_pull', guarded(pull))
redis.register_function('{library}_register', guarded(register))
redis.register_function('{library}_renew', guarded(renew))
redis.register_function('{library}_charge', guarded(charge))
redis.register_function('{library}_account', guarded(account))
redis.register_function('{library}_requeue', guarded(requeue))
redis.register_function('{library}_adopt', guarded(adopt))
redis.register_function{function_name = '{library}_release', callback = guarded(release), flags = FREEING}
redis.register_function{function_name = '{library}_leave', callback = guarded(leave), flags = FREEING}
redis.register_function{function_name = '{library}_cancel', callback = guarded(cancel), flags = FREEING}
redis.register_function{function_name = '{library}_finish', callback = guarded(finish), flags = FREEING}
redis.register_function{function_name = '{library}_declare', callback = guarded(declare), flags = FREEING}
redis.register_function{function_name = '{library}_close', callback = guarded(close), flags = FREEING}
redis.register_function{function_name = '{library}_reap', callback = guarded(reap), flags = FREEING}
