"""Where settings stand in the TOML file, and what a key that stands nowhere was probably meant to be.

A setting's dotted path `worker.engine.threads` is the key `threads` of section `[worker.engine]`; a path without a
dot is a key at the top level. `upstreams` and `keys` are lists of sections, written `[[upstreams]]`.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from magnitude_engine.errors import ConfigError

LISTS = ("upstreams", "keys")


class Unknown(NamedTuple):
    """A key that no section of that name has; `others` are the keys it does have, where it is one of a list."""

    section: str
    key: str
    others: tuple[str, ...] = ()


def place(path: str) -> str:
    """Returns where the setting `path` stands in the file, for example `[worker.engine] threads`."""
    if path in LISTS:
        return f"[[{path}]]"
    section, _, key = path.rpartition(".")
    return f"{_header(section)} {key}" if section else key


def refuse_unknown(tree: Mapping[str, Any], kind: type[msgspec.Struct], file: str, paths: Sequence[str]) -> None:
    """Refuses the first key of `tree`, read from `file`, that `kind` does not have; `paths` may be meant instead.

    Raises:
        ConfigError: names the file, the key, its section and the nearest setting.
    """
    found = next(_unknown(tree, kind, ""), None)
    if found is None:
        return
    where = f"in section {_header(found.section)}" if found.section else "at the top level"
    nearest = _nearest(found, paths)
    hint = ""
    if nearest is not None:
        hint = f"did you mean {place(nearest)}{'' if '.' in nearest else ' at the top level'}? "
    raise ConfigError(
        f"the file {file} has the unknown key {found.key} {where}: {hint}"
        "`magnitude serve --help` names the place of every setting",
        param=f"{found.section}.{found.key}".lstrip("."),
    )


def _header(section: str) -> str:
    return f"[[{section}]]" if section in LISTS else f"[{section}]"


def _unknown(tree: Mapping[str, Any], kind: type[msgspec.Struct], section: str) -> Iterator[Unknown]:
    """Yields the keys in `tree` that are no fields of `kind`, each at its deepest section."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in tree.items():
        if key not in fields:
            inner, name = section, key
            while isinstance(value, dict) and value:
                inner = f"{inner}.{name}".lstrip(".")
                name, value = next(iter(value.items()))
            others = tuple(f"{section}.{field}" for field in fields) if section in LISTS else ()
            yield Unknown(inner, name, others)
            continue
        struct = next(_structs(fields[key]), None)
        if struct is not None:
            for branch in value if isinstance(value, list) else [value]:
                if isinstance(branch, dict):
                    yield from _unknown(branch, struct, f"{section}.{key}".lstrip("."))


def _structs(annotation: Any) -> Iterator[type[msgspec.Struct]]:
    """Yields the structs that a field of this type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _structs(part)


def _nearest(found: Unknown, paths: Sequence[str]) -> str | None:
    """Returns the path whose key is nearest, among equal keys the one whose section is; None when none is near."""
    choices = found.others or paths
    whole = f"{found.section}.{found.key}".lstrip(".")
    keys = {path.rpartition(".")[2] for path in choices}
    near = difflib.get_close_matches(found.key, sorted(keys), n=1)
    if near:
        choices = [path for path in choices if path.rpartition(".")[2] == near[0]]
    return next(iter(difflib.get_close_matches(whole, choices, n=1, cutoff=0.0 if near else 0.6)), None)
