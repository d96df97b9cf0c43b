from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from api_client import C, Door, assert_error, events, finishes, joined
from openai.types import Completion
from scripted_generator import ScriptedGenerator, says
from tiny_model import EOS, MAX_MODEL_LEN, ids_of

from coordinator.api.request_builder import choice_seed
from coordinator.text_model import TextModel

MakeDoor = Callable[..., Door]


def repeat(text: TextModel, what: str) -> dict[str, Any]:
    (token_id,) = ids_of(text, what)
    return {"logit_bias": {str(token_id): 100}, "temperature": 0}


async def test_D1_nulls_act_as_absent_and_default_is_16_tokens(door: MakeDoor) -> None:
    names = [
        "max_tokens", "n", "stop", "seed", "logprobs", "logit_bias", "stream", "stream_options", "top_p", "user",
        "temperature",
        "echo", "best_of", "suffix", "presence_penalty", "frequency_penalty", "top_k", "min_p", "min_tokens", "ignore_eos",
        "stop_token_ids", "include_stop_str_in_output", "repetition_penalty", "cache_salt",
    ]  # fmt: skip
    front = door()
    response = await front.post(C, **dict.fromkeys(names))
    answer = Completion.model_validate(response.json(), strict=True)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert front.script.num_live == 0


async def test_A5_stream_and_whole_answer_are_the_same_bytes(door: MakeDoor, text: TextModel) -> None:
    front = door(ScriptedGenerator(source=says(*ids_of(text, "a😀\u2028b🫠\x85c the fox"))))
    whole = (await front.post(C, max_tokens=30, ignore_eos=True)).json()["choices"][0]
    for size in (1, 2, 5):
        front.script.tokens_per_item = size
        chunks = events(await front.post(C, max_tokens=30, stream=True))
        assert joined(chunks) == {0: whole["text"]}
        assert finishes(chunks) == {0: "length"}
        assert len({chunk["id"] for chunk in chunks}) == 1
    assert "\ufffd" not in whole["text"]


async def test_A5_line_ends_inside_text_never_cut_an_event(door: MakeDoor, text: TextModel) -> None:
    front = door(ScriptedGenerator(source=says(*ids_of(text, "a\u2028b\x85\u2029\r\n"))))
    response = await front.post(C, max_tokens=12, stream=True)
    lines = response.content.decode("utf-8").splitlines()
    assert all(line == "" or line.startswith("data: ") for line in lines)
    assert joined(events(response))[0].startswith("a\u2028b\x85\u2029\r\n")


@pytest.mark.parametrize("stop", [[" a a a"], "a a", ["ZZ", "a a"]])
async def test_B1_B9_stop_over_tokens_is_cut_and_cancels(door: MakeDoor, text: TextModel, stop: Any) -> None:
    front = door()
    asked = {**repeat(text, " a"), "stop": stop, "max_tokens": 200}
    whole = (await front.post(C, **asked)).json()
    chunks = events(await front.post(C, **asked, stream=True, stream_options={"include_usage": True}))
    expected = "" if stop == [" a a a"] else " "
    assert whole["choices"][0] == {"index": 0, "text": expected, "logprobs": None, "finish_reason": "stop"}
    assert joined(chunks[:-1]) == {0: expected}
    assert finishes(chunks[:-1]) == {0: "stop"}
    # The generation ended at the match, and usage says so in both modes.
    matching = 3 if stop == [" a a a"] else 2
    assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == matching
    assert all(generation.cancelled and generation.num_produced <= matching + 1 for generation in front.script.generations)


async def test_B3_tokens_behind_the_match_never_leak(door: MakeDoor, text: TextModel) -> None:
    front = door(ScriptedGenerator(tokens_per_item=8))
    asked = {**repeat(text, " a"), "stop": " a a a", "max_tokens": 64, "logprobs": 1}
    whole = (await front.post(C, **asked, include_stop_str_in_output=True)).json()
    assert whole["choices"][0]["text"] == " a a a"
    assert whole["choices"][0]["logprobs"]["tokens"] == [" a"] * 3
    assert whole["usage"]["completion_tokens"] == 3
    chunks = events(await front.post(C, **asked, stream=True))
    assert joined(chunks) == {0: ""}
    assert chunks[-1]["choices"][0]["logprobs"] is None


async def test_B5_a_stop_that_never_comes_delays_nothing(door: MakeDoor, text: TextModel) -> None:
    chunks = events(await door().post(C, **repeat(text, " a"), stop=["Z" * 20], max_tokens=5, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [" a"] * 5


async def test_C1_include_usage_gives_one_extra_chunk(door: MakeDoor, text: TextModel) -> None:
    front = door(ScriptedGenerator(cached=lambda spec: 1))
    chunks = events(await front.post(C, max_tokens=3, stream=True, stream_options={"include_usage": True}))
    *others, last = chunks
    assert last["choices"] == []
    prompt = len(ids_of(text, "the fox"))
    assert last["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert all("usage" in chunk and chunk["usage"] is None for chunk in others)
    for chunk in others:
        Completion.model_validate(
            {**chunk, "choices": [{**c, "finish_reason": "stop"} for c in chunk["choices"]]}, strict=True
        )


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}, None])
async def test_C3_no_usage_unless_asked(door: MakeDoor, options: Any) -> None:
    chunks = events(await door().post(C, max_tokens=2, stream=True, stream_options=options))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_C3_stream_options_are_strict(door: MakeDoor) -> None:
    front = door()
    assert_error(await front.post(C, stream_options={"include_usage": True}), 400, "stream_options")
    bad = await front.post(C, stream=True, stream_options={"include_usage": "True"})
    assert_error(bad, 400, "stream_options.include_usage")
    assert front.script.specs == []


async def test_C7_F9_choices_are_complete_and_seeded_apart(door: MakeDoor) -> None:
    front = door(ScriptedGenerator(tokens_per_item=2))
    asked = {"n": 3, "seed": 7, "max_tokens": 5, "logprobs": 1}
    whole = (await front.post(C, **asked)).json()
    chunks = events(await front.post(C, **asked, stream=True))
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert joined(chunks) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert finishes(chunks) == dict.fromkeys(range(3), "length")
    assert [spec.sampling.seed for spec in front.script.specs[:3]] == [7, choice_seed(7, 1), choice_seed(7, 2)]
    assert len({spec.request_id for spec in front.script.specs}) == 6
    # Choice 0 equals a request of its own with that seed.
    alone = (await front.post(C, seed=7, max_tokens=5)).json()
    assert alone["choices"][0]["text"] == whole["choices"][0]["text"]


async def test_D9_D11_batches_keep_order_and_count_each_prompt_once(door: MakeDoor, text: TextModel) -> None:
    prompts = [ids_of(text, "the quick")[:2], ids_of(text, "lazy dog two phases"), ids_of(text, "lazy dog two phases")]
    counts = [len(prompt) for prompt in prompts]
    front = door(ScriptedGenerator(cached=lambda spec: len(spec.prompt) - 1))
    asked = {"prompt": prompts, "n": 2, "max_tokens": 4, "seed": 3}
    whole = (await front.post(C, **asked)).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert whole["usage"]["prompt_tokens"] == sum(counts)
    assert whole["usage"]["completion_tokens"] == 24
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(counts) - 3
    chunks = events(await front.post(C, **asked, stream=True, stream_options={"include_usage": True}))
    assert chunks.pop()["usage"] == whole["usage"]
    assert joined(chunks) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    # A prompt of a batch gives what it gives alone.
    alone = (await front.post(C, **{**asked, "prompt": prompts[1]})).json()
    assert [choice["text"] for choice in alone["choices"]] == [choice["text"] for choice in whole["choices"][2:4]]


async def test_D9_echo_and_max_tokens_0(door: MakeDoor, text: TextModel) -> None:
    front = door()
    whole = (await front.post(C, prompt=["A", "B", "C"], echo=True, max_tokens=1)).json()
    assert [choice["text"][0] for choice in whole["choices"]] == ["A", "B", "C"]
    chunks = events(await front.post(C, prompt=["A", "B", "C"], echo=True, max_tokens=1, stream=True, seed=1))
    assert {index: value[0] for index, value in joined(chunks).items()} == {0: "A", 1: "B", 2: "C"}
    front.script.specs.clear()
    nothing = (await front.post(C, prompt=ids_of(text, "the fox"), echo=True, max_tokens=0)).json()
    assert nothing["choices"][0] == {"index": 0, "text": "the fox", "logprobs": None, "finish_reason": "length"}
    assert nothing["usage"]["completion_tokens"] == 0
    assert joined(events(await front.post(C, echo=True, max_tokens=0, stream=True))) == {0: "the fox"}
    assert front.script.specs == [], "no worker was asked"
    assert_error(await front.post(C, max_tokens=0), 400, "max_tokens")


@pytest.mark.parametrize(
    "prompt", ["", [""], ["ok", ""], [], [[]], [[1], []], None, 5, {"a": 1}, [None], ["a", 1], [1, "a"], [["a"]]]
)
async def test_D5_empty_and_misshapen_prompts_are_named(door: MakeDoor, prompt: Any) -> None:
    front = door()
    assert_error(await front.post(C, prompt=prompt), 400, "prompt")
    assert front.script.specs == []


async def test_D7_only_ids_of_the_vocabulary(door: MakeDoor, text: TextModel) -> None:
    front = door()
    for bad in (text.vocab_size, text.vocab_size + 10**6, -1, 2**63, 1.0, True, 10**400):
        assert_error(await front.post(C, prompt=[5, bad]), 400, "prompt")
        assert_error(await front.post(C, prompt=[[5], [bad]]), 400, "prompt")
        assert_error(await front.post(C, stop_token_ids=[bad]), 400)
    assert front.script.specs == []
    assert (await front.post(C, prompt=[text.vocab_size - 1])).status_code == 200


async def test_D3_limits_have_true_counts(door: MakeDoor) -> None:
    front = door()
    limit = MAX_MODEL_LEN
    for stream in (False, True):
        for length, max_tokens in (
            (limit + 1, None),
            (limit, None),
            (limit + 1, 1),
            (limit - 1, 2),
            (limit - 1, 10**9),
            (9, limit),
        ):
            error = assert_error(
                await front.post(C, prompt=[70] * length, max_tokens=max_tokens, stream=stream),
                400,
                code="context_length_exceeded",
            )
            assert str(limit) in error["message"]
            assert str(length) in error["message"]
        assert (await front.post(C, prompt=[70] * (limit - 1), max_tokens=1, stream=stream)).status_code == 200
    # The default is no wish: it is cut to what fits.
    response = await front.post(C, prompt=[70] * (limit - 3))
    assert response.json()["usage"]["completion_tokens"] == 3
    # What workers can hold counts as well.
    front.script.max_model_len = 20
    assert_error(await front.post(C, prompt=[70] * 20), 400, code="context_length_exceeded")


async def test_J11_a_hopelessly_long_text_is_refused_untokenised(door: MakeDoor, text: TextModel) -> None:
    front = door()
    num_chars = MAX_MODEL_LEN * text.tokenizer.token_bytes.longest + 1
    error = assert_error(await front.post(C, prompt="x" * num_chars), 400, "prompt", "context_length_exceeded")
    assert str(num_chars) in error["message"]
    # A shorter one is tokenised (in a thread) and counted.
    error = assert_error(await front.post(C, prompt="the fox " * 400), 400, "prompt", "context_length_exceeded")
    assert str(len(ids_of(text, "the fox " * 400))) in error["message"]


async def test_E3_offsets_follow_the_text_in_both_modes(door: MakeDoor, text: TextModel) -> None:
    front = door(ScriptedGenerator(source=says(*ids_of(text, "the quick fox"))))
    asked = {"max_tokens": 6, "logprobs": 2}
    whole = (await front.post(C, **asked)).json()["choices"][0]
    logprobs = whole["logprobs"]
    assert "".join(logprobs["tokens"]) == whole["text"]
    position = 0
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert offset == position
        position += len(token)
    assert all(value == -0.25 for value in logprobs["token_logprobs"])
    assert all(
        2 <= len(top) <= 3 and token in top for top, token in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True)
    )
    chunks = events(await front.post(C, **asked, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {key: [item for part in parts for item in part[key]] for key in logprobs} == logprobs


async def test_E9_more_logprobs_than_the_cap_are_refused(door: MakeDoor) -> None:
    front = door()
    for value in (6, 10, 10**6, -1, True, 1.0):
        error = assert_error(await front.post(C, logprobs=value), 400, "logprobs")
        assert "5" in error["message"] or "integer" in error["message"] or "0" in error["message"]
    assert_error(await front.post(C, suffix="x"), 400, "suffix", "unsupported_parameter")
    assert_error(await front.post(C, frobnicate=1), 400, "frobnicate", "unknown_parameter")
    assert_error(await front.post(C, **{"<script>": 1}), 400, "<script>", "unknown_parameter")
    assert_error(await front.post(C, **{"<str>": 1}), 400, "<str>", "unknown_parameter")
    assert_error(await front.post(C, **{"x" * 100_000: 1}), 400, "x" * 100, "unknown_parameter")
    assert_error(await front.post(C, stream=True, stream_options={"a": 1}), 400, "stream_options.a", "unknown_parameter")
    refused = await front.post(C, stream=True, stream_options={"include_obfuscation": True})
    assert_error(refused, 400, "stream_options.include_obfuscation", "unsupported_parameter")
    assert (await front.post(C, stream=True, stream_options={"include_obfuscation": False})).status_code == 200
    for field, value, words in (
        ("stop", "", "must have at least 1 character"),
        ("stop", ["a"] * 5, "must have at most 4 items, not 5"),
        ("stop_token_ids", [1] * 129, "must have at most 128 items, not 129"),
    ):
        error = assert_error(await front.post(C, **{field: value}), 400, field)
        assert error["message"] == f"{field} {words}"


@pytest.mark.parametrize("seed", [2**63, 2**64, -(2**63) - 1, 10**20, "100", 1.5, True])
async def test_F5_bad_seeds_are_refused(door: MakeDoor, seed: Any) -> None:
    front = door()
    assert_error(await front.post(C, seed=seed), 400, "seed")
    assert front.script.specs == []


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1, -1, 0])
async def test_F5_every_int64_is_a_seed(door: MakeDoor, seed: int) -> None:
    front = door()
    assert (await front.post(C, seed=seed, n=2)).status_code == 200
    assert front.script.specs[0].sampling.seed == seed
    assert all(-(2**63) <= spec.sampling.seed < 2**63 for spec in front.script.specs)


async def test_F5_without_a_seed_each_request_draws_its_own(door: MakeDoor) -> None:
    front = door()
    for _ in range(3):
        await front.post(C)
    assert len({spec.sampling.seed for spec in front.script.specs}) == 3


async def test_F7_extreme_sampling_values(door: MakeDoor, text: TextModel) -> None:
    front = door()
    for fine in ({"temperature": 5e-324}, {"temperature": 1e-12}, {"top_p": 0}, {"top_p": 1}, {"top_k": -1}, {"top_k": 0}):
        assert (await front.post(C, **fine)).status_code == 200, fine
    assert (await front.post(C, top_k=10**9)).status_code == 200
    assert front.script.specs[-1].sampling.top_k == text.vocab_size
    for name, values in {
        "temperature": (-0.1, 2.1, "1", True),
        "top_p": (-0.1, 1.1),
        "presence_penalty": (2.1, -2.1),
        "frequency_penalty": (2.1,),
        "repetition_penalty": (0, -1),
        "top_k": (-2, 1.0),
        "min_p": (1.1,),
        "n": (0, -1, 129, True, 1.0),
        "min_tokens": (-1, 17),
        "max_tokens": (-1, "5", True, 1.5),
        "stop": ([""], "", ["a"] * 5, 5, [1]),
        "logit_bias": ({"x": 1}, {"-1": 1}, {str(text.vocab_size): 1}, {"5": 101}, {"5": "1"}, [1], {"٣": 1}),
        "user": (5,),
        "cache_salt": (5,),
        "stream": ("true", 1),
    }.items():
        for value in values:
            error = assert_error(await front.post(C, **{name: value}), 400)
            assert error["param"].startswith(name), (name, value, error)


async def test_sampling_and_stop_rules_reach_the_sequence(door: MakeDoor) -> None:
    front = door()
    asked = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": -0.3,
        "repetition_penalty": 1.2, "logit_bias": {"70": -5}, "logprobs": 3, "min_tokens": 2, "max_tokens": 9,
        "ignore_eos": True,
        "stop_token_ids": [9, 8], "cache_salt": "tenant",
    }  # fmt: skip
    await front.post(C, **asked)
    (spec,) = front.script.specs
    sampling, stop = spec.sampling, spec.stop
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.9, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.2, -0.3, 1.2)
    assert (sampling.logit_bias, sampling.num_logprobs) == ({70: -5.0}, 3)
    assert (stop.max_tokens, stop.min_tokens, stop.ignore_eos, stop.stop_token_ids) == (9, 2, True, (9, 8))
    assert (stop.eos_token_ids, spec.cache_salt, spec.resumed) == ((EOS,), "tenant", ())


async def test_F11_L3_end_token_first_gives_empty_text(door: MakeDoor) -> None:
    front = door()
    whole = (await front.post(C, logit_bias={str(EOS): 100}, max_tokens=9)).json()
    assert whole["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    assert whole["usage"]["completion_tokens"] == 1
    chunks = events(await front.post(C, logit_bias={str(EOS): 100}, max_tokens=9, stream=True))
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [("", "stop")]


@pytest.mark.parametrize("bias", [{}, {str(EOS): 100}], ids=["any token", "end token"])
async def test_E1_an_evaluation_gets_one_logprob_more_than_its_prompt_has_tokens(
    door: MakeDoor, bias: dict[str, int]
) -> None:
    """lm-evaluation-harness drops the last logprob unseen: with an end token drawn, it must not be the prompt's."""
    front = door()
    asked = {"prompt": [70, 71, 72], "echo": True, "logprobs": 1, "max_tokens": 1, "seed": 5, "logit_bias": bias}
    whole = (await front.post(C, **asked)).json()["choices"][0]
    assert {len(values) for values in whole["logprobs"].values()} == {4}
    chunks = events(await front.post(C, **asked, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    for key, values in whole["logprobs"].items():
        assert [value for part in parts for value in part[key]] == values
