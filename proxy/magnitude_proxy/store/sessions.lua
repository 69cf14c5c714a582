#!lua name=magnitude_sessions_1
-- The session functions. Each touches one key, the hash of one session, so that a cluster can place it anywhere:
--
--   record fields    epoch steps prompt_tokens completion_tokens cached_tokens failures state route finish_reason
--                    created seen
--   lease:<branch>   token of the branch's last lease, until it commits
--
-- A token is <run id>.<nonce>.<epoch>. The run id names this server process and the nonce is never reused: neither a
-- flushed store nor a replica that was promoted without the last writes can hold, or give out again, an old token.

local FIELDS = {'epoch', 'steps', 'prompt_tokens', 'completion_tokens', 'cached_tokens', 'failures', 'state', 'route',
                'finish_reason', 'created', 'seen'}
local MAX_LEASES = 512

local run_id = nil

local function server()
  if not run_id then
    run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  end
  return run_id
end

-- Drops leases that never committed, so that no session holds more than twice MAX_LEASES.
local function sweep(key, epoch)
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local counter = string.sub(all[i], 1, 6) == 'lease:' and tonumber(string.match(all[i + 1], '(%d+)$'))
    if counter and counter < epoch - MAX_LEASES then
      redis.call('HDEL', key, all[i])
    end
  end
end

-- KEYS: session. ARGV: branch, nonce, Unix time, milliseconds to live. Returns the token, then the record's FIELDS.
local function open(keys, args)
  local key = keys[1]
  local epoch = redis.call('HINCRBY', key, 'epoch', 1)
  local token = server() .. '.' .. args[2] .. '.' .. epoch
  if epoch == 1 then
    redis.call('HSET', key, 'created', args[3])
  end
  redis.call('HSET', key, 'state', 'thinking', 'seen', args[3], 'lease:' .. args[1], token)
  if epoch % MAX_LEASES == 0 then
    sweep(key, epoch)
  end
  redis.call('PEXPIRE', key, args[4])
  return {token, redis.call('HMGET', key, unpack(FIELDS))}
end

-- KEYS: session. ARGV: branch, token, Unix time, milliseconds to live, prompt, completion and cached tokens, failures,
-- state, route, finish reason. Returns 1 when the step was added, 0 when the token is not the branch's lease.
local function commit(keys, args)
  local key = keys[1]
  local lease = 'lease:' .. args[1]
  if redis.call('HGET', key, lease) ~= args[2] then
    return 0
  end
  redis.call('HDEL', key, lease)
  redis.call('HINCRBY', key, 'steps', 1)
  redis.call('HINCRBY', key, 'prompt_tokens', args[5])
  redis.call('HINCRBY', key, 'completion_tokens', args[6])
  redis.call('HINCRBY', key, 'cached_tokens', args[7])
  redis.call('HINCRBY', key, 'failures', args[8])
  redis.call('HSET', key, 'seen', args[3], 'state', args[9], 'route', args[10], 'finish_reason', args[11])
  redis.call('PEXPIRE', key, args[4])
  return 1
end

-- KEYS: session. Returns the record's FIELDS, all empty when there is no such session.
local function get(keys, args)
  return redis.call('HMGET', keys[1], unpack(FIELDS))
end

redis.register_function('magnitude_session_open_1', open)
redis.register_function('magnitude_session_commit_1', commit)
redis.register_function{function_name = 'magnitude_session_get_1', callback = get, flags = {'no-writes'}}
