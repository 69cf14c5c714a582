"""The packed profile on a CPU: weights stay in 4 or 8 bits, and a whole step is one call of compiled code.

The rows of a step have the same bits whatever is computed beside them (`magnitude_kernels.cpu`), so here too an answer
does not depend on batching, caching, chunks or drafts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from magnitude_engine.errors import ModelUnsupported
from magnitude_engine.model.arrange import arrange
from magnitude_engine.model.batch import KeyValueCache, StepBatch, StepOutput
from magnitude_engine.model.decoder import Embedding
from magnitude_engine.model.gguf import Blocks
from magnitude_engine.model.pointwise import Rotary
from magnitude_engine.model.weights import Checkpoint, LlamaConfig, Matrix
from magnitude_kernels.cpu import attend, forward, frame, lay, product
from magnitude_kernels.cpu.emit import LANES
from magnitude_kernels.cpu.rows import CODED_GROUP, GROUP
from magnitude_kernels.cpu.threads import Team

# Attention is shared out by tiles and key heads; with so many of them for each thread none waits long for another.
_ITEMS_PER_THREAD = 6


class Packed(NamedTuple):
    """A matrix in the layout of `magnitude_kernels.cpu.product`.

    Attributes:
        kind: bits of a code.
        codes: bytes.
        scales: float16, empty for 16 bits.
        blocks: of 16 outputs.
    """

    kind: int
    codes: torch.Tensor
    scales: torch.Tensor
    blocks: int

    def row(self) -> tuple[int, int, int, int, int]:
        """Returns its row in the table of weights."""
        coded = self.kind != product.BFLOAT16
        return product.tiles(self.kind), self.codes.data_ptr(), self.scales.data_ptr(), self.blocks, coded


def pack(matrix: Matrix) -> Packed:
    """Packs a matrix [outputs, inputs]; outputs are filled up to whole blocks with zeros.

    4- and 8-bit blocks keep their values as far as float16 holds scales and minima, others are rounded to bfloat16.

    Raises:
        ModelUnsupported: the number of inputs is not a multiple of 32.
    """
    outputs, inputs = matrix.codes.shape if isinstance(matrix, Blocks) else matrix.shape
    if inputs % GROUP:
        raise ModelUnsupported(
            f"a matrix has {inputs} inputs and the packed profile takes multiples of {GROUP}; "
            "start with --profile reference or native"
        )
    missing = -outputs % product.OUTPUTS
    blocks = (outputs + missing) // product.OUTPUTS

    def by_block(values: torch.Tensor) -> torch.Tensor:
        """Returns [outputs, n] as [blocks, n, 16]."""
        padded = torch.nn.functional.pad(values, (0, 0, 0, missing))
        return padded.view(blocks, product.OUTPUTS, -1).transpose(1, 2)

    if not isinstance(matrix, Blocks):
        return Packed(product.BFLOAT16, by_block(matrix.bfloat16()).contiguous(), torch.empty(0), blocks)
    if matrix.bits == product.EIGHT_BITS:
        codes, minimum = _in_pairs(by_block(matrix.codes)), matrix.minimum
    else:
        # [blocks, inputs / 8, pairs, 16 outputs, 2]: a word takes one code from each pair.
        pairs = _in_pairs(by_block(matrix.codes + 8)).view(blocks, inputs // 8, 4, product.OUTPUTS, 2).int()
        words = sum((pairs[:, :, n] << 4 * n for n in range(4)), torch.zeros(1, dtype=torch.int32))
        codes = words.to(torch.int16).contiguous()
        minimum = matrix.minimum - 8 * matrix.scale
    scales = torch.stack([by_block(matrix.scale), by_block(minimum)], 2).half().contiguous()
    return Packed(matrix.bits, codes, scales, blocks)


def _in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Returns [blocks, inputs, 16] as [blocks, inputs / 2, 16, 2]."""
    blocks, inputs, outputs = codes.shape
    return codes.view(blocks, inputs // 2, 2, outputs).transpose(2, 3).contiguous()


@dataclass(slots=True)
class _Memory:
    """Buffers that grow with the largest step."""

    kept: dict[str, frame.Floats] = field(default_factory=dict)

    def take(self, name: str, *size: int) -> frame.Floats:
        """Returns memory of this size, with whatever stands in it."""
        needed = int(np.prod(size))
        kept = self.kept.get(name)
        if kept is None or kept.size < needed:
            kept = self.kept[name] = np.zeros(needed, np.float32)
        return kept[:needed].reshape(size)


class PackedModel:
    """A model whose steps are computed by compiled code.

    Attributes:
        config: the model's sizes.
        description: how it multiplies, in words.
        cache_dtype: of keys and values.
    """

    def __init__(
        self, config: LlamaConfig, model: frame.Model, matrices: Sequence[Packed], embedding: Embedding
    ) -> None:
        """`matrices` are those that the model's table points to."""
        self.config = config
        self.description = "packed weights, compiled"
        self.cache_dtype = torch.bfloat16
        self._model = model
        self._matrices = tuple(matrices)
        self._embedding = embedding
        self._memory = _Memory()
        self._frames = frames = frame.empty()
        threads = torch.get_num_threads()
        self._team = Team(threads, lambda team, thread: forward.work(frames, team, thread, threads))
        weakref.finalize(self, self._team.close)

    def forward(self, batch: StepBatch, cache: KeyValueCache, layers: Sequence[int] | None = None) -> StepOutput:
        """Writes the step's keys and values into `cache` and returns the wanted rows' logits."""
        wanted = batch.logit_rows.shape[0]
        vocab = -(-self.config.vocab // product.OUTPUTS) * product.OUTPUTS
        # What is returned outlives the next step, unlike the memory in between.
        logits, hidden = torch.empty(wanted, vocab), torch.empty(wanted, self.config.hidden)
        step = self._step(batch, cache, range(self.config.layers) if layers is None else layers)
        space = self._space(step, hidden.numpy(), logits.numpy())
        frame.fill(self._frames, self._model, step, space)
        self._team.step()
        return StepOutput(logits[:, : self.config.vocab], hidden)

    def _step(self, batch: StepBatch, cache: KeyValueCache, layers: Sequence[int]) -> frame.Step:
        arranged = arrange(batch, -(-_ITEMS_PER_THREAD * self._team.size // self.config.kv_heads))
        first, size = cache.pages.data_ptr(), cache.pages.stride(0) * cache.pages.element_size()
        places = first + np.arange(2 * self.config.layers, dtype=np.int64) * size
        return frame.Step(
            layers=np.array(layers, np.int64),
            keys=places[0::2].copy(),
            values=places[1::2].copy(),
            h=self._embedding(batch.ids).contiguous().numpy(),
            positions=batch.positions.numpy(),
            slots=batch.slots.numpy(),
            sequence_slots=arranged.slots,
            tiles=arranged.tiles,
            own=arranged.own,
            wanted=batch.logit_rows.numpy(),
        )

    def _space(self, step: frame.Step, hidden: frame.Floats, logits: frame.Floats) -> frame.Space:
        c, rows, threads = self.config, step.h.shape[0], self._team.size
        state = attend.STATE + c.head_dim
        parts = int(step.tiles[:, 4].max()) // attend.PART + 1 if rows <= frame.SPLIT_ROWS else 1
        outputs = self._model.weights[0, :, 3] * product.OUTPUTS
        residual = int(outputs[frame.DOWN])
        widest = max(int(outputs[: frame.OUT].sum()), 3 * int(outputs[frame.GATE]), residual)
        take = self._memory.take
        x = take("x", rows, max(residual, c.heads * c.head_dim))
        groups = max(x.shape[1], c.ffn) // GROUP
        return frame.Space(
            counters=np.zeros(1 + (len(step.layers) + 1) * frame.COUNTERS, np.int64),
            x=x,
            coded=take("coded", rows, groups * CODED_GROUP // 4).view(np.uint8),
            y=take("y", rows, widest),
            states=take("states", rows if parts > 1 else 1, parts, c.heads, state),
            blocks=take("blocks", threads, lay.BLOCK * (c.head_dim + 2)),
            totals=take("totals", threads, 2, frame.TILE, c.heads // c.kv_heads, state),
            scores=take("scores", threads, 3 * lay.BLOCK),
            padded=np.zeros((threads, LANES), np.int64),
            hidden=hidden,
            logits=logits,
        )


def packed_model(
    checkpoint: Checkpoint, rotary: Rotary, embedding: Embedding, progress: Callable[[float], None]
) -> PackedModel:
    """Packs a model; `progress` gets 0..1.

    Raises:
        ModelUnsupported: sizes that the compiled code does not take.
    """
    c = checkpoint.config
    if c.head_dim % 8:
        raise ModelUnsupported(
            f"heads have {c.head_dim} dimensions and the packed profile takes multiples of 8; "
            "start with --profile reference or native"
        )
    matrices: list[Packed] = []
    norms: list[torch.Tensor] = []
    table = np.zeros((c.layers + 1, frame.MATRICES, frame.MATRIX_NUMBERS), np.int64)
    for index in range(c.layers):
        w = checkpoint.layer(index)
        norms += [w.attention_norm, w.ffn_norm]
        for which, matrix in enumerate((w.q, w.k, w.v, w.out, w.gate, w.up, w.down)):
            matrices.append(pack(matrix))
            table[index, which] = matrices[-1].row()
        progress((index + 1) / c.layers)
    head = checkpoint.head()
    matrices.append(pack(checkpoint.embedding() if head is None else head))
    table[c.layers, 0] = matrices[-1].row()
    model = frame.Model(
        weights=table,
        norms=torch.stack([n.float() for n in (*norms, checkpoint.final_norm())]).contiguous().numpy(),
        cosine=rotary.cosine.numpy(),
        sine=rotary.sine.numpy(),
        epsilon=c.epsilon,
        heads=c.heads,
        kv_heads=c.kv_heads,
        ffn=c.ffn,
    )
    return PackedModel(c, model, matrices, embedding)
