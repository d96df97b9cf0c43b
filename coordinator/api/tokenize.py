"""/tokenize and /detokenize: what the server makes of a text, token by token."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.body import read_json_object
from coordinator.api.errors import bad_request, json_response
from coordinator.api.generate import check_model, off_loop
from coordinator.api.request_builder import RequestBuilder
from coordinator.api.schemas import DetokenizeRequest, TokenizeRequest, validate
from coordinator.api.settings import ApiSettings
from coordinator.text_model import TextModel


@dataclass(frozen=True, slots=True)
class TokenizeRoutes:
    text: TextModel
    builder: RequestBuilder
    settings: ApiSettings
    model_name: str

    async def tokenize(self, request: Request) -> Response:
        """`prompt` (as /v1/completions takes it) or `messages` (through the chat template) to token ids."""
        body, size = await read_json_object(request, self.settings.max_body_bytes, self.settings.body_timeout_s)
        parsed = validate(TokenizeRequest, body)
        check_model(self.model_name if parsed.model is None else parsed.model, self.model_name)
        if (parsed.prompt is None) == (parsed.messages is None):
            raise bad_request("give either prompt or messages", param="prompt")

        def encode() -> tuple[int, ...]:
            if parsed.prompt is not None:
                return self.builder.encode_text(parsed.prompt, "prompt", parsed.add_special_tokens)
            assert parsed.messages is not None
            return self.builder.chat_prompt(parsed.messages, parsed.add_generation_prompt)

        ids = await off_loop(size, encode)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": self.builder.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        body, size = await read_json_object(request, self.settings.max_body_bytes, self.settings.body_timeout_s)
        parsed = validate(DetokenizeRequest, body)
        check_model(self.model_name if parsed.model is None else parsed.model, self.model_name)

        def decode() -> str:
            ids = self.builder.check_token_ids(parsed.tokens, "tokens", "tokens")
            return self.text.tokenizer.decode(ids, parsed.skip_special_tokens)

        return json_response({"prompt": await off_loop(size, decode)})
