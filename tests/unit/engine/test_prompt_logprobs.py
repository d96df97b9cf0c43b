"""A prompt's own log-probabilities: chunked, behind a cached prefix, preempted, exported, with and without output."""

from __future__ import annotations

import pytest
from engine_driver import VOCAB_SIZE, Driver, make_spec

from engine.engine_config import EngineConfig
from engine.fake_runner import reference_output
from engine.messages import Add, Rejected, Release, Reserve, TokensSampled
from wire.ids import RequestId
from wire.sequence import FinishReason, SampledToken, SequenceSpec

PROMPT = [7, 1, 9, 30, 22, 5, 5, 80, 61, 12, 3]


def scored_spec(name: str, prompt: list[int] = PROMPT, max_tokens: int = 3, num_logprobs: int = 2) -> SequenceSpec:
    plain = make_spec(name, prompt, max_tokens)
    return SequenceSpec(plain.request_id, plain.prompt, plain.sampling, plain.stop, prompt_logprobs=num_logprobs)


def prompt_of(driver: Driver, name: str) -> tuple[SampledToken, ...]:
    """What came with its events; it must have come once, with the first ones."""
    mine = [event for event in driver.events if isinstance(event, TokensSampled) and event.request_id == name]
    assert all(not event.prompt for event in mine[1:])
    return mine[0].prompt


@pytest.mark.parametrize("chunk", [1, 3, 4, 512])
def test_every_prompt_token_is_scored_whatever_the_chunks(chunk: int) -> None:
    driver = Driver(config=EngineConfig(prefill_chunk=chunk))
    spec = scored_spec("a")
    driver.handle(Add(spec))
    driver.run()
    expected = reference_output(spec, VOCAB_SIZE, driver.max_model_len).prompt
    assert prompt_of(driver, "a") == expected
    assert [token.token_id for token in expected] == PROMPT
    assert expected[0].logprob is None
    assert all(token.logprob is not None and token.logprob <= 0 and len(token.top) == 2 for token in expected[1:])
    driver.assert_equals_solo_run("a")
    driver.assert_empty()


def test_E1_a_cached_prefix_does_not_hide_them() -> None:
    """1. The prompt is cached. 2. Asked for its log-probabilities, it is computed again, and counts as uncached."""
    driver = Driver()
    driver.handle(Add(make_spec("first", PROMPT)))
    driver.run()
    driver.handle(Add(scored_spec("scored")))
    driver.run()
    assert prompt_of(driver, "scored") == reference_output(scored_spec("scored"), VOCAB_SIZE, 64).prompt
    (times,) = [event.times for event in driver.events if getattr(event, "times", None) and event.request_id == "scored"]
    assert times.num_cached_tokens == 0
    driver.assert_equals_solo_run("scored")
    driver.assert_empty()


def test_a_prompt_alone_draws_nothing() -> None:
    driver = Driver(max_model_len=len(PROMPT))
    spec = scored_spec("a", max_tokens=0)
    driver.handle(Add(spec))
    driver.run()
    assert prompt_of(driver, "a") == reference_output(spec, VOCAB_SIZE, 64).prompt
    assert driver.tokens[spec.request_id] == []
    assert driver.finish[spec.request_id] is FinishReason.LENGTH
    driver.assert_empty()


def test_an_exported_prompt_brings_them_with_the_first_token() -> None:
    driver = Driver()
    for name, max_tokens in (("a", 5), ("b", 0)):
        spec = scored_spec(name, max_tokens=max_tokens)
        driver.handle(Add(spec, export=True))
        driver.run()
        assert prompt_of(driver, name) == reference_output(spec, VOCAB_SIZE, 64).prompt
        driver.handle(Release(spec.request_id))
    driver.assert_empty()


def test_a_preempted_prompt_is_scored_once_and_completely() -> None:
    """A pool for one and a half: the one admitted last loses its blocks and begins again."""
    driver = Driver(num_blocks=7, block_size=4, config=EngineConfig(prefill_chunk=2, max_batched_tokens=8))
    for name in ("a", "b"):
        driver.handle(Add(scored_spec(name, PROMPT[:9], max_tokens=12)))
    driver.run()
    assert driver.core.stats().preemptions > 0
    for name in ("a", "b"):
        spec = driver.specs[RequestId(name)]
        assert prompt_of(driver, name) == reference_output(spec, VOCAB_SIZE, 64).prompt
        driver.assert_equals_solo_run(name)
    driver.assert_empty()


def test_a_filled_sequence_scores_nothing() -> None:
    """P sent them already; D only decodes."""
    driver = Driver()
    spec = scored_spec("a")
    driver.handle(Reserve(spec))
    driver.fill("a")
    driver.run()
    assert all(event.prompt == () for event in driver.events if isinstance(event, TokensSampled))
    driver.assert_empty()


def test_a_reservation_without_output_is_refused() -> None:
    driver = Driver()
    driver.handle(Reserve(scored_spec("a", max_tokens=0)))
    assert isinstance(driver.rejected[RequestId("a")], Rejected)
    driver.assert_empty()
