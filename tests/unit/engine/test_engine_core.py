"""A sequence computed here, what is refused, and steps that go wrong."""

from __future__ import annotations

import pytest
from engine_driver import VOCAB_SIZE, Driver, make_spec

from engine.engine_config import EngineConfig
from engine.errors import StepMismatch
from engine.fake_runner import reference_output
from engine.messages import (
    Abort,
    Add,
    Rejected,
    Release,
    Reserve,
    SequenceTimes,
)
from engine.plan import StepResult
from wire.sequence import FinishReason, SamplingParams


def forced(token_id, **more):
    return SamplingParams(seed=1, temperature=0.0, logit_bias={token_id: 100.0}, **more)


# -- a sequence computed here ---------------------------------------------------------------------------------------


def test_a_sequence_from_add_to_finish():
    driver = Driver()
    driver.handle(Add(make_spec("a", range(5), 3)))
    driver.now = 2.0
    assert driver.run() == 3
    first, second, third = driver.events
    assert first.times == SequenceTimes(queue_s=2.0, compute_s=1.0, num_cached_tokens=0)
    assert second.times is third.times is None
    assert [event.first_index for event in driver.events] == [0, 1, 2]
    assert third.finish is FinishReason.LENGTH
    driver.assert_equals_solo_run("a")
    stats = driver.core.stats()
    assert (stats.prefill_tokens, stats.decode_tokens, stats.steps) == (5, 2, 3)
    driver.assert_empty()


def test_end_tokens_end_it_only_behind_min_tokens():
    driver = Driver()
    driver.handle(Add(make_spec("a", [1], 9, sampling=forced(7), stop_token_ids=(7,), min_tokens=3)))
    driver.run()
    drawn = [token.token_id for token in driver.tokens["a"]]
    assert 7 not in drawn[:3]
    assert drawn[3:] == [7]
    assert driver.finish["a"] is FinishReason.STOP
    driver.assert_equals_solo_run("a")


def test_the_context_ends_it():
    driver = Driver(max_model_len=8)
    driver.handle(Add(make_spec("a", range(5), 100)))
    driver.run()
    assert len(driver.tokens["a"]) == 3
    assert driver.finish["a"] is FinishReason.LENGTH
    driver.assert_equals_solo_run("a")


def test_resumed_tokens_are_computed_like_a_prompt_and_count_as_output():
    driver = Driver()
    whole = reference_output(make_spec("w", range(5), 7), VOCAB_SIZE, 64).tokens
    resumed = [token.token_id for token in whole[:3]]
    driver.handle(Add(make_spec("a", range(5), 7, resumed=resumed)))
    plan = driver.step()
    assert plan.num_tokens == 8
    assert plan.sequences[0].sample.position == 8
    driver.run()
    assert driver.events[0].first_index == 3
    assert tuple(driver.tokens["a"]) == whole[3:]
    driver.assert_empty()


def test_penalties_see_prompt_and_output_apart():
    driver = Driver()
    sampling = SamplingParams(seed=1, temperature=0.0, presence_penalty=0.5)
    driver.handle(Add(make_spec("a", [1, 2], 6, resumed=[3], sampling=sampling)))
    driver.step()
    sample = driver.core.plan(driver.now).sequences[0].sample
    assert sample.prompt == (1, 2)
    assert sample.output == (3, driver.tokens["a"][0].token_id)


def test_history_is_not_copied_without_penalties():
    driver = Driver()
    driver.handle(Add(make_spec("a", [1, 2])))
    sample = driver.step().sequences[0].sample
    assert (sample.prompt, sample.output) == ((), ())


def test_block_ids_are_one_tuple_until_a_block_is_added():
    driver = Driver(block_size=4)
    driver.handle(Add(make_spec("a", range(4), 8)))
    tables = [driver.step().sequences[0].block_ids for _ in range(6)]
    assert [len(table) for table in tables] == [1, 2, 2, 2, 2, 3]
    assert tables[1] is tables[4]


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [Add, Reserve])
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec("a", []), "prompt: it must have at least one token"),
        (make_spec("a", range(20)), "prompt: 20 tokens leave no room"),
        (make_spec("a", range(18), 1, resumed=[1, 2]), "prompt: 20 tokens leave no room"),
        (make_spec("a", range(10), 9), "19 tokens need 5 blocks, more than the 4"),
        (make_spec("a", range(10), 900), "20 tokens need 5 blocks, more than the 4"),
        (make_spec("a", [1, -1]), "prompt: token ids lie between 0 and"),
        (make_spec("a", [1], resumed=[2**32]), "prompt: token ids lie between 0 and"),
        (make_spec("a", [1], 2, resumed=[1, 2]), "max_tokens: 2 leaves nothing to generate"),
    ],
)
def test_what_can_never_fit_is_rejected_at_once(command, spec, reason):
    driver = Driver(num_blocks=4, block_size=4, max_model_len=20)
    [event] = driver.handle(command(spec))
    assert isinstance(event, Rejected)
    assert event.invalid
    assert reason in event.reason
    driver.assert_empty()


def test_an_export_needs_blocks_for_its_prompt_only():
    driver = Driver(num_blocks=2, block_size=4)
    [event] = driver.handle(Add(make_spec("a", range(9), 1), export=True))
    assert event.invalid
    assert driver.handle(Add(make_spec("b", range(8), 50), export=True)) == []
    driver.run()
    driver.handle(Release("b"))
    driver.assert_empty()


def test_a_duplicate_id_is_rejected_and_the_first_one_undisturbed():
    driver = Driver()
    driver.handle(Add(make_spec("a", range(5), 3)))
    driver.step()
    for again in (Add(make_spec("a", [9], 1)), Reserve(make_spec("a", [9], 1)), Add(make_spec("a", [9], 1), export=True)):
        [event] = driver.handle(again)
        assert event.invalid
        assert "'a' is already in the engine" in event.reason
    driver.run()
    driver.assert_equals_solo_run("a")
    driver.assert_empty()


def test_ids_outside_the_vocabulary_do_no_harm():
    driver = Driver()
    driver.handle(Add(make_spec("a", [2**32 - 1, VOCAB_SIZE, 10**6], 2)))
    driver.run()
    driver.assert_equals_solo_run("a")
    driver.assert_empty()


# -- steps ----------------------------------------------------------------------------------------------------------


def test_a_failed_step_rejects_its_sequences_and_no_others():
    driver = Driver(config=EngineConfig(max_num_sequences=2))
    for one in "abc":
        driver.handle(Add(make_spec(one, range(5), 3)))
    plan = driver.core.plan(0.0)
    events = driver.take(driver.core.fail_step(plan, RuntimeError("the device is gone"), 1.0))
    assert [(event.request_id, event.invalid) for event in events] == [("a", False), ("b", False)]
    assert "RuntimeError: the device is gone" in events[0].reason
    driver.run()
    driver.assert_equals_solo_run("c")
    driver.assert_empty()


def test_an_abort_while_its_step_is_out_keeps_the_blocks_until_it_is_over():
    driver = Driver(num_blocks=2, block_size=4)
    driver.handle(Add(make_spec("a", range(6), 2)))
    plan = driver.core.plan(0.0)
    driver.handle(Abort("a"))
    driver.handle(Reserve(make_spec("r", range(20, 26), 2)))
    assert "r" not in driver.reserved  # the runner may still write into a's blocks
    driver.core.check_conservation()
    events = driver.take(driver.core.apply(plan, driver.runner.execute(plan), 1.0))
    assert [event.request_id for event in events] == ["r"]
    driver.fill("r")
    driver.run()
    driver.assert_equals_solo_run("r")
    driver.assert_empty()


def test_an_id_used_again_while_its_step_is_out_does_not_get_the_old_result():
    driver = Driver()
    driver.handle(Add(make_spec("a", range(6), 2)))
    plan = driver.core.plan(0.0)
    driver.handle(Abort("a"))
    driver.specs.clear()
    driver.handle(Add(make_spec("a", range(20, 26), 3)))
    assert driver.core.apply(plan, driver.runner.execute(plan), 1.0) == []
    driver.run()
    driver.assert_equals_solo_run("a")
    driver.assert_empty()


def test_steps_go_out_and_come_back_in_turn():
    driver = Driver()
    driver.handle(Add(make_spec("a", range(6), 2)))
    plan = driver.core.plan(0.0)
    with pytest.raises(StepMismatch, match="step 1 is still out"):
        driver.core.plan(0.0)
    with pytest.raises(StepMismatch, match="a result of step 7"):
        driver.core.apply(plan, StepResult(7), 0.0)
    with pytest.raises(StepMismatch, match="drew no token for a"):
        driver.core.apply(plan, StepResult(1), 0.0)
    driver.core.fail_step(plan, RuntimeError(), 0.0)
    with pytest.raises(StepMismatch, match="step 1 is not out"):
        driver.core.fail_step(plan, RuntimeError(), 0.0)
    driver.assert_empty()


def test_stats_count_what_is_still_to_compute():
    driver = Driver(num_blocks=64, config=EngineConfig(max_batched_tokens=6, prefill_chunk=6))
    driver.handle(Add(make_spec("a", range(10), 3)))
    driver.handle(Add(make_spec("b", range(20, 27), 3)))
    driver.handle(Reserve(make_spec("r", range(5), 3)))
    assert driver.core.stats().waiting_tokens == 17
    driver.step()
    stats = driver.core.stats()
    assert (stats.waiting, stats.running, stats.reserved, stats.waiting_tokens) == (1, 1, 1, 11)
    assert stats.blocks_free + stats.blocks_cached + stats.blocks_held == stats.blocks_total == 64
