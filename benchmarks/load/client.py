"""One request to an OpenAI-compatible server, timed piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from benchmarks.load.records import RequestRecord
from benchmarks.load.sse import BrokenStream, EventParser

MAX_ERROR_CHARS = 300
CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what this server wants beside OpenAI's fields.

    Args:
        endpoint: ``completions`` or ``chat``.
        body: more fields of the body, such as ``ignore_eos``. The text ``{output_tokens}`` in a value becomes the number
            of tokens that the request is to generate.
        stream_usage: the server takes `stream_options`.
    """

    url: str
    model: str
    endpoint: str = "completions"
    body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    stream_usage: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def payload(self, text: str, output_tokens: int) -> bytes:
        body: dict[str, Any] = {"model": self.model, "max_tokens": output_tokens, "temperature": 0, "stream": True}
        if self.stream_usage:
            body["stream_options"] = {"include_usage": True}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        return msgspec.json.encode(body | {name: _filled(value, output_tokens) for name, value in self.body.items()})


def _filled(value: Any, output_tokens: int) -> Any:
    if value == "{output_tokens}":
        return output_tokens
    return value.replace("{output_tokens}", str(output_tokens)) if isinstance(value, str) else value


class Client:
    """Sends requests over as many connections as it takes, and keeps connections that were used."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, clock: Callable[[], float]) -> None:
        """
        Args:
            clock: seconds since the start of the run.
        """
        self._session = session
        self._target = target
        self._clock = clock

    async def send(self, record: RequestRecord, text: str, on_token: Callable[[RequestRecord], None]) -> str:
        """Fill `record`; returns the text that was generated. Raises nothing but cancellation.

        The caller decides what a cancellation means: the record's status is ``unfinished`` then.
        """
        payload = self._target.payload(text, record.planned_output_tokens)
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **self._target.headers}
        pieces: list[str] = []
        record.sent_s = self._clock()
        try:
            async with self._session.post(self._target.url + self._target.path, data=payload, headers=headers) as answer:
                record.http_status = answer.status
                record.first_byte_s = self._clock()
                if answer.status != 200:
                    body = await answer.content.read(65536)
                    record.status, record.error = "error", body.decode(errors="replace")[:MAX_ERROR_CHARS]
                else:
                    await self._read(answer, record, pieces, on_token)
        except (aiohttp.ClientError, TimeoutError, OSError, BrokenStream) as error:
            record.status, record.error = "error", f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        finally:
            record.end_s = self._clock()
        return "".join(pieces)

    async def _read(
        self,
        answer: aiohttp.ClientResponse,
        record: RequestRecord,
        pieces: list[str],
        on_token: Callable[[RequestRecord], None],
    ) -> None:
        parser = EventParser()
        finished = False
        async for data in answer.content.iter_any():
            now = self._clock()
            for event in parser.push(data):
                if event.text:
                    record.token_s.append(now)
                    pieces.append(event.text)
                    on_token(record)
                if event.output_tokens is not None:
                    record.prompt_tokens, record.output_tokens = event.prompt_tokens, event.output_tokens
                    record.cached_tokens = event.cached_tokens
                if event.timeline is not None:
                    record.timeline = event.timeline
                finished = finished or event.finished or event.done
        if not finished:
            raise BrokenStream("the stream ended before the answer did")
        if not record.token_s:
            raise BrokenStream("the answer has no text")
        record.status = "ok"


def make_session() -> aiohttp.ClientSession:
    """No limit on connections, no overall timeout (the run cuts off), no proxy."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300), timeout=timeout, trust_env=False
    )


async def wait_until_answers(session: aiohttp.ClientSession, url: str, deadline: float, alive: Callable[[], str]) -> None:
    """Until GET `url` answers 200.

    Args:
        deadline: by the event loop's clock.
        alive: why it is no use to wait any more; empty = it is.

    Raises:
        TimeoutError: the message says what was answered last.
    """
    loop = asyncio.get_running_loop()
    last = "nothing answers"
    while loop.time() < deadline:
        if reason := alive():
            raise TimeoutError(reason)
        try:
            async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as answer:
                if answer.status == 200:
                    return
                last = f"{url} answers {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            last = f"{url}: {type(error).__name__} {error}".strip()
        await asyncio.sleep(0.1)
    raise TimeoutError(last)
