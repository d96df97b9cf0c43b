"""Which sequences a step holds, in which order, and who must give way."""

from __future__ import annotations

import pytest
from engine_driver import Driver, make_spec

from engine.engine_config import EngineConfig
from engine.messages import Abort, Add, BlocksComputed, ComputeHere, Fill, Release, Reserve, Reserved
from engine.sequence import TRANSITIONS, Sequence, SequenceEvent, SequenceState
from wire.errors import InvalidTransition
from wire.sequence import SampledToken


def rows(plan):
    return [(row.request_id, row.start, len(row.token_ids)) for row in plan.sequences]


def test_decode_comes_first_then_chunks_within_the_budget():
    driver = Driver(config=EngineConfig(max_batched_tokens=8, prefill_chunk=6))
    driver.handle(Add(make_spec("a", range(3), 10)))
    assert rows(driver.step()) == [("a", 0, 3)]
    driver.handle(Add(make_spec("b", range(10, 25), 10)))
    driver.handle(Add(make_spec("c", range(30, 34), 10)))
    assert rows(driver.step()) == [("a", 3, 1), ("b", 0, 6), ("c", 0, 1)]  # one chunk each, the rest of the budget for c
    assert rows(driver.step()) == [("a", 4, 1), ("b", 6, 6), ("c", 1, 1)]
    assert rows(driver.step()) == [("a", 5, 1), ("b", 12, 3), ("c", 2, 2)]
    assert rows(driver.step()) == [("a", 6, 1), ("b", 15, 1), ("c", 4, 1)]
    driver.run()
    driver.assert_empty()
    for one in "abc":
        driver.assert_equals_solo_run(one)


def test_decode_is_never_starved_however_long_the_prompts_are():
    driver = Driver(num_blocks=64, config=EngineConfig(max_batched_tokens=4, prefill_chunk=4))
    driver.handle(Add(make_spec("a", range(3), 20)))
    driver.step()
    for one in "bcd":
        driver.handle(Add(make_spec(one, range(30), 2)))
    while "a" not in driver.finish:
        assert rows(driver.step())[0][0] == "a"
    driver.run()
    driver.assert_empty()


def test_more_sequences_than_the_budget_wait_for_their_turn():
    driver = Driver(config=EngineConfig(max_batched_tokens=2, max_num_sequences=8))
    for one in "abc":
        driver.handle(Add(make_spec(one, [1], 3)))
    driver.step()
    assert (driver.core.stats().running, driver.core.stats().waiting) == (2, 1)
    driver.run()
    assert list(driver.finish) == ["a", "b", "c"]
    driver.assert_empty()


def test_a_prefix_hit_moves_the_start_forward():
    driver = Driver()
    driver.handle(Add(make_spec("a", range(10), 2)))
    driver.run()
    driver.handle(Add(make_spec("b", [*range(9), 50], 2)))
    plan = driver.step()
    assert rows(plan) == [("b", 8, 2)]
    assert driver.core.stats().cached_prompt_tokens == 8
    driver.run()
    driver.assert_equals_solo_run("b")


def test_a_full_hit_gives_up_its_last_block_when_it_computes():
    driver = Driver()
    driver.handle(Add(make_spec("a", range(8), 2)))
    driver.run()
    driver.handle(Add(make_spec("b", range(8), 2)))
    assert rows(driver.step()) == [("b", 4, 4)]
    driver.run()
    driver.assert_equals_solo_run("b")
    driver.assert_empty()


def test_output_blocks_are_cached_too():
    driver = Driver()
    driver.handle(Add(make_spec("a", range(4), 6)))
    driver.run()
    answer = [token.token_id for token in driver.tokens["a"]]
    driver.handle(Add(make_spec("b", [*range(4), *answer, 5], 1)))
    assert rows(driver.step())[0][1] == 8  # 4 prompt tokens and 4 of the 5 computed output tokens


def test_blocks_of_another_salt_are_not_found():
    driver = Driver()
    driver.handle(Add(make_spec("a", range(8), 1, salt="tenant 1")))
    driver.run()
    driver.handle(Add(make_spec("b", range(8), 1, salt="tenant 2")))
    assert rows(driver.step()) == [("b", 0, 8)]
    driver.handle(Add(make_spec("c", range(8), 1, salt="tenant 1")))
    assert rows(driver.step()) == [("c", 4, 4)]


def test_nothing_is_found_while_the_step_that_computes_it_is_out():
    driver = Driver()
    driver.handle(Add(make_spec("a", range(8), 2)))
    plan = driver.core.plan(0.0)
    driver.handle(Reserve(make_spec("b", range(8), 2)))
    assert driver.reserved["b"].num_cached_tokens == 0
    driver.take(driver.core.apply(plan, driver.runner.execute(plan), 1.0))
    driver.handle(Reserve(make_spec("c", range(8), 2)))
    assert driver.reserved["c"].num_cached_tokens == 8


def test_without_the_prefix_cache_everything_is_computed():
    driver = Driver(config=EngineConfig(prefix_cache=False))
    for one in "ab":
        driver.handle(Add(make_spec(one, range(8), 2)))
        assert rows(driver.step()) == [(one, 0, 8)]
        driver.run()
    assert driver.core.stats().blocks_cached == 0
    driver.assert_empty()


def test_preemption_takes_the_last_admitted_and_repeats_no_token():
    driver = Driver(num_blocks=6, block_size=2, config=EngineConfig(prefix_cache=False))
    for index, one in enumerate("ab"):
        driver.handle(Add(make_spec(one, [index, index], 8)))
    driver.run()
    stats = driver.core.stats()
    assert stats.preemptions >= 1
    assert stats.prefill_tokens > 4  # b was computed again
    assert list(driver.finish) == ["a", "b"]
    for one in "ab":
        driver.assert_equals_solo_run(one)
    driver.assert_empty()


def test_admission_leaves_room_for_the_growth_of_those_that_run():
    driver = Driver(num_blocks=3, block_size=2)
    driver.handle(Add(make_spec("a", [1, 2], 4)))
    driver.step()
    driver.handle(Add(make_spec("b", [3, 4, 5], 2)))  # needs 2 of the 2 blocks that are left; one must stay free
    driver.run()
    assert driver.core.stats().preemptions == 0
    assert list(driver.finish) == ["a", "b"]
    driver.assert_empty()


def test_a_sequence_that_needs_the_whole_pool_runs_when_it_is_alone():
    driver = Driver(num_blocks=3, block_size=2)
    driver.handle(Add(make_spec("a", range(5), 1)))
    driver.run()
    driver.assert_equals_solo_run("a")


def test_with_all_other_blocks_lent_a_sequence_waits_without_steps_and_goes_on_later():
    driver = Driver(num_blocks=4, block_size=2)
    # 1. a runs; a reservation takes the rest but the block that a grows into.
    driver.handle(Add(make_spec("a", [1, 2], 6)))
    driver.step()
    driver.handle(Reserve(make_spec("r", [7, 8, 9], 2)))
    assert "r" in driver.reserved
    # 2. a needs a third block, and none can be had: it gives up its own and waits. Nothing can run.
    driver.run()
    assert driver.core.stats().preemptions == 1
    assert driver.core.plan(driver.now) is None
    assert driver.core.stats().waiting == 1
    # 3. The hand-off fails; its blocks are enough.
    driver.reserved.clear()
    driver.handle(Abort("r"))
    driver.run()
    driver.assert_equals_solo_run("a")
    driver.assert_empty()


def test_reservations_wait_in_arrival_order_and_nobody_overtakes():
    driver = Driver(num_blocks=6, block_size=2)
    for one, length in (("a", 8), ("b", 6), ("c", 2)):
        driver.handle(Reserve(make_spec(one, range(length), 2)))
    assert list(driver.reserved) == ["a"]  # c would fit, but b came before it
    assert driver.core.stats().waiting == 2
    granted = driver.handle(Abort("a"))
    assert [(type(event), event.request_id) for event in granted] == [(Reserved, "b"), (Reserved, "c")]


def test_a_reservation_is_granted_beside_waiting_sequences_if_all_of_them_fit():
    driver = Driver(num_blocks=10, block_size=2, config=EngineConfig(max_batched_tokens=4))
    driver.handle(Add(make_spec("a", range(8), 1)))
    driver.handle(Reserve(make_spec("r", range(20, 24), 2)))  # a has not been admitted yet: 4 blocks are kept for it
    assert "r" in driver.reserved
    driver.handle(Reserve(make_spec("s", range(30, 40), 2)))
    assert "s" not in driver.reserved
    driver.run()
    driver.fill("r")
    driver.run()
    assert "s" in driver.reserved
    driver.fill("s")
    driver.run()
    for one in "ars":
        driver.assert_equals_solo_run(one)
    driver.assert_empty()


def test_reservations_count_against_the_number_of_sequences():
    driver = Driver(config=EngineConfig(max_num_sequences=2))
    for one in "abc":
        driver.handle(Reserve(make_spec(one, [1, 2], 3)))
    driver.handle(Add(make_spec("d", [1], 1)))
    assert list(driver.reserved) == ["a", "b"]
    assert driver.core.plan(0.0) is None  # d waits behind c
    driver.fill("a")
    driver.run()
    assert list(driver.reserved) == ["b", "c"]
    driver.fill("b")
    driver.fill("c")
    driver.run()
    assert set(driver.finish) == {"a", "b", "c", "d"}
    driver.assert_empty()


def test_compute_here_goes_ahead_of_all_who_wait():
    driver = Driver(config=EngineConfig(max_num_sequences=1))
    driver.handle(Reserve(make_spec("r", range(6), 2)))
    driver.handle(Reserve(make_spec("q", range(6), 2)))
    driver.handle(Add(make_spec("a", [1], 2)))
    driver.handle(ComputeHere("q"))  # still queued
    driver.handle(ComputeHere("r"))
    driver.run()
    assert list(driver.finish) == ["r", "q", "a"]
    for one in "rqa":
        driver.assert_equals_solo_run(one)
    driver.assert_empty()


def test_an_export_in_the_middle_of_its_prompt_is_not_preempted_though_admitted_last():
    driver = Driver(num_blocks=6, block_size=2, config=EngineConfig(prefill_chunk=1, prefix_cache=False))
    driver.handle(Add(make_spec("a", [1, 2], 6)))
    driver.step()
    driver.step()
    driver.handle(Add(make_spec("x", range(6), 6), export=True))
    driver.run()
    computed = [event.num_tokens for event in driver.events if isinstance(event, BlocksComputed)]
    assert computed == [1, 2, 3, 4, 5, 6]  # without going back
    assert driver.core.stats().preemptions == 1  # a preempted itself: x keeps its three blocks
    driver.handle(Release("x"))
    driver.run()
    driver.assert_equals_solo_run("a")
    driver.assert_empty()


def test_of_a_prompt_in_chunks_only_computed_blocks_are_found():
    driver = Driver(config=EngineConfig(prefill_chunk=4))
    driver.handle(Add(make_spec("a", range(12), 2)))
    driver.step()
    driver.handle(Reserve(make_spec("r", range(12), 2)))
    assert driver.reserved["r"].num_cached_tokens == 4
    driver.handle(Add(make_spec("b", range(12), 2)))
    assert rows(driver.step()) == [("a", 4, 4), ("b", 4, 4)]
    driver.run()
    for one in "ab":
        driver.assert_equals_solo_run(one)


def test_reservations_leave_the_places_of_those_who_came_before():
    driver = Driver(config=EngineConfig(max_num_sequences=2))
    driver.handle(Add(make_spec("a", [1], 3)))
    driver.handle(Reserve(make_spec("r", [1, 2], 3)))
    driver.handle(Reserve(make_spec("s", [1, 2], 3)))
    assert list(driver.reserved) == ["r"]  # the other place is a's
    driver.run()
    assert list(driver.reserved) == ["r", "s"]


@pytest.mark.parametrize("state", SequenceState)
@pytest.mark.parametrize("event", SequenceEvent)
def test_every_pair_moves_by_the_table_or_raises_with_the_history(state, event):
    sequence = Sequence(make_spec("a", [1]), 4, state, 0.0)
    if (state, event) in TRANSITIONS:
        sequence.move(event)
        assert sequence.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(InvalidTransition) as caught:
            sequence.move(event)
        assert sequence.state is state
        assert caught.value.history == (state.value,)


def test_every_state_but_the_last_can_end():
    assert {state for state, event in TRANSITIONS if event is SequenceEvent.END} == set(SequenceState) - {
        SequenceState.ENDED
    }


def test_a_command_in_the_wrong_state_changes_nothing():
    driver = Driver()
    driver.handle(Add(make_spec("a", range(4), 3)))
    for command in (Fill("a", SampledToken(1)), ComputeHere("a"), Release("a")):
        with pytest.raises(InvalidTransition, match="sequence a"):
            driver.core.handle(command, 0.0)
    driver.run()
    driver.assert_equals_solo_run("a")
    driver.assert_empty()


@pytest.mark.parametrize("key", ["max_batched_tokens", "max_num_sequences", "prefill_chunk"])
def test_limits_must_be_positive(key):
    with pytest.raises(ValueError, match=f"{key} must be at least 1, not 0"):
        EngineConfig(**{key: 0})
