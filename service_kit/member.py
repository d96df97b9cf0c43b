"""What a worker's service tells its coordinator about itself, the same for prefill and decode."""

from __future__ import annotations

from collections.abc import Callable

from wire.control import FailureKind, Leaving, RequestFailed, WorkerMessage
from wire.ids import Incarnation, RequestId


class Member:
    """The part of a service that drains and refuses.

    Args:
        post: sends to the coordinator, in order.
    """

    def __init__(self, incarnation: Incarnation, post: Callable[[WorkerMessage], None]) -> None:
        self.draining = False
        self._incarnation = incarnation
        self._post = post

    def on_registered(self) -> None:
        """A coordinator that knows us newly does not know that we drain."""
        if self.draining:
            self._post(Leaving(self._incarnation, finished=False))

    def begin_drain(self) -> None:
        """Take nothing new, and say so once."""
        if not self.draining:
            self.draining = True
            self._post(Leaving(self._incarnation, finished=False))

    def _post_failed(self, request_id: RequestId, kind: FailureKind, message: str) -> None:
        self._post(RequestFailed(request_id, kind, message))
