"""Routes for operators.

/health   this process answers, and (if the operator gave a check) holds together; 503 otherwise
/ready    a request could be served now; 503 otherwise, with Retry-After
/metrics  Prometheus text
/cluster  what the coordinator knows of its workers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.errors import json_response


@dataclass(frozen=True, slots=True)
class HealthRoutes:
    is_healthy: Callable[[], bool]
    is_ready: Callable[[], bool]
    cluster_state: Callable[[], dict[str, Any]]
    exposition: Callable[[], bytes]
    retry_after_s: int

    async def health(self, request: Request) -> Response:
        healthy = self.is_healthy()
        body = {"status": "ok" if healthy else "failed", "ready": self.is_ready()}
        return json_response(body, 200 if healthy else 503)

    async def ready(self, request: Request) -> Response:
        if self.is_ready():
            return json_response({"status": "ready"})
        return json_response({"status": "not ready"}, 503, {"Retry-After": str(self.retry_after_s)})

    async def metrics(self, request: Request) -> Response:
        return Response(self.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def cluster(self, request: Request) -> Response:
        return json_response(self.cluster_state())
