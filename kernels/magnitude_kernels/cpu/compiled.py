"""How these functions are compiled, and where what was compiled is kept.

Compiled code is kept between processes, in the user's cache folder or else in the data folder that MAGNITUDE_DATA_DIR
names; where neither can be written it is compiled at every start. numba looks only at the file of a function to see
whether it changed; here functions are made of each other, so the folder carries a digest of all of them.
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
    with _cache_here() as kept:
        return cast(F, numba.njit(nogil=True, cache=kept, error_model="numpy", fastmath=_FAST)(function))


def address_of(function: Callable[..., None], arguments: int) -> int:
    """Compiles a function of int64 by itself and returns its address, for good.

    What compiled code calls by name is compiled anew inside of each caller; by address it is compiled once.
    """
    signature = numba.types.void(*[numba.types.int64] * arguments)
    with _cache_here() as kept:
        made = numba.cfunc(signature, cache=kept, error_model="numpy", fastmath=_FAST)(function)
    _KEPT.append(made)
    return int(made.address)


@contextlib.contextmanager
def _cache_here() -> Iterator[bool]:
    """Lets numba keep what it compiles in our folder; yields whether there is one."""
    before = numba.config.CACHE_DIR
    if _FOLDER is not None:
        numba.config.CACHE_DIR = str(_FOLDER)
    try:
        yield _FOLDER is not None
    finally:
        numba.config.CACHE_DIR = before


def _folder() -> Path | None:
    """Returns a folder of this user's for what was compiled, None where there can be none."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "magnitude"
    places = (cache, Path(os.environ.get("MAGNITUDE_DATA_DIR") or cache))
    return next((place for place in (p / "compiled" / digest.hexdigest() for p in places) if usable(place)), None)


def usable(folder: Path) -> bool:
    """Makes a folder of this user's; what lies there is run, so one of somebody else's is not used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder.stat().st_uid == os.geteuid() and os.access(folder, os.W_OK)
    except OSError:
        return False


_FOLDER = _folder()
_KEPT: list[Any] = []
