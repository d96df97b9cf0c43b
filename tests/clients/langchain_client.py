"""langchain-openai: invoke, stream, structured output, bound tools. Argument: the server's URL."""

from __future__ import annotations

import sys
from importlib.metadata import version

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

model = ChatOpenAI(model="m", base_url=f"{sys.argv[1]}/v1", api_key="none", max_tokens=300, seed=1)


class Pick(BaseModel):
    """Pick one."""

    n: int = Field(ge=0, le=99)


whole = model.bind(max_tokens=7).invoke("hi")
assert "".join(str(part.content) for part in model.bind(max_tokens=7).stream("hi")) == whole.content
assert model.with_structured_output(Pick, method="json_schema").invoke("pick").n <= 99
assert model.bind_tools([Pick], tool_choice="any").invoke("pick").tool_calls[0]["name"] == "Pick"
assert model.with_structured_output(Pick, method="function_calling").invoke("pick").n <= 99
print("langchain-openai", version("langchain-openai"), "ok")
