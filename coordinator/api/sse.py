"""An answer as server-sent events.

    [`: keep-alive`]*  opening and chunks of every choice, interleaved  [usage chunk]  `data: [DONE]`

Every event is one `data:` line. The response starts with the first event (or the first keep-alive comment): what fails
before is an HTTP error with its own status. What fails later is one `data: {"error": …}` frame, and then the stream ends
without `[DONE]`. With X-Kvrelay-Timeline, a choice's last chunk has the extra field `kvrelay_timeline` with this choice's
entry (a client that does not know the field ignores it).

Events that are ready together leave in one write, so a busy loop writes less often instead of falling behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from coordinator.api.answer import AnswerFormat, json_bytes, timeline_entry
from coordinator.api.errors import ApiError, deadline_exceeded, error_object, error_response
from coordinator.api.running import RunningChoice, RunningRequest, unexpected
from coordinator.choice_stream import Delta

_log = logging.getLogger(__name__)
_Item = tuple[RunningChoice, Delta] | ApiError


class EventStream(Response):
    """Calls `at_end` once when the stream is over, however it ended; that must cancel the running request."""

    media_type = "text/event-stream"

    def __init__(
        self,
        running: RunningRequest,
        answer: AnswerFormat,
        timelines: bool,
        keepalive_s: float | None,
        write_timeout_s: float,
        at_end: Callable[[], None],
        deadline_s: float | None = None,
    ) -> None:
        """`deadline_s`: the loop's time at which the stream ends with an error."""
        super().__init__()
        self._running = running
        self._answer = answer
        self._timelines = timelines
        self._keepalive_s = keepalive_s
        self._write_timeout_s = write_timeout_s
        self._at_end = at_end
        self._deadline_s = deadline_s
        self._queue: asyncio.Queue[_Item | None] = asyncio.Queue()  # None: a keep-alive is due
        self._opened: set[int] = set()
        self._num_finished = 0
        self._silent_since_s = 0.0
        self._write_began_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._silent_since_s = asyncio.get_running_loop().time()
        writing = asyncio.ensure_future(self._write(scope, receive, send))
        ends = [writing, asyncio.ensure_future(until_disconnect(receive)), asyncio.ensure_future(self._watch())]
        followers = [asyncio.ensure_future(self._follow(choice)) for choice in self._running.choices]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        except (TimeoutError, OSError) as error:  # the client reads nothing, or the connection broke under the write
            _log.info("stream given up: %s", type(error).__name__)
        finally:
            self._at_end()
            for task in (*ends, *followers):
                task.cancel()
            await asyncio.gather(*ends, *followers, return_exceptions=True)

    async def _follow(self, choice: RunningChoice) -> None:
        try:
            async for delta in choice.deltas(self._running.arrived_s):
                self._queue.put_nowait((choice, delta))
        except Exception as error:  # becomes the stream's last frame
            self._queue.put_nowait(unexpected(error))

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        while self._num_finished < len(self._running.choices):
            items = await self._next_items()
            events, failure = self._events(items)
            if failure is not None and not started:
                await error_response(failure)(scope, receive, send)
                return
            if not started:
                started = True
                await self._send(send, {"type": "http.response.start", "status": 200, "headers": self._start_headers()})
            if failure is not None:
                events += b"data: " + json_bytes(error_object(failure)) + b"\n\n"
                await self._send_body(send, events, more=False)
                return
            if self._num_finished == len(self._running.choices):
                if self._running.plan.include_usage:
                    events += self._answer.usage_chunk(self._running.usage())
                events += b"data: [DONE]\n\n"
                await self._send_body(send, events, more=False)
                return
            await self._send_body(send, events or b": keep-alive\n\n", more=True)

    async def _watch(self) -> None:
        """One timer for the stream's two deadlines, so that tokens pass without any timer of their own.

        Raises:
            TimeoutError: a write did not get through in time.
        """
        now_s = asyncio.get_running_loop().time
        while True:
            due_s = (now_s() if self._write_began_s is None else self._write_began_s) + self._write_timeout_s
            if self._write_began_s is not None and now_s() >= due_s:
                raise TimeoutError
            if self._keepalive_s is not None and self._write_began_s is None:
                if now_s() >= self._silent_since_s + self._keepalive_s:
                    self._silent_since_s = now_s()
                    self._queue.put_nowait(None)
                due_s = min(due_s, self._silent_since_s + self._keepalive_s)
            if self._deadline_s is not None:
                if now_s() >= self._deadline_s:
                    self._deadline_s = None
                    self._queue.put_nowait(deadline_exceeded())
                else:
                    due_s = min(due_s, self._deadline_s)
            await asyncio.sleep(max(due_s - now_s(), 0.001))

    async def _next_items(self) -> list[_Item]:
        """All that is ready, at least one; only a keep-alive mark (which is left out) after an interval of silence."""
        items = [await self._queue.get()]
        while not self._queue.empty():
            items.append(self._queue.get_nowait())
        return [item for item in items if item is not None]

    def _events(self, items: list[_Item]) -> tuple[bytes, ApiError | None]:
        events: list[bytes] = []
        for item in items:
            if isinstance(item, ApiError):
                return b"".join(events), item
            choice, delta = item
            index = choice.planned.index
            if index not in self._opened:
                self._opened.add(index)
                events.append(self._answer.opening(index, delta.prompt))
            if not delta.has_output:
                continue  # it only brought what the opening shows
            timelines = None
            if delta.finish is not None:
                self._num_finished += 1
                if self._timelines:
                    timelines = [timeline_entry(index, choice.generation)]
            events.append(self._answer.chunk(index, delta, timelines))
        return b"".join(events), None

    def _start_headers(self) -> list[tuple[bytes, bytes]]:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._running.headers(),
        }
        return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]

    async def _send_body(self, send: Send, body: bytes, more: bool) -> None:
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": more})

    async def _send(self, send: Send, message: Message) -> None:
        now_s = asyncio.get_running_loop().time
        self._write_began_s = now_s()
        await send(message)
        self._write_began_s = None
        self._silent_since_s = now_s()


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
