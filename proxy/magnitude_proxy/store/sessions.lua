#!lua name=magnitude_sessions_4
-- The session functions. Each touches one key, the hash of one session, so that a cluster can place it anywhere:
--
--   record fields    epoch steps prompt_tokens completion_tokens cached_tokens failures state route finish_reason
--                    created seen tenant source raw line
--   advice           what the agent's author was told last of the session ids
--   since_…          answered steps, tokens and Unix time at the beginning of the run that the limits count
--   max_…            the session's limits as its client set them
--   extra_…          answered steps, and tokens, of leases that came to their end fenced: they count for the limits only
--   lease:<branch>   token of the branch's last lease, until it commits
--   fenced:<epoch>   token of one that a later lease of its branch has fenced, until it comes to its end
--   branch:<name>    a branch that was forked: its state, `|`, the rest as JSON (see `branches.py`)
--   branch_version   counts the changes of branches
--   branch_limit     most open branches, where the client asked for that
--   step:<n>         what is kept of step n for later feedback, where the client asked for that
--   dead:<n>         why step n came to nothing, where the agent said so
--   said:<id>        feedback: 1 once it stands in the tenant's stream, else 0; Unix time; the rest as JSON
--
-- Of steps and feedback the last KEPT are kept. Functions that take a tenant treat another tenant's session as none.
--
-- A token is <run id>.<nonce>.<epoch>. The run id names this server process and the nonce is never reused: neither a
-- flushed store nor a replica that was promoted without the last writes can hold, or give out again, an old token.

local FIELDS = {'epoch', 'steps', 'prompt_tokens', 'completion_tokens', 'cached_tokens', 'failures', 'state', 'route',
                'finish_reason', 'created', 'seen', 'tenant', 'source', 'raw', 'line',
                'since_steps', 'since_tokens', 'since_s', 'max_iterations', 'max_tokens', 'max_seconds', 'max_repeats',
                'extra_steps', 'extra_tokens'}
local LIMITS = {'max_iterations', 'max_tokens', 'max_seconds', 'max_repeats'}
local USED = {'steps', 'failures', 'prompt_tokens', 'completion_tokens', 'since_steps', 'since_tokens', 'since_s',
              'created', 'extra_steps', 'extra_tokens'}
local MAX_LEASES = 512
local KEPT = 64

local run_id = nil

local function server()
  if not run_id then
    run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  end
  return run_id
end

-- Returns the field of a lease once it is fenced.
local function fenced(token)
  return 'fenced:' .. (string.match(token, '(%d+)$') or '')
end

-- Drops leases that never committed, so that no session holds more than twice MAX_LEASES.
local function sweep(key, epoch)
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local kind = string.match(all[i], '^(%l+):')
    local counter = (kind == 'lease' or kind == 'fenced') and tonumber(string.match(all[i + 1], '(%d+)$'))
    if counter and counter < epoch - MAX_LEASES then
      redis.call('HDEL', key, all[i])
    end
  end
end

-- Returns why a branch can be neither asked nor committed to: its state, '' where only a fork gives such a name and
-- none did; nil where it can.
local function closed(key, branch)
  if branch == 'main' then
    return nil
  end
  local note = redis.call('HGET', key, 'branch:' .. branch)
  if not note then
    return string.sub(branch, 1, 4) == 'mbr-' and '' or nil
  end
  local state = string.match(note, '^(%l+)|')
  return state ~= 'open' and state or nil
end

-- Returns the limit that a session has reached, or nil and the fields that its next step sets. The arguments are those
-- of `open`; `begun` in record.py is the same.
local function begun(key, args)
  local at, now = {}, tonumber(args[3])
  for i, value in ipairs(redis.call('HMGET', key, unpack(USED))) do
    at[USED[i]] = tonumber(value or 0)
  end
  local own = redis.call('HMGET', key, unpack(LIMITS))
  local answered = at.steps - at.failures + at.extra_steps
  local tokens = at.prompt_tokens + at.completion_tokens + at.extra_tokens
  local began = at.since_s > 0 and at.since_s or at.created > 0 and at.created or now
  local used = {answered - at.since_steps, tokens - at.since_tokens, now - began, tonumber(args[17] or 0)}
  local changed = {}
  if args[18] == '1' then
    used = {0, 0, 0, used[4]}
    changed = {'since_steps', answered, 'since_tokens', tokens, 'since_s', args[3]}
  end
  for i, name in ipairs(LIMITS) do
    local server, asked, most = tonumber(args[8 + i] or ''), tonumber(args[12 + i] or ''), tonumber(own[i] or '')
    if asked and (not most or asked < most) then
      most = asked
      changed[#changed + 1] = name
      changed[#changed + 1] = args[12 + i]
    end
    if (server and used[i] >= server) or (most and used[i] >= most) then
      return name
    end
  end
  return nil, changed
end

-- KEYS: session. ARGV: branch, nonce, Unix time, milliseconds to live, tenant, source, raw id, advice, the server's
-- four LIMITS and the client's ('' for none), repeated calls, 1 where a run begins. Returns the token, then the
-- record's FIELDS; where a limit is reached '', the FIELDS, and the limit's name; only why where the branch is closed.
-- Either changes nothing.
local function open(keys, args)
  local key = keys[1]
  local reason = closed(key, args[1])
  if reason then
    return {reason}
  end
  local reached, changed = begun(key, args)
  if reached then
    return {'', redis.call('HMGET', key, unpack(FIELDS)), reached}
  end
  if #changed > 0 then
    redis.call('HSET', key, unpack(changed))
  end
  local epoch = redis.call('HINCRBY', key, 'epoch', 1)
  local token = server() .. '.' .. args[2] .. '.' .. epoch
  if epoch == 1 then
    redis.call('HSET', key, 'created', args[3], 'source', args[6], 'raw', args[7])
  end
  local before = redis.call('HGET', key, 'lease:' .. args[1])
  if before then
    redis.call('HSET', key, fenced(before), before)
  end
  redis.call('HSET', key, 'state', 'thinking', 'seen', args[3], 'tenant', args[5], 'lease:' .. args[1], token)
  if (args[8] or '') ~= '' then
    redis.call('HSET', key, 'advice', args[8])
  end
  if epoch % MAX_LEASES == 0 then
    sweep(key, epoch)
  end
  redis.call('PEXPIRE', key, args[4])
  return {token, redis.call('HMGET', key, unpack(FIELDS))}
end

-- KEYS: session. ARGV: branch, token, Unix time, milliseconds to live, prompt, completion and cached tokens, failures,
-- state, route, finish reason, what to keep of the step, steps that this is (0 for a call beside them). Returns 1 when
-- it was added, 0 when the token is not the branch's lease, -1 when the branch was pruned meanwhile. Of a lease that a
-- later one has fenced only what the limits count is added, once.
local function commit(keys, args)
  local key = keys[1]
  local lease = 'lease:' .. args[1]
  if redis.call('HGET', key, lease) ~= args[2] then
    if redis.call('HGET', key, fenced(args[2])) == args[2] then
      redis.call('HDEL', key, fenced(args[2]))
      redis.call('HINCRBY', key, 'extra_steps', (args[13] or 1) - args[8])
      redis.call('HINCRBY', key, 'extra_tokens', args[5] + args[6])
    end
    return closed(key, args[1]) == 'pruned' and -1 or 0
  end
  redis.call('HDEL', key, lease)
  local step = redis.call('HINCRBY', key, 'steps', args[13] or 1) - 1
  redis.call('HDEL', key, 'step:' .. (step - KEPT), 'dead:' .. (step - KEPT))
  if args[12] ~= '' then
    redis.call('HSET', key, 'step:' .. step, args[12])
  end
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

local function owned(key, tenant)
  return redis.call('HGET', key, 'tenant') == tenant
end

-- Returns how many feedbacks a session holds, and the field and time of the earliest.
local function feedbacks(key)
  local count, field, at = 0, nil, nil
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 5) == 'said:' then
      local when = tonumber(string.match(all[i + 1], '^%d|([^|]+)|'))
      count = count + 1
      if not at or when < at or (when == at and all[i] < field) then
        field, at = all[i], when
      end
    end
  end
  return count, field, at
end

-- KEYS: session. ARGV: tenant, id of the feedback, its Unix time, the rest. Returns what became of it and the steps:
-- `unknown` (no such session), `known`, `pending` (kept, perhaps not in the stream), `old` (KEPT later ones are kept)
-- or `added`.
local function feedback(keys, args)
  local key, field, at = keys[1], 'said:' .. args[2], tonumber(args[3])
  if not owned(key, args[1]) then
    return {'unknown', 0}
  end
  local steps = tonumber(redis.call('HGET', key, 'steps') or 0)
  local held = redis.call('HGET', key, field)
  if held then
    return {string.sub(held, 1, 1) == '1' and 'known' or 'pending', steps}
  end
  local count, earliest, since = feedbacks(key)
  if count >= KEPT then
    if at < since or (at == since and field < earliest) then
      return {'old', steps}
    end
    redis.call('HDEL', key, earliest)
  end
  redis.call('HSET', key, field, '0|' .. args[3] .. '|' .. args[4])
  return {'added', steps}
end

-- KEYS: session. ARGV: id of a feedback that now stands in the stream.
local function settle(keys, args)
  local field = 'said:' .. args[1]
  local held = redis.call('HGET', keys[1], field)
  if held then
    redis.call('HSET', keys[1], field, '1' .. string.sub(held, 2))
  end
  return held and 1 or 0
end

-- KEYS: session. ARGV: tenant, step or '' for the last, reason. Returns the step, -1 without such a session, -2 where
-- it is none of the last KEPT steps.
local function fail(keys, args)
  local key = keys[1]
  if not owned(key, args[1]) then
    return -1
  end
  local steps = tonumber(redis.call('HGET', key, 'steps') or 0)
  local step = args[2] == '' and steps - 1 or tonumber(args[2])
  if step < 0 or step >= steps or step < steps - KEPT then
    return -2
  end
  redis.call('HSET', key, 'dead:' .. step, args[3], 'state', 'failed')
  return step
end

-- KEYS: session. ARGV: tenant. Returns 1 when the session was there; it no longer is, and no lease of it can commit.
local function finish(keys, args)
  if not owned(keys[1], args[1]) then
    return 0
  end
  return redis.call('DEL', keys[1])
end

-- KEYS: session. ARGV: tenant, the version that was read, the new `line` and limit ('' where they stay), how many leases
-- end, their branches, then names and notes in turn ('' to forget one). Returns 1 when that was done, 0 when the version
-- is another one by now, -1 without such a session.
local function branches(keys, args)
  local key = keys[1]
  if not owned(key, args[1]) then
    return -1
  end
  if (redis.call('HGET', key, 'branch_version') or '0') ~= args[2] then
    return 0
  end
  redis.call('HINCRBY', key, 'branch_version', 1)
  if args[3] ~= '' then
    redis.call('HSET', key, 'line', args[3])
  end
  if args[4] ~= '' then
    redis.call('HSET', key, 'branch_limit', args[4])
  end
  local first = 6 + tonumber(args[5])
  for i = 6, first - 1 do
    redis.call('HDEL', key, 'lease:' .. args[i])
  end
  for i = first, #args, 2 do
    local field = 'branch:' .. args[i]
    if args[i + 1] == '' then
      redis.call('HDEL', key, field)
    else
      redis.call('HSET', key, field, args[i + 1])
    end
  end
  return 1
end

redis.register_function('magnitude_session_open_4', open)
redis.register_function('magnitude_session_commit_4', commit)
redis.register_function{function_name = 'magnitude_session_get_4', callback = get, flags = {'no-writes'}}
redis.register_function('magnitude_session_feedback_4', feedback)
redis.register_function('magnitude_session_settle_4', settle)
redis.register_function('magnitude_session_fail_4', fail)
redis.register_function('magnitude_session_finish_4', finish)
redis.register_function('magnitude_session_branches_4', branches)
