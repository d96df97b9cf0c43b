"""A validated request to the sequences that it asks for.

Every prompt × choice is one `SequenceSpec` under a request id of its own. Limits, the same for both routes:
- a prompt must leave room for at least one token;
- an explicit max_tokens must fit behind the prompt, else 400 `context_length_exceeded` (never silently less than asked);
- a default max_tokens (completions: 16, chat: the rest of the context) is cut to what fits.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.api.chat_messages import rendered, template_messages
from coordinator.api.errors import ApiError, bad_request
from coordinator.api.schemas import ChatMessage, ChatRequest, CompletionRequest, GenerationFields
from coordinator.api.settings import ApiSettings
from coordinator.api.tools import ToolUse
from coordinator.chat_template import ChatTemplateError
from coordinator.text_model import TextModel
from coordinator.tool_formats import TOOL_CALL_TAGS
from wire.ids import new_request_id
from wire.sequence import SamplingParams, SequenceSpec, StopRules


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: tuple[int, ...]
    echo_text: str = ""  # shown in front of the output


@dataclass(frozen=True, slots=True)
class PlannedChoice:
    index: int  # prompt index × best_of + choice
    prompt_index: int
    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class Plan:
    """All that serving a request needs; nothing of the request's own shape is left in it."""

    prompts: tuple[Prompt, ...]
    choices: tuple[PlannedChoice, ...]
    n: int  # choices of each prompt that are shown
    best_of: int  # and that are generated
    stop_strings: tuple[str, ...]
    include_stop: bool
    num_logprobs: int | None  # None: none
    stream: bool
    include_usage: bool
    timeout_s: float | None = None  # for the whole request
    end_logprobs: bool = False  # the token that ends a choice has logprobs too
    shown_special_ids: frozenset[int] = frozenset()  # special tokens whose text is part of the output: tags of tool calls

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt once, however many choices."""
        return sum(len(prompt.ids) for prompt in self.prompts)


class RequestBuilder:
    """Pure but for the drawn ids and seeds; slow for long prompts, so call it from a thread then."""

    def __init__(self, text: TextModel, settings: ApiSettings, max_model_len: Callable[[], int | None]) -> None:
        self._text = text
        self._settings = settings
        self._cluster_max_model_len = max_model_len

    @property
    def max_model_len(self) -> int:
        limit = self._cluster_max_model_len()
        return self._text.max_model_len if limit is None else min(limit, self._text.max_model_len)

    # -- the two kinds of request ---------------------------------------------------------------------------------------

    def completion(self, request: CompletionRequest, grammar: str = "") -> Plan:
        """
        Args:
            grammar: what the output must be, in the workers' form.

        Raises:
            ApiError: 400 that names the field.
        """
        best_of = request.n if request.best_of is None else request.best_of
        if best_of < request.n:
            raise bad_request("best_of must be at least n", param="best_of")
        if best_of > request.n and request.stream:
            raise bad_request("best_of above n cannot be streamed", param="best_of")
        if request.max_tokens == 0 and not request.echo:
            raise bad_request("max_tokens can be 0 only with echo", param="max_tokens")
        prompts = self._completion_prompts(request.prompt, request.echo)
        plan = self._plan(
            request,
            prompts,
            request.max_tokens,
            "max_tokens",
            self._settings.default_max_tokens,
            request.logprobs,
            grammar=grammar,
            best_of=best_of,
            prompt_logprobs=request.logprobs if request.echo else None,
        )
        return replace(plan, end_logprobs=True)

    def chat(self, request: ChatRequest, grammar: str = "", tools: ToolUse | None = None) -> Plan:
        """
        Args:
            grammar: what the output must be, in the workers' form.

        Raises:
            ApiError: 400 that names the field.
        """
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
        max_tokens, param = request.max_tokens, "max_tokens"
        if request.max_completion_tokens is not None:
            if max_tokens is not None and max_tokens != request.max_completion_tokens:
                raise bad_request("max_tokens and max_completion_tokens differ; give one", param="max_tokens")
            max_tokens, param = request.max_completion_tokens, "max_completion_tokens"
        prompt = Prompt(self.chat_prompt(request.messages, tools=tools))
        if not prompt.ids:
            raise bad_request("messages give an empty prompt", param="messages")
        num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        plan = self._plan(request, (prompt,), max_tokens, param, None, num_logprobs, grammar)
        if tools is None:
            return plan
        tags = (self._text.tokenizer.id_of(tag) for tag in TOOL_CALL_TAGS)
        return replace(plan, shown_special_ids=frozenset(tag for tag in tags if tag is not None))

    def chat_prompt(
        self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True, tools: ToolUse | None = None
    ) -> tuple[int, ...]:
        """Messages to ids. The template writes the beginning token itself, so the tokenizer adds none.

        Raises:
            ApiError: 400; no template, or the template refused.
        """
        template = self._text.chat_template
        if template is None:
            raise bad_request(
                "this model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
            )
        plain = template_messages(messages)
        self._check_chars(sum(len(item["content"]) for item in plain), "messages")
        try:
            text = rendered(template, plain, add_generation_prompt, tools)
        except ChatTemplateError as error:
            raise bad_request(str(error), param="messages") from error
        return self._text.tokenizer.encode(text, add_special_tokens=False)

    def encode_text(self, text: str, param: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """
        Raises:
            ApiError: 400 without tokenising when the text cannot fit whatever its tokens are.
        """
        self._check_chars(len(text), param)
        return self._text.tokenizer.encode(text, add_special_tokens)

    def check_token_ids(self, ids: Sequence[Any], param: str, where: str) -> tuple[int, ...]:
        """
        Raises:
            ApiError: 400 unless all are integers of the vocabulary.
        """
        for position, token_id in enumerate(ids):
            if type(token_id) is not int:
                raise bad_request(f"{where}[{position}] must be an integer", param=param)
            if not 0 <= token_id < self._text.vocab_size:
                raise bad_request(f"{where}[{position}] is not a token id (0 to {self._text.vocab_size - 1})", param=param)
        return tuple(ids)

    # -- prompts --------------------------------------------------------------------------------------------------------

    def _completion_prompts(self, value: Any, echo: bool) -> tuple[Prompt, ...]:
        if value is None:
            raise bad_request("prompt is required", param="prompt")
        if isinstance(value, str):
            return (self._one_prompt(value, echo, "prompt"),)
        if not isinstance(value, list):
            raise bad_request("prompt must be a string, an array of token ids, or an array of either", param="prompt")
        if not value:
            raise bad_request("prompt must not be empty", param="prompt")
        if isinstance(value[0], str | list):
            if len(value) > self._settings.max_sequences:
                raise bad_request(
                    f"prompt has {len(value)} prompts; {self._settings.max_sequences} are allowed", param="prompt"
                )
            return tuple(self._one_prompt(item, echo, f"prompt[{index}]") for index, item in enumerate(value))
        return (self._one_prompt(value, echo, "prompt"),)

    def _one_prompt(self, value: Any, echo: bool, where: str) -> Prompt:
        if isinstance(value, str):
            if not value:
                raise bad_request(f"{where} must not be empty", param="prompt")
            ids = self.encode_text(value, "prompt")
            if not ids:
                raise bad_request(f"{where} has no tokens", param="prompt")
            return Prompt(ids, value if echo else "")
        if not isinstance(value, list):
            raise bad_request(f"{where} must be a string or an array of token ids", param="prompt")
        if not value:
            raise bad_request(f"{where} must not be empty", param="prompt")
        if len(value) > self.max_model_len and all(type(item) is int for item in value):
            raise self._too_long(len(value), None, "prompt")
        ids = self.check_token_ids(value, "prompt", where)
        return Prompt(ids, self._text.tokenizer.decode(ids, skip_special_tokens=False) if echo else "")

    # -- limits ---------------------------------------------------------------------------------------------------------

    def _plan(
        self,
        request: GenerationFields,
        prompts: tuple[Prompt, ...],
        max_tokens: int | None,
        max_tokens_param: str,
        default_max_tokens: int | None,
        num_logprobs: int | None,
        grammar: str,
        best_of: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> Plan:
        num_choices = request.n if best_of is None else best_of
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options needs stream: true", param="stream_options")
        if request.stream_options is not None and request.stream_options.include_obfuscation:
            param = "stream_options.include_obfuscation"
            raise bad_request(f"{param} is not offered by this server", param=param, code="unsupported_parameter")
        if request.n > self._settings.max_choices:
            raise bad_request(f"n must be at most {self._settings.max_choices}", param="n")
        if len(prompts) * num_choices > self._settings.max_sequences:
            raise bad_request(f"prompts times n (or best_of) must be at most {self._settings.max_sequences}", param="n")
        limits = [self._token_limit(len(prompt.ids), max_tokens, max_tokens_param, default_max_tokens) for prompt in prompts]
        if request.min_tokens > min(limits):
            raise bad_request(f"min_tokens must be at most max_tokens ({min(limits)})", param="min_tokens")
        seed = secrets.randbits(63) if request.seed is None else request.seed
        drawn_logprobs = 0 if num_logprobs is None and num_choices > request.n else num_logprobs
        samplings = [self._sampling(request, choice_seed(seed, choice), drawn_logprobs) for choice in range(num_choices)]
        stop_token_ids = self.check_token_ids(request.stop_token_ids, "stop_token_ids", "stop_token_ids")
        choices = []
        for prompt_index, prompt in enumerate(prompts):
            stop = StopRules(
                max_tokens=limits[prompt_index],
                min_tokens=request.min_tokens,
                eos_token_ids=self._text.eos_token_ids,
                stop_token_ids=stop_token_ids,
                ignore_eos=request.ignore_eos,
            )
            for choice, sampling in enumerate(samplings):
                spec = SequenceSpec(
                    request_id=new_request_id(),
                    prompt=prompt.ids,
                    sampling=sampling,
                    stop=stop,
                    cache_salt=request.cache_salt,
                    prompt_logprobs=prompt_logprobs,
                    grammar=grammar,
                    priority=request.priority,
                )
                choices.append(PlannedChoice(prompt_index * num_choices + choice, prompt_index, spec))
        stops = () if request.stop is None else (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
        return Plan(
            prompts=prompts,
            choices=tuple(choices),
            n=request.n,
            best_of=num_choices,
            stop_strings=stops,
            include_stop=request.include_stop_str_in_output,
            num_logprobs=num_logprobs,
            stream=request.stream,
            timeout_s=request.timeout,
            include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        )

    def _token_limit(self, num_prompt_tokens: int, max_tokens: int | None, param: str, default: int | None) -> int:
        room = self.max_model_len - num_prompt_tokens
        if max_tokens == 0 and room >= 0:
            return 0
        if room < 1:
            raise self._too_long(num_prompt_tokens, max_tokens, "messages" if default is None else "prompt")
        if max_tokens is None:
            return room if default is None else min(default, room)
        if max_tokens > room:
            raise self._too_long(num_prompt_tokens, max_tokens, param)
        return max_tokens

    def _sampling(self, request: GenerationFields, seed: int, num_logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            seed=seed,
            temperature=request.temperature,
            top_k=min(max(request.top_k, 0), self._text.vocab_size),
            top_p=request.top_p,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=self._logit_bias(request.logit_bias),
            num_logprobs=num_logprobs,
        )

    def _logit_bias(self, given: dict[str, float]) -> dict[int, float]:
        bias = {}
        for key, value in given.items():
            if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < self._text.vocab_size):
                raise bad_request(
                    f"logit_bias: keys must be token ids (0 to {self._text.vocab_size - 1})", param="logit_bias"
                )
            bias[int(key)] = value
        return bias

    def _check_chars(self, num_chars: int, param: str) -> None:
        """No token is longer than the vocabulary's longest, so a text beyond that many characters never fits."""
        longest = self._text.tokenizer.token_bytes.longest
        if num_chars > self.max_model_len * longest:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens. {param} has {num_chars} characters, "
                f"which are at least {-(-num_chars // longest)} tokens.",
                param=param,
                code="context_length_exceeded",
            )

    def _too_long(self, num_prompt_tokens: int, max_tokens: int | None, param: str) -> ApiError:
        limit = self.max_model_len
        if max_tokens is None:
            asked = f"the prompt has {num_prompt_tokens} tokens, and at least one must be left for the output"
        else:
            total = num_prompt_tokens + max_tokens
            asked = f"{total} were asked for ({num_prompt_tokens} in the prompt, {max_tokens} to generate)"
        message = f"This model's maximum context length is {limit} tokens, but {asked}."
        return ApiError(400, message, param=param, code="context_length_exceeded")


def choice_seed(seed: int, choice: int) -> int:
    """Seed of choice `choice` of a request: the request's own for the first, an independent int64 for each other one."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True) + choice.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
