"""Where the real model for tests lies: where the product itself keeps it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from magnitude_engine.config import default_data_dir

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_path() -> Path:
    """Returns the GGUF of SmolLM2; skips the test where it was not pulled (`magnitude pull smollm2`)."""
    named = os.environ.get("MAGNITUDE_TEST_MODEL")
    path = Path(named) if named else default_data_dir() / "models" / "smollm2" / SMOLLM2
    if not path.is_file():
        pytest.skip(f"{path} is not here: run `magnitude pull smollm2`")
    return path
