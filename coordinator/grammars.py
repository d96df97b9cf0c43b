"""What the output must be: from a schema, a regular expression or a grammar to the text of which workers make a matcher.

Everything is compiled here once before any worker hears of it, off the event loop, under the workers' own limits and within
a deadline, so that a bad one is the client's error and disturbs nobody (docs/adr/0012).
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance

from coordinator.grammar_size import MAX_EXPANDED_SIZE, expanded_size, patterns_of, schema_text
from coordinator.tokenizer import Tokenizer
from wire.grammar_limits import MAX_GRAMMAR_BYTES, PARSER_LIMITS

_MAX_KNOWN = 256
_MASKS_TRIED = 3
_JSON_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}


class BadGrammar(ValueError):
    """The text is fit for the client."""


def from_json_schema(schema: Any) -> str:
    """
    Raises:
        BadGrammar
    """
    text = schema_text(schema)
    _check_size(text, patterns_of(schema))
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
    except ValueError as error:
        raise BadGrammar(_first_line(str(error))) from error


def from_regex(regex: str) -> str:
    """
    Raises:
        BadGrammar
    """
    _check_size(regex, [regex])
    return llguidance.LLMatcher.grammar_from_regex(regex)


def from_lark(grammar: str) -> str:
    """llguidance's dialect of Lark, or GBNF (with `::=`).

    Raises:
        BadGrammar
    """
    _check_size(grammar, [grammar])
    try:
        return llguidance.grammar_from("gbnf" if "::=" in grammar else "lark", grammar)
    except ValueError as error:
        raise BadGrammar(_first_line(str(error))) from error


def _check_size(text: str, patterns: list[str]) -> None:
    num_bytes = len(text.encode("utf-8"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise BadGrammar(f"it has {num_bytes} bytes; {MAX_GRAMMAR_BYTES} are allowed")
    if any(expanded_size(pattern) > MAX_EXPANDED_SIZE for pattern in patterns):
        raise BadGrammar(f"its repetitions stand for more than {MAX_EXPANDED_SIZE} parts")


class GrammarChecker:
    """Compiles grammars in threads of its own; remembers those that were good."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, timeout_s: float) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._library_tokenizer: llguidance.LLTokenizer | None = None
        self._building = threading.Lock()
        self._good: OrderedDict[str, None] = OrderedDict()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="ThreadPoolExecutor-grammar")

    async def checked(self, make: Callable[[], str]) -> str:
        """The grammar that `make` makes, if workers will take it; both happen off the loop.

        Raises:
            BadGrammar: it does not compile, uses what is not supported, or costs too much.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self.load)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await loop.run_in_executor(self._threads, self._made, make)
        except TimeoutError as error:
            raise BadGrammar(f"it takes longer to compile than {self._timeout_s:g} s") from error

    def _made(self, make: Callable[[], str]) -> str:
        grammar = make()
        with self._building:
            if grammar in self._good:
                self._good.move_to_end(grammar)
                return grammar
        problem = self._problem(grammar)
        if problem is not None:
            raise BadGrammar(problem)
        with self._building:
            self._good[grammar] = None
            if len(self._good) > _MAX_KNOWN:
                self._good.popitem(last=False)
        return grammar

    def load(self) -> None:
        """Once, and not on the clock of a grammar: a third of a second for 49,152 tokens. Any thread.

        Raises:
            BadGrammar: the tokenizer is of a kind that the library does not know.
        """
        with self._building:
            if self._library_tokenizer is not None:
                return
            if not self._tokenizer.special_ids:
                raise BadGrammar("this model's tokenizer has no special token, and cannot be constrained")
            try:
                self._library_tokenizer = llguidance.LLTokenizer(
                    self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=min(self._tokenizer.special_ids)
                )
            except ValueError as error:
                raise BadGrammar("this model's tokenizer cannot be constrained") from error

    def _problem(self, grammar: str) -> str | None:
        """What is wrong with it, or None. Tries the first masks too: that is where an expensive one costs."""
        assert self._library_tokenizer is not None
        limits = llguidance.LLParserLimits(
            max_items_in_row=PARSER_LIMITS["max_items_in_row"],
            initial_lexer_fuel=PARSER_LIMITS["initial_lexer_fuel"],
            step_lexer_fuel=PARSER_LIMITS["step_lexer_fuel"],
            step_max_items=PARSER_LIMITS["step_max_items"],
            max_lexer_states=PARSER_LIMITS["max_lexer_states"],
            max_grammar_size=PARSER_LIMITS["max_grammar_size"],
            precompute_large_lexemes=False,
        )
        matcher = llguidance.LLMatcher(self._library_tokenizer, grammar, log_level=0, limits=limits)
        for _ in range(_MASKS_TRIED):
            if matcher.is_error():
                return _first_line(matcher.get_error())
            if matcher.is_stopped():
                break
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error() or allowed == 0:
                return _first_line(matcher.get_error() or "nothing can follow its beginning")
            if not matcher.consume_token((allowed & -allowed).bit_length() - 1):
                break
        return _first_line(matcher.get_error()) if matcher.is_error() else None


# The library's word for a start symbol of which no text can be made.
_ENDLESS = ("NoExtensionBias", "it refers to itself without end")


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    if lines and lines[0] == _ENDLESS[0]:
        return _ENDLESS[1]
    return lines[0][:300] if lines else "it cannot be used"
