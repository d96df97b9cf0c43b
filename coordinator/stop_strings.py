"""Finding stop strings in text that arrives in pieces.

What is found does not depend on how the text is cut into pieces: the stop string that is complete first wins, and of those
complete at the same character the longest one (it starts earliest, so nothing of another is left in front of it). Only a
suffix that could still become a stop string is held back.
"""

from __future__ import annotations


class StopMatcher:
    """Feed text with `push`; after a match nothing more may be fed. At the end of the sequence, `flush` what is held."""

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """
        Returns:
            The text that may be shown now, and whether a stop string was completed.
        """
        if not self._stops:
            return piece, False
        text = self._held + piece
        match = self._first_match(text)
        if match is not None:
            start, end = match
            self._held = ""
            return text[: end if self._include_stop else start], True
        keep = self._possible_beginning(text)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        best: tuple[int, int] | None = None  # (end, start): smaller is better on both
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else (best[1], best[0])

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest suffix of `text` that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
