"""Log-probabilities of tokens that are there already: a prompt's, for `echo` with `logprobs`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.plan import ScoreRequest
from wire.sequence import SampledToken

_ROWS_AT_ONCE = 64  # bounds the float32 copies of the logits


def score(logits: Tensor, request: ScoreRequest) -> tuple[SampledToken, ...]:
    """
    Args:
        logits: [R, vocab], raw, of any float dtype, one row in front of each of the request's tokens; not changed.
    """
    count = min(request.num_logprobs, logits.shape[1])
    scored: list[SampledToken] = []
    for start in range(0, len(request.token_ids), _ROWS_AT_ONCE):
        token_ids = request.token_ids[start : start + _ROWS_AT_ONCE]
        table = torch.log_softmax(logits[start : start + len(token_ids)].float(), dim=-1)
        own = table.gather(1, torch.tensor(token_ids).view(-1, 1)).view(-1).tolist()
        values, ids = torch.topk(table, count, dim=-1) if count else (table[:, :0], table[:, :0].long())
        for token_id, logprob, top_ids, top_values in zip(token_ids, own, ids.tolist(), values.tolist(), strict=True):
            pairs = sorted(zip(top_ids, top_values, strict=True), key=lambda pair: (-pair[1], pair[0]))
            scored.append(SampledToken(token_id, logprob, tuple(pairs)))
    return tuple(scored)
