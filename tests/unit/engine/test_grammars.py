"""Output that follows a grammar: colocated, handed over, preempted and resumed, and what bad grammars do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import llguidance
import pytest
import torch
from engine_driver import Driver
from tiny_models import EOS_TOKEN_ID, write_tiny_tokenizer
from tokenizers import Tokenizer

from engine.core import EngineCore
from engine.engine_config import EngineConfig
from engine.fake_runner import FakeRunner, reference_output
from engine.grammar_state import GrammarError
from engine.grammars import Grammars
from engine.messages import Abort, Add, Fill, Rejected, Release, Reserve, TokensSampled
from engine.plan import SampleRequest
from engine.sampler import sample
from wire.ids import RequestId
from wire.sequence import FinishReason, SampledToken, SamplingParams, SequenceSpec, StopRules

VOCAB = 320
REGEX = r"(yes|no), [0-9]{3}( and [a-f]{2})*"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["näive", "日本"]}, "n": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("grammars")
    write_tiny_tokenizer(directory, VOCAB)
    return directory


@pytest.fixture(scope="module")
def grammars(model_dir: Path) -> Grammars:
    loaded = Grammars.load(model_dir, VOCAB)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def regex(text: str = REGEX) -> str:
    return llguidance.LLMatcher.grammar_from_regex(text)


def json_schema(schema: object = SCHEMA) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})


def spec_of(name: str, grammar: str, *, seed: int = 1, resumed: tuple[int, ...] = (), **stop: int) -> SequenceSpec:
    rules = StopRules(**{"max_tokens": 60, **stop}, eos_token_ids=(EOS_TOKEN_ID,))
    sampling = SamplingParams(seed=seed, temperature=1.0)
    return SequenceSpec(RequestId(name), (5, 6, 7, 8, 9), sampling, rules, resumed, grammar=grammar)


def driver_with(grammars: Grammars | None, num_blocks: int = 64) -> Driver:
    driver = Driver(num_blocks=num_blocks, max_model_len=128)
    driver.runner = FakeRunner(driver.layout, driver.memory, num_blocks, VOCAB, 128)
    driver.core = EngineCore(EngineConfig(), driver.layout, num_blocks, 128, grammars)
    return driver


def text_of(driver: Driver, name: str, tokenizer: Tokenizer) -> str:
    ids = [token.token_id for token in driver.tokens[RequestId(name)]]
    assert ids.pop() == EOS_TOKEN_ID, "the end token comes when the grammar is complete, and not before"
    assert driver.finish[RequestId(name)] is FinishReason.STOP
    return tokenizer.decode(ids)


def test_seeds_give_different_texts_that_all_follow(grammars: Grammars, tokenizer: Tokenizer) -> None:
    driver = driver_with(grammars)
    for seed in range(8):
        driver.handle(Add(spec_of(f"r{seed}", regex(), seed=seed)))
        driver.handle(Add(spec_of(f"s{seed}", json_schema(), seed=seed)))
    driver.run()
    texts = {text_of(driver, f"r{seed}", tokenizer) for seed in range(8)}
    assert all(re.fullmatch(REGEX, text) for text in texts), texts
    assert len(texts) > 2
    for seed in range(8):
        value = json.loads(text_of(driver, f"s{seed}", tokenizer))
        assert value["kind"] in ("näive", "日本")
        assert all(type(item) is bool for item in value["n"])
    driver.assert_empty()


def test_handed_over_preempted_and_resumed_ones_equal_a_solo_run(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """1. P draws the first token, D the rest. 2. A pool too small for two preempts. 3. A replay goes on from 9 tokens."""
    spec = spec_of("a", json_schema())
    expected = reference_output(spec, VOCAB, 128, grammars)
    prefill = driver_with(grammars)
    prefill.handle(Add(spec, export=True))
    prefill.run()
    (first,) = prefill.tokens[spec.request_id]
    prefill.handle(Release(spec.request_id))
    prefill.assert_empty()

    decode = driver_with(grammars)
    decode.handle(Reserve(spec))
    written = decode.write_kv("a")
    assert written != first, "the driver's own draw knows no grammar"
    decode.tokens[spec.request_id].append(first)
    decode.handle(Fill(spec.request_id, first))
    decode.run()
    assert tuple(decode.tokens[spec.request_id]) == expected.tokens
    decode.assert_empty()

    crowded = driver_with(grammars, num_blocks=17)
    for name in ("a", "b", "c", "d"):
        crowded.handle(Add(spec_of(name, json_schema())))
    crowded.run()
    assert crowded.core.stats().preemptions > 0
    assert tuple(crowded.tokens[spec.request_id]) == tuple(crowded.tokens[RequestId("b")]) == expected.tokens
    crowded.assert_empty()

    resumed = tuple(token.token_id for token in expected.tokens[:9])
    replay = driver_with(grammars)
    replay.handle(Add(spec_of("a", json_schema(), resumed=resumed)))
    replay.run()
    assert tuple(replay.tokens[spec.request_id]) == expected.tokens[9:]
    replay.assert_empty()


def test_min_tokens_cannot_be_had_as_well(grammars: Grammars) -> None:
    driver = driver_with(grammars)
    driver.handle(Add(spec_of("a", regex("[ab]{4}"), min_tokens=30)))
    assert "min_tokens" in driver.rejected[RequestId("a")].reason
    driver.assert_empty()


BAD = ["{", 'start: "a" b', regex("("), json_schema({"type": "not-a-type"})]


@pytest.mark.parametrize("grammar", BAD)
def test_I1_a_bad_grammar_is_rejected_and_nobody_else(grammars: Grammars, grammar: str) -> None:
    driver = driver_with(grammars)
    driver.handle(Add(spec_of("good", regex())))
    driver.handle(Add(spec_of("bad", grammar)))
    if RequestId("bad") in driver.rejected:
        assert driver.rejected[RequestId("bad")].invalid
    driver.run()
    assert RequestId("bad") in driver.rejected
    assert RequestId("good") in driver.finish
    driver.assert_empty()


def test_without_a_usable_tokenizer_grammars_are_rejected(tmp_path: Path) -> None:
    assert Grammars.load(tmp_path, VOCAB) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert Grammars.load(tmp_path, VOCAB) is None
    driver = driver_with(None)
    driver.handle(Add(spec_of("a", regex())))
    assert driver.rejected[RequestId("a")].invalid


def test_a_foreign_first_token_ends_its_sequence_alone(grammars: Grammars) -> None:
    driver = driver_with(grammars)
    for name in ("a", "b"):
        driver.handle(Reserve(spec_of(name, regex())))
    events = driver.handle(Fill(RequestId("a"), SampledToken(50)))
    assert [type(event) for event in events] == [Rejected]
    assert not driver.rejected[RequestId("a")].invalid
    driver.handle(Abort(RequestId("b")))
    driver.assert_empty()
    assert not any(isinstance(event, TokensSampled) for event in driver.events)


def test_the_sampler_draws_inside_the_mask(grammars: Grammars) -> None:
    """Greedy, drawn, and with a bias that wants something else."""
    state = grammars.start(regex("[abc]x"), ())
    mask = state.allowed(frozenset({EOS_TOKEN_ID}))
    logits = torch.randn(3, VOCAB + 5, generator=torch.Generator().manual_seed(0))
    logits[:, EOS_TOKEN_ID] = 50.0
    requests = [
        SampleRequest(SamplingParams(seed=3, temperature=0.0), 9, allowed=mask),
        SampleRequest(SamplingParams(seed=3, temperature=1.0, top_p=0.9), 9, allowed=mask),
        SampleRequest(SamplingParams(seed=3, temperature=1.0, logit_bias={90: 100.0}), 9, allowed=mask),
    ]
    allowed = {token for token in range(VOCAB) if mask[token >> 3] >> (token & 7) & 1}
    assert len(allowed) == 3
    assert {token.token_id for token in sample(logits, requests)} <= allowed
    with pytest.raises(GrammarError):
        state.advance(EOS_TOKEN_ID)
