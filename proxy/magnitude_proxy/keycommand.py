"""`magnitude keys new` and `magnitude keys hash`: keys that a key file knows by their hashes."""

from __future__ import annotations

import argparse
import os
from typing import TextIO

from magnitude_engine.errors import ConfigError
from magnitude_proxy.keyfile import hashed_line, new_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the two commands and their options."""
    commands = parser.add_subparsers(dest="keys_command", required=True, metavar="COMMAND")
    new = commands.add_parser(
        "new",
        help="make a key",
        description="Makes a key. The key goes to stdout, once, and is kept nowhere; the line for the key file, which "
        "holds its hash, goes to stderr, or with --append to the end of a file.",
    )
    hashed = commands.add_parser(
        "hash",
        help="the line for a key that exists",
        description="Reads one key from stdin and prints the line that a key file needs to know it by its hash.",
    )
    for each in (new, hashed):
        each.add_argument("--tenant", required=True, help="whom it stands for; tenants see nothing of each other")
        each.add_argument("--name", help="for people: shown in the log, never to clients")
        each.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="OPTION=VALUE",
            help="upstream, admin or a limit, such as max_iterations=50 (repeatable)",
        )
    new.add_argument("--append", metavar="FILE", help="add the line to this key file; a server reads it by itself")


def run(options: argparse.Namespace, stdin: TextIO, stdout: TextIO, stderr: TextIO) -> int:
    """Carries one of the commands out and returns the exit status; raises ConfigError."""
    words = [*([] if options.name is None else [f"name={options.name}"]), *options.set]
    if options.keys_command == "hash":
        key = stdin.readline().strip()
        if not key or len(key.split()) != 1:
            raise ConfigError("keys hash: put one key, without spaces, on stdin", param="keys")
        stdout.write(hashed_line(key, options.tenant, words) + "\n")
        return 0
    made = new_key(options.tenant, words)
    if options.append is not None:
        _append(options.append, made.line)
        stderr.write(f"its line was added to {options.append}; the key, shown this once:\n")
    else:
        stderr.write(f"line for the key file:\n{made.line}\nthe key, shown this once:\n")
    stderr.flush()
    stdout.write(made.key + "\n")
    return 0


def _append(file: str, line: str) -> None:
    """Adds a line to a key file, which is made (mode 0600) where there is none."""
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "r+b") as opened:
            size = opened.seek(0, os.SEEK_END)
            if size:
                opened.seek(size - 1)
                line = line if opened.read(1) == b"\n" else f"\n{line}"
            opened.write(f"{line}\n".encode())
    except OSError as error:
        raise ConfigError(f"--append {file}: cannot be written ({error.strerror})", param="append") from error
