"""Grammars by llguidance (docs/adr/0012): a token-level automaton over the model's own vocabulary.

End tokens are the stop rules' business, not the tokenizer's: llguidance is given any special token as its end of text, and
the real ones are set and cleared here.

Compiling costs from a millisecond to a tenth of a second, copying what was compiled some 20 microseconds: `prepare` does the
one in whatever thread calls it, `start` the other in the engine's (`engine/grammar_ahead.py` sees to the order).
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import llguidance

from engine.grammar_state import GrammarError
from wire.grammar_limits import PARSER_LIMITS

logger = logging.getLogger(__name__)

_MAX_KEPT = 64


class Grammars:
    def __init__(self, tokenizer: llguidance.LLTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=PARSER_LIMITS["max_items_in_row"],
            initial_lexer_fuel=PARSER_LIMITS["initial_lexer_fuel"],
            step_lexer_fuel=PARSER_LIMITS["step_lexer_fuel"],
            step_max_items=PARSER_LIMITS["step_max_items"],
            max_lexer_states=PARSER_LIMITS["max_lexer_states"],
            max_grammar_size=PARSER_LIMITS["max_grammar_size"],
            precompute_large_lexemes=False,
        )
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()  # bad ones too
        self._changing = threading.Lock()  # never held while something compiles

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int) -> Grammars | None:
        """Reads `tokenizer.json` (a third of a second for 49,152 tokens); None if there is none, or of no usable kind."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            text = path.read_text(encoding="utf-8")
            end = next(entry["id"] for entry in json.loads(text)["added_tokens"] if entry["special"])
            tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=end)
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            logger.warning("output cannot be constrained by grammars: %s: %s", path, error or "no special token")
            return None
        return cls(tokenizer, vocab_size)

    def is_prepared(self, grammar: str) -> bool:
        with self._changing:
            return grammar in self._compiled

    def prepare(self, grammar: str) -> None:
        """Compile it, and its first mask, unless that has been done lately. Any thread; `start` reports what is wrong."""
        self._matcher(grammar)

    def start(self, grammar: str, output: Sequence[int]) -> MatcherState:
        matcher = self._matcher(grammar).deep_copy()
        if matcher.is_error():
            raise GrammarError(f"grammar: {matcher.get_error().splitlines()[0]}")
        state = MatcherState(matcher, self._vocab_size, self._tokenizer.eos_token)
        for token_id in output:
            state.advance(token_id)
        return state

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        """At its beginning, and to be left there: copies of it advance."""
        with self._changing:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        with self._changing:
            self._compiled[grammar] = matcher
            if len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
        return matcher


class MatcherState:
    """Implements `engine.grammar_state.GrammarState`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, library_end: int) -> None:
        self._matcher = matcher
        self._library_end = library_end
        self._vocab_size = vocab_size
        self._num_bytes = -(-vocab_size // 8)
        self._last = 0xFF >> (-vocab_size % 8)  # the bits of the last byte that stand for tokens

    def advance(self, token_id: int) -> None:
        if token_id == self._library_end or self._matcher.is_stopped() or not self._matcher.consume_token(token_id):
            raise GrammarError(f"grammar: token {token_id} cannot stand where it does")

    def allowed(self, end_token_ids: frozenset[int]) -> bytes:
        complete = self._matcher.is_accepting()
        bits = bytearray(self._matcher.compute_bitmask()[: self._num_bytes])
        bits[-1] &= self._last
        ends = [token_id for token_id in end_token_ids if 0 <= token_id < self._vocab_size]
        for token_id in (*ends, self._library_end):
            bits[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
        if complete:
            for token_id in ends:
                bits[token_id >> 3] |= 1 << (token_id & 7)
        if self._matcher.is_error() or not any(bits):
            raise GrammarError("grammar: no token can follow")
        return bytes(bits)
