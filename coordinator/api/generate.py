"""The life of one generating request at the front door, the same for both routes.

    read body → validate → build sequences (in a thread if long) → all accepted → stream, or collect and answer

While it waits, the connection is watched: a client that leaves ends everything of its request at once, in both modes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from coordinator.api.answer import AnswerFormat
from coordinator.api.body import read_json_object
from coordinator.api.chat import ChatFormat
from coordinator.api.completions import CompletionFormat
from coordinator.api.errors import ApiError, ClientGone, json_response
from coordinator.api.headers import Wishes, read_wishes
from coordinator.api.request_builder import Plan, RequestBuilder
from coordinator.api.running import RunningRequest
from coordinator.api.schemas import REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS, ChatRequest, CompletionRequest, validate
from coordinator.api.settings import ApiSettings
from coordinator.api.sse import EventStream, until_disconnect
from coordinator.generation import Generator
from coordinator.metrics import RequestMetrics
from coordinator.text_model import TextModel

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MAX_BYTES_ON_LOOP = 16 * 1024  # bodies above are rendered and tokenised in a thread


class InFlightLimit:
    """At most `limit` generating requests at once; the rest is refused promptly instead of queued for ever."""

    def __init__(self, limit: int, retry_after_s: int) -> None:
        self._limit = limit
        self._retry_after_s = retry_after_s
        self._held = 0

    def take(self) -> None:
        """
        Raises:
            ApiError: 429.
        """
        if self._held >= self._limit:
            raise ApiError(
                429,
                f"The server is serving {self._limit} requests already; try again later.",
                type_="rate_limit_error",
                code="server_busy",
                headers={"Retry-After": str(self._retry_after_s)},
            )
        self._held += 1

    def give_back(self) -> None:
        self._held -= 1


@dataclass(frozen=True, slots=True)
class GenerateRoutes:
    """Handlers of the two routes and all that they need."""

    generator: Generator
    text: TextModel
    settings: ApiSettings
    builder: RequestBuilder
    metrics: RequestMetrics
    limit: InFlightLimit
    model_name: str
    clock: Callable[[], float]
    unix_time: Callable[[], float]

    async def completions(self, request: Request) -> Response:
        async def prepare(body: dict[str, Any], size: int) -> tuple[Plan, AnswerFormat]:
            parsed = validate(CompletionRequest, body, REFUSED_IN_COMPLETIONS)
            check_model(parsed.model, self.model_name)
            plan = await off_loop(size, lambda: self.builder.completion(parsed))
            echo_texts = [plan.prompts[choice.prompt_index].echo_text for choice in plan.choices]
            answer = CompletionFormat(
                f"cmpl-{secrets.token_hex(12)}",
                int(self.unix_time()),
                self.model_name,
                self.text.tokenizer,
                echo_texts,
                plan.num_logprobs is not None,
                plan.include_usage,
            )
            return plan, answer

        return await self._serve(request, prepare)

    async def chat_completions(self, request: Request) -> Response:
        async def prepare(body: dict[str, Any], size: int) -> tuple[Plan, AnswerFormat]:
            parsed = validate(ChatRequest, body, REFUSED_IN_CHAT)
            check_model(parsed.model, self.model_name)
            plan = await off_loop(size, lambda: self.builder.chat(parsed))
            answer = ChatFormat(
                f"chatcmpl-{secrets.token_hex(12)}",
                int(self.unix_time()),
                self.model_name,
                self.text.tokenizer,
                plan.num_logprobs is not None,
                plan.include_usage,
            )
            return plan, answer

        return await self._serve(request, prepare)

    async def _serve(
        self, request: Request, prepare: Callable[[dict[str, Any], int], Coroutine[Any, Any, tuple[Plan, AnswerFormat]]]
    ) -> Response:
        arrived_s = self.clock()
        wishes = read_wishes(request.headers, self.settings.allow_policy_header)
        body, size = await read_json_object(request, self.settings.max_body_bytes, self.settings.body_timeout_s)
        plan, answer = await prepare(body, size)
        self.limit.take()
        running = RunningRequest(plan, self.text.tokenizer, self.metrics, self.clock, arrived_s)
        handed_over = False
        try:
            await while_connected(request.receive, running.accept(self.generator, wishes.policy))
            if plan.stream:
                handed_over = True
                return self._stream(running, answer, wishes)
            return await self._whole(request, running, answer, wishes)
        finally:
            if not handed_over:
                self._end(running)

    def _stream(self, running: RunningRequest, answer: AnswerFormat, wishes: Wishes) -> Response:
        return EventStream(
            running,
            answer,
            wishes.timeline,
            self.settings.keepalive_s,
            self.settings.write_timeout_s,
            at_end=lambda: self._end(running),
        )

    async def _whole(self, request: Request, running: RunningRequest, answer: AnswerFormat, wishes: Wishes) -> Response:
        results = await while_connected(request.receive, running.collect())
        timelines = running.timelines() if wishes.timeline else None
        return json_response(answer.whole(results, running.usage(), timelines), headers=running.headers())

    def _end(self, running: RunningRequest) -> None:
        running.cancel()
        self.limit.give_back()
        self.metrics.prompt_cached(running.usage().cached_tokens)


def check_model(asked: str, served: str) -> None:
    """
    Raises:
        ApiError: 404. The name is given back, but short: it is the client's.
    """
    if asked != served:
        raise ApiError(404, f"The model `{asked[:100]}` does not exist.", param="model", code="model_not_found")


async def off_loop(size: int, work: Callable[[], _T]) -> _T:
    """Run `work`, in a thread if the request's `size` in bytes means that it may take long."""
    return work() if size <= _MAX_BYTES_ON_LOOP else await asyncio.to_thread(work)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work`, but end it when the client leaves.

    Raises:
        ClientGone: the client left first; `work` has ended.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
