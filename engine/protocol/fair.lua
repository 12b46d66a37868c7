-- The fair queue: which request a pool serves next. Its twin, with the rules F1-F4, is fair.py. Whole numbers only.

local UNIT = 1000                -- counters and deficits are thousandths of a weighted token
local GATE = 64 * UNIT           -- so far above the smallest active counter of its tier a tenant may still go
local QUANTUM = 1024 * UNIT      -- a floor is due once this much is saved up
local DEFICIT_CAP = 8192 * UNIT
local FLOORS = {0, 100, 50}      -- guaranteed share in thousandths, by tier rank; the last holds for all ranks beyond
local HEADS = 256                -- heads of one tier that a choice looks at
local LEAD = 8192 * UNIT         -- a light tenant so far above the least served heavy one has to queue as all do (see lift)
local TENANTS = 1024             -- least served tenants of a tier among whom its rows are shared out
local MISSED = 10                -- rows are kept until no more than so many thousandths of light requests find none
local KEPT = 64                  -- most rows kept in one engine
local LIGHT_EVERY = 16           -- requests over which the part of light ones is averaged
local LATE_EVERY = 16            -- after so many others of its tier a late request goes first

-- Members of a tier's queues: a tenant, "~request" for one that was lost and queued again, "!tenant" for late ones.
local function kind_of(member) return string.sub(member, 1, 1) end

local function thousandths(weight) return math.max(1, math.floor(weight * UNIT + 0.5)) end

local function ready_key(p, pool, tier, member)
  return p .. 'ready:' .. pool .. ':' .. tier .. (kind_of(member) == '!' and '!' or '')
end

local function is_late(r, now)
  local kind, ttft = kind_of(r.member), tonumber(r.ttft)
  return kind ~= '!' and kind ~= '~' and ttft > 0 and 4 * (now - tonumber(r.admitted)) >= 3 * ttft
end

local function floor_of(rank) return FLOORS[math.min(rank, #FLOORS - 1) + 1] end

local function counter_of(p, pool, name) return tonumber(redis.call('HGET', p .. 'vtc:' .. pool, name)) or 0 end

-- Sorted set of the tier's tenants that have any request, by their counter.
local function actives(p, pool, tier) return p .. 'active:' .. pool .. ':' .. tier end

local function least_counter(p, pool, tier)
  return tonumber(redis.call('ZRANGE', actives(p, pool, tier), 0, 0, 'WITHSCORES')[2]) or 0
end

local function add_deficit(p, pool, tier, by)
  local key = p .. 'deficit:' .. pool
  local value = (tonumber(redis.call('HGET', key, tier)) or 0) + by
  redis.call('HSET', key, tier, int(math.max(-DEFICIT_CAP, math.min(DEFICIT_CAP, value))))
end

local function heads(p, pool, tier, late)
  return redis.call('ZRANGE', p .. 'ready:' .. pool .. ':' .. tier .. (late and '!' or ''), 0, HEADS - 1)
end

-- Who has nothing queued begins at the least counter of those that have. When nobody has, where the tier stands: at the
-- greatest counter in it. Who has something running may stay behind that by LEAD.
local function lift(p, r, name, is_active)
  for _, member in ipairs({r.tenant, '!' .. r.tenant}) do
    if redis.call('ZSCORE', ready_key(p, r.pool, r.tier, member), member) then return end
  end
  local names, level = {}, nil
  for _, late in ipairs({false, true}) do
    for _, member in ipairs(heads(p, r.pool, r.tier, late)) do
      if kind_of(member) ~= '~' then names[#names + 1] = r.tier .. ':' .. (late and string.sub(member, 2) or member) end
    end
  end
  if #names == 0 then names[1] = r.tier .. ':' end
  for _, counter in ipairs(redis.call('HMGET', p .. 'vtc:' .. r.pool, unpack(names))) do
    level = math.min(level or math.huge, tonumber(counter) or 0)
  end
  if is_active then level = level - LEAD end
  redis.call('HSET', p .. 'vtc:' .. r.pool, name, int(math.max(level, counter_of(p, r.pool, name))))
end

-- Rows that the tenant's requests ask for, queued or running: one for each choice.
local function fair_enter(p, r)
  local weights = p .. 'weight:' .. r.pool
  if redis.call('HGET', weights, r.tenant) ~= r.weight then redis.call('HSET', weights, r.tenant, r.weight) end
  local name, key = r.tier .. ':' .. r.tenant, actives(p, r.pool, r.tier)
  local is_active = redis.call('ZSCORE', key, r.tenant)
  if not is_active then redis.call('HDEL', p .. 'asked:' .. r.pool, name) end
  redis.call('HINCRBY', p .. 'asked:' .. r.pool, name, r.choices)
  lift(p, r, name, is_active)
  redis.call('ZADD', key, int(counter_of(p, r.pool, name)), r.tenant)
end

local function fair_leave(p, r)
  local asked = p .. 'asked:' .. r.pool
  local name = r.tier .. ':' .. r.tenant
  if redis.call('HINCRBY', asked, name, -tonumber(r.choices)) > 0 then return end
  redis.call('HDEL', asked, name)
  redis.call('ZREM', actives(p, r.pool, r.tier), r.tenant)
  if redis.call('ZCARD', actives(p, r.pool, r.tier)) > 0 then return end
  redis.call('HDEL', p .. 'rows:' .. r.pool, r.tier)
  local deficit = tonumber(redis.call('HGET', p .. 'deficit:' .. r.pool, r.tier)) or 0
  if deficit > 0 then redis.call('HSET', p .. 'deficit:' .. r.pool, r.tier, '0') end
end

-- It runs (`sign` 1), or no more (-1).
local function fair_run(p, r, sign)
  local key = p .. 'rows:' .. r.pool
  if redis.call('HINCRBY', key, r.tier, sign * tonumber(r.choices)) <= 0 then redis.call('HDEL', key, r.tier) end
end

-- Tiers of a pool that have anything queued, as {name, rank}, best first.
local function queued_tiers(p, pool)
  local flat, found = redis.call('ZRANGE', p .. 'tiers:' .. pool, 0, -1, 'WITHSCORES'), {}
  for i = 1, #flat, 2 do
    local key = p .. 'ready:' .. pool .. ':' .. flat[i]
    if redis.call('EXISTS', key, key .. '!') > 0 then
      found[#found + 1] = {flat[i], tonumber(flat[i + 1])}
    end
  end
  return found
end

-- `tiers`: those with anything queued, where that is known.
local function fair_charge(p, pool, tier, tenant, cost, tiers)
  local name = tier .. ':' .. tenant
  local weight = tonumber(redis.call('HGET', p .. 'weight:' .. pool, tenant)) or UNIT
  local counter = counter_of(p, pool, name) + math.floor(cost * UNIT / weight)
  local greatest = math.max(counter, counter_of(p, pool, tier .. ':'))
  redis.call('HSET', p .. 'vtc:' .. pool, name, int(counter), tier .. ':', int(greatest))
  redis.call('ZADD', actives(p, pool, tier), 'XX', int(counter), tenant)
  for _, t in ipairs(tiers or queued_tiers(p, pool)) do
    if floor_of(t[2]) > 0 then add_deficit(p, pool, t[1], math.floor(cost * floor_of(t[2]) / 1000)) end
  end
  add_deficit(p, pool, tier, -cost)
end

-- By tier: requests pulled since a late one was. Under '+': thousandths that were light tenants' of those pulled lately from
-- tiers with a heavy one. Where there is none all are light, and that says nothing of what a flood would leave them.
local function fair_passed(p, r, light, line)
  local key = p .. 'passed:' .. r.pool
  if kind_of(r.member) == '!' then redis.call('HDEL', key, r.tier) else redis.call('HINCRBY', key, r.tier, 1) end
  if not line.limit then return end
  local part = tonumber(redis.call('HGET', key, '+')) or 0
  redis.call('HSET', key, '+', int(part + math.floor(((light and 1000 or 0) - part) / LIGHT_EVERY)))
end

-- The max-min fair share of a tier's rows, running and offered, and the counter up to which a tenant within it is light (nil:
-- there is no heavy one).
local function line_of(p, pool, tier, credit)
  local members, names = redis.call('ZRANGE', actives(p, pool, tier), 0, TENANTS - 1), {}
  if #members == 0 then return {share = 1} end
  for i, tenant in ipairs(members) do names[i] = tier .. ':' .. tenant end
  local demands, ordered = redis.call('HMGET', p .. 'asked:' .. pool, unpack(names)), {}
  for i, demand in ipairs(demands) do ordered[i] = tonumber(demand) or 0 end
  table.sort(ordered)
  local left = (credit[tier] or 0) + (credit['+'] or 0) + (tonumber(redis.call('HGET', p .. 'rows:' .. pool, tier)) or 0)
  local share
  for i, demand in ipairs(ordered) do
    share = math.max(1, math.floor(left / (#ordered - i + 1)))
    if demand > share then break end
    left = left - demand
  end
  for i, name in ipairs(names) do
    if (tonumber(demands[i]) or 0) > share then return {share = share, limit = counter_of(p, pool, name) + LEAD} end
  end
  return {share = share}
end

-- By tier; nothing when there is no credit, as no choice is made then.
local function fair_lines(p, pool, credit)
  local lines, most = {}, 0
  for _, slots in pairs(credit) do most = math.max(most, slots) end
  if most <= 0 then return lines end
  for _, t in ipairs(queued_tiers(p, pool)) do lines[t[1]] = line_of(p, pool, t[1], credit) end
  return lines
end

local function is_light(p, pool, tier, member, line)
  if kind_of(member) == '~' then return true end
  local name = tier .. ':' .. (kind_of(member) == '!' and string.sub(member, 2) or member)
  if (tonumber(redis.call('HGET', p .. 'asked:' .. pool, name)) or 0) > line.share then return false end
  return not line.limit or counter_of(p, pool, name) <= line.limit
end

-- Rows of an engine that only light tenants may take.
local function kept(p, pool)
  local part, chance = tonumber(redis.call('HGET', p .. 'passed:' .. pool, '+')) or 0, 1000
  for keep = 0, KEPT - 1 do
    if chance <= MISSED then return keep end
    chance = math.floor(chance * part / 1000)
  end
  return KEPT
end

local function choose_of(p, pool, tier, late)
  local limit, best, least = least_counter(p, pool, tier) + GATE, nil, nil
  for _, member in ipairs(heads(p, pool, tier, late)) do
    local counter = counter_of(p, pool, tier .. ':' .. (late and string.sub(member, 2) or member))
    if kind_of(member) == '~' or counter <= limit then return member, true end
    if not best or counter < least then best, least = member, counter end
  end
  return best, false
end

-- Those within the gate before those beyond it, in each those in time before the late ones (but for a late one's turn).
local function choose(p, pool, tier)
  local first = (tonumber(redis.call('HGET', p .. 'passed:' .. pool, tier)) or 0) >= LATE_EVERY
  local one, within = choose_of(p, pool, tier, first)
  if one and within then return one end
  local other, also = choose_of(p, pool, tier, not first)
  if other and (also or not one) then return other end
  return one
end

-- (tier, member, by floor, express, light) of the next request; nil when credit or queue is used up. `express` names the credit
-- for light tenants that it used: '+', or '+tier' for rows that heavy ones have to give up, where there are any; nil: that of the
-- tiers.
local function fair_pick(p, pool, credit, lines)
  local tiers, spare = queued_tiers(p, pool), credit['+'] or 0
  local free = spare > kept(p, pool)
  for _, by_floor in ipairs({1, 0}) do
    for _, t in ipairs(tiers) do
      local due = floor_of(t[2]) > 0 and (tonumber(redis.call('HGET', p .. 'deficit:' .. pool, t[1])) or 0) >= QUANTUM
      local slots = (credit[t[1]] or 0) > 0
      if (slots or free) and (due or by_floor == 0) then
        local member = choose(p, pool, t[1])
        return t[1], member, by_floor, not slots and '+' or nil, is_light(p, pool, t[1], member, lines[t[1]])
      end
    end
  end
  for _, t in ipairs(tiers) do
    local express = spare > 0 and '+' or '+' .. t[1]
    local open = (credit[express] or 0) > 0 and (spare > 0 or lines[t[1]].limit)
    for _, late in ipairs(open and {false, true} or {}) do
      for _, member in ipairs(heads(p, pool, t[1], late)) do
        if is_light(p, pool, t[1], member, lines[t[1]]) then return t[1], member, 0, express, true end
      end
    end
  end
end
