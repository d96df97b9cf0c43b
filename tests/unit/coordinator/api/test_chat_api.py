from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_client import CH, C, Door, assert_error, events, finishes, joined
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from scripted_generator import ScriptedGenerator, says
from tiny_model import EOS, MAX_MODEL_LEN, TEMPLATE, ids_of, write_model

from coordinator.text_model import TextModel

MakeDoor = Callable[..., Door]


HI = [{"role": "user", "content": "hi"}]


async def test_chat_answer_has_every_field_and_renders_the_template(door: MakeDoor, text: TextModel) -> None:
    front = door(ScriptedGenerator(source=says(*ids_of(text, "the fox"), EOS)))
    raw = (await front.post(CH)).json()
    answer = ChatCompletion.model_validate(raw, strict=True)
    assert set(raw["choices"][0]) == {"finish_reason", "index", "message", "logprobs"}
    assert raw["choices"][0]["message"] == {"role": "assistant", "content": "the fox", "refusal": None}
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    (spec,) = front.script.specs
    assert spec.prompt == text.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False)
    assert spec.stop.max_tokens == MAX_MODEL_LEN - len(spec.prompt), "the default is the rest of the context"


async def test_B7_empty_and_null_stop_leave_the_end_token_alone(door: MakeDoor, text: TextModel) -> None:
    front = door(ScriptedGenerator(source=says(*ids_of(text, "dog"), EOS)))
    for stop in ([], None):
        choice = (await front.post(CH, stop=stop)).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("dog", "stop")


async def test_C1_C7_stream_has_one_role_per_choice_and_strict_chunks(door: MakeDoor, text: TextModel) -> None:
    front = door(ScriptedGenerator(tokens_per_item=2))
    asked = {"n": 2, "seed": 5, "max_tokens": 7, "logprobs": True, "top_logprobs": 2}
    whole = (await front.post(CH, **asked)).json()
    response = await front.post(CH, **asked, stream=True, stream_options={"include_usage": True})
    chunks = events(response)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    last = chunks.pop()
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    roles = [choice["index"] for chunk in chunks for choice in chunk["choices"] if "role" in choice["delta"]]
    assert sorted(roles) == [0, 1]
    assert joined(chunks) == {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    assert finishes(chunks) == {0: "length", 1: "length"}
    for index in (0, 1):
        streamed = [
            entry
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == index and choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        assert streamed == whole["choices"][index]["logprobs"]["content"]
    # No chunk without content but the role's and the finish's.
    for chunk in chunks:
        choice = chunk["choices"][0]
        assert "role" in choice["delta"] or choice["finish_reason"] or choice["delta"]["content"] or choice["logprobs"]


async def test_A1_E7_split_emoji_with_true_bytes(door: MakeDoor, text: TextModel) -> None:
    front = door(ScriptedGenerator(source=says(*ids_of(text, "a😀🫠"), EOS)))
    asked = {"logprobs": True, "top_logprobs": 2}
    whole = ChatCompletion.model_validate((await front.post(CH, **asked)).json(), strict=True).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    raw = [entry.bytes for entry in whole.logprobs.content]
    assert bytes(byte for piece in raw for byte in piece or []).decode("utf-8") == whole.message.content == "a😀🫠"
    assert raw[1:5] == [[0xF0], [0x9F], [0x98], [0x80]]
    assert all(len(entry.top_logprobs) == 2 and entry.token for entry in whole.logprobs.content)
    chunks = events(await front.post(CH, stream=True))
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert [content for content in contents if content] == ["a", "😀", "🫠"]


async def test_E5_E9_logprobs_of_chat(door: MakeDoor) -> None:
    front = door()
    only = (await front.post(CH, logprobs=True, max_tokens=2)).json()["choices"][0]["logprobs"]
    assert only["refusal"] is None
    assert all(
        set(entry) == {"token", "logprob", "bytes", "top_logprobs"} and entry["top_logprobs"] == []
        for entry in only["content"]
    )
    assert_error(await front.post(CH, top_logprobs=2), 400, "top_logprobs")
    assert_error(await front.post(CH, logprobs=5), 400, "logprobs")
    error = assert_error(await front.post(CH, logprobs=True, top_logprobs=21), 400, "top_logprobs")
    assert "20" in error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": {}, "content": "x"}], "messages[0].role"),
        ([1], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": 0, "content": "x"}], "messages[0].role"),
        ([{"role": "alien", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x", "tool_call_id": "c1"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": 0}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([*HI, {"role": "user", "content": [{"type": "text", "text": 0}]}], "messages[1].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "user", "content": "x", "colour": 1}], "messages[0].colour"),
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
    ],
)
async def test_G5_badly_typed_messages_are_named(door: MakeDoor, messages: Any, param: str) -> None:
    front = door()
    error = assert_error(await front.post(CH, messages=messages), 400, param)
    assert not any(word in error["message"] for word in ("ChatMessage", "instance of", "dict", "pydantic", "Input"))
    assert front.script.specs == []


async def test_G5_ten_thousand_messages_and_a_raising_template(door: MakeDoor, tmp_path: Path) -> None:
    error = assert_error(await door().post(CH, messages=HI * 10_000), 400, "messages", "context_length_exceeded")
    assert "tokens" in error["message"]
    raising = TextModel.load(
        write_model(tmp_path / "m", template="{{ raise_exception('roles must alternate') }}"), name="tiny"
    )
    error = assert_error(await door(model=raising).post(CH), 400, "messages")
    assert "roles must alternate" in error["message"]


async def test_G1_one_beginning_token_in_chat(door: MakeDoor, tmp_path: Path) -> None:
    model = TextModel.load(
        write_model(tmp_path / "m", template="{{ bos_token }}" + TEMPLATE, add_bos_token=True), name="tiny"
    )
    front = door(model=model)
    chat = (await front.client.post("/tokenize", json={"messages": HI})).json()["tokens"]
    assert chat[:3].count(1) == 2, "the template's own and the first turn's"
    rendered = "<|im_start|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    plain = (await front.client.post("/tokenize", json={"prompt": rendered})).json()["tokens"]
    assert plain == [1, *chat], "completions add one, as the config says"
    await front.post(CH)
    assert list(front.script.specs[0].prompt) == chat


async def test_G3_no_template_is_a_clear_error_and_completions_work(door: MakeDoor, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", template=None)
    front = door(model=TextModel.load(directory, name="tiny"))
    error = assert_error(await front.post(CH), 400, "messages", "no_chat_template")
    assert "chat template" in error["message"]
    assert (await front.post(C)).status_code == 200
    override = door(model=TextModel.load(directory, name="tiny", chat_template=TEMPLATE))
    assert (await override.post(CH)).status_code == 200


async def test_content_parts_names_and_developer_role(door: MakeDoor, text: TextModel) -> None:
    front = door()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], "name": "ann"},
        {
            "role": "assistant",
            "content": "x",
            "refusal": None,
            "tool_calls": [],
            "audio": None,
            "function_call": None,
            "annotations": [],
        },
    ]
    assert (await front.post(CH, messages=messages, max_tokens=1)).status_code == 200
    shown = text.tokenizer.decode(front.script.specs[0].prompt, skip_special_tokens=False)
    assert shown.startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nx"
    )


@pytest.mark.parametrize(
    ("name", "refused", "harmless"),
    [
        ("functions", [{}], []),
        ("function_call", {"name": "f"}, "none"),
        ("modalities", ["audio"], ["text"]),
        ("audio", {}, None),
        ("prediction", {}, None),
        ("store", True, False),
        ("store", 0, False),
        ("metadata", {"a": "b"}, {}),
        ("service_tier", "flex", "auto"),
        ("reasoning_effort", "high", "none"),
        ("web_search_options", {}, None),
        ("chat_template", "{{ 1 }}", None),
    ],
)
async def test_I1_what_is_not_offered_is_refused_by_name(door: MakeDoor, name: str, refused: Any, harmless: Any) -> None:
    front = door()
    error = assert_error(await front.post(CH, **{name: refused}), 400, name, "unsupported_parameter")
    assert name in error["message"]
    assert front.script.specs == []
    assert (await front.post(CH, **{name: harmless}, max_tokens=1)).status_code == 200
    assert (await front.post(CH, **{name: None}, max_tokens=1)).status_code == 200
    assert_error(await front.post(CH, guided_json={}), 400, "guided_json", "unknown_parameter")


async def test_D3_chat_limits(door: MakeDoor, text: TextModel) -> None:
    front = door()
    room = MAX_MODEL_LEN - len(ids_of(text, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
    for name in ("max_tokens", "max_completion_tokens"):
        assert_error(await front.post(CH, **{name: room + 1}), 400, name, "context_length_exceeded")
        assert (await front.post(CH, **{name: room})).json()["usage"]["completion_tokens"] == room
        assert_error(await front.post(CH, **{name: 0}), 400, name)
    assert_error(await front.post(CH, max_tokens=1, max_completion_tokens=2), 400, "max_tokens")
    long = [{"role": "user", "content": "the fox " * 400}]
    assert_error(await front.post(CH, messages=long, stream=True), 400, "messages", "context_length_exceeded")


async def test_tokenize_and_back(door: MakeDoor, text: TextModel) -> None:
    front = door()
    found = (await front.client.post("/tokenize", json={"prompt": "the 😀"})).json()
    assert found == {"tokens": ids_of(text, "the 😀"), "count": len(ids_of(text, "the 😀")), "max_model_len": MAX_MODEL_LEN}
    back = await front.client.post("/detokenize", json={"tokens": found["tokens"]})
    assert back.json() == {"prompt": "the 😀"}
    assert_error(await front.client.post("/tokenize", json={}), 400, "prompt")
    assert_error(await front.client.post("/detokenize", json={"tokens": [text.vocab_size]}), 400, "tokens")
    assert_error(await front.client.post("/tokenize", json={"prompt": "x", "model": "nope"}), 404, "model")
