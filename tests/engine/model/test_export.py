"""The folder that is written for other servers holds the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from magnitude_engine.model import tokenizer as tokenizers
from magnitude_engine.model.export import export, main
from magnitude_engine.model.gguf import GgufFile
from magnitude_engine.model.safetensors import FolderLlama
from magnitude_engine.model.weights import GgufLlama, LayerWeights, Matrix, dense
from testkit.model import smollm2_path

TEXT = 'In 2026, the agent\'s 17 tools said: <|im_end|> naïve 日本語\n\n  {"a": 1}'


def same(stored: Matrix | None, written: torch.Tensor | None) -> bool:
    if stored is None or written is None:
        return stored is written
    return torch.equal(dense(stored).to(torch.bfloat16), written)


@pytest.mark.slow
def test_weights_tokens_and_template_are_those_of_the_file(tmp_path: Path) -> None:
    path = smollm2_path()
    export(path, tmp_path)
    file = GgufFile.open(path)
    source, folder = GgufLlama(file), FolderLlama(tmp_path)
    assert folder.config == source.config._replace(epsilon=folder.config.epsilon)
    assert folder.config.epsilon == pytest.approx(source.config.epsilon)
    for index in (0, source.config.layers - 1):
        stored, written = source.layer(index), folder.layer(index)
        for name in LayerWeights._fields:
            assert same(getattr(stored, name), getattr(written, name)), name
    assert same(source.embedding(), folder.embedding())
    assert same(source.final_norm(), folder.final_norm())
    assert same(source.head(), folder.head())
    old, new = tokenizers.from_gguf(file), folder.tokenizer()
    assert new.encode(TEXT) == old.encode(TEXT)
    assert new.encode_markup(TEXT) == old.encode_markup(TEXT)
    assert (new.eos_ids, new.eos_id, new.bos_id) == (old.eos_ids, old.eos_id, old.bos_id)
    assert folder.template() == file.text("tokenizer.chat_template")


def test_what_is_no_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"none")
    assert main([str(path), str(tmp_path / "out")]) == 2
    assert "is not a GGUF file" in capsys.readouterr().err
