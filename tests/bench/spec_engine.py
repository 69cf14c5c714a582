"""Speculation through the engine on recorded sessions: tokens per verify step, and time against speculation off.

    python tests/bench/spec_engine.py [--model PATH] [--draft PATH] [--every 10] [--steps 3] [--tokens 96]
                                      [--context 3000] [--parts sources,self] [--threads 2] [--json FILE]

Teacher-forced: the recorded answers of the public traces (`../shared/data/traces/public`) are what the model says, so
that every engine computes the same tokens; drafts, verification, controller and sampling are the engine's own. Each
answer is forced on one engine after the other before the next comes, so that a change of the machine's load meets all
of them, and their order rotates. Times are those of the steps after an answer's first token.

`sources` compares, by source: `own` (a session's own words only: each session is a tenant), `runs` (one tenant, so
that earlier sessions are past runs), `runs, at any cost` (all that is likelier than not is verified), `wrong` (a
proposer that promises 0.95 a token and is always wrong), and with `--draft` a draft model. `self` drafts with layers
left out: by kind of answer, how many passes over the model's layers a token took, by share of the layers and by
whether the controller may decide.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from magnitude_engine import api
from magnitude_engine.calibrate import ROWS, seconds
from magnitude_engine.config import EngineConfig, default_data_dir
from magnitude_engine.draft.controller import Controller, FixedRule, Rule
from magnitude_engine.draft.costs import StepCosts
from magnitude_engine.draft.need import Signs
from magnitude_engine.draft.proposer import DEFAULT_LIMITS, Proposer
from magnitude_engine.draft.tree import DraftTree
from magnitude_engine.draft.vote import Limits
from magnitude_engine.drafters.chain import Pass
from magnitude_engine.drafters.selfdraft import SelfDrafter, spread
from magnitude_engine.engine import Engine
from magnitude_engine.model.loader import LoadedModel, load_model
from magnitude_engine.request import Sequence as Choice
from testkit.engine import Recorder
from testkit.model import SMOLLM2
from testkit.traces import Turn, public_traces, request, turns

# A token that no answer has.
NEVER = 3
DEPTH = 4
SHARES = (0.4, 0.6, 0.8)
ALL = "all"


class _Wrong:
    """Promises much and is always wrong."""

    def propose(self, context: Sequence[int], limits: Limits = DEFAULT_LIMITS) -> DraftTree:
        scores = tuple(0.95**depth for depth in range(1, 9))
        return DraftTree((NEVER,) * 8, tuple(range(-1, 7)), scores)


@dataclass(slots=True)
class Tally:
    """What answers took after their first token: tokens, steps, seconds; and how much was drafted and accepted."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    def add(self, other: Tally) -> None:
        """Adds another one's figures."""
        self.tokens += other.tokens
        self.steps += other.steps
        self.seconds += other.seconds
        self.drafted += other.drafted
        self.accepted += other.accepted


@dataclass(slots=True)
class Contender:
    """An engine on which answers are forced.

    Attributes:
        tenant: whose a session is.
        tallies: by source or kind.
    """

    name: str
    engine: Engine
    tenant: Callable[[Turn], str]
    tallies: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def force(self, turn: Turn, tokens: int, group: str) -> None:
        """Has the engine say the first `tokens` tokens of an answer."""
        recorder = Recorder()
        self.engine.submit(_forced(turn, tokens, self.tenant(turn)), recorder)
        while not recorder.of(api.Delta) and not recorder.done:
            self.engine.step()
        first = sum(len(delta.ids) for delta in recorder.of(api.Delta))
        steps, began = 0, time.perf_counter()
        while not recorder.done:
            self.engine.step()
            steps += 1
        seconds = time.perf_counter() - began
        if recorder.failed is not None:
            raise RuntimeError(f"{turn.trace.name}/{turn.number} failed: {recorder.failed}")
        usage = recorder.usage
        taken = Tally(usage.completion_tokens - first, steps, seconds, usage.drafted_tokens, usage.accepted_tokens)
        for each in (group, ALL):
            self.tallies[each].add(taken)


def _forced(turn: Turn, tokens: int, tenant: str) -> api.Generate:
    """Returns a request whose answer is known; with log-probabilities its tokens are computed one after the other."""
    known = turn.answer[:tokens]
    resume = (api.Resume(choice=0, ids=known[:-1]),)
    asked = msgspec.structs.replace(request(turn), resume=resume, max_tokens=len(known), logprobs=0, tenant=tenant)
    return msgspec.structs.replace(asked, request=f"{asked.request}/{time.perf_counter_ns()}")


class Bench:
    """The model, and the answers to force in the order of the files."""

    def __init__(self, model: LoadedModel, config: EngineConfig, options: argparse.Namespace) -> None:
        self._model = model
        self._config = config
        self._tokens: int = options.tokens
        self._costs: dict[str, dict[int, float]] = {}
        sessions = [turns(trace, model) for trace in public_traces()[:: options.every]]
        fitting = [[t for t in s if len(t.prompt) <= options.context and len(t.answer) > 8] for s in sessions]
        self.sessions = [session[: options.steps] for session in fitting if session]

    def _engine(self, **settings: object) -> Engine:
        config = msgspec.structs.replace(self._config, **settings)
        model = self._model if config.draft_model_path else self._model._replace(draft=None)
        engine = Engine(model, config)
        if config.drafts:
            engine._stepper.speculation.rule = self._rule(engine, model.draft is not None)
        return engine

    def _rule(self, engine: Engine, draft: bool) -> Rule:
        """Returns a rule of its own for an engine; costs are measured once, so that all begin with the same."""
        stepper = engine._stepper
        if "" not in self._costs or (draft and "model" not in self._costs):
            own = Pass(stepper._runner, stepper._tensors, stepper.manager.total)
            measured = {each.name: each.a_pass(own.pages) for each in stepper.speculation.drafters}
            self._costs = {n: dict(seconds(p, ROWS, time.perf_counter)) for n, p in {"": own, **measured}.items()}
        passes = {each.name: StepCosts(self._costs[each.name]) for each in stepper.speculation.drafters}
        return Controller(StepCosts(self._costs[""]), passes)

    def _run(self, contenders: list[Contender], group: Callable[[Turn], str]) -> None:
        for number, turn in enumerate(turn for session in self.sessions for turn in session):
            shift = number % len(contenders)
            for contender in (*contenders[shift:], *contenders[:shift]):
                contender.force(turn, self._tokens, group(turn))
            print(f"\r{number + 1} answers ", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        for contender in contenders:
            contender.engine.close()

    def sources(self) -> list[dict[str, object]]:
        """Compares proposers by source."""
        contenders = [
            Contender("off", self._engine(speculation=False, draft_model_path=None), _one),
            Contender("own", self._engine(draft_model_path=None), _each),
            Contender("runs", self._engine(draft_model_path=None), _one),
            Contender("runs, at any cost", _at_any_cost(self._engine(draft_model_path=None)), _one),
            Contender("wrong", _wrong(self._engine(draft_model_path=None)), _one),
        ]
        if self._model.draft is not None:
            contenders.append(Contender("model", self._engine(), _one))
        self._run(contenders, lambda turn: turn.trace.group)
        return list(_compared(contenders))

    def self(self) -> list[dict[str, object]]:
        """Drafts with a part of the layers, always and as the controller decides."""
        found: list[dict[str, object]] = []
        for share in SHARES:
            engine = self._engine(draft_model_path=None)
            stepper = engine._stepper
            layers = spread(stepper._runner.shape.layers, share)
            drafter = SelfDrafter(stepper._runner, stepper._tensors, stepper.cache, layers)
            always = _Always()
            stepper.speculation.drafters = (drafter,)
            stepper.speculation.rule = always
            contender = Contender(f"{share:.0%}", engine, _one)

            def kind(turn: Turn, always: _Always = always) -> str:
                always.kind = _kind(turn)
                return always.kind

            self._run([contender], kind)
            part = len(layers) / stepper._runner.shape.layers
            found += [always.row(share, each, part) for each in sorted(always.runs)]
        controlled = Contender("controlled", self._engine(draft_model_path=None), _each)
        counted = _Counted(controlled.engine)
        self._run([controlled], _kind)
        found += [counted.row(each, tally) for each, tally in sorted(controlled.tallies.items())]
        return found


class _Always(FixedRule):
    """Has the layers draft `DEPTH` tokens whatever comes of it, and counts how many in a row were right."""

    def __init__(self) -> None:
        super().__init__({"self": DEPTH})
        self.kind = ""
        self.runs: defaultdict[str, list[int]] = defaultdict(list)

    def asks(self, proposer: str) -> bool:
        return False

    def learn(self, proposer: str, signs: Signs | None, stated: float, sampled: bool, right: bool) -> None:
        if signs is not None:
            self.runs[self.kind].append(0)
        self.runs[self.kind][-1] += right

    def row(self, share: float, kind: str, part: float) -> dict[str, object]:
        """Returns the figures of a kind; passes of the part count as that part of a pass."""
        runs = self.runs[kind]
        emitted = sum(runs) + len(runs)
        passes = len(runs) * (1 + DEPTH * part) / emitted
        first = sum(run > 0 for run in runs) / len(runs)
        return {
            "layers": f"{share:.0%}",
            "kind": kind,
            "first right": f"{first:.0%}",
            "passes per token": f"{passes:.2f}",
        }


class _Counted:
    """Counts the passes of an engine's drafters as the controller has them."""

    def __init__(self, engine: Engine) -> None:
        stepper = engine._stepper
        self._part = 0
        for drafter in stepper.speculation.drafters:
            passes = drafter.guess

            def guess(chains: Sequence[object], passes: Callable[..., object] = passes) -> object:
                self._part += 1
                return passes(chains)

            drafter.guess = guess  # type: ignore[method-assign, assignment]

    def row(self, kind: str, tally: Tally) -> dict[str, object]:
        """Returns the figures of a kind; partial passes are counted over all kinds."""
        shown = f"{tally.steps / tally.tokens:.2f}" + (f", {self._part} partial passes in all" if kind == ALL else "")
        return {"layers": "as decided, with all proposers", "kind": kind, "first right": "", "passes per token": shown}


def _at_any_cost(engine: Engine) -> Engine:
    """Returns the engine with the rule of `reference`: it verifies what is likelier than not."""
    engine._stepper.speculation.rule = FixedRule({})
    return engine


def _wrong(engine: Engine) -> Engine:
    """Returns the engine with a proposer that is always wrong."""

    def proposers(sequence: Choice) -> list[tuple[str, Proposer]]:
        return [("suffix", _Wrong())]

    engine._stepper.speculation._proposers = proposers  # type: ignore[method-assign]
    return engine


def _one(turn: Turn) -> str:
    return "replay"


def _each(turn: Turn) -> str:
    return turn.trace.name


def _kind(turn: Turn) -> str:
    """Returns what most of an answer is."""
    message = turn.trace.messages[len(turn.chat.messages)]
    if message.tool_calls:
        return "tool call"
    return "code" if "```" in message.content else "text"


class _Line(NamedTuple):
    """One row of the comparison."""

    source: str
    contender: str
    tokens: int
    per_step: float
    speed: float
    right: float


def _compared(contenders: Sequence[Contender]) -> Iterator[dict[str, object]]:
    plain = contenders[0].tallies
    for source in sorted(plain, key=lambda each: (each == ALL, each)):
        for contender in contenders[1:]:
            tally = contender.tallies[source]
            off = plain[source].seconds / plain[source].tokens
            line = _Line(
                source,
                contender.name,
                tally.tokens,
                round(tally.tokens / max(tally.steps, 1), 2),
                round(off / (tally.seconds / tally.tokens), 2),
                round(tally.accepted / max(tally.drafted, 1), 2),
            )
            yield line._asdict()


def table(rows: Sequence[dict[str, object]]) -> None:
    """Prints a Markdown table."""
    print(f"\n| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(str(value) for value in row.values())} |", flush=True)


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=default_data_dir() / "models" / "smollm2" / SMOLLM2)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--every", type=int, default=10, help="take each Nth session")
    parser.add_argument("--steps", type=int, default=3, help="answers per session")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--context", type=int, default=3000, help="longest prompt")
    parser.add_argument("--parts", default="sources,self")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    config = EngineConfig(
        model_path=str(options.model),
        model_name=options.model.stem,
        draft_model_path=None if options.draft is None else str(options.draft),
        kv_memory_mb=512,
        threads=options.threads,
    )
    bench = Bench(load_model(config), config, options)
    answers = sum(map(len, bench.sessions))
    print(f"{len(bench.sessions)} sessions, {answers} answers, {torch.get_num_threads()} threads")
    receipt: dict[str, list[dict[str, object]]] = {}
    for part in options.parts.split(","):
        receipt[part] = getattr(bench, part)()
        table(receipt[part])
    if options.json:
        options.json.write_text(json.dumps(receipt, indent=1), "utf-8")


if __name__ == "__main__":
    main()
