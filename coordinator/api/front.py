"""The outermost layer: request id, API key, metrics, and an answer even when everything else failed.

The key is checked before anything of the request is read, on every path but an explicit list, whether or not the path
exists.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.errors import ApiError, ClientGone, error_response, internal_error
from coordinator.api.headers import request_id_for
from coordinator.api.settings import ApiSettings
from coordinator.api_keys import KeyRing
from coordinator.metrics import RequestMetrics

CLIENT_KEY = "kvrelay.client"  # of an ASGI scope: whose request it is
_log = logging.getLogger(__name__)


class FrontLayer:
    """ASGI middleware. WebSockets are refused; lifespan passes."""

    def __init__(
        self, app: ASGIApp, settings: ApiSettings, keys: KeyRing, metrics: RequestMetrics, clock: Callable[[], float]
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._clock = clock
        self._open_paths = frozenset({"/health", "/ready"} | (set() if settings.metrics_need_key else {"/metrics"}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["method"] == "HEAD":  # as GET; the server below, whose scope this is not, sends no body
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        request_id = request_id_for(headers.get("x-request-id"))
        status = 499  # until something was answered

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        began_s = self._clock()
        self._metrics.request_started()
        try:
            client = self._client(scope["path"], headers)
            if client is None:
                await error_response(_unauthorized())(scope, receive, send_with_id)
                return
            scope[CLIENT_KEY] = client
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            return
        except Exception:
            _log.exception("unexpected failure of a request")
            if status == 499:
                await error_response(internal_error())(scope, receive, send_with_id)
            else:
                raise
        finally:
            route = scope.get("route")
            self._metrics.request_finished(getattr(route, "path", "unmatched"), status, self._clock() - began_s)

    def _client(self, path: str, headers: Headers) -> str | None:
        """Whose request it is; empty where no key is needed, None where one is and is not there."""
        if not self._keys.is_needed or path in self._open_paths:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        client = self._keys.identify(key.strip().encode("utf-8", "surrogateescape"))
        return client if scheme.lower() == "bearer" else None


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "A valid API key is needed: `Authorization: Bearer KEY`.",
        type_="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
