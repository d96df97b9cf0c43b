"""The two halves of a hand-off: exports on a prefill worker, reservations on a decode worker."""

from __future__ import annotations

from engine_driver import Driver, make_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine_config import EngineConfig
from engine.messages import (
    Abort,
    Add,
    BlocksComputed,
    ComputeHere,
    Fill,
    Release,
    Reserve,
    SequenceTimes,
    TokensSampled,
)
from wire.sequence import FinishReason, SampledToken, SamplingParams


def forced(token_id, **more):
    return SamplingParams(seed=1, temperature=0.0, logit_bias={token_id: 100.0}, **more)


# -- export (prefill worker) ----------------------------------------------------------------------------------------


def test_an_export_announces_blocks_then_the_token_and_keeps_them_lent():
    driver = Driver(config=EngineConfig(prefill_chunk=4))
    # 1. Each step announces what is computed; the last one draws, blocks first.
    driver.handle(Add(make_spec("a", range(10), 5), export=True))
    driver.run()
    *computed, token = driver.events
    assert [(event.num_tokens, len(event.block_ids)) for event in computed] == [(4, 1), (8, 2), (10, 3)]
    assert isinstance(token, TokensSampled)
    assert token.times == SequenceTimes(0.0, 3.0, 0)
    assert token.finish is None
    # 2. Lent: held, not running, nothing to do.
    stats = driver.core.stats()
    assert (stats.exporting, stats.running, stats.blocks_held) == (1, 0, 3)
    # 3. Released: two full blocks stay in the cache, and the first announcement of a second export covers them.
    driver.handle(Release("a"))
    assert (driver.core.stats().blocks_cached, driver.core.stats().exporting) == (2, 0)
    driver.events.clear()
    driver.handle(Add(make_spec("b", range(10), 5), export=True))
    driver.run()
    assert [event.num_tokens for event in driver.events if isinstance(event, BlocksComputed)] == [10]
    assert driver.events[-1].times.num_cached_tokens == 8
    driver.handle(Abort("b"))
    driver.assert_empty()


def test_an_export_whose_first_token_is_the_last_says_so_and_stays_lent():
    driver = Driver()
    driver.handle(Add(make_spec("a", range(3), 1), export=True))
    driver.run()
    assert driver.events[-1].finish is FinishReason.LENGTH
    assert driver.core.stats().exporting == 1
    driver.handle(Release("a"))
    driver.handle(Release("a"))  # late: ignored
    driver.assert_empty()


def test_an_export_waits_until_its_whole_prompt_fits():
    driver = Driver(num_blocks=4, block_size=4, config=EngineConfig(prefill_chunk=4))
    driver.handle(Add(make_spec("a", range(10), 5), export=True))
    driver.handle(Add(make_spec("b", range(50, 58), 5), export=True))
    driver.run()
    assert "b" not in driver.tokens
    driver.handle(Release("a"))
    driver.run()
    assert "b" in driver.tokens
    driver.handle(Release("b"))
    driver.assert_empty()


# -- reservations (decode worker) -----------------------------------------------------------------------------------


def test_a_hand_off_from_reserve_to_finish_computes_no_prompt_token():
    driver = Driver()
    driver.handle(Reserve(make_spec("a", range(10), 5)))
    assert len(driver.reserved["a"].block_ids) == 3
    assert driver.core.plan(0.0) is None
    driver.now = 5.0
    driver.fill("a")
    driver.now = 7.0
    driver.run()
    first = next(event for event in driver.events if isinstance(event, TokensSampled))
    assert first.first_index == 1  # the first token came with Fill and is not emitted again
    assert first.times == SequenceTimes(2.0, 1.0, 0)
    stats = driver.core.stats()
    assert (stats.prefill_tokens, stats.decode_tokens, stats.preemptions) == (0, 4, 0)
    driver.assert_equals_solo_run("a")
    driver.assert_empty()


def test_a_filled_prompt_is_cached_and_a_second_reservation_may_hit_it_all():
    driver = Driver()
    driver.handle(Reserve(make_spec("a", range(8), 2)))
    driver.handle(Reserve(make_spec("b", range(8), 2)))
    assert driver.reserved["b"].num_cached_tokens == 0  # a's blocks are not filled yet
    driver.fill("a")
    driver.handle(Reserve(make_spec("c", range(8), 3)))
    assert driver.reserved["c"].num_cached_tokens == 8
    driver.fill("b")
    driver.fill("c")
    driver.run()
    times = [event.times for event in driver.events if isinstance(event, TokensSampled) and event.request_id == "c"]
    assert times[0].num_cached_tokens == 8
    for one in "abc":
        driver.assert_equals_solo_run(one)
    assert driver.core.stats().prefill_tokens == 0
    driver.assert_empty()


def test_fill_with_a_last_token_ends_the_sequence_without_a_step():
    driver = Driver()
    driver.handle(Reserve(make_spec("a", range(4), 5, resumed=[1], sampling=forced(7), eos_token_ids=(7,))))
    [event] = driver.fill("a")
    assert event == TokensSampled("a", 2, (), FinishReason.STOP, SequenceTimes(0.0, 0.0, 0))
    assert driver.core.plan(0.0) is None
    driver.assert_empty()


def test_fill_with_what_is_no_token_fails_the_sequence_alone():
    driver = Driver()
    driver.handle(Reserve(make_spec("a", range(4), 5)))
    [event] = driver.handle(Fill("a", SampledToken(-1)))
    assert not event.invalid
    driver.assert_empty()


def test_commands_for_ended_sequences_are_ignored():
    driver = Driver()
    driver.handle(Reserve(make_spec("a", range(4), 5)))
    driver.handle(Abort("a"))
    for late in (Fill("a", SampledToken(1)), ComputeHere("a"), Release("a"), Abort("a")):
        assert driver.handle(late) == []
    driver.assert_empty()


def test_compute_here_keeps_what_was_cached():
    driver = Driver()
    driver.handle(Add(make_spec("a", range(8), 1)))
    driver.run()
    driver.handle(Reserve(make_spec("r", range(12), 3)))
    assert driver.reserved["r"].num_cached_tokens == 8
    driver.now = 10.0
    driver.handle(ComputeHere("r"))
    plan = driver.step()
    assert plan.sequences[0].start == 8
    assert driver.events[-1].times == SequenceTimes(0.0, 1.0, 8)
    driver.run()
    driver.assert_equals_solo_run("r")
    driver.assert_empty()


def test_a_reservation_is_granted_when_a_step_makes_room():
    driver = Driver(num_blocks=3, block_size=4)
    driver.handle(Add(make_spec("a", range(8), 2)))
    driver.step()
    driver.handle(Reserve(make_spec("r", range(20, 29), 2)))
    assert "r" not in driver.reserved
    driver.step()
    assert "a" in driver.finish
    assert "r" in driver.reserved


@settings(max_examples=30, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 90), min_size=1, max_size=20),
    max_tokens=st.integers(1, 20),
    chunk=st.integers(1, 9),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_output_through_two_engines_equals_one(prompt, max_tokens, chunk, sizes):
    """The prefill worker's first token, the decode worker's rest: together a solo run."""
    spec = make_spec("a", prompt, max_tokens, sampling=SamplingParams(seed=9, temperature=1.0))
    prefill = Driver(block_size=sizes[0], config=EngineConfig(prefill_chunk=chunk))
    prefill.handle(Add(spec, export=True))
    prefill.run()
    decode = Driver(block_size=sizes[1], num_blocks=64)
    decode.handle(Reserve(spec))
    assert decode.write_kv("a") == prefill.tokens["a"][0]
    decode.fill("a")
    decode.run()
    decode.assert_equals_solo_run("a")
    decode.assert_empty()
