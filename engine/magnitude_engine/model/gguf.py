"""Reads GGUF files (versions 2 and 3, little-endian): metadata, and tensors as stored blocks or as float32.

The layout is llama.cpp's: header, key-value metadata, tensor table, then aligned tensor data. The file is mapped,
never read whole; every offset is checked against the real file size, so that a truncated download is a
`ModelUnsupported` that says so. gguf-py's own reader is not used: it takes seconds to open a file.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from magnitude_engine.errors import ModelUnsupported

Value: TypeAlias = "int | float | bool | str | list[Value]"

GROUP = 32
_F32, _F16, _Q4_0, _Q4_1, _Q8_0, _BF16 = 0, 1, 2, 3, 8, 30
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_SAMPLE_BYTES = 4096


class Encoding(NamedTuple):
    """How one tensor type is stored: its name, and `size` bytes per `block` values."""

    name: str
    block: int
    size: int


ENCODINGS = {
    _F32: Encoding("F32", 1, 4),
    _F16: Encoding("F16", 1, 2),
    _BF16: Encoding("BF16", 1, 2),
    _Q4_0: Encoding("Q4_0", GROUP, 18),
    _Q4_1: Encoding("Q4_1", GROUP, 20),
    _Q8_0: Encoding("Q8_0", GROUP, 34),
}


class TensorInfo(NamedTuple):
    """Where a tensor lies; `shape` is in torch's order, `offset` is from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix: weight[r, c] = codes[r, c] * scale[r, c // 32] + minimum[r, c // 32].

    Attributes:
        codes: int8 [rows, columns]; -8..7 for the 4-bit types, -128..127 for Q8_0.
        scale, minimum: float32 [rows, columns / 32].
        bits: 4 or 8.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    bits: int

    def dense(self) -> torch.Tensor:
        """Returns the float32 weights, [rows, columns]."""
        rows, columns = self.codes.shape
        grouped = self.codes.view(rows, columns // GROUP, GROUP).float()
        return grouped.mul_(self.scale[..., None]).add_(self.minimum[..., None]).view(rows, columns)

    def rows(self, order: torch.Tensor) -> Blocks:
        """Returns the same matrix with its rows in another order."""
        return Blocks(self.codes[order], self.scale[order], self.minimum[order], self.bits)


class _Cursor:
    """Reads header fields one after another; raises ModelUnsupported at the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.at = 0

    def scalar(self, code: str) -> int | float | bool:
        size = struct.calcsize(code)
        self.need(size)
        value: int | float | bool = struct.unpack_from(code, self._data, self.at)[0]
        self.at += size
        return value

    def count(self) -> int:
        return int(self.scalar("<Q"))

    def string(self) -> str:
        # A vocabulary is a hundred thousand of these, so this one reads its length itself.
        start = self.at + 8
        end = start + int.from_bytes(self._data[self.at : start], "little")
        self.need(end - self.at)
        self.at = end
        try:
            return self._data[start:end].decode("utf-8")
        except UnicodeDecodeError:
            raise ModelUnsupported(f"{self._path}: a metadata string is not UTF-8; the file is damaged") from None

    def value(self, kind: int, depth: int = 0) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < 2:
            inner, size = int(self.scalar("<I")), self.count()
            self.need(size)  # Each element takes a byte at least: refuses absurd counts before looping.
            if inner in _SCALARS:
                return self._scalars(_SCALARS[inner], size)
            return [self.value(inner, depth + 1) for _ in range(size)]
        if kind not in _SCALARS:
            raise ModelUnsupported(f"{self._path}: unknown metadata type {kind} at byte {self.at}")
        return self.scalar(_SCALARS[kind])

    def _scalars(self, code: str, size: int) -> list[Value]:
        self.need(size * struct.calcsize(code))
        values = struct.unpack_from(f"<{size}{code[1]}", self._data, self.at)
        self.at += size * struct.calcsize(code)
        return list(values)

    def need(self, size: int) -> None:
        if self.at + size > len(self._data):
            raise ModelUnsupported(
                f"{self._path} ends inside its header (byte {len(self._data)}); "
                "the download is incomplete, fetch it again"
            )


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened GGUF file."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    data: mmap.mmap
    header_size: int

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Maps the file and reads its header (about 0.1 s for a vocabulary of 49,152).

        Raises:
            ModelUnsupported: not GGUF, an unknown version, damaged or truncated.
        """
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelUnsupported(f"{path} is not a GGUF file; give a .gguf file or a folder with safetensors")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(path, data)
        cursor.at = 4
        version = int(cursor.scalar("<I"))
        if version not in (2, 3):
            raise ModelUnsupported(f"{path}: GGUF version {version} is not supported (2 and 3 are); convert it again")
        tensor_count, pair_count = cursor.count(), cursor.count()
        metadata: dict[str, Value] = {}
        for _ in range(pair_count):
            key = cursor.string()
            metadata[key] = cursor.value(int(cursor.scalar("<I")))
        tensors = _tensor_table(path, cursor, tensor_count, metadata.get("general.alignment", 32), len(data))
        return cls(path, metadata, tensors, data, cursor.at)

    def text(self, key: str, default: str | None = None) -> str:
        """Returns a string of the metadata; raises ModelUnsupported when absent without default."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self._missing(key, "a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a whole number of the metadata; raises ModelUnsupported when absent without default."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._missing(key, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number of the metadata; raises ModelUnsupported when absent without default."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._missing(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Returns a boolean of the metadata."""
        return bool(self.metadata.get(key, default))

    def texts(self, key: str) -> list[str]:
        """Returns a list of strings of the metadata."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._missing(key, "a list of strings")
        return [str(item) for item in value]

    def integers(self, key: str) -> list[int]:
        """Returns a list of whole numbers of the metadata."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self._missing(key, "a list of whole numbers")
        return [int(item) for item in value if isinstance(item, int)]

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | Blocks:
        """Returns a copy of the tensor: float32, or `Blocks` where it is stored quantised.

        Raises:
            ModelUnsupported: absent, of another shape, or of a type the engine cannot read.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ModelUnsupported(f"{self.path} has no tensor {name}; the file is incomplete or of another kind")
        if info.shape != shape:
            raise ModelUnsupported(f"{self.path}: tensor {name} has shape {info.shape}, expected {shape}")
        raw = np.frombuffer(self.data, dtype=np.uint8, count=info.size, offset=info.offset)
        if info.kind == _F32:
            return torch.from_numpy(raw.view("<f4").reshape(shape).copy())
        if info.kind == _F16:
            return torch.from_numpy(raw.view("<f2").reshape(shape).astype(np.float32))
        if info.kind == _BF16:
            return torch.from_numpy(raw.view("<i2").reshape(shape).copy()).view(torch.bfloat16).float()
        return _blocks(raw.reshape(shape[0], -1), info.kind)

    def dense(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns the tensor as float32, whatever its type (see `tensor` for errors)."""
        found = self.tensor(name, shape)
        return found.dense() if isinstance(found, Blocks) else found

    def fingerprint(self) -> str:
        """Returns a SHA-256 (hex) over the header and both ends of every tensor; cheap for files of any size."""
        digest = hashlib.sha256(self.data[: self.header_size])
        for info in self.tensors.values():
            end = info.offset + info.size
            digest.update(self.data[info.offset : min(end, info.offset + _SAMPLE_BYTES)])
            digest.update(self.data[max(info.offset, end - _SAMPLE_BYTES) : end])
        return digest.hexdigest()

    def _missing(self, key: str, what: str) -> ModelUnsupported:
        return ModelUnsupported(f"{self.path}: metadata {key} must be {what}, found {self.metadata.get(key)!r:.80}")


def _tensor_table(path: Path, cursor: _Cursor, count: int, alignment: Value, size: int) -> dict[str, TensorInfo]:
    """Reads the table and checks that each tensor lies inside the file."""
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelUnsupported(f"{path}: general.alignment must be a whole number above 0, not {alignment!r:.40}")
    entries: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        name = cursor.string()
        dimensions = int(cursor.scalar("<I"))
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ModelUnsupported(f"{path}: tensor {name} has {dimensions} dimensions, 1 to 4 are allowed")
        shape = tuple(cursor.count() for _ in range(dimensions))[::-1]
        entries.append((name, shape, int(cursor.scalar("<I")), cursor.count()))
    base = -(-cursor.at // alignment) * alignment
    table: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        encoding = ENCODINGS.get(kind)
        if encoding is None:
            supported = ", ".join(e.name for e in ENCODINGS.values())
            raise ModelUnsupported(
                f"{path}: tensor {name} has GGUF type {kind}; convert the model to one of {supported}"
            )
        values = int(np.prod(shape, dtype=object))
        if shape[-1] % encoding.block:
            raise ModelUnsupported(f"{path}: tensor {name} has rows of {shape[-1]}, not a multiple of {encoding.block}")
        length = values // encoding.block * encoding.size
        if base + offset + length > size:
            raise ModelUnsupported(
                f"{path} has {size} bytes but tensor {name} ends at byte {base + offset + length}; "
                "the download is incomplete, fetch it again"
            )
        table[name] = TensorInfo(name, shape, kind, base + offset, length)
    return table


def _blocks(raw: np.ndarray, kind: int) -> Blocks:
    """Splits raw rows (uint8 [rows, bytes]) into codes, scales and minima."""
    encoding = ENCODINGS[kind]
    rows = raw.shape[0]
    block = raw.reshape(rows, -1, encoding.size)
    scale = torch.from_numpy(block[..., :2].copy().view("<f2")[..., 0].astype(np.float32))
    if kind == _Q8_0:
        codes = torch.from_numpy(block[..., 2:].copy().view(np.int8).reshape(rows, -1))
        return Blocks(codes, scale, torch.zeros_like(scale), 8)
    packed = block[..., encoding.size - GROUP // 2 :]
    nibbles = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8) - np.int8(8)
    codes = torch.from_numpy(nibbles.reshape(rows, -1))
    if kind == _Q4_0:
        return Blocks(codes, scale, torch.zeros_like(scale), 4)
    minimum = torch.from_numpy(block[..., 2:4].copy().view("<f2")[..., 0].astype(np.float32))
    return Blocks(codes, scale, minimum + 8 * scale, 4)
