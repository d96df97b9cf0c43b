"""The sampler: exact rules, and its distribution against softmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import sampler
from engine.noise import gumbel_noise, uniform_noise
from engine.plan import SampleRequest
from engine.sampler import sample
from wire.sequence import SampledToken, SamplingParams

VOCAB = 24
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def request(position: int = 0, *, seed: int = 7, **params: Any) -> SampleRequest:
    others = {name: params.pop(name) for name in ("prompt", "output", "banned_token_ids") if name in params}
    return SampleRequest(SamplingParams(seed=seed, **params), position, **others)


def draw_one(logits: Tensor, **arguments: Any) -> int:
    return sample(logits.view(1, -1), [request(**arguments)])[0].token_id


def frequencies(count: int, **params: Any) -> Tensor:
    drawn = sample(LOGITS.expand(count, VOCAB), [request(position, **params) for position in range(count)])
    return torch.bincount(torch.tensor([token.token_id for token in drawn]), minlength=VOCAB).double()


def expected_distribution(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """By the book, on sorted probabilities."""
    probabilities = (LOGITS.double() / temperature).softmax(-1)
    order = probabilities.argsort(descending=True)
    kept = order[:top_k] if top_k else order
    renormalised = probabilities[kept] / probabilities[kept].sum()
    count = int((renormalised.cumsum(0) < top_p).sum()) + 1
    kept = kept[:count]
    kept = kept[probabilities[kept] >= min_p * probabilities[kept].max()]
    result = torch.zeros(VOCAB, dtype=torch.float64)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_softmax(params: dict[str, Any]) -> None:
    count = 6000
    observed, expected = frequencies(count, **params), expected_distribution(**params) * count
    assert observed[expected == 0].sum() == 0, "a filtered token was drawn"
    # Pearson's chi-square; rare tokens are pooled, so that the approximation holds.
    rare = expected < 8
    pooled = [(observed[~rare & (expected > 0)], expected[~rare & (expected > 0)])]
    if expected[rare].sum() >= 8:
        pooled.append((observed[rare].sum().view(1), expected[rare].sum().view(1)))
    o, e = (torch.cat(part) for part in zip(*pooled, strict=True))
    freedom = len(o) - 1
    assert freedom >= 1
    # Wilson-Hilferty: four standard deviations, about 3 in 100,000.
    limit = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3
    assert float(((o - e) ** 2 / e).sum()) < limit


def test_noise_is_uniform_and_depends_on_each_coordinate() -> None:
    ids = np.arange(4096)
    values = uniform_noise(1, 0, ids)
    assert values.min() > 0
    assert values.max() < 1
    counts, _ = np.histogram(values, bins=16, range=(0, 1))
    assert abs(counts - 256).max() < 80
    for other in (
        uniform_noise(2, 0, ids),
        uniform_noise(1, 1, ids),
        uniform_noise(1, 0, ids + 4096),
        uniform_noise(-1, 0, ids),
    ):
        assert abs(np.corrcoef(values, other)[0, 1]) < 0.06
    # Seed and position do not stand in for each other, and the extremes of int64 are seeds like any other.
    assert not np.array_equal(uniform_noise(3, 5, ids), uniform_noise(5, 3, ids))
    for seed in (2**63 - 1, -(2**63)):
        assert np.isfinite(gumbel_noise(seed, 2**31, ids)).all()
    # A subset of candidates sees the same numbers as the whole vocabulary.
    assert np.array_equal(uniform_noise(1, 0, ids[[5, 900]]), values[[5, 900]])


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.sampled_from([0.0, 1e-5, 0.7, 1.3]),
    top_k=st.integers(0, 40),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    repetition=st.sampled_from([1.0, 1.3]),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 10_000),
    mates=st.integers(0, 5),
)
def test_a_row_draws_the_same_alone_and_in_any_batch(
    temperature: float, top_k: int, top_p: float, min_p: float, repetition: float, seed: int, position: int, mates: int
) -> None:
    params = SamplingParams(
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        num_logprobs=2,
    )
    mine = SampleRequest(params, position, prompt=(1, 2), output=(3,))
    batch = torch.randn(mates + 1, VOCAB, generator=torch.Generator().manual_seed(mates))
    batch[mates] = LOGITS
    others = [request(position + mate, temperature=[0.0, 1.0][mate % 2], top_k=mate, seed=seed) for mate in range(mates)]
    (alone,) = sample(LOGITS.view(1, -1), [mine])
    assert sample(batch, [*others, mine])[mates] == alone


def test_greedy_takes_the_lowest_id_of_equals_and_leaves_the_logits_alone() -> None:
    logits = torch.full((3, 50_000), -1.0)
    logits[0, [49_999, 17, 300]] = 2.0
    logits[1, [40_000, 39_999]] = 2.0
    before = logits.clone()
    drawn = sample(
        logits,
        [request(temperature=0.0), request(temperature=0.0), request(temperature=0.0, banned_token_ids=frozenset({0}))],
    )
    assert [token.token_id for token in drawn] == [17, 39_999, 1]
    assert torch.equal(logits, before)
    assert sample(logits.bfloat16(), [request(temperature=0.0)] * 3)[0] == SampledToken(17)


@pytest.mark.parametrize("temperature", [1e-5, 1e-38, 5e-324])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    for position in range(20):
        assert draw_one(LOGITS * 100, position=position, temperature=temperature) == int(LOGITS.argmax())


@pytest.mark.parametrize("params", [{"top_p": 0.0}, {"top_p": 1e-12}, {"top_k": 1}, {"min_p": 1.0}])
def test_filters_always_keep_the_best_token(params: dict[str, Any]) -> None:
    assert {draw_one(LOGITS, position=position, **params) for position in range(20)} == {int(LOGITS.argmax())}


def test_a_huge_top_k_is_no_filter() -> None:
    for position in range(30):
        assert draw_one(LOGITS, position=position, top_k=2**31) == draw_one(LOGITS, position=position)


def test_top_p_reads_past_its_shortlist_when_the_mass_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(seed=0, top_p=p) for p in (0.1, 0.5, 0.95, 0.999999)]
    scaled = (LOGITS - LOGITS.max()).expand(4, VOCAB)
    whole = sampler._threshold(scaled, params)
    monkeypatch.setattr(sampler, "_SHORTLIST", 2)
    assert torch.equal(sampler._threshold(scaled, params), whole)
    assert whole[0] > whole[1] > whole[2] >= whole[3]


def test_penalties_count_what_they_should() -> None:
    logits = torch.tensor([[4.0, 3.0, -1.0, 2.5]])
    greedy = {"temperature": 0.0}
    # 1. Repetition: divides positive logits and multiplies negative ones, of prompt and output.
    assert draw_one(logits, **greedy, repetition_penalty=2.0, prompt=(0,)) == 1
    assert draw_one(logits, **greedy, repetition_penalty=2.0, prompt=(0,), output=(1,)) == 3
    # 2. Frequency and presence: output alone.
    assert draw_one(logits, **greedy, frequency_penalty=1.0, prompt=(0, 0, 0)) == 0
    assert draw_one(logits, **greedy, frequency_penalty=0.6, output=(0, 0)) == 1
    assert draw_one(logits, **greedy, presence_penalty=1.1, output=(0, 0, 0)) == 1
    # 3. Order: the bias comes first, so that repetition scales it too (4 + 8 = 12, halved: 6).
    assert draw_one(logits, **greedy, logit_bias={0: 8.0, 1: 3.5}, repetition_penalty=2.0, prompt=(0,)) == 1
    # 4. A banned token cannot be drawn whatever its bias.
    assert draw_one(logits, **greedy, logit_bias={0: 100.0}, banned_token_ids=frozenset({0})) == 1
    # 5. Ids that the vocabulary does not have change nothing.
    odd = {
        "logit_bias": {99: 5.0, -1: 5.0},
        "repetition_penalty": 2.0,
        "frequency_penalty": 1.0,
        "output": (99,),
        "prompt": (77,),
    }
    assert draw_one(logits, **greedy, **odd, banned_token_ids=frozenset({99})) == 0


def test_logprobs_come_from_the_raw_logits() -> None:
    expected = torch.log_softmax(LOGITS, -1)
    best = int(LOGITS.argmax())
    asked = request(temperature=0.3, num_logprobs=3, banned_token_ids=frozenset({best}), logit_bias={1: 5.0})
    none_asked, zero_asked = request(temperature=0.0), request(temperature=0.0, num_logprobs=0)
    first, second, third = sample(LOGITS.expand(3, VOCAB), [asked, none_asked, zero_asked])
    assert first.token_id != best
    assert first.logprob == pytest.approx(float(expected[first.token_id]))
    assert [token for token, _ in first.top] == LOGITS.topk(3).indices.tolist()
    assert first.top[0][1] == pytest.approx(float(expected[best]))
    assert second == SampledToken(best)
    assert third == SampledToken(best, pytest.approx(float(expected[best])))
    (many,) = sample(LOGITS.view(1, -1), [request(num_logprobs=100)])
    assert len(many.top) == VOCAB


def test_rows_without_a_finite_best_token_are_an_error() -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = float("nan")
    for temperature in (0.0, 1.0):
        with pytest.raises(ArithmeticError, match=r"\[1\]"):
            sample(logits, [request(temperature=0.0), request(temperature=temperature)])
    with pytest.raises(ArithmeticError, match=r"\[0\]"):
        sample(torch.zeros(1, 4), [request(banned_token_ids=frozenset(range(4)))])
