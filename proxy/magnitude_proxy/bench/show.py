"""`magnitude bench show`: prints a receipt's tables and draws its chart anew."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from magnitude_engine.errors import ConfigError
from magnitude_proxy.bench import chart, receipt, summary
from magnitude_proxy.bench.part import Part


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument(
        "receipt", type=Path, metavar="RECEIPT", help="the JSON file that `magnitude bench agent` wrote"
    )
    parser.add_argument("--chart", type=Path, metavar="PNG", help="draw the chart there, too")


def run(options: argparse.Namespace) -> int:
    """Prints; returns the exit status.

    Raises:
        ConfigError: there is no such receipt, or no matplotlib for the chart.
    """
    found = receipt.read(options.receipt)
    sys.stdout.write(summary.render(found))
    if options.chart is not None:
        if not chart.available():
            raise ConfigError(chart.MISSING, param="chart")
        chart.draw(found, options.chart)
    return 0


PART = Part(
    name="show",
    help="print the tables of a receipt",
    description="Prints what `magnitude bench agent` measured, from its receipt.",
    add_arguments=add_arguments,
    run=run,
)
