"""What a sequence is to be: prompt, sampling and stop rules, and what comes back of it.

These values are made once by the coordinator and travel unchanged to P and D, so that both apply the same rules.
"""

from __future__ import annotations

import enum

import msgspec

from wire.ids import RequestId


class FinishReason(enum.Enum):
    """Why a sequence ended well. Everything else that ends one is an error (`RequestFailed`)."""

    STOP = "stop"  # end-of-sequence token or a stop token id (stop strings are the coordinator's)
    LENGTH = "length"  # max_tokens, or the model's context, is used up


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to draw a token from logits. Ranges are checked at the front door, not here.

    Order of application: logit_bias, repetition, frequency and presence penalties, min_tokens' ban of end tokens,
    temperature, top_k, top_p, min_p, draw. Frequency and presence count generated tokens only; repetition counts prompt
    and generated ones.
    """

    seed: int  # int64; the coordinator draws one when the client gives none, so that a replay repeats the draw
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    num_logprobs: int | None = None  # None = none, k = the drawn token's and the k best (k may be 0)

    @property
    def needs_history(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class StopRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """When a sequence ends, as far as token ids can tell.

    max_tokens and min_tokens count output tokens, those in `SequenceSpec.resumed` included. With max_tokens 0 the prompt is
    computed, for its log-probabilities, and nothing is drawn.
    """

    max_tokens: int
    min_tokens: int = 0  # end tokens and stop token ids cannot be drawn before that many
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Ids that end the sequence when drawn."""
        return frozenset(self.stop_token_ids) if self.ignore_eos else frozenset(self.stop_token_ids + self.eos_token_ids)


class SequenceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One sequence to generate.

    `resumed` holds output tokens that the client already has (replay after a decode worker died): they are computed like
    a prompt, but count as output for limits and penalties, and generation goes on behind them.

    `prompt_logprobs` asks for each prompt token's log-probability and the k best in its place. Whoever computes the prompt
    then computes all of it: cached blocks have no logits.

    `grammar`, in llguidance's own form, says what the output must be (`wire` does not read it). Everyone who draws rebuilds
    the matcher's state from the output tokens so far, resumed ones included.
    """

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRules
    resumed: tuple[int, ...] = ()
    cache_salt: str = ""  # sequences share cached blocks only within one salt
    prompt_logprobs: int | None = None
    grammar: str = ""  # empty: any text
    priority: int = 0  # lower ones leave a worker's queue earlier; each counts as some seconds of waiting

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens whose KV must exist before the next one is drawn."""
        return self.prompt + self.resumed


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """A drawn token; natural-log probabilities come from the raw logits, before penalties, bias and temperature."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


def finish_reason_after(stop: StopRules, num_output_tokens: int, token_id: int, room: int) -> FinishReason | None:
    """The one rule by which P, D and the fake runner decide that a token was the last.

    Args:
        num_output_tokens: output tokens so far, `token_id` and resumed ones included.
        room: positions left in the model's context behind `token_id`.
    """
    if num_output_tokens > stop.min_tokens and token_id in stop.end_token_ids:
        return FinishReason.STOP
    if num_output_tokens >= stop.max_tokens or room <= 0:
        return FinishReason.LENGTH
    return None
