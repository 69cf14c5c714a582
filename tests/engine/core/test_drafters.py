"""A draft model and the model's own layers draft: what they are right about is accepted, and no token changes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from magnitude_engine import api
from magnitude_engine.config import EngineConfig
from magnitude_engine.draft.controller import FixedRule
from magnitude_engine.drafters.model import ModelDrafter
from magnitude_engine.drafters.selfdraft import SelfDrafter, spread
from magnitude_engine.engine import Engine
from magnitude_engine.errors import ConfigError
from magnitude_engine.model.loader import LoadedModel, check_vocabulary, load_model
from magnitude_engine.model.tokenizer import SpecialTokens, Tokenizer
from testkit.engine import alone, engine_config, generate, run
from testkit.model import smollm2_path
from testkit.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.thorough

PAGES, DRAFT_PAGES = 96, 64
SEEDED = api.Sampling(temperature=1.1, top_p=0.95, seed=11)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"sampling": SEEDED},
    "penalties": {"sampling": api.Sampling(temperature=0.0, frequency_penalty=1.3, presence_penalty=0.7)},
    "logprobs": {"sampling": msgspec.structs.replace(SEEDED, logit_bias={70: 4.0}), "logprobs": 2},
    "several": {"sampling": SEEDED, "n": 2},
    "regex": {"sampling": SEEDED, "format": api.RegexFormat(pattern="[a-f]{9}(0|1)+")},
}


@pytest.fixture(scope="module")
def other() -> LoadedModel:
    """A model of other weights with the same vocabulary."""
    return tiny_model(seed=9, layers=1)


def request(**fields: Any) -> api.Generate:
    return generate("a prompt of some words and of some more", **{"max_tokens": 20, **fields})


def with_draft(model: LoadedModel, draft: LoadedModel, pages: int = DRAFT_PAGES, **settings: Any) -> Engine:
    """Returns an engine whose drafts come from another model alone."""
    engine = Engine(model, engine_config(**settings), pages=PAGES)
    drafter = ModelDrafter(draft.runner, model.tokenizer.vocab_size, pages)
    return only(engine, drafter, {"model": 4})


def with_layers(model: LoadedModel, layers: tuple[int, ...]) -> Engine:
    """Returns an engine whose drafts come from some of its own layers."""
    engine = Engine(model, engine_config(), pages=PAGES)
    stepper = engine._stepper
    return only(engine, SelfDrafter(stepper._runner, stepper._tensors, stepper.cache, layers), {"self": 4})


class _Only(FixedRule):
    def asks(self, proposer: str) -> bool:
        return False


def only(engine: Engine, drafter: ModelDrafter | SelfDrafter, depths: dict[str, int]) -> Engine:
    speculation = engine._stepper.speculation
    speculation.drafters = (drafter,)
    speculation.rule = _Only(depths)
    return engine


def use(usage: api.Usage, name: str) -> tuple[int, int]:
    """Returns drafted and accepted tokens of a proposer."""
    (found,) = usage.speculation
    assert found.name == name
    assert (found.drafted, found.accepted) == (usage.drafted_tokens, usage.accepted_tokens)
    return found.drafted, found.accepted


def answered_alike(model: LoadedModel, engine: Engine, asked: api.Generate) -> api.Usage:
    (answer,) = run(engine, asked)
    expected = alone(model, asked)
    assert answer.failed is None
    for choice in range(asked.n):
        assert answer.ids(choice) == expected.ids(choice)
        assert answer.text(choice) == expected.text(choice)
    assert [d.logprobs for d in answer.of(api.Delta)] == [d.logprobs for d in expected.of(api.Delta)] or asked.n > 1
    assert engine.status().pages_free == PAGES
    return answer.usage


@pytest.mark.parametrize("case", CASES)
def test_the_model_itself_as_draft_model_is_always_right(model: LoadedModel, case: str) -> None:
    usage = answered_alike(model, with_draft(model, model), request(**CASES[case]))
    drafted, accepted = use(usage, "model")
    assert drafted > 0
    assert accepted == drafted


@pytest.mark.parametrize("case", CASES)
def test_all_layers_are_always_right(model: LoadedModel, case: str) -> None:
    usage = answered_alike(model, with_layers(model, (0, 1)), request(**CASES[case]))
    drafted, accepted = use(usage, "self")
    assert drafted > 0
    assert accepted == drafted


@pytest.mark.parametrize("case", ["seeded", "several", "regex"])
def test_another_model_changes_no_token(model: LoadedModel, other: LoadedModel, case: str) -> None:
    drafted, accepted = use(answered_alike(model, with_draft(model, other), request(**CASES[case])), "model")
    assert accepted < drafted


@pytest.mark.parametrize("case", ["greedy", "penalties", "logprobs"])
def test_half_the_layers_change_no_token(model: LoadedModel, case: str) -> None:
    drafted, accepted = use(answered_alike(model, with_layers(model, (0,)), request(**CASES[case])), "self")
    assert accepted < drafted


@pytest.mark.parametrize("draft_pages", [DRAFT_PAGES, 7, 3])
def test_batched_sessions_share_the_draft_models_pages(
    model: LoadedModel, other: LoadedModel, draft_pages: int
) -> None:
    """Three pages are too few for any but one sequence, and then for none."""
    requests = [generate(f"{i} words that go on", sampling=SEEDED, max_tokens=14 + i) for i in range(4)]
    engine = with_draft(model, other, draft_pages)
    answers = run(engine, *requests)
    for asked, answer in zip(requests, answers, strict=True):
        assert answer.ids() == alone(model, asked).ids()
    assert sum(answer.usage.drafted_tokens for answer in answers) > 0
    (drafter,) = engine._stepper.speculation.drafters
    assert isinstance(drafter, ModelDrafter)
    held = [page for each in drafter._held.values() for page in each.lease.pages]
    assert sorted([*held, *drafter._free]) == list(range(draft_pages))


def test_a_long_context_is_caught_up_with_in_parts(model: LoadedModel) -> None:
    ids = tuple(3 + i % 200 for i in range(600))
    engine = with_draft(model, model, prefill_chunk=1024)
    usage = answered_alike(model, engine, generate(ids, max_tokens=16))
    # Three steps catch up, the others draft.
    assert usage.accepted_tokens == usage.drafted_tokens > 4


def test_the_sessions_next_step_goes_on_with_what_the_draft_model_has(model: LoadedModel) -> None:
    engine = with_draft(model, model)
    first = request(session="s")
    (before,) = run(engine, first)
    history = (*model.prompts.encode(first.input), *before.ids())
    second = generate((*history, *model.tokenizer.encode("and?")), session="s", step=1, max_tokens=8)
    (drafter,) = engine._stepper.speculation.drafters
    assert isinstance(drafter, ModelDrafter)
    answered_alike(model, engine, second)
    assert len(drafter._held) == 1


def test_layers_are_spread_from_the_first_to_the_last() -> None:
    assert spread(2, 0.6) == (0, 1)
    assert spread(8, 1.0) == tuple(range(8))
    chosen = spread(30, 0.6)
    assert len(chosen) == 18
    assert {0, 1, 2, 27, 28, 29} < set(chosen)


def special(**ids: frozenset[int]) -> Tokenizer:
    """Returns the tiny tokenizer with other tokens taken for special ones."""
    known = {"special_ids": frozenset({0, 1, 2}), "eos_ids": frozenset({0, 2})}
    return Tokenizer(tiny_tokenizer().backend, SpecialTokens(**{**known, **ids}, bos_id=1), byte_level=True)


def test_a_draft_model_of_another_vocabulary_is_refused_by_name() -> None:
    config = EngineConfig(model_path="large.gguf", draft_model_path="small.gguf")
    check_vocabulary(config, tiny_tokenizer(), tiny_tokenizer())
    # Where an answer ends is the model's own business.
    check_vocabulary(config, tiny_tokenizer(), special(eos_ids=frozenset({0})))
    with pytest.raises(ConfigError, match=r"small\.gguf has another vocabulary .* large\.gguf") as refused:
        check_vocabulary(config, tiny_tokenizer(), special(special_ids=frozenset({0, 1, 2, 3})))
    assert refused.value.param == "draft_model_path"


@pytest.mark.slow
def test_a_draft_model_is_loaded_from_its_path_and_named() -> None:
    path = str(smollm2_path())
    config = EngineConfig(
        model_path=path, draft_model_path=path, profile="reference", context_length=512, kv_memory_mb=64, threads=1
    )
    loaded = load_model(config)
    assert loaded.card.draft == "SmolLM2-135M-Instruct.Q4_1"
    engine = Engine(loaded, config)
    try:
        (answer,) = run(engine, generate("The capital of France is", max_tokens=12))
        drafted = {use.name: (use.drafted, use.accepted) for use in answer.usage.speculation}
        assert drafted["model"][0] == drafted["model"][1] > 4
    finally:
        engine.close()
    without = Engine(load_model(msgspec.structs.replace(config, draft_model_path=None, speculation=False)), config)
    try:
        assert run(without, generate("The capital of France is", max_tokens=12))[0].ids() == answer.ids()
    finally:
        without.close()
