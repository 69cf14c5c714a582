"""The GGUF reader against gguf-py's writer and quantisers, and against damaged files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from magnitude_engine.errors import ModelUnsupported
from magnitude_engine.model.gguf import Blocks, GgufFile

KINDS = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
    "Q4_1": gguf.GGMLQuantizationType.Q4_1,
}


def write(path: Path, kind: str = "F32", shape: tuple[int, int] = (6, 96)) -> np.ndarray:
    """Writes one tensor of a kind, returns what gguf-py decodes it to."""
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    stored = gguf.quants.quantize(values, KINDS[kind])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.text", "héllo")
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.ratio", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_array("a.texts", ["x", "", "ÿ"])
    writer.add_array("a.numbers", [3, 1, 2])
    writer.add_tensor("first", np.arange(5, dtype=np.float32))
    writer.add_tensor("weight", stored, raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return np.asarray(gguf.quants.dequantize(stored, KINDS[kind]), dtype=np.float32).reshape(shape)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_decodes_as_gguf_py_does(kind: str, tmp_path: Path) -> None:
    expected = torch.from_numpy(write(tmp_path / "m.gguf", kind))
    file = GgufFile.open(tmp_path / "m.gguf")
    found = file.tensor("weight", (6, 96))
    assert isinstance(found, Blocks) == kind.startswith("Q")
    torch.testing.assert_close(file.dense("weight", (6, 96)), expected, rtol=1e-6, atol=1e-7)
    assert file.dense("first", (5,)).tolist() == [0, 1, 2, 3, 4]


def test_metadata_has_types(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    file = GgufFile.open(tmp_path / "m.gguf")
    assert file.text("a.text") == "héllo"
    assert file.integer("a.number") == 7
    assert file.number("a.ratio") == 0.5
    assert file.flag("a.flag", False)
    assert file.texts("a.texts") == ["x", "", "ÿ"]
    assert file.integers("a.numbers") == [3, 1, 2]
    assert file.integer("absent", 4) == 4
    for read in (file.integer, file.number, file.texts, file.integers):
        with pytest.raises(ModelUnsupported, match=r"a\.text must be"):
            read("a.text")
    with pytest.raises(ModelUnsupported, match="absent must be a string"):
        file.text("absent")


@pytest.mark.thorough
def test_a_cut_file_says_so_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    whole = path.read_bytes()
    for size in range(8, len(whole) - 64, 37):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelUnsupported, match="incomplete"):
            GgufFile.open(path)


def test_other_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content, message in (
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 a zip", "not a GGUF file"),
        (b"GGUF\x01\x00\x00\x00" + bytes(64), "version 1"),
        (b"GGUF\x00\x00\x00\x03" + bytes(64), "version 50331648"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelUnsupported, match=message):
            GgufFile.open(path)


def test_an_absurd_count_ends_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    key = (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + (4).to_bytes(4, "little")
    head = b"GGUF\x03\x00\x00\x00" + bytes(8) + (1).to_bytes(8, "little")
    path.write_bytes(head + key + (1 << 60).to_bytes(8, "little") + bytes(100))
    with pytest.raises(ModelUnsupported, match="incomplete"):
        GgufFile.open(path)


def test_unknown_tensor_types_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("weight", np.zeros((1, 144), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelUnsupported, match="tensor weight has GGUF type 12; convert the model to one of F32"):
        GgufFile.open(tmp_path / "m.gguf")


def test_shapes_and_names_are_checked(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    file = GgufFile.open(tmp_path / "m.gguf")
    with pytest.raises(ModelUnsupported, match="no tensor other"):
        file.tensor("other", (1,))
    with pytest.raises(ModelUnsupported, match=r"shape \(6, 96\), expected \(96, 6\)"):
        file.tensor("weight", (96, 6))


def test_the_fingerprint_follows_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    first = GgufFile.open(path).fingerprint()
    assert GgufFile.open(path).fingerprint() == first
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    assert GgufFile.open(path).fingerprint() != first
