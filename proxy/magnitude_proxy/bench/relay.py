"""The least that an HTTP proxy in Python does: aiohttp's server and client with nothing between them.

`python -m magnitude_proxy.bench.relay URL` listens on a free port of loopback, prints it on one line and passes every
request on to the server at URL, and its answer back piece by piece, until standard input closes. What a proxy costs
above this is its own work.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import aiohttp
from aiohttp import web

CONNECTIONS = 1024
_PLAIN = {"Content-Type": "application/json"}


async def serve(url: str) -> None:
    """Serves until standard input ends."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=CONNECTIONS), cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
    ) as session:

        async def relay(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            async with session.post(url + request.path, data=body, headers=_PLAIN) as answer:
                if answer.content_type == "application/json":
                    return web.Response(body=await answer.read(), content_type=answer.content_type)
                response = web.StreamResponse(headers={"Content-Type": answer.content_type})
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=16 * 1024 * 1024)
        app.router.add_post("/{path:.*}", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=CONNECTIONS).start()
        sys.stdout.write(f"{runner.addresses[0][1]}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
        await runner.cleanup()


def main(arguments: Sequence[str]) -> None:
    """Runs the relay on the fastest loop there is."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(arguments[0]))
    else:
        uvloop.run(serve(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
