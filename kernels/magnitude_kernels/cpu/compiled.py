"""How these functions are compiled, and where what was compiled is kept.

Compiled code is kept between processes. numba looks only at the file of a function to see whether it changed; here
functions are made of each other, so the folder carries a digest of all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])

# Infinities stand for what may not be seen, so nothing may assume that there are none.
_FAST = {"reassoc", "contract", "arcp", "nsz"}


def compiled(function: F) -> F:
    """Compiles a function for this processor at its first call; it runs without Python's lock.

    Sums may be taken in any order that is the same for every call, and a product and a sum may be rounded once.
    """
    with _cache_here():
        return cast(F, numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=_FAST)(function))


def address_of(function: Callable[..., None], arguments: int) -> int:
    """Compiles a function of int64 by itself and returns its address, for good.

    What compiled code calls by name is compiled anew inside of each caller; by address it is compiled once.
    """
    signature = numba.types.void(*[numba.types.int64] * arguments)
    with _cache_here():
        made = numba.cfunc(signature, cache=True, error_model="numpy", fastmath=_FAST)(function)
    _KEPT.append(made)
    return int(made.address)


@contextlib.contextmanager
def _cache_here() -> Iterator[None]:
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_FOLDER)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def _folder() -> Path:
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return Path(base) / "magnitude" / digest.hexdigest()


_FOLDER = _folder()
_KEPT: list[Any] = []
