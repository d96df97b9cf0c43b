"""Plans: what is drawn when, that seeds fix everything, and that shared prefixes and conversations are really shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from bench_words import WORDS, count, no_trace

from benchmarks.errors import SpecError
from benchmarks.topologies.fake_model import write_fake_model
from benchmarks.workloads.arrivals import Closed, Constant, Poisson, Trace
from benchmarks.workloads.lengths import Fixed, Uniform
from benchmarks.workloads.plan import StreamPlan, plan_stream
from benchmarks.workloads.stream import SharedPrefix, Stream
from benchmarks.workloads.traces import TraceRow
from benchmarks.workloads.words import load_words

CHAT = Stream("chat", Poisson(5.0), Uniform(10, 20), Uniform(3, 6))


def plan(stream: Stream, load: float = 1.0, seed: Sequence[int] = (1, 2), duration_s: float = 40.0) -> StreamPlan:
    return plan_stream(stream, load, duration_s, seed, WORDS, no_trace)


def test_a_prompt_has_as_many_words_as_tokens_were_drawn() -> None:
    sessions = plan(CHAT).sessions
    assert len(sessions) > 100
    for session in sessions:
        (turn,) = session.turns
        assert count(turn.text) == turn.prompt_tokens
        assert 10 <= turn.prompt_tokens <= 20
        assert 3 <= turn.output_tokens <= 6


def test_a_seed_fixes_everything() -> None:
    assert plan(CHAT) == plan(CHAT)
    assert plan(CHAT) != plan(CHAT, seed=(1, 3))


def test_what_happens_to_requests_does_not_move_their_arrivals_or_lengths() -> None:
    """Arrivals, lengths, contents and behaviour are drawn apart."""
    calm = plan(CHAT)
    wild = plan(Stream("chat", Poisson(5.0), Uniform(10, 20), Uniform(3, 6), cancel_rate=0.5))
    assert [one.at_s for one in calm.sessions] == [one.at_s for one in wild.sessions]
    assert [one.turns[0].text for one in calm.sessions] == [one.turns[0].text for one in wild.sessions]
    cancelled = sum(one.turns[0].cancel_after_s is not None for one in wild.sessions)
    assert 0.35 < cancelled / len(wild.sessions) < 0.65
    assert all(one.turns[0].cancel_after_s is None for one in calm.sessions)


def test_only_scaling_streams_follow_the_load() -> None:
    steady = Stream("steady", Constant(2.0), scales=False)
    assert len(plan(steady, load=5.0, duration_s=10.0).sessions) == 20
    assert len(plan(Stream("main", Constant(2.0)), load=5.0, duration_s=10.0).sessions) == 100


def test_a_shared_prefix_is_shared_by_its_share() -> None:
    stream = Stream("chat", Poisson(10.0), Fixed(5), shared_prefix=SharedPrefix(share=0.5, tokens=30, groups=2))
    turns = [session.turns[0] for session in plan(stream).sessions]
    with_prefix = [turn for turn in turns if turn.prompt_tokens == 35]
    assert {turn.prompt_tokens for turn in turns} == {5, 35}
    assert 0.4 < len(with_prefix) / len(turns) < 0.6
    assert len({" ".join(turn.text.split()[:30]) for turn in with_prefix}) == 2


def test_a_conversation_adds_to_itself_and_pauses() -> None:
    stream = Stream("talk", Poisson(1.0), Fixed(4), Fixed(2), turns=3, think_s=2.0)
    for session in plan(stream).sessions:
        assert [turn.prompt_tokens for turn in session.turns] == [4, 4, 4]
        assert session.turns[0].think_s == 0.0
        assert all(turn.think_s > 0 for turn in session.turns[1:])


def test_a_closed_loop_has_no_moments() -> None:
    found = plan(Stream("loop", Closed(3)), duration_s=1.0)
    assert found.concurrency == 3
    assert {session.at_s for session in found.sessions} == {None}


def test_equal_hash_ids_are_equal_tokens() -> None:
    """Blocks of 512 tokens, scaled to 64."""
    rows = [
        TraceRow(0.0, 1300, 10, (1, 2, 3)),
        TraceRow(1.0, 1536, 10, (1, 2, 4)),
        TraceRow(2.0, 600, 10, (9, 8)),
        TraceRow(99.0, 600, 10, (1,)),
    ]
    stream = Stream("replay", Trace("x.jsonl", time_scale=2.0, prompt_scale=0.125, output_scale=0.5))
    found = plan_stream(stream, 1.0, 10.0, (1,), WORDS, lambda name: rows if name == "x.jsonl" else [])
    assert [session.at_s for session in found.sessions] == [0.0, 2.0, 4.0]
    prompts = [session.turns[0].text.split() for session in found.sessions]
    assert [len(prompt) for prompt in prompts] == [163, 192, 75]
    assert prompts[0][:128] == prompts[1][:128]
    assert prompts[0][128:] != prompts[1][128:163]
    assert prompts[2][:64] != prompts[0][:64]
    assert [session.turns[0].output_tokens for session in found.sessions] == [5, 5, 5]


def test_words_are_one_token_each_wherever_they_stand(tmp_path: Path) -> None:
    words = load_words(write_fake_model(tmp_path / "model"))
    assert len(words) > 500
    text = words.text(300, np.random.default_rng(1))
    assert count(text) == 300


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"tokenizer\.json is missing"):
        load_words(tmp_path)
