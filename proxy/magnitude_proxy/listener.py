"""The two HTTP listeners, with answers in OpenAI's form also to what is not HTTP."""

from __future__ import annotations

import functools
import socket

from aiohttp import web

from magnitude_engine.errors import ConfigError
from magnitude_proxy import anthropic
from magnitude_proxy.errors import HttpRefused
from magnitude_proxy.middleware import ADMIN, around, error_response, name_request
from magnitude_proxy.routes import ADMIN_ROUTES, PUBLIC_ROUTES
from magnitude_proxy.surface import SURFACE, Surface
from magnitude_proxy.telemetry import proxy_log

IDLE_S = 75.0
LINGER_S = 1.0
LAST_S = 2.0
BACKLOG = 1024


def api_application(surface: Surface) -> web.Application:
    """Returns the application of the public listener."""
    app = _application(surface, admin=False)
    app.on_response_prepare.append(anthropic.name_request)
    return app


def admin_application(surface: Surface) -> web.Application:
    """Returns the application of the second listener."""
    return _application(surface, admin=True)


def _application(surface: Surface, *, admin: bool) -> web.Application:
    outward = [around] if admin else [anthropic.in_anthropics_form, around]
    app = web.Application(middlewares=outward, client_max_size=surface.config.listen.max_body_bytes)
    app[SURFACE] = surface
    app[ADMIN] = admin
    app.on_response_prepare.append(name_request)
    for route in ADMIN_ROUTES if admin else PUBLIC_ROUTES:
        # A GET is a HEAD too, but for its body.
        add = app.router.add_get if route.method == "GET" else functools.partial(app.router.add_route, route.method)
        add(route.path, route.handler)
    return app


def bind(host: str, port: int, flag: str) -> socket.socket:
    """Returns a socket that listens; clients wait until `listen` serves it.

    Raises:
        ConfigError: the address cannot be used; `flag` is what to change.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another with {flag}",
            param=flag,
        ) from error


async def listen(app: web.Application, listener: socket.socket) -> Runner:
    """Starts to serve `listener`; the caller cleans the runner up."""
    runner = Runner(
        app,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=IDLE_S,
        lingering_time=LINGER_S,
        auto_decompress=False,
        shutdown_timeout=LAST_S,
    )
    await runner.setup()
    await web.SockSite(runner, listener, backlog=BACKLOG).start()
    return runner


class Runner(web.AppRunner):
    """aiohttp's runner with `Protocol` on every connection."""

    @property
    def port(self) -> int:
        """The port of the first socket."""
        return int(self.addresses[0][1])

    async def _make_server(self) -> web.Server:
        # aiohttp has no setting for the class of its connections, so the server it makes is made again.
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return Protocol(self, loop=self._loop, **self._kwargs)


class Protocol(web.RequestHandler):
    """A connection whose protocol errors (no HTTP, oversized headers) are told in OpenAI's form."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Returns the response for a request that never reached a handler; closes the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun and cannot be replaced")
        proxy_log.debug("a request could not be read: %s", type(exc).__name__)
        words = "the request is not HTTP as this server reads it: check its first line, its headers and their size"
        response = error_response(HttpRefused(words, status=status if status < 500 else 400))
        response.force_close()
        return response
