"""`echo` with `logprobs` through P and D, colocated, streamed and behind cached prefixes, against transformers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
import transformers
from serving_case import C, Served

TOLERANCE = 1e-3


class Scorer:
    """transformers' own forward pass."""

    def __init__(self, model_dir: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[T - 1, vocab]: row i belongs to token i + 1."""
        with torch.inference_mode():
            return torch.log_softmax(self._model(torch.tensor([tokens])).logits[0, :-1].float(), dim=-1)


@pytest.fixture(scope="module")
def scorer(tiny: Served) -> Scorer:
    torch.set_num_threads(1)
    return Scorer(tiny.model_dir)


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, 259) for _ in range(length)]


@pytest.mark.parametrize("length", [1, 2, 7, 16, 47, 48, 49, 150])
async def test_E1_prompt_logprobs_equal_a_forward_pass(tiny: Served, scorer: Scorer, policy: str, length: int) -> None:
    """What lm-eval sends. 1. Cold. 2. With the whole prompt in every prefix cache."""
    prompt = prompt_of(length)
    for _ in range(2):
        answer = await tiny.ask(C, policy, prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0)
        logprobs = answer["choices"][0]["logprobs"]
        assert {len(values) for values in logprobs.values()} == {length + 1}
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "all of it is computed"
        best = int(scorer.logprobs([*prompt, 0])[-1].argmax())
        expected = scorer.logprobs([*prompt, best])
        for index, token_id in enumerate([*prompt[1:], best]):
            ours = logprobs["token_logprobs"][index + 1]
            assert ours == pytest.approx(float(expected[index, token_id]), abs=TOLERANCE), index
            assert max(logprobs["top_logprobs"][index + 1].values()) == pytest.approx(
                float(expected[index].max()), abs=TOLERANCE
            )
        await tiny.ask(C, policy, prompt=prompt, max_tokens=1)
    tiny.cluster.assert_empty()


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
async def test_E3_a_stream_has_the_same_offsets_and_logprobs(tiny: Served, policy: str, max_tokens: int) -> None:
    text = "Prompt with an 🦊 in it, "
    for echo in (True, False):
        if not echo and max_tokens == 0:
            continue
        answer = await tiny.both(
            C, policy, prompt=text, echo=echo, logprobs=2, max_tokens=max_tokens, temperature=0, ignore_eos=True
        )
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]
        assert choice["finish_reason"] == "length"
        assert len(logprobs["tokens"]) == max_tokens + (len(text.encode()) if echo else 0)
        assert choice["text"].startswith(text) is echo
        assert logprobs["text_offset"][0] == 0
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert token.startswith("bytes:") or choice["text"].startswith(token, offset)


async def test_E1_p_d_and_colocated_agree_under_load(tiny: Served) -> None:
    """24 at once, in lists and alone, through both ways: the same numbers."""
    prompts = [prompt_of(length) for length in range(3, 99, 4)]
    requests = [{"prompt": prompt, "echo": True, "logprobs": 3, "max_tokens": 2, "temperature": 0} for prompt in prompts]
    split = await asyncio.gather(*(tiny.ask(C, "always", **request) for request in requests))
    whole = await asyncio.gather(*(tiny.ask(C, "never", **request) for request in requests))
    for one, other in zip(split, whole, strict=True):
        for key, values in one["choices"][0]["logprobs"].items():
            theirs = other["choices"][0]["logprobs"][key]
            assert values == (theirs if key in ("tokens", "text_offset") else Close(theirs)), key
    joined = await tiny.ask(C, "always", **{**requests[0], "prompt": prompts})
    assert [choice["text"] for choice in joined["choices"]] == [answer["choices"][0]["text"] for answer in split]
    tiny.cluster.assert_empty()


class Close:
    """Equal to lists of numbers, of maps of numbers, and of nulls, within the tolerance."""

    def __init__(self, values: list[object]) -> None:
        self._values = values

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, list)
        return len(other) == len(self._values) and all(
            mine == (theirs if theirs is None else pytest.approx(theirs, abs=TOLERANCE))
            for mine, theirs in zip(other, self._values, strict=True)
        )

    def __hash__(self) -> int:
        return 0
