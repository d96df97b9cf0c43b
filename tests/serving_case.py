"""Requests to a running cluster, whole and streamed, for end-to-end cases."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from http_cluster import HttpCluster

C, CH = "/v1/completions", "/v1/chat/completions"
LOGPROB_ROUNDING = 1e-5  # float32, logprobs of a few units
LOGPROB_KEYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass(frozen=True)
class Served:
    cluster: HttpCluster
    model_dir: Path

    def client(self, policy: str | None = None, timeout_s: float = 60.0) -> httpx.AsyncClient:
        headers = {} if policy is None else {"X-Kvrelay-Policy": policy}
        limits = httpx.Limits(max_connections=300)
        return httpx.AsyncClient(base_url=self.cluster.url, timeout=timeout_s, headers=headers, limits=limits)

    async def ask(self, path: str, policy: str | None = None, **body: Any) -> dict[str, Any]:
        """A whole answer; asserts 200."""
        async with self.client(policy) as client:
            return await ask(client, path, **body)

    async def stream(self, path: str, policy: str | None = None, **body: Any) -> list[dict[str, Any]]:
        async with self.client(policy) as client:
            return await stream(client, path, **body)

    async def both(self, path: str, policy: str | None = None, **body: Any) -> dict[str, Any]:
        """The whole answer, after the stream has been found to say the same."""
        whole = await self.ask(path, policy, **body)
        chunks = await self.stream(path, policy, **body, stream_options={"include_usage": True})
        streamed, plain = choices_of(chunks), plain_choices(whole)
        assert same(streamed, plain), (streamed, plain)
        usage = chunks[-1]["usage"]
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[key] == whole["usage"][key], key
        return whole


def same(streamed: Any, whole: Any) -> bool:
    """Equal, but for rounding in logprobs: what came out of a prefix cache was summed in other chunks."""
    match streamed, whole:
        case None, dict():
            return not any(whole.values())  # no token, so no chunk that could carry logprobs (case B3)
        case float(), float():
            return abs(streamed - whole) <= LOGPROB_ROUNDING
        case dict(), dict():
            return streamed.keys() == whole.keys() and all(same(streamed[key], whole[key]) for key in whole)
        case list(), list():
            return len(streamed) == len(whole) and all(same(one, other) for one, other in zip(streamed, whole, strict=True))
    return bool(streamed == whole)


def body_of(path: str, body: dict[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"model": "m"}
    if path == CH:
        defaults["messages"] = [{"role": "user", "content": "hi"}]
    return {**defaults, **body}


async def ask(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body_of(path, body))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def stream(client: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """All chunks of a stream that ended well."""
    async with client.stream("POST", path, json=body_of(path, {**body, "stream": True})) as answer:
        content = (await answer.aread()).decode("utf-8")
        assert answer.status_code == 200, content
    events = [block for block in content.split("\n\n") if block and not block.startswith(":")]
    assert events.pop() == "data: [DONE]", content[-300:]
    return [json.loads(event.removeprefix("data: ")) for event in events]


def choices_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A stream's choices, put together: index, text, finish, logprobs, tool calls."""
    found: dict[int, dict[str, Any]] = defaultdict(
        lambda: {"text": "", "finish_reason": None, "logprobs": None, "tool_calls": []}
    )
    assert len({chunk["id"] for chunk in chunks}) == 1
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = found[part["index"]]
            assert choice["finish_reason"] is None, "nothing follows a choice's finish"
            choice["finish_reason"] = part["finish_reason"]
            delta = part.get("delta", {})
            choice["text"] += part["text"] if "text" in part else delta.get("content") or ""
            _add_calls(choice["tool_calls"], delta.get("tool_calls", []))
            choice["logprobs"] = _joined(choice["logprobs"], part["logprobs"])
    return [{"index": index, **found[index]} for index in sorted(found)]


def plain_choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """A whole answer's choices in the form of `choices_of`."""
    return [
        {
            "index": choice["index"],
            "text": choice["text"] if "text" in choice else choice["message"]["content"] or "",
            "finish_reason": choice["finish_reason"],
            "logprobs": choice["logprobs"],
            "tool_calls": [
                (call["function"]["name"], call["function"]["arguments"])
                for call in choice.get("message", {}).get("tool_calls", [])
            ],
        }
        for choice in answer["choices"]
    ]


def _add_calls(calls: list[tuple[str, str]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        if "id" in delta:
            assert delta["index"] == len(calls), "calls are numbered in their order"
            assert delta["type"] == "function"
            calls.append((delta["function"]["name"], delta["function"]["arguments"]))
        else:
            name, arguments = calls[delta["index"]]
            assert "name" not in delta["function"]
            calls[delta["index"]] = (name, arguments + delta["function"]["arguments"])


def _joined(known: dict[str, Any] | None, more: dict[str, Any] | None) -> dict[str, Any] | None:
    if known is None or more is None:
        return known if more is None else more
    return {key: value + more[key] if isinstance(value, list) else value for key, value in known.items()}
