"""Milliseconds of one step by context, rows and layout of pages, and of prefill per token.

python tests/bench/step.py --model PATH [--profile packed|reference|native|naive] [--threads N] [--cpu-time]

`naive` is the baseline: float32 weights, one operation after another as a tutorial would write them. Each figure is
the best of some rounds, because other work on the machine can only slow a step down. Log what matters in log.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional

from magnitude_engine.config import PAGE_TOKENS, EngineConfig
from magnitude_engine.model.batch import SequenceRows, StepBatch
from magnitude_engine.model.gguf import GgufFile
from magnitude_engine.model.loader import load_model
from magnitude_engine.model.pointwise import Rotary
from magnitude_engine.model.weights import GgufLlama, LayerWeights, dense


class Case(NamedTuple):
    """A step: `rows` rows of each of `sequences` at `context`, the first `prefix` tokens in pages common to all.

    `run` is how many pages lie together in a sequence's own part, 0 where all do.
    """

    context: int
    rows: int = 1
    sequences: int = 1
    prefix: int = 0
    run: int = 0


CONTEXTS = (16, 512, 2048, 4096)
ROWS = (1, 2, 4, 8, 16)
PREFILL = 256
LAYOUTS = {
    "8 sequences at 512": Case(512, 1, 8),
    "8 sequences at 2,064, 2,000 shared": Case(2064, 1, 8, 2000),
    "2 sequences at 2,064, 2,000 shared": Case(2064, 1, 2, 2000),
    "16 sequences at 576, 512 shared": Case(576, 1, 16, 512),
    "4,096 in two runs": Case(4096, run=128),
    "4,096 in 16 runs": Case(4096, run=16),
    "4,096 scattered": Case(4096, run=1),
}


class Engine:
    """The product's runner; every sequence has pages of its own."""

    def __init__(self, path: Path, profile: str) -> None:
        config = EngineConfig(model_path=str(path), profile=profile, kv_memory_mb=512)  # type: ignore[arg-type]
        self.runner = load_model(config).runner
        self.name = f"{profile} ({self.runner.description})"
        self._cache = self.runner.allocate_cache(max(ROWS) * (max(CONTEXTS) // PAGE_TOKENS + 1))
        for tensor in (*self._cache.keys, *self._cache.values):
            tensor.normal_()

    def step(self, case: Case) -> None:
        """Computes one step."""
        positions = torch.arange(case.context - case.rows, case.context)
        tables = [torch.tensor(self._pages(case, i)) for i in range(case.sequences)]
        slots = [t[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS for t in tables]
        rows = len(slots) * case.rows
        batch = StepBatch(
            ids=(positions % 1000).repeat(case.sequences),
            positions=positions.repeat(case.sequences),
            slots=torch.cat(slots),
            sequences=tuple(
                SequenceRows(i * case.rows, case.rows, case.context, tuple(t.tolist())) for i, t in enumerate(tables)
            ),
            logit_rows=torch.arange(rows) if case.rows < PREFILL else torch.tensor([rows - 1]),
        )
        self.runner.forward(batch, self._cache)

    def _pages(self, case: Case, index: int) -> list[int]:
        shared = case.prefix // PAGE_TOKENS
        own = -(-case.context // PAGE_TOKENS) - shared
        ids = [shared + index * own + i for i in range(own)]
        if case.run:
            blocks = [ids[i : i + case.run] for i in range(0, own, case.run)]
            ids = [page for block in reversed(blocks) for page in block]
        return [*range(shared), *ids]


class Naive:
    """A plain float32 decoder with contiguous keys and values."""

    name = "naive float32"

    def __init__(self, path: Path) -> None:
        checkpoint = GgufLlama(GgufFile.open(path))
        self._config = checkpoint.config
        c = self._config
        self._layers = [LayerWeights(*map(dense, checkpoint.layer(i))) for i in range(c.layers)]
        self._embedding = dense(checkpoint.embedding())
        self._norm = checkpoint.final_norm()
        self._rotary = Rotary.build(c, max(CONTEXTS) + PREFILL, None, torch.device("cpu"))
        size = (c.kv_heads, max(CONTEXTS) + PREFILL, c.head_dim)
        self._cache = [(torch.randn(size), torch.randn(size)) for _ in range(c.layers)]

    @torch.inference_mode()
    def step(self, case: Case) -> None:
        """Computes one sequence after another; there are no pages."""
        for _ in range(case.sequences):
            self._one(torch.arange(case.context - case.rows, case.context))

    def _one(self, positions: torch.Tensor) -> None:
        c, context = self._config, int(positions[-1]) + 1
        mask = torch.arange(context)[None] <= positions[:, None]
        h = self._embedding[positions % 1000]
        for layer, (keys, values) in zip(self._layers, self._cache, strict=True):
            x = functional.rms_norm(h, (c.hidden,), layer.attention_norm, c.epsilon)
            q, k, v = (functional.linear(x, dense(m)).view(len(x), -1, c.head_dim).transpose(0, 1) for m in layer[1:4])
            keys[:, positions], values[:, positions] = self._turn(k, positions), v
            q = self._turn(q, positions)
            found = functional.scaled_dot_product_attention(
                q[None], keys[None, :, :context], values[None, :, :context], attn_mask=mask, enable_gqa=True
            )
            h = h + functional.linear(found[0].transpose(0, 1).reshape(len(x), -1), dense(layer.out))
            x = functional.rms_norm(h, (c.hidden,), layer.ffn_norm, c.epsilon)
            gate = functional.silu(functional.linear(x, dense(layer.gate)))
            h = h + functional.linear(gate * functional.linear(x, dense(layer.up)), dense(layer.down))
        wanted = h if len(h) < PREFILL else h[-1:]
        functional.linear(functional.rms_norm(wanted, (c.hidden,), self._norm, c.epsilon), self._embedding)

    def _turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = self._config.head_dim // 2
        return x * self._rotary.cosine[positions] + x.roll(half, -1) * self._rotary.sine[positions]


def best(function: Callable[[], object], rounds: int, clock: Callable[[], float]) -> float:
    """Returns the least milliseconds of a call by `clock`."""
    function()
    least = float("inf")
    for _ in range(rounds):
        began = clock()
        function()
        least = min(least, clock() - began)
    return least * 1000


def table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Prints a Markdown table."""
    print(f"\n{title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for line in lines:
        print(f"| {' | '.join(line)} |")


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--profile", default="packed", choices=["packed", "reference", "native", "naive"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cpu-time", action="store_true", help="processor time; for one thread on a busy machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    subject = Naive(options.model) if options.profile == "naive" else Engine(options.model, options.profile)
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    print(f"{subject.name}; {machine}, {options.threads} threads, load {os.getloadavg()[0]:.1f}")
    clock = time.thread_time if options.cpu_time else time.perf_counter
    unit = "processor ms" if options.cpu_time else "ms"

    def timed(case: Case, rounds: int = options.rounds) -> float:
        return best(lambda: subject.step(case), rounds, clock)

    def cells(case: Callable[[int, int], Case]) -> list[list[str]]:
        return [[str(c), *(f"{timed(case(c, n)):.1f}" for n in ROWS)] for c in CONTEXTS]

    table(f"{unit} per step, rows of one sequence", ["context", *map(str, ROWS)], cells(Case))
    separate = cells(lambda context, n: Case(context, sequences=n))
    table(f"{unit} per step, one row of each of n sequences", ["context", *map(str, ROWS)], separate)
    table(f"{unit} per step", ["layout", unit], [[name, f"{timed(case):.1f}"] for name, case in LAYOUTS.items()])
    prefill = [(c, timed(Case(c, PREFILL), max(2, options.rounds // 4))) for c in (256, 2048, 4096)]
    table(
        f"prefill, a chunk of {PREFILL}",
        ["context after", unit, "tokens/s"],
        [[str(c), f"{ms:.0f}", f"{PREFILL / ms * 1000:.0f}"] for c, ms in prefill],
    )


if __name__ == "__main__":
    main()
