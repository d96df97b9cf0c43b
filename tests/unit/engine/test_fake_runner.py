"""The fake runner notices every byte of the pool, and costs what it is told to."""

from __future__ import annotations

import numpy as np
import pytest
from engine_driver import VOCAB_SIZE, Driver, make_spec

from engine.engine_config import EngineConfig
from engine.fake_runner import FakeRunner, fake_layout, reference_output
from engine.messages import Add, Fill, Release, Reserve
from engine.plan import SampleRequest, ScheduledSequence, StepPlan
from wire.kv_layout import KvLayout
from wire.sequence import SamplingParams

GREEDY = SamplingParams(seed=1, temperature=0.0)


def make_runner(num_blocks=8, block_size=4, **costs):
    layout = fake_layout(block_size)
    memory = bytearray(num_blocks * layout.block_bytes)
    return FakeRunner(layout, memoryview(memory), num_blocks, 10_000, 64, **costs), memory


def draw(runner, tokens, start, blocks, params=GREEDY, banned=frozenset(), prompt=(), output=()):
    sample = SampleRequest(params, start + len(tokens), banned, prompt, output)
    return runner.execute(StepPlan(1, (ScheduledSequence("a", tuple(tokens), start, tuple(blocks), sample),))).sampled["a"]


def expected(tokens, params=GREEDY, **stop):
    return reference_output(make_spec("a", tokens, 1, sampling=params, **stop), 10_000, 64).tokens[0]


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("split", [1, 4, 6])
def test_chunks_and_whole_prompts_draw_what_the_reference_draws(length, split):
    runner, _ = make_runner()
    tokens = list(range(100, 100 + length))
    if split < length:
        chunk = ScheduledSequence("a", tuple(tokens[:split]), 0, (5, 2, 7, 0), None)
        assert runner.execute(StepPlan(1, (chunk,))).sampled == {}
        drawn = draw(runner, tokens[split:], split, (5, 2, 7, 0))
    else:
        drawn = draw(runner, tokens, 0, (5, 2, 7, 0))
    assert drawn == expected(tokens)


def test_many_sequences_in_one_step_draw_what_each_draws_alone():
    runner, _ = make_runner(num_blocks=16)
    prompts = [list(range(start, start + length)) for start, length in ((1, 3), (50, 8), (90, 9), (7, 1))]
    rows, used = [], 0
    for index, prompt in enumerate(prompts):
        blocks = tuple(range(used, used + runner.layout.blocks_for(len(prompt))))
        used += len(blocks)
        rows.append(ScheduledSequence(str(index), tuple(prompt), 0, blocks, SampleRequest(GREEDY, len(prompt))))
    sampled = runner.execute(StepPlan(1, tuple(rows))).sampled
    assert [sampled[str(index)] for index in range(4)] == [expected(prompt) for prompt in prompts]


def test_every_byte_of_every_used_position_matters_and_no_other():
    """Flip each byte of the pool in turn: the next draw changes exactly if the byte is part of the sequence."""
    runner, memory = make_runner(num_blocks=3)
    tokens = [*range(100, 106)]
    draw(runner, tokens, 0, (2, 0))
    before = bytes(memory)
    follow_up = draw(runner, [9], 6, (2, 0)).token_id
    words = np.zeros((3, 2, 4, 8), dtype=bool)  # [block, k/v, token, byte]
    words[2] = True
    words[0, :, :2] = True  # positions 4 and 5; 6 is written by the step itself
    for index, matters in enumerate(words.reshape(-1)):
        memory[:] = before
        memory[index] ^= 0x10
        assert (draw(runner, [9], 6, (2, 0)).token_id != follow_up) == bool(matters), index


def test_swapped_blocks_change_the_output():
    runner, memory = make_runner()
    draw(runner, range(8), 0, (0, 1))
    right = draw(runner, [9], 8, (0, 1, 2))
    size = runner.layout.block_bytes
    memory[:size], memory[size : 2 * size] = memory[size : 2 * size], memory[:size]
    assert draw(runner, [9], 8, (0, 1, 2)) != right


def test_the_seed_matters_unless_greedy():
    assert expected([1, 2], SamplingParams(seed=1)) != expected([1, 2], SamplingParams(seed=2))
    assert expected([1, 2], SamplingParams(seed=1, temperature=0)) == expected([1, 2], SamplingParams(seed=2, temperature=0))


def test_penalties_make_the_history_matter():
    params = SamplingParams(seed=1, temperature=0.0, frequency_penalty=0.1)
    runner, _ = make_runner()
    whole = draw(runner, [1, 2, 3], 0, (0,), params, prompt=(1, 2), output=(3,))
    assert whole != draw(runner, [1, 2, 3], 0, (0,), params, prompt=(1, 2), output=())


def test_the_largest_forcing_bias_wins_and_bans_are_respected():
    runner, _ = make_runner()
    params = SamplingParams(seed=1, logit_bias={5: 60.0, 6: 100.0, 7: 49.0, 20_000: 100.0})
    assert draw(runner, [1], 0, (0,), params).token_id == 6
    assert draw(runner, [1], 0, (0,), params, banned=frozenset({6})).token_id == 5
    assert draw(runner, [1], 0, (0,), params, banned=frozenset({5, 6})).token_id not in (5, 6)
    free = draw(runner, [1], 0, (0,)).token_id
    assert draw(runner, [1], 0, (0,), SamplingParams(seed=1, temperature=0.0, logit_bias={free: -100.0})).token_id != free
    assert draw(runner, [1], 0, (0,), banned=frozenset(range(10_000))).token_id == free


def test_logprobs_come_when_asked_for_best_first():
    runner, _ = make_runner()
    assert draw(runner, [1], 0, (0,)).logprob is None
    none = draw(runner, [1], 0, (0,), SamplingParams(seed=1, num_logprobs=0))
    assert none.logprob < 0.0
    assert none.top == ()
    three = draw(runner, [1], 0, (0,), SamplingParams(seed=1, num_logprobs=3))
    assert three.top[0] == (three.token_id, three.logprob)
    assert len({token_id for token_id, _ in three.top}) == 3
    assert [logprob for _, logprob in three.top] == sorted((logprob for _, logprob in three.top), reverse=True)
    assert three == expected([1], SamplingParams(seed=1, num_logprobs=3))


def test_a_step_costs_what_was_set():
    slept = []
    runner, _ = make_runner(step_s=1.0, prefill_token_s=0.1, decode_token_s=0.01, sleep=slept.append)
    runner.warm_up()
    assert slept == []
    decode = ScheduledSequence("a", (1,), 0, (0,), None)
    prefill = ScheduledSequence("b", (1, 2, 3), 0, (1,), None)
    runner.execute(StepPlan(1, (decode, prefill)))
    assert slept == [pytest.approx(1.31)]
    free, _ = make_runner(sleep=slept.append)
    free.execute(StepPlan(1, (decode,)))
    assert len(slept) == 1


def test_wrong_layouts_and_too_little_memory_are_refused():
    layout = fake_layout(4)
    with pytest.raises(ValueError, match="layout: the fake runner takes"):
        FakeRunner(KvLayout(2, 1, 8, 4, "uint8"), memoryview(bytearray(1024)), 2, 10, 10)
    with pytest.raises(ValueError, match="kv_memory: 2 blocks need 128 bytes, not 127"):
        FakeRunner(layout, memoryview(bytearray(127)), 2, 10, 10)


def test_close_lets_go_of_the_memory():
    runner, memory = make_runner()
    runner.close()
    memory.clear()  # raises BufferError while anyone holds a view


def test_bytes_copied_between_two_pools_carry_a_sequence_over():
    """A hand-off by hand: export on one engine, copy blocks, fill on the other."""
    spec = make_spec("a", range(11), 8)
    prefill, decode = Driver(config=EngineConfig(prefill_chunk=3)), Driver(num_blocks=9)
    prefill.handle(Add(spec, export=True))
    prefill.run()
    decode.handle(Reserve(spec))
    size = prefill.layout.block_bytes
    for source, target in zip(prefill.events[-2].block_ids, decode.reserved["a"].block_ids, strict=True):
        decode.memory[target * size : (target + 1) * size] = prefill.memory[source * size : (source + 1) * size]
    first = prefill.tokens["a"][0]
    decode.tokens["a"].append(first)
    decode.handle(Fill("a", first))
    decode.run()
    decode.assert_equals_solo_run("a")
    decode.assert_empty()
    prefill.handle(Release("a"))
    prefill.assert_empty()


def test_a_block_that_was_not_copied_changes_the_output():
    spec = make_spec("a", range(11), 8)
    driver = Driver()
    driver.handle(Reserve(spec))
    lost = driver.reserved["a"].block_ids[1]
    driver.fill("a")
    size = driver.layout.block_bytes
    driver.memory[lost * size : (lost + 1) * size] = bytes(size)
    driver.run()
    assert tuple(driver.tokens["a"]) != reference_output(spec, VOCAB_SIZE, 64).tokens
