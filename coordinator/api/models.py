"""/v1/models: the one model that is served."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.errors import json_response
from coordinator.api.generate import check_model
from coordinator.api.request_builder import RequestBuilder


@dataclass(frozen=True, slots=True)
class ModelRoutes:
    model_name: str
    created: int  # Unix seconds
    builder: RequestBuilder

    async def list_models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        check_model(request.path_params["model_id"], self.model_name)
        return json_response(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvrelay",
            "max_model_len": self.builder.max_model_len,
        }
