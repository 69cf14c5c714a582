"""The model as a Hugging Face folder, for peers that read no GGUF; written by the engine, once it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from magnitude_engine.errors import MagnitudeError


class ExportFailed(MagnitudeError):
    """The folder could not be written."""


class Exported:
    """Returns the folder when it is called; writes it at the first call."""

    def __init__(self, file: Path, folder: Path) -> None:
        self._file = file
        self._folder = folder

    def __call__(self) -> Path:
        """Returns the folder.

        Raises:
            ExportFailed: the engine is not installed, or cannot read the model.
        """
        if (self._folder / "config.json").is_file():
            return self._folder
        command = (sys.executable, "-m", "magnitude_engine.model.export", str(self._file), str(self._folder))
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            lines = ended.stderr.strip().splitlines() or [f"status {ended.returncode}"]
            raise ExportFailed(f"{self._file.name} could not be written as a Hugging Face folder: {lines[-1]}")
        return self._folder
