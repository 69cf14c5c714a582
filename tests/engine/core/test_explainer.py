"""What is remembered of sessions' prompts is bounded, forgotten when asked, and kept apart."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from magnitude_engine import api
from magnitude_engine.engine import Engine
from magnitude_engine.explain.cause import Told
from magnitude_engine.explain.memory import MAX_LINES, MAX_MISSES, MAX_SESSIONS, MAX_STEPS, Ledgers, Prompts, size
from magnitude_engine.explain.overlap import pack
from magnitude_engine.kv.retention import SessionKey
from magnitude_engine.model.loader import LoadedModel
from testkit.engine import Recorder, engine_config, generate, run

ASKED = api.AskMisses(request="m", epoch=0, tenant="t", session="s")


def owner(number: int, tenant: str = "t") -> SessionKey:
    return SessionKey(tenant, f"s{number}", "main")


def line(number: int, length: int = 100) -> Told:
    message = api.Message(role="user", content=f"{number} " * length)
    return Told(pack(range(number, number + length)), length, (message,))


def test_prompts_are_bounded_by_bytes_sessions_and_lines() -> None:
    prompts = Prompts(40 * size(line(7)))
    for number in range(1000):
        prompts.put(owner(number), line(number), None)
        assert prompts.held <= 40 * size(line(7))
    assert prompts.of(owner(999)) == [line(999)]
    assert prompts.of(owner(0)) == []
    many = Prompts(10**9)
    for number in range(2 * MAX_SESSIONS):
        many.put(owner(number), line(number, 1), None)
    assert [bool(many.of(owner(number))) for number in (0, MAX_SESSIONS - 1, MAX_SESSIONS)] == [False, False, True]
    for number in range(MAX_LINES + 2):
        many.put(owner(-1), line(number), None)
    assert many.of(owner(-1)) == [line(number) for number in range(2, MAX_LINES + 2)]
    # A step that goes on takes the place of the one before it.
    origin = many.of(owner(-1))[0]
    many.put(owner(-1), line(99), origin)
    assert [each.ids for each in many.of(owner(-1))] == [line(n).ids for n in (*range(3, MAX_LINES + 2), 99)]
    for key in [owner(-1), *(owner(number) for number in range(2 * MAX_SESSIONS))]:
        many.forget(key)
    assert many.held == 0


def test_only_the_tenants_own_prompts_are_beside_a_session() -> None:
    prompts = Prompts(10**9)
    for number in range(6):
        prompts.put(owner(number, tenant="tu"[number % 2]), line(number), None)
    assert prompts.beside(owner(0), 9) == [line(2), line(4)]
    assert prompts.beside(owner(9, tenant="u"), 2) == [line(3), line(5)]


def chat(*texts: str) -> api.ChatInput:
    return api.ChatInput(messages=tuple(api.Message(role="user", content=text) for text in texts))


@pytest.fixture
def engine(model: LoadedModel) -> Engine:
    return Engine(model, engine_config(), pages=256)


def step(engine: Engine, number: int, *texts: str, **fields: object) -> Recorder:
    asked = {"session": "s", "step": number, "max_tokens": 1, **fields}
    (answer,) = run(engine, generate(chat(*texts), **asked))
    return answer


def misses(engine: Engine, tenant: str = "t") -> api.SessionMisses:
    return engine.misses(replace(ASKED, tenant=tenant))


def test_a_sessions_report_is_bounded_and_goes_with_the_session(engine: Engine) -> None:
    ledgers = Ledgers()
    for number in range(MAX_STEPS + 2):
        kept = api.StepCache(step=number, branch="main", at_s=0.0, prompt_tokens=9, cached_tokens=4)
        why = api.CacheMiss(cause="nonce", at=4, wasted=5)
        detail = api.MissDetail(step=number, branch="main", at_s=0.0, miss=why, prompt_tokens=9, cached_tokens=4)
        ledgers.add(owner(0), kept, detail)
        ledgers.add(owner(number + 1), kept, None)
    told = ledgers.get("t", "s0").report(ASKED)
    assert (len(told.steps), len(told.misses), told.step_count) == (MAX_STEPS, MAX_MISSES, MAX_STEPS + 2)
    assert [s.step for s in told.steps] == list(range(2, MAX_STEPS + 2))
    assert told.causes == (api.CauseTotal(cause="nonce", misses=MAX_STEPS + 2, wasted=5 * (MAX_STEPS + 2)),)
    for number in range(MAX_SESSIONS):
        ledgers.add(owner(-number - 1), kept, None)
    assert ledgers.get("t", "s0").count == 0

    answer = step(engine, 0, "A conversation of this session.")
    assert answer.started.miss == answer.usage.miss
    assert (misses(engine).step_count, misses(engine, tenant="u").step_count) == (1, 0)
    engine.end_session(api.EndSession(tenant="t", session="s"))
    engine.step()
    assert misses(engine) == api.SessionMisses(request="m", epoch=0)


@pytest.mark.thorough
def test_two_conversations_of_one_session_take_turns_without_a_miss(engine: Engine) -> None:
    lines = {
        "a": ["List the files of the parser, please."],
        "b": ["Name this conversation in three words, nothing else."],
    }
    for number in range(8):
        texts = lines["ab"[number % 2]]
        miss = step(engine, number, *texts).started.miss
        assert (miss is None) == (number > 1), (number, miss)
        texts.append(f"And then, in step {number}?")
    assert [(c.cause, c.misses) for c in misses(engine).causes] == [("unseen", 2)]


@pytest.mark.thorough
def test_an_agent_with_another_session_id_at_every_step_is_followed(engine: Engine) -> None:
    rest = ("Find out why the tests of the parser fail.", "Here is what they print: " + "E " * 40)
    first = step(engine, 0, "It is 12:01 now. Look before you change anything.", *rest, session="one")
    second = step(engine, 0, "It is 12:02 now. Look before you change anything.", *rest, session="two")
    assert first.started.miss is not None
    assert second.started.miss is not None
    assert (first.started.miss.cause, second.started.miss.cause) == ("unseen", "timestamp")
    # Behind the minute all is as before; tenants know nothing of each other.
    assert second.started.miss.wasted == first.usage.prompt_tokens - second.started.miss.at - 1
    foreign = step(engine, 0, "It is 12:03 now. Look before you change anything.", *rest, session="one", tenant="u")
    assert foreign.started.miss is not None
    assert (foreign.started.miss.cause, foreign.started.miss.wasted) == ("unseen", 0)


def test_nothing_is_explained_where_nothing_is_cached(model: LoadedModel) -> None:
    engine = Engine(model, engine_config(optimization_level="off"), pages=256)
    assert step(engine, 0, "It is 12:01.").started.miss is None
    assert step(engine, 1, "It is 12:02.").started.miss is None
    assert misses(engine).step_count == 0
