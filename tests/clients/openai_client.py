"""The official Python client, which validates every answer strictly. Argument: the server's URL."""

from __future__ import annotations

import json
import sys

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", _strict_response_validation=True, max_retries=0)
assert [model.id for model in client.models.list()] == ["m"]
assert client.models.retrieve("m").owned_by == "kvrelay"

# Not `echo` with `logprobs`: the first token has no logprob, which the API says by null and the client's schema forbids.
done = client.completions.create(model="m", prompt=["ab", "cd"], n=2, max_tokens=5, logprobs=2, seed=1)
assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
assert done.usage is not None
assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
# A streamed completion's chunks have `finish_reason: null` before the last, which the client's schema does not know either.
lenient = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
text = "".join(part.choices[0].text for part in lenient.completions.create(model="m", prompt="x", max_tokens=9, stream=True))
assert isinstance(text, str)

messages = [{"role": "user", "content": "hi"}]
chat = client.chat.completions.create(model="m", messages=messages, max_tokens=4, logprobs=True, top_logprobs=2, seed=1)
assert chat.choices[0].message.role == "assistant"
parts = list(
    client.chat.completions.create(
        model="m", messages=messages, max_tokens=4, stream=True, stream_options={"include_usage": True}, seed=1
    )
)
assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == chat.choices[0].message.content
assert parts[-1].usage is not None

schema = {"type": "object", "properties": {"c": {"enum": ["a", "b"]}}, "required": ["c"], "additionalProperties": False}
forced = client.chat.completions.create(
    model="m",
    messages=messages,
    max_tokens=60,
    response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema, "strict": True}},
)
assert json.loads(forced.choices[0].message.content)["c"] in ("a", "b")

tools = [{"type": "function", "function": {"name": "pick", "parameters": schema}}]
called = client.chat.completions.create(model="m", messages=messages, tools=tools, tool_choice="required", max_tokens=300)
call = called.choices[0].message.tool_calls[0]
assert json.loads(call.function.arguments)["c"] in ("a", "b")
again = [*messages, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
client.chat.completions.create(model="m", messages=again, tools=tools, max_tokens=3)
with client.chat.completions.stream(
    model="m", messages=messages, tools=tools, tool_choice={"type": "function", "function": {"name": "pick"}}, max_tokens=300
) as stream:
    assert stream.get_final_completion().choices[0].finish_reason == "tool_calls"

for wrong, error in (({"model": "nope"}, openai.NotFoundError), ({"n": 0}, openai.BadRequestError)):
    try:
        client.completions.create(**{"model": "m", "prompt": "x", **wrong})
    except error:
        continue
    raise AssertionError(f"{wrong} was accepted")
print("openai", openai.__version__, "ok")
