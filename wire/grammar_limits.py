"""How much a grammar may cost. The coordinator accepts a grammar under the limits under which the workers run it."""

from __future__ import annotations

MAX_GRAMMAR_BYTES = 64 * 1024

# llguidance's `LLParserLimits`. Measured at these on one core with the default model's vocabulary: a grammar that passes the
# coordinator's check takes a worker at most some 100 ms to start and some 30 ms for a mask; usual ones take 1 ms and 20 µs.
PARSER_LIMITS: dict[str, int] = {
    "max_items_in_row": 1_000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 50_000,
}
