"""What the HTTP half reads of one sequence: tokens as they come, then one end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from coordinator.generation import GenerationError, Placement, Timeline, Tokens
from coordinator.request_life import RequestLife


class TokenStream:
    """Implements `Generation`. One reader; what it has not read yet is bounded by the sequence's max_tokens."""

    def __init__(self, life: RequestLife, cancel: Callable[[], None]) -> None:
        self._life = life
        self._cancel = cancel
        self._unread: deque[Tokens] = deque()
        self._error: GenerationError | None = None
        self._over = False
        self._wake = asyncio.Event()

    @property
    def placement(self) -> Placement | None:
        return self._life.placement

    @property
    def timeline(self) -> Timeline:
        return self._life.timeline.snapshot()

    @property
    def num_cached_tokens(self) -> int:
        return self._life.num_cached_tokens

    @property
    def error(self) -> GenerationError | None:
        """Set as soon as the sequence has failed, read or not."""
        return self._error

    def cancel(self) -> None:
        self._unread.clear()
        self._cancel()

    def push(self, tokens: Tokens) -> None:
        self._unread.append(tokens)
        self._over = tokens.finish is not None
        self._wake.set()

    def fail(self, error: GenerationError) -> None:
        self._error = error
        self._over = True
        self._wake.set()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Tokens:
        """
        Raises:
            GenerationError: the sequence ended badly; tokens that came before are delivered first.
        """
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._unread.popleft()
