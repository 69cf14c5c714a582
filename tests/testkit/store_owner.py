"""A process that owns or shares the embedded store of a folder: prints its server's process id, then waits.

python store_owner.py FOLDER
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from magnitude_proxy.store.embedded import EmbeddedStore


async def main(folder: Path) -> None:
    embedded = EmbeddedStore(folder)
    await embedded.start()
    print(embedded.pid, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
