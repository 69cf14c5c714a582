"""CUDA graphs of decode steps: a step of a known shape is launched as one, not as hundreds of kernels.

A graph replays the same launches on the same memory. So a step is brought to one of few shapes, its rows and the
pages of its longest context each rounded up to a bucket, and copied into the input tensors of that shape's graph:

    rows    |-- 5 of the step --|-- 3 of padding --|      bucket of 5 rows: 8
    table   |-- 37 pages of the longest --|-- any --|     bucket of 37 pages: 64

Rows of padding belong to no sequence, so that attention skips them, and write to a spare page behind the cache's own.

At warm-up the widest table of every row bucket is captured, which fits any decode step. Narrower ones, which launch
less, follow between steps when nothing is to be computed, for the shapes that steps then have; a step whose shape has
no graph takes the next that holds it. Prefill, and whatever fits nowhere, runs eagerly.

Shapes and choices are pure functions; `GraphRunner` carries them out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from magnitude_engine.config import PAGE_TOKENS, Profile
from magnitude_engine.model.attention import Attention, AttentionPlan
from magnitude_engine.model.batch import KeyValueCache, StepBatch, StepOutput
from magnitude_engine.model.decoder import Decoder, Model
from magnitude_engine.model.paged import PagedAttention, PagedPlan
from magnitude_engine.model.runner import Runner
from magnitude_engine.telemetry import worker_log
from magnitude_kernels.paged_attention.ragged import Ragged, Run

LEAST_PAGES = 16
PAGES_FACTOR = 4
# A step takes a graph of more rows than its own bucket only up to so many times as many.
MOST_PADDING = 4
# Graphs beside those of warm-up; each holds its inputs, outputs and a share of a common pool.
ROOM = 16
# A capture costs as much as some steps save; a shape must have come so often since it was last counted.
LEAST_STEPS = 64
_WARM_UP_RUNS = 2


class Shape(NamedTuple):
    """Rows of a decode step, and pages of its longest context."""

    rows: int
    pages: int


class Choice(NamedTuple):
    """Shapes to capture, most wanted first, and those to give up before."""

    capture: tuple[Shape, ...]
    drop: tuple[Shape, ...]


class Recording(NamedTuple):
    """Work that can be repeated on the same memory: `replay` renews `output`."""

    replay: Callable[[], None]
    output: StepOutput


Recorder = Callable[[Callable[[], StepOutput]], Recording]


def bucket(size: int, most: int, least: int = 1, factor: int = 2) -> int | None:
    """Returns the smallest of least, least * factor, least * factor**2, … and `most` that holds `size`, if one does."""
    if size > most:
        return None
    step = least
    while step < size:
        step *= factor
    return min(step, most)


def buckets(most: int) -> tuple[int, ...]:
    """Returns the row buckets up to `most`, largest first."""
    powers = itertools.takewhile(lambda size: size < most, (1 << n for n in itertools.count()))
    return (most, *reversed(list(powers)))


def shape_of(batch: StepBatch, most: Shape) -> Shape | None:
    """Returns the buckets of a step, or None where no graph could serve it: it prefills, or is larger than `most`."""
    if not batch.sequences or any(s.count != 1 for s in batch.sequences):
        return None
    rows = bucket(len(batch.sequences), most.rows)
    pages = bucket(_pages(max(s.context for s in batch.sequences)), most.pages, LEAST_PAGES, PAGES_FACTOR)
    return None if rows is None or pages is None else Shape(rows, pages)


def fitting(wanted: Shape, captured: Collection[Shape]) -> Shape | None:
    """Returns the smallest captured shape that holds a step of `wanted` without undue padding."""
    holding = (s for s in captured if wanted.rows <= s.rows <= MOST_PADDING * wanted.rows and s.pages >= wanted.pages)
    return min(holding, default=None)


def choose(seen: Mapping[Shape, int], captured: Collection[Shape], room: int) -> Choice:
    """Returns how to have graphs for the `room` shapes that were seen most often, as far as they are worth one."""
    ranked = sorted(seen, key=lambda shape: (-seen[shape], shape))
    wanted = [shape for shape in ranked if seen[shape] >= LEAST_STEPS][:room]
    missing = tuple(shape for shape in wanted if shape not in captured)
    spare = sorted((s for s in captured if s not in wanted), key=lambda shape: (seen.get(shape, 0), shape))
    return Choice(missing, tuple(spare[: max(0, len(captured) + len(missing) - room)]))


def padded(batch: StepBatch, shape: Shape, spare_slot: int) -> tuple[StepBatch, Ragged]:
    """Returns a decode step of exactly `shape`, its padding last, with its lengths and page tables.

    The logits of all rows are wanted. The lengths and tables lie on the CPU, everything else where the step lies; the
    tables are as wide as the step needs, since what lies beyond is never read.
    """
    used = len(batch.sequences)
    missing = shape.rows - used
    fill = torch.nn.functional.pad
    held = [s.pages[: _pages(s.context)] for s in batch.sequences]
    table = torch.zeros(shape.rows, max(map(len, held), default=0), dtype=torch.int32)
    for row, pages in zip(table, held, strict=False):
        row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
    counts = torch.tensor([1] * used + [0] * missing, dtype=torch.int32)
    contexts = torch.tensor([s.context for s in batch.sequences] + [0] * missing, dtype=torch.int32)
    starts = torch.arange(shape.rows, dtype=torch.int32)
    step = StepBatch(
        ids=fill(batch.ids, (0, missing)),
        positions=fill(batch.positions, (0, missing)),
        slots=fill(batch.slots, (0, missing), value=spare_slot),
        sequences=batch.sequences,
        logit_rows=torch.arange(shape.rows, device=batch.ids.device),
    )
    return step, Ragged(starts, counts, contexts, table, (Run(shape.rows, shape.rows, 1),))


@dataclass(frozen=True, slots=True)
class Planned:
    """An attention whose plan was made before and lies in fixed memory."""

    attention: Attention
    given: AttentionPlan

    def plan(self, batch: StepBatch, dtype: torch.dtype) -> AttentionPlan:
        """Returns the given plan."""
        return self.given

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Attends as the wrapped attention does."""
        return self.attention(q, keys, values, plan)


class Captured:
    """A graph of one shape: its inputs, and what replays it."""

    def __init__(self, decoder: Decoder, cache: KeyValueCache, shape: Shape, record: Recorder) -> None:
        """Captures the decoder's step on `cache`, whose last page is spare."""
        self._shape = shape
        self._spare_slot = (cache.keys[0].shape[0] - 1) * PAGE_TOKENS
        device = cache.keys[0].device
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self._step, ragged = padded(StepBatch(nothing, nothing, nothing, (), nothing), shape, self._spare_slot)
        self._ragged = Ragged(
            ragged.starts.to(device),
            ragged.counts.to(device),
            ragged.contexts.to(device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            ragged.runs,
        )
        plan = PagedPlan((), self._step.positions, self._ragged)
        fixed = replace(decoder, attention=Planned(decoder.attention, plan))
        self._recording = record(lambda: fixed.forward(self._step, cache))

    def run(self, batch: StepBatch) -> StepOutput:
        """Computes a step that fits the shape; the result is its own."""
        step, ragged = padded(batch, self._shape, self._spare_slot)
        for target, source in (
            (self._step.ids, step.ids),
            (self._step.positions, step.positions),
            (self._step.slots, step.slots),
            (self._ragged.counts, ragged.counts),
            (self._ragged.contexts, ragged.contexts),
            (self._ragged.table[:, : ragged.table.shape[1]], ragged.table),
        ):
            target.copy_(source)
        self._recording.replay()
        logits, hidden = self._recording.output
        return StepOutput(logits[batch.logit_rows], hidden[batch.logit_rows])


class GraphRunner(Runner):
    """A runner whose decode steps are replayed as graphs; it serves the last cache that it allocated.

    Args:
        max_rows: most sequences decoded together.
        record: how work is captured; `record_cuda` on a GPU.
    """

    def __init__(
        self,
        decoder: Decoder,
        profile: Profile,
        context: int,
        device: torch.device,
        max_rows: int,
        record: Recorder,
    ) -> None:
        super().__init__(decoder, profile, context, device)
        self._decoder = decoder
        self._most = Shape(max_rows, _pages(context))
        self._record = record
        self._cache: KeyValueCache | None = None
        self._always: dict[Shape, Captured] = {}
        self._chosen: dict[Shape, Captured] = {}
        self._seen: Counter[Shape] = Counter()
        self._room = ROOM

    def allocate_cache(self, pages: int) -> KeyValueCache:
        """Returns zeroed keys and values for `pages` pages and a spare one, and captures the graphs of warm-up."""
        self._always, self._chosen = {}, {}
        cache = self._cache = super().allocate_cache(pages + 1)
        # Largest first: the graphs share a pool, and smaller ones find what they need in it.
        for rows in buckets(self._most.rows):
            self._capture(self._always, Shape(rows, self._most.pages), cache)
        return cache

    def forward(self, batch: StepBatch, cache: KeyValueCache, layers: Sequence[int] | None = None) -> StepOutput:
        """Computes one step, by a graph where one holds it."""
        wanted = shape_of(batch, self._most) if cache is self._cache and layers is None else None
        if wanted is None:
            return super().forward(batch, cache, layers)
        self._seen[wanted] += 1
        graphs = self._always | self._chosen
        shape = fitting(wanted, graphs)
        if shape is None:
            return super().forward(batch, cache)
        with torch.inference_mode():
            return graphs[shape].run(batch)

    def recapture(self) -> bool:
        """Captures one graph that recent steps would have used; False where there is none to capture.

        What was seen until then counts half from there on.
        """
        seen = {shape: count for shape, count in self._seen.items() if shape not in self._always}
        choice = choose(seen, self._chosen, self._room)
        if not choice.capture or self._cache is None:
            self._seen = Counter({shape: count // 2 for shape, count in self._seen.items() if count > 1})
            return False
        for shape in choice.drop:
            del self._chosen[shape]
        self._capture(self._chosen, choice.capture[0], self._cache)
        return True

    def _capture(self, graphs: dict[Shape, Captured], shape: Shape, cache: KeyValueCache) -> None:
        if not self._room:
            return
        try:
            with torch.inference_mode():
                graphs[shape] = Captured(self._decoder, cache, shape, self._record)
        except torch.OutOfMemoryError:
            # Graphs save time only. What runs eagerly needs no more memory than before.
            self._room = 0
            worker_log.warning("no memory for a graph of %d rows: lower kv_memory_mb to have all graphs", shape.rows)


def record_cuda() -> Recorder:
    """Returns what captures on the current GPU, all graphs in one pool of memory.

    Follows torch.cuda.CUDAGraph's documentation: runs beside the current stream first, for what is set up on first
    use, then captures. Replays must follow each other, and an output is renewed by the next replay.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], StepOutput]) -> Recording:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy pages of the cache meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = work()
        return Recording(graph.replay, output)

    return record


def build_runner(model: Model, profile: Profile, context: int, device: torch.device, max_rows: int) -> Runner:
    """Returns a runner that uses graphs where the device and the attention allow it."""
    if device.type == "cuda" and isinstance(model, Decoder) and isinstance(model.attention, PagedAttention):
        return GraphRunner(model, profile, context, device, max_rows, record_cuda())
    return Runner(model, profile, context, device)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
