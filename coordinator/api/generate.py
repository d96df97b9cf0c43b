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

from coordinator.api.admission import Admission, Place
from coordinator.api.answer import AnswerFormat, best_of_each
from coordinator.api.body import read_json_object
from coordinator.api.chat import ChatFormat
from coordinator.api.completions import CompletionFormat
from coordinator.api.errors import ApiError, ClientGone, deadline_exceeded, json_response
from coordinator.api.front import CLIENT_KEY
from coordinator.api.headers import Wishes, read_wishes
from coordinator.api.request_builder import Plan, RequestBuilder
from coordinator.api.running import RunningRequest
from coordinator.api.schemas import REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS, ChatRequest, CompletionRequest, validate
from coordinator.api.settings import ApiSettings
from coordinator.api.sse import EventStream, until_disconnect
from coordinator.api.structured import grammar_for
from coordinator.api.tools import tool_use
from coordinator.generation import Generator
from coordinator.grammars import GrammarChecker
from coordinator.metrics import RequestMetrics
from coordinator.text_model import TextModel

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MAX_BYTES_ON_LOOP = 16 * 1024  # bodies above are rendered and tokenised in a thread


@dataclass(frozen=True, slots=True)
class GenerateRoutes:
    """Handlers of the two routes and all that they need."""

    generator: Generator
    text: TextModel
    settings: ApiSettings
    builder: RequestBuilder
    grammars: GrammarChecker
    metrics: RequestMetrics
    admission: Admission
    model_name: str
    clock: Callable[[], float]
    unix_time: Callable[[], float]

    async def completions(self, request: Request) -> Response:
        async def prepare(body: dict[str, Any], size: int) -> tuple[Plan, AnswerFormat]:
            parsed = validate(CompletionRequest, body, REFUSED_IN_COMPLETIONS)
            check_model(parsed.model, self.model_name)
            grammar = await grammar_for(parsed, self.grammars, self.text)
            plan = await off_loop(size, lambda: self.builder.completion(parsed, grammar))
            answer = CompletionFormat(
                f"cmpl-{secrets.token_hex(12)}",
                int(self.unix_time()),
                self.model_name,
                self.text.tokenizer,
                [prompt.echo_text for prompt in plan.prompts],
                plan.n,
                plan.num_logprobs is not None,
                plan.include_usage,
            )
            return plan, answer

        return await self._serve(request, prepare)

    async def chat_completions(self, request: Request) -> Response:
        async def prepare(body: dict[str, Any], size: int) -> tuple[Plan, AnswerFormat]:
            parsed = validate(ChatRequest, body, REFUSED_IN_CHAT)
            check_model(parsed.model, self.model_name)
            tools = tool_use(parsed, self.text.chat_template)
            grammar = await grammar_for(parsed, self.grammars, self.text, tools)
            plan = await off_loop(size, lambda: self.builder.chat(parsed, grammar, tools))
            answer = ChatFormat(
                f"chatcmpl-{secrets.token_hex(12)}",
                int(self.unix_time()),
                self.model_name,
                self.text.tokenizer,
                plan.num_logprobs is not None,
                plan.include_usage,
                None if tools is None else tools.style.format,
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
        place = self.admission.take(request.scope.get(CLIENT_KEY, ""), self.clock())
        running = RunningRequest(plan, self.text.tokenizer, self.metrics, self.clock, arrived_s, place.began)
        limit_s = self._limit_s(plan, wishes)
        deadline_s = None if limit_s is None else asyncio.get_running_loop().time() + limit_s - (self.clock() - arrived_s)
        handed_over = False
        try:
            async with asyncio.timeout_at(deadline_s):
                await while_connected(request.receive, running.accept(self.generator, wishes.policy))
                if plan.stream:
                    handed_over = True
                    return self._stream(running, answer, wishes, place, deadline_s)
                return await self._whole(request, running, answer, wishes)
        except TimeoutError as error:
            raise deadline_exceeded() from error
        finally:
            if not handed_over:
                self._end(running, place)

    def _limit_s(self, plan: Plan, wishes: Wishes) -> float | None:
        """Seconds that the whole request may take: the shortest of what the body, the header and the operator say."""
        operator = self.settings.request_timeout_s or None
        return min((limit for limit in (plan.timeout_s, wishes.timeout_s, operator) if limit is not None), default=None)

    def _stream(
        self, running: RunningRequest, answer: AnswerFormat, wishes: Wishes, place: Place, deadline_s: float | None
    ) -> Response:
        return EventStream(
            running,
            answer,
            wishes.timeline,
            self.settings.keepalive_s,
            self.settings.write_timeout_s,
            at_end=lambda: self._end(running, place),
            deadline_s=deadline_s,
        )

    async def _whole(self, request: Request, running: RunningRequest, answer: AnswerFormat, wishes: Wishes) -> Response:
        collected = await while_connected(request.receive, running.collect())
        results = best_of_each(collected, running.plan.n, running.plan.best_of)
        timelines = running.timelines() if wishes.timeline else None
        return json_response(answer.whole(results, running.usage(), timelines), headers=running.headers())

    def _end(self, running: RunningRequest, place: Place) -> None:
        running.cancel()
        place.end()
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
