"""`magnitude bench PART`: reads its command line and runs one part; `PARTS` lists them in the order of the help."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from magnitude_proxy.bench import agent, checkout, proxy, show
from magnitude_proxy.bench.part import Part

PARTS: tuple[Part, ...] = (agent.PART, proxy.PART, *checkout.PARTS, show.PART)


def main(words: Sequence[str]) -> int:
    """Runs the part that `words` name and returns the exit status.

    Raises:
        MagnitudeError: it cannot run as asked.
    """
    parser = argparse.ArgumentParser(
        prog="magnitude bench",
        description="Measures the product on this machine, beside what a user would run instead.",
    )
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for part in PARTS:
        part.add_arguments(parts.add_parser(part.name, help=part.help, description=part.description))
    options = parser.parse_args(words)
    chosen = next(part for part in PARTS if part.name == options.part)
    return chosen.run(options)
