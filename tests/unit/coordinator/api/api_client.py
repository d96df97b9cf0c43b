"""Small helpers to talk to the front door in tests."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI
from scripted_generator import ScriptedGenerator

from coordinator.metrics import RequestMetrics

C, CH = "/v1/completions", "/v1/chat/completions"


@dataclass
class Door:
    app: FastAPI
    script: ScriptedGenerator
    client: httpx.AsyncClient
    metrics: RequestMetrics

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        body.setdefault("model", "tiny")
        if path == C:
            body.setdefault("prompt", "the fox")
        elif path == CH:
            body.setdefault("messages", [{"role": "user", "content": "hi"}])
        return await self.client.post(path, json=body, headers=headers or {})

    def metric(self, name: str, **labels: str) -> float:
        value = self.metrics._registry.get_sample_value(name, labels)
        return 0.0 if value is None else value


def events(response: httpx.Response) -> list[Any]:
    """The stream's events, parsed; asserts framing: one `data:` line each, `[DONE]` last."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.content.decode("utf-8").split("\n\n")
    assert blocks.pop() == ""
    lines = [block for block in blocks if not block.startswith(":")]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = defaultdict(str)
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return dict(texts)


def finishes(chunks: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert choice["index"] not in found, "nothing follows a choice's finish"
            if choice["finish_reason"] is not None:
                found[choice["index"]] = choice["finish_reason"]
    return found


def assert_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    return error


async def until(condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
