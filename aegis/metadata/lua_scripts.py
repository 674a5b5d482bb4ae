"""Lua scripts that the server runs as one step, because two proxies might race.

Keys and arguments of each are named in its first lines. A script's answers are told apart by their first word.
"""

from __future__ import annotations

ENTER = """
-- keys: schema, cluster, proxy; arguments: schema, cluster, lease_ms, address
local schema = redis.call('GET', KEYS[1])
if schema and schema ~= ARGV[1] then return {'schema', schema, 0} end
local cluster = redis.call('GET', KEYS[2])
if cluster and cluster ~= ARGV[2] then return {'cluster', cluster, redis.call('PTTL', KEYS[2])} end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SET', KEYS[3], ARGV[4], 'PX', ARGV[3])
return {'entered', '', 0}
"""
"""Takes or renews the leases of the cluster and of the proxy. After a loss of all data it writes them anew."""

LEAVE = """
-- keys: cluster; arguments: cluster
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
"""Gives the lease of the cluster back, if it is still its own."""

CLAIM = """
-- keys: request and tokens of each; arguments: owner, ttl_ms, what a proxy's key begins with, then of each, as many of
--       one as of another: fingerprint, 'again' or '', names and values of what else is recorded
local each = (#ARGV - 3) / (#KEYS / 2)
local function claim(request, tokens, first)
  local found = redis.call('HMGET', request, 'fingerprint', 'state', 'owner', 'seed')
  local fingerprint, state, owner, seed = found[1], found[2], found[3], found[4]
  if fingerprint and fingerprint ~= ARGV[first] then return {'different', '', {}} end
  if state == 'finished' and ARGV[first + 1] == '' then
    return {'finished', seed, redis.call('LRANGE', tokens, 0, -1)}
  end
  if state == 'running' and owner ~= ARGV[1] and redis.call('EXISTS', ARGV[3] .. owner) == 1 then
    return {'running', owner, {}}
  end
  local word = 'taken'
  if not fingerprint then
    word = 'new'
    redis.call('DEL', tokens)
    redis.call('HSET', request, 'fingerprint', ARGV[first], unpack(ARGV, first + 2, first + each - 1))
    seed = redis.call('HGET', request, 'seed')
  end
  redis.call('HSET', request, 'state', 'running', 'owner', ARGV[1])
  redis.call('PEXPIRE', request, ARGV[2])
  redis.call('PEXPIRE', tokens, ARGV[2])
  return {word, seed, redis.call('LRANGE', tokens, 0, -1)}
end
local answers = {}
for i = 1, #KEYS, 2 do
  local told, answer = pcall(claim, KEYS[i], KEYS[i + 1], 4 + (i - 1) / 2 * each)
  -- before Redis 7 an error is its text
  if not told then answer = {'failed', type(answer) == 'table' and answer.err or answer, {}} end
  answers[#answers + 1] = answer
end
return answers
"""
"""The proxy that asks becomes the owner of each request, unless it is finished or a living proxy is at work on it.
Requests that ended otherwise, and those of a dead proxy, go on from the tokens recorded. One that fails, fails
alone."""

GIVE_BACK = """
-- keys: requests; arguments: owner
for _, request in ipairs(KEYS) do
  local found = redis.call('HMGET', request, 'owner', 'state')
  if found[1] == ARGV[1] and found[2] == 'running' then redis.call('HSET', request, 'state', 'cancelled') end
end
"""
"""The next proxy that claims one of them may go on with it."""

APPEND = """
-- keys: request and tokens of each; arguments: owner, ttl_ms, then state and batch of each
local answers = {}
for i = 1, #KEYS, 2 do
  local owner = redis.call('HGET', KEYS[i], 'owner')
  local answer = 'kept'
  if not owner then
    answer = 'gone'
  elseif owner ~= ARGV[1] then
    answer = 'lost'
  else
    if ARGV[i + 3] ~= '' then redis.call('RPUSH', KEYS[i + 1], ARGV[i + 3]) end
    redis.call('HSET', KEYS[i], 'state', ARGV[i + 2])
    redis.call('PEXPIRE', KEYS[i], ARGV[2])
    redis.call('PEXPIRE', KEYS[i + 1], ARGV[2])
  end
  answers[#answers + 1] = answer
end
return answers
"""
"""Appends to many requests at once. Only the owner may: a proxy that was taken for dead does not disturb its
successor."""

CREATE = """
-- keys: request and tokens of each; arguments: owner, ttl_ms, then of each, as many of one as of another: state, batch,
--       names and values of what else is recorded
local each = (#ARGV - 2) / (#KEYS / 2)
local answers = {}
for i = 1, #KEYS, 2 do
  local first = 3 + (i - 1) / 2 * each
  local answer = 'kept'
  local owner = redis.call('HGET', KEYS[i], 'owner')
  if owner and owner ~= ARGV[1] then
    answer = 'lost'
  else
    redis.call('DEL', KEYS[i + 1])
    redis.call('HSET', KEYS[i], 'owner', ARGV[1], 'state', ARGV[first], unpack(ARGV, first + 2, first + each - 1))
    if ARGV[first + 1] ~= '' then redis.call('RPUSH', KEYS[i + 1], ARGV[first + 1]) end
    redis.call('PEXPIRE', KEYS[i], ARGV[2])
    redis.call('PEXPIRE', KEYS[i + 1], ARGV[2])
  end
  answers[#answers + 1] = answer
end
return answers
"""
"""Writes records that were never claimed, and again those that the server lost, unless another proxy has begun them
anew. A command that failed may have been carried out: what it wrote is written again."""

KEEP = """
-- keys: responses; arguments: ttl_ms, then the text of each
for i, response in ipairs(KEYS) do redis.call('SET', response, ARGV[i + 1], 'PX', ARGV[1]) end
"""

PUBLISH = """
-- keys: loads; arguments: lease_ms, then name and load of each instance
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], string.format('%d ', now_ms) .. ARGV[i + 1]) end
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""
"""The server's clock stamps each load, so that no two machines' clocks have to agree."""
