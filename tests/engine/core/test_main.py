"""The worker's command line: wrong settings are one line and exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from magnitude_engine.errors import ConfigError
from magnitude_engine.main import main, read_config


def test_settings_are_json_or_a_file(tmp_path: Path) -> None:
    text = '{"model_path": "m.gguf", "threads": 2}'
    file = tmp_path / "config.json"
    file.write_text(text, "utf-8")
    assert read_config(text) == read_config(str(file))
    assert read_config(text).threads == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_path": 5}', "model_path"),
        ('{"model_path": "m", "nonsense": 1}', "nonsense"),
        ('{"model_path": "m", "prefill_chunk": 0}', "prefill_chunk"),
        ("{", "--config"),
        ("no/such/file.json", "cannot read no/such/file.json"),
    ],
)
def test_wrong_settings_say_what_is_wrong(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(text)
    assert main(["--config", text, "--socket", "unused.sock"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("magnitude worker: --config: ")
