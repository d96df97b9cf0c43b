"""litellm, as its users call an OpenAI-compatible server. Argument: the server's URL."""

from __future__ import annotations

import sys
from importlib.metadata import version

import litellm

known = {"model": "openai/m", "api_base": f"{sys.argv[1]}/v1", "api_key": "none"}
messages = [{"role": "user", "content": "hi"}]
whole = litellm.completion(messages=messages, max_tokens=6, seed=1, **known)
parts = litellm.completion(messages=messages, max_tokens=6, seed=1, stream=True, **known)
assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
assert whole.usage.completion_tokens == 6 or whole.choices[0].finish_reason == "stop"
tools = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}]
called = litellm.completion(messages=messages, tools=tools, tool_choice="required", max_tokens=400, seed=2, **known)
assert called.choices[0].message.tool_calls[0].function.name == "go"
text = litellm.text_completion(prompt="x", max_tokens=3, **{**known, "model": "text-completion-openai/m"})
assert text.choices[0].text is not None
try:
    litellm.completion(messages=messages, n=0, **known)
except litellm.BadRequestError:
    print("litellm", version("litellm"), "ok")
