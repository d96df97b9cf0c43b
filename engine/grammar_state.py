"""What the engine needs of whatever makes output follow a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.errors import EngineError


class GrammarError(EngineError):
    """A grammar cannot be used here, or its sequence cannot go on under it."""


class GrammarState(Protocol):
    """One sequence's place in its grammar: a function of the grammar and of the output tokens so far, whoever drew them."""

    def advance(self, token_id: int) -> None:
        """
        Raises:
            GrammarError: the grammar does not allow that token here.
        """

    def allowed(self, end_token_ids: frozenset[int]) -> bytes:
        """The tokens that may come next, one bit each: token t is bit `t % 8` of byte `t // 8`.

        End tokens are allowed exactly where the output is complete.

        Raises:
            GrammarError: nothing may come next.
        """


class GrammarFactory(Protocol):
    def start(self, grammar: str, output: Sequence[int]) -> GrammarState:
        """
        Raises:
            GrammarError: not a grammar, over the limits, or the output does not follow it.
        """
