"""The requests of one run, made before it starts: a pure function of the streams, the load, and the seed.

Equal seeds give equal plans, so that topologies are compared request by request. Each purpose has a generator of its own: a
change of the lengths leaves the arrivals as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.workloads.arrivals import Closed, Trace, arrival_times
from benchmarks.workloads.lengths import draw_lengths
from benchmarks.workloads.stream import Stream
from benchmarks.workloads.traces import HASH_BLOCK_TOKENS, TraceRow, scaled_rows
from benchmarks.workloads.words import Words

CLOSED_SESSIONS_PER_CLIENT_S = 50
"""A closed loop's requests are made in advance too; this many per client and second are more than any server answers."""
MAX_CLOSED_SESSIONS = 20_000


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """`text` is what this turn adds to the prompt; `prompt_tokens` counts that alone."""

    text: str
    prompt_tokens: int
    output_tokens: int
    think_s: float = 0.0  # before it, behind the previous turn's answer
    cancel_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """One request, or a conversation of several. `at_s` is None in a closed loop."""

    stream: str
    index: int
    at_s: float | None
    turns: tuple[PlannedTurn, ...]


@dataclass(frozen=True, slots=True)
class StreamPlan:
    stream: Stream
    sessions: tuple[Session, ...]

    @property
    def concurrency(self) -> int | None:
        """Of a closed loop; None when arrivals are planned."""
        return self.stream.arrivals.concurrency if isinstance(self.stream.arrivals, Closed) else None


@dataclass(frozen=True, slots=True)
class _Generators:
    arrivals: np.random.Generator
    lengths: np.random.Generator
    content: np.random.Generator
    behaviour: np.random.Generator

    @classmethod
    def of(cls, entropy: Sequence[int]) -> _Generators:
        children = np.random.SeedSequence(list(entropy)).spawn(4)
        return cls(*(np.random.default_rng(child) for child in children))


def plan_stream(
    stream: Stream,
    load: float,
    duration_s: float,
    entropy: Sequence[int],
    words: Words,
    trace: Callable[[str], Sequence[TraceRow]],
) -> StreamPlan:
    """
    Args:
        load: factor on the stream's rates, if it scales.
        entropy: non-negative integers that identify the run's randomness.
        trace: reads a trace by its name.
    """
    generators = _Generators.of(entropy)
    load = stream.load_of(load)
    if isinstance(stream.arrivals, Trace):
        rows = scaled_rows(trace(stream.arrivals.file), stream.arrivals, load, duration_s)
        return StreamPlan(stream, _trace_sessions(stream, stream.arrivals, list(rows), generators, words))
    if isinstance(stream.arrivals, Closed):
        wanted = int(stream.arrivals.concurrency * duration_s * CLOSED_SESSIONS_PER_CLIENT_S)
        moments: list[float | None] = [None] * min(MAX_CLOSED_SESSIONS, max(wanted, stream.arrivals.concurrency))
    else:
        moments = [float(at) for at in arrival_times(stream.arrivals, load, duration_s, generators.arrivals)]
    return StreamPlan(stream, _synthetic_sessions(stream, moments, generators, words))


def _synthetic_sessions(
    stream: Stream, moments: Sequence[float | None], generators: _Generators, words: Words
) -> tuple[Session, ...]:
    num_turns = len(moments) * stream.turns
    prompts = draw_lengths(stream.prompt, num_turns, generators.lengths)
    outputs = draw_lengths(stream.output, num_turns, generators.lengths)
    shared = stream.shared_prefix
    prefixes = [words.text(shared.tokens, generators.content) for _ in range(shared.groups)] if shared else []
    sessions = []
    for index, at_s in enumerate(moments):
        prefix = ""
        if shared and generators.behaviour.random() < shared.share:
            prefix = prefixes[int(generators.behaviour.integers(len(prefixes)))]
        turns = []
        for turn in range(stream.turns):
            number = index * stream.turns + turn
            text = words.text(int(prompts[number]), generators.content)
            tokens = int(prompts[number])
            if turn == 0 and prefix and shared:
                text, tokens = prefix + text, tokens + shared.tokens
            think_s = float(generators.behaviour.exponential(stream.think_s)) if turn and stream.think_s else 0.0
            turns.append(PlannedTurn(text, tokens, int(outputs[number]), think_s, _cancel_after_s(stream, generators)))
        sessions.append(Session(stream.name, index, at_s, tuple(turns)))
    return tuple(sessions)


def _trace_sessions(
    stream: Stream, trace: Trace, rows: Sequence[TraceRow], generators: _Generators, words: Words
) -> tuple[Session, ...]:
    """A block of the trace becomes `512 * prompt_scale` words that depend on its id alone."""
    seed = int(generators.content.integers(2**62))
    block_tokens = max(1, round(HASH_BLOCK_TOKENS * trace.prompt_scale))
    sessions = []
    for index, row in enumerate(rows):
        num_blocks = min(len(row.hash_ids), row.prompt_tokens // block_tokens)
        blocks = [words.text(block_tokens, np.random.default_rng([seed, one])) for one in row.hash_ids[:num_blocks]]
        rest = words.text(row.prompt_tokens - num_blocks * block_tokens, generators.content)
        turn = PlannedTurn(
            "".join(blocks) + rest, row.prompt_tokens, row.output_tokens, 0.0, _cancel_after_s(stream, generators)
        )
        sessions.append(Session(stream.name, index, row.at_s, (turn,)))
    return tuple(sessions)


def _cancel_after_s(stream: Stream, generators: _Generators) -> float | None:
    """Always two draws, so that a change of the rate leaves the rest as it is."""
    chosen, after_s = generators.behaviour.random(), generators.behaviour.exponential(stream.cancel_after_s)
    return float(after_s) if chosen < stream.cancel_rate else None
