"""What a part of `magnitude bench` is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple


class Part(NamedTuple):
    """One bench.

    Attributes:
        name: its word on the command line.
        help: one line for `magnitude bench --help`.
        description: what it measures, for its own `--help`.
        add_arguments: adds its options to its parser.
        run: measures and prints; returns the exit status.
    """

    name: str
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
