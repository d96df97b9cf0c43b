"""`echo` with `logprobs`, `max_tokens: 0`, and `best_of`, at the front door."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_client import C, Door, assert_error, events
from scripted_generator import ScriptedGenerator, says
from tiny_model import write_model

from coordinator.prompt_offsets import prompt_offsets
from coordinator.text_model import TextModel
from wire.sequence import SequenceSpec

MakeDoor = Callable[..., Door]


def ids_of(text: TextModel, string: str) -> tuple[int, ...]:
    return text.tokenizer.encode(string, add_special_tokens=False)


def merged(chunks: list[Any]) -> tuple[str, dict[str, list[Any]]]:
    """Text and logprobs of a stream's only choice."""
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    logprobs: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for key in logprobs:
            logprobs[key] += (part["logprobs"] or {}).get(key, [])
    return "".join(part["text"] for part in parts), logprobs


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
async def test_E1_E3_echo_with_logprobs_in_both_modes(door: MakeDoor, text: TextModel, max_tokens: int) -> None:
    front = door(ScriptedGenerator(source=says(*ids_of(text, " jumps over the lazy"))))
    prompt = ids_of(text, "the quick brown 🦊 fox")
    asked = {"prompt": list(prompt), "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    answer = (await front.post(C, **asked)).json()
    choice, logprobs = answer["choices"][0], answer["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(prompt) + max_tokens}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value == -0.25 for value in logprobs["token_logprobs"][1:])
    assert choice["text"].startswith("the quick brown 🦊 fox")
    assert answer["usage"]["completion_tokens"] == max_tokens
    # Every token starts where the ones in front of it end; those inside the fox share its place.
    for index, (token, offset) in enumerate(zip(logprobs["tokens"], logprobs["text_offset"], strict=True)):
        if not token.startswith("bytes:"):
            assert choice["text"].startswith(token, offset), (index, token, offset)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert merged(events(await front.post(C, **asked, stream=True))) == (choice["text"], logprobs)


async def test_E1_prompts_of_a_list_keep_their_own(door: MakeDoor, text: TextModel) -> None:
    front = door()
    prompts = ["the fox", "a dog", "two phases"]
    answer = (await front.post(C, prompt=prompts, echo=True, logprobs=0, max_tokens=1, n=2, temperature=0)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for choice in answer["choices"]:
        prompt = prompts[choice["index"] // 2]
        assert choice["text"].startswith(prompt)
        assert len(choice["logprobs"]["tokens"]) == len(ids_of(text, prompt)) + 1


async def test_E1_a_prompt_alone_may_fill_the_context(door: MakeDoor, text: TextModel) -> None:
    front = door()
    full = [60] * text.max_model_len
    answer = await front.post(C, prompt=full, echo=True, logprobs=1, max_tokens=0)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert front.script.specs[0].stop.max_tokens == 0
    assert_error(await front.post(C, prompt=[*full, 60], echo=True, logprobs=1, max_tokens=0), 400, "prompt")
    assert_error(await front.post(C, max_tokens=0, logprobs=1), 400, "max_tokens")


async def test_max_tokens_0_without_logprobs_runs_nothing(door: MakeDoor) -> None:
    front = door()
    answer = (await front.post(C, prompt="the fox", echo=True, max_tokens=0)).json()
    assert answer["choices"][0]["text"] == "the fox"
    assert front.script.specs == []


async def test_E1_without_echo_nothing_of_the_prompt_is_asked_for(door: MakeDoor) -> None:
    front = door()
    await front.post(C, logprobs=1)
    await front.post(C, echo=True)
    assert [spec.prompt_logprobs for spec in front.script.specs] == [None, None]


def test_E3_offsets_skip_what_the_tokenizer_added(tmp_path: Path) -> None:
    model = TextModel.load(write_model(tmp_path / "bos", add_bos_token=True))
    ids = model.tokenizer.encode("the fox", add_special_tokens=True)
    offsets = prompt_offsets(ids, "the fox", model.tokenizer)
    assert model.tokenizer.special_tokens["bos_token"] == model.tokenizer.token_text(ids[0])[0]
    assert offsets[:2] == [0, 0]
    position = 0
    for token_id, offset in zip(ids[1:], offsets[1:], strict=True):
        assert offset == position
        position += len(model.tokenizer.token_text(token_id)[0])
    # Written out in the prompt, the same token is text.
    assert prompt_offsets(ids, "<|im_start|>the fox", model.tokenizer)[:2] == [0, len("<|im_start|>")]


# -- best_of ------------------------------------------------------------------------------------------------------------


def by_seed(spec: SequenceSpec, index: int) -> int:
    return 10 + spec.sampling.seed % 61  # one printable character each


async def test_C7_best_of_shows_the_likeliest_and_counts_all(door: MakeDoor, text: TextModel) -> None:
    """1. Four are generated for each prompt. 2. The two likeliest come, best first, numbered from 0. 3. All tokens count."""
    generator = ScriptedGenerator(source=by_seed, logprob=lambda token_id: -1.0 - (token_id * 7) % 13)
    front = door(generator)
    answer = (await front.post(C, prompt=["the fox", "a dog"], n=2, best_of=4, max_tokens=3, seed=5)).json()
    assert len(generator.specs) == 8
    assert all(spec.sampling.num_logprobs == 0 for spec in generator.specs)
    tokens = sorted({by_seed(spec, 0) for spec in generator.specs}, key=lambda token_id: (token_id * 7) % 13)
    assert len(tokens) == 4, "four seeds, the same for each prompt"
    best = [text.tokenizer.decode([token_id] * 3, skip_special_tokens=False) for token_id in tokens[:2]]
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(best * 2))
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 8 * 3


async def test_C7_best_of_is_refused_where_it_has_no_meaning(door: MakeDoor) -> None:
    front = door()
    assert_error(await front.post(C, best_of=1, n=2), 400, "best_of")
    assert_error(await front.post(C, best_of=0), 400, "best_of")
    assert_error(await front.post(C, best_of=21), 400, "best_of")
    assert_error(await front.post(C, best_of=3, n=2, stream=True), 400, "best_of")
    assert (await front.post(C, best_of=2, n=2, stream=True)).status_code == 200
