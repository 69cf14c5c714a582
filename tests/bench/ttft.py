"""Time to the first token of a later step of a long session, against a bare forward pass of its new tokens.

    python tests/bench/ttft.py --model PATH [--context 6000] [--new 64] [--rounds 9] [--threads 2] [--cpu-time]

A session of `--context` tokens goes on and on, as an agent's does: each step's prompt is the whole conversation with
the last answer and a tool's result behind it. The bare pass computes as many rows at the same position, its pages
resident, and nothing else. Both are run in turn, on the same machine in the same minutes; the figure is the ratio of
their medians, by the clock and by processor time. The keys and values of the first prompt are drawn, not computed:
that changes no time that is reported. What computing them would take is the sum over chunks, some of which are timed.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from magnitude_engine import api
from magnitude_engine.config import PAGE_TOKENS, EngineConfig, default_data_dir
from magnitude_engine.engine import Engine
from magnitude_engine.gauges import record
from magnitude_engine.kv.lease import CacheKey, Lease
from magnitude_engine.model.batch import KeyValueCache, StepBatch, StepOutput
from magnitude_engine.model.loader import LoadedModel, load_model
from magnitude_engine.step import Rows, build_batch
from magnitude_engine.stepper import SAVES_PER_STEP
from testkit.model import SMOLLM2

CHUNK = 256
TEXT = "the keeper of the lamp counts ships and gulls until the fog comes in from the north and hides both"
WORDS = TEXT.split()
TOOL = api.Tool(
    name="look",
    description="Look through the window and return what is there.",
    parameters={"type": "object", "properties": {"side": {"type": "string"}}, "required": ["side"]},
)


class Spent(NamedTuple):
    """Milliseconds of something, by the clock and of the processor."""

    wall: float
    processor: float


class First(NamedTuple):
    """When a request's parts were there: milliseconds since it was sent, and rows that were computed for it."""

    spent: Spent
    prompt: int
    rows: int


class Session:
    """One agent's conversation, growing step by step."""

    def __init__(self, model: LoadedModel, context: int, new: int) -> None:
        self._model = model
        self._new = new
        self._messages = [api.Message(role="system", content="You keep a lighthouse."), self._words("user", context)]
        while len(model.prompts.encode(self.chat)) > context:
            text = self._messages[-1].content
            self._messages[-1] = api.Message(role="user", content=text[: len(text) - 40])
        self.steps = 0

    @property
    def chat(self) -> api.ChatInput:
        """All messages so far."""
        return api.ChatInput(messages=tuple(self._messages), tools=(TOOL,))

    def answered(self, text: str) -> None:
        """Takes in an answer, and the result of a tool of about the wanted length."""
        self.steps += 1
        call = api.ToolCall(id=f"call{self.steps}", name="look", arguments='{"side": "sea"}')
        self._messages.append(api.Message(role="assistant", content=text, tool_calls=(call,)))
        result = self._words("tool", self._new - 45)
        self._messages.append(api.Message(role="tool", content=result.content, tool_call_id=call.id))

    def _words(self, role: api.Role, count: int) -> api.Message:
        start = len(self._messages) if hasattr(self, "_messages") else 0
        return api.Message(role=role, content=" ".join(WORDS[(start + i) % len(WORDS)] for i in range(count)))


class Filling:
    """The model's runner, which can draw keys and values instead of computing them.

    Attributes:
        rows: of each forward pass since the list was emptied.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._runner = model.runner
        self.computes = True
        self.rows: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def forward(self, batch: StepBatch, cache: KeyValueCache) -> StepOutput:
        """Computes a step, or fills its slots."""
        self.rows.append(len(batch.ids))
        if self.computes:
            return self._runner.forward(batch, cache)
        for tensor in (*cache.keys, *cache.values):
            slots = tensor.view(-1, *tensor.shape[2:])
            slots[batch.slots] = torch.randn(len(batch.slots), *tensor.shape[2:]).to(tensor.dtype)
        wanted = len(batch.logit_rows)
        return StepOutput(torch.zeros(wanted, self._runner.shape.vocab), torch.zeros(wanted, 1))


class Client:
    """Sends requests to a running engine and waits for their first token."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sent = 0

    def first_token(self, chat: api.ChatInput, tokens: int = 1) -> tuple[First, str]:
        """Returns when the first token came, and the whole answer."""
        self._sent += 1
        came, ended = threading.Event(), threading.Event()
        events: list[api.AnswerEvent] = []
        at: list[Spent] = []

        def sink(event: api.AnswerEvent) -> None:
            events.append(event)
            if isinstance(event, api.Delta) and not came.is_set():
                at.append(Spent(time.perf_counter(), time.process_time()))
                came.set()
            if isinstance(event, api.Completed | api.Failed):
                ended.set()

        began = Spent(time.perf_counter(), time.process_time())
        self._engine.submit(self.request(chat, tokens), sink)
        if not ended.wait(600):
            raise RuntimeError("no answer in 600 s")
        (started,) = [e for e in events if isinstance(e, api.Started)]
        spent = Spent((at[0].wall - began.wall) * 1000, (at[0].processor - began.processor) * 1000)
        text = "".join(e.text for e in events if isinstance(e, api.Delta))
        return First(spent, started.prompt_tokens, started.prompt_tokens - started.cached_tokens), text

    def request(self, chat: api.ChatInput, tokens: int) -> api.Generate:
        """Returns a request of the session."""
        return api.Generate(
            request=f"ttft{self._sent}",
            epoch=1,
            tenant="bench",
            session="lighthouse",
            input=chat,
            sampling=api.Sampling(temperature=0.0),
            max_tokens=tokens,
            ignore_eos=True,
            preferences=api.Preferences(predictive_caching=False),
        )


class Bare:
    """Forward passes of the model alone, on a cache whose pages are all there."""

    def __init__(self, model: LoadedModel, context: int) -> None:
        self._runner = model.runner
        pages = context // PAGE_TOKENS + 32
        self._cache = model.runner.allocate_cache(pages)
        self._cache.pages.normal_()
        self._pages = list(range(pages))

    def forward(self, position: int, rows: int) -> Spent:
        """Computes `rows` new tokens behind `position` resident ones, and takes the most likely next token."""
        ids = [i % 1000 for i in range(position + rows)]
        began = Spent(time.perf_counter(), time.process_time())
        lease = Lease(CacheKey("bench", "bare", "main"), self._pages, position)
        batch = build_batch([Rows(ids, lease, rows, True)], self._runner.device)
        self._runner.forward(batch, self._cache).logits.argmax().item()
        return Spent((time.perf_counter() - began.wall) * 1000, (time.process_time() - began.processor) * 1000)


def medians(spent: Iterable[Spent]) -> Spent:
    """Returns the median of each kind."""
    found = list(spent)
    return Spent(statistics.median(s.wall for s in found), statistics.median(s.processor for s in found))


def table(title: str, header: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Prints a Markdown table."""
    print(f"\n{title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for line in lines:
        print(f"| {' | '.join(line)} |", flush=True)


def later_steps(model: LoadedModel, config: EngineConfig, options: argparse.Namespace) -> None:
    """Times later steps of one session and bare passes in turn."""
    session = Session(model, options.context, options.new)
    filling = Filling(model)
    clock = time.process_time if options.cpu_time else time.monotonic
    engine = Engine(model._replace(runner=filling), config, clock)  # type: ignore[arg-type]
    engine.start()
    client = Client(engine)
    filling.computes = False
    bare = Bare(model, options.context + (options.rounds + 4) * (options.new + 32))
    firsts: list[First] = []
    passes: list[Spent] = []
    _, text = client.first_token(session.chat)
    filling.computes = True
    for number in range(options.rounds + 2):
        session.answered(text)
        filling.rows.clear()
        first, text = client.first_token(session.chat, tokens=4)
        spent = bare.forward(first.prompt - first.rows, first.rows)
        if number >= 2:
            firsts.append(first)
            passes.append(spent)
        chunks = "+".join(map(str, filling.rows[:-3]))
        print(
            f"step {number}: {chunks} of {first.rows} rows, {first.spent.processor:.0f} processor ms, "
            f"bare {spent.processor:.0f}",
            file=sys.stderr,
        )
    engine.close()
    step, alone = medians(f.spent for f in firsts), medians(passes)
    lines = [
        ["first token of a later step", f"{step.wall:.0f}", f"{step.processor:.0f}"],
        ["bare pass of its new tokens", f"{alone.wall:.0f}", f"{alone.processor:.0f}"],
        ["ratio", f"{step.wall / alone.wall:.2f}", f"{step.processor / alone.processor:.2f}"],
    ]
    rows = statistics.median(f.rows for f in firsts)
    title = f"{firsts[0].prompt} to {firsts[-1].prompt} tokens, {rows:.0f} new; medians of {len(firsts)}"
    table(title, ("", "ms", "processor ms"), lines)


def resume(model: LoadedModel, options: argparse.Namespace) -> None:
    """Times the first step after a restart, whose pages come from disk, against computing all of them."""
    session = Session(model, options.context, options.new)
    lines: list[list[str]] = []
    filling = Filling(model)
    filled = model._replace(runner=filling)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(options, kv_disk_mb=4096, kv_dir=str(Path(folder) / "kv"))
        for restart in range(4):
            filling.computes = restart > 0
            engine = Engine(filled, config)
            engine.start()
            first, text = Client(engine).first_token(session.chat)
            engine.close()
            session.answered(text)
            if restart:
                name = f"first token after restart {restart}"
                lines.append([name, f"{first.rows}", f"{first.spent.wall:.0f}", f"{first.spent.processor:.0f}"])
    whole = cold(model, options.context)
    lines.append(["all tokens computed", f"{options.context}", f"{whole.wall:.0f}", f"{whole.processor:.0f}"])
    table("resuming from disk", ("", "rows computed", "ms", "processor ms"), lines)


def overheads(model: LoadedModel, options: argparse.Namespace) -> None:
    """Times what the engine's thread does in a step besides the model, at the end of a prompt."""
    session = Session(model, options.context, options.new)
    filling = Filling(model)
    filling.computes = False
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(options, kv_disk_mb=4096, kv_dir=str(Path(folder) / "kv"))
        engine = Engine(model._replace(runner=filling), config)  # type: ignore[arg-type]
        engine.submit(Client(engine).request(session.chat, 1), lambda event: None)
        while engine.step():
            pass
        stepper, manager = engine._stepper, engine._stepper.manager
        ids = model.prompts.encode(session.chat)
        lease = manager.acquire(CacheKey("bench", "overhead", "main"), ids)
        parts: dict[str, Callable[[], object]] = {
            "prompt to ids, known text": lambda: model.prompts.encode(session.chat),
            "digests of a prompt's pages": lambda: manager.chain("bench", ids),
            "which blocks to read": lambda: list(manager.missing("bench", ids)),
            "a lease on all of it": lambda: manager.release(manager.acquire(lease.key, ids)),
            "publish after a chunk": lambda: manager.publish(lease, ids),
            f"write back {SAVES_PER_STEP} pages": lambda: stepper.cache.save(SAVES_PER_STEP),
            "figures as metrics": lambda: record(stepper.telemetry, stepper.cache, stepper.ahead.queue),
        }
        lines = [[name, f"{thread_ms(part, 25):.2f}"] for name, part in parts.items()]
        manager.release(lease)
        engine.close()
    table(f"engine's thread at {len(ids)} tokens, medians of 25", ("", "processor ms"), lines)


def thread_ms(part: Callable[[], object], rounds: int) -> float:
    """Returns the median milliseconds of this thread in a call."""
    part()
    found: list[float] = []
    for _ in range(rounds):
        began = time.thread_time()
        part()
        found.append((time.thread_time() - began) * 1000)
    return statistics.median(found)


def cold(model: LoadedModel, context: int) -> Spent:
    """Returns what bare passes over a whole prompt take in chunks, four of which are timed."""
    bare = Bare(model, context)
    bare.forward(0, CHUNK)
    timed = [bare.forward(position, CHUNK) for position in range(0, context, context // 4)][:4]
    chunks = context / CHUNK / len(timed)
    return Spent(chunks * sum(t.wall for t in timed), chunks * sum(t.processor for t in timed))


def engine_config(options: argparse.Namespace, **settings: object) -> EngineConfig:
    """Returns settings with room for two such sessions."""
    fields = {"model_path": str(options.model), "threads": options.threads, "kv_memory_mb": 1024, **settings}
    return msgspec.convert(fields, EngineConfig)


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=default_data_dir() / "models" / "smollm2" / SMOLLM2)
    parser.add_argument("--context", type=int, default=6000)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cpu-time", action="store_true", help="the engine, too, goes by processor time (busy machine)"
    )
    parser.add_argument("--parts", default="steps,resume,overheads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = engine_config(options)
    model = load_model(config)
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    print(f"{model.runner.description}; {machine}, {options.threads} threads, load {os.getloadavg()[0]:.1f}")
    parts: dict[str, Callable[[], None]] = {
        "steps": lambda: later_steps(model, config, options),
        "resume": lambda: resume(model, options),
        "overheads": lambda: overheads(model, options),
    }
    for part in options.parts.split(","):
        parts[part]()


if __name__ == "__main__":
    main()
