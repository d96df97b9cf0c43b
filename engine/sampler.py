"""Draws tokens: a pure function of each row's logits, parameters, history, seed and position.

    raw logits ─▶ bias, penalties, bans ─▶ ÷ temperature ─▶ threshold of top_k, top_p, min_p ─▶ + Gumbel noise ─▶ argmax
         └─▶ log_softmax for logprobs

Rows that only want the best token cost one argmax over all of them. Filters are thresholds on the logits, so tokens that tie
with the last one kept are kept too, and the outcome does not depend on how a sort breaks ties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.noise import gumbel_noise
from engine.plan import SampleRequest
from wire.sequence import SampledToken, SamplingParams

_MIN_TEMPERATURE = 1e-6  # float32 logits divided by it stay finite
_SHORTLIST = 512  # best tokens that usually hold top_p's mass, so that the vocabulary needs no full sort


def sample(
    logits: Tensor, requests: Sequence[SampleRequest], best: Sequence[int | None] | None = None
) -> list[SampledToken]:
    """
    Args:
        logits: [R, vocab], raw, of any float dtype; not changed.
        requests: one for each row.
        best: for each row its best token, if the model found it already; None where that is not known.

    Raises:
        ArithmeticError: a row has no finite best token (NaN, or everything is banned).
    """
    token_ids = [0] * len(requests)
    plain = [row for row, request in enumerate(requests) if _is_greedy(request.params) and not _edits_logits(request)]
    others = sorted(set(range(len(requests))) - set(plain))
    searched = []
    for row in plain:
        known = None if best is None else best[row]
        if known is None:
            searched.append(row)
        else:
            token_ids[row] = known
    if searched:
        chosen = logits if len(searched) == len(requests) else logits[searched]
        _store(token_ids, searched, _best(chosen, searched))
    if others:
        edited = logits[others].float()
        for index, row in enumerate(others):
            _edit_logits(edited[index], requests[row])
        _draw(edited, [requests[row] for row in others], others, token_ids)
    logprobs = _logprobs(logits, requests, token_ids)
    return [logprobs.get(row) or SampledToken(token_id) for row, token_id in enumerate(token_ids)]


def _is_greedy(params: SamplingParams) -> bool:
    """Whatever leaves the best token alone; the lowest id among equals."""
    return params.temperature <= 0.0 or params.top_k == 1 or params.top_p <= 0.0 or params.min_p >= 1.0


def _edits_logits(request: SampleRequest) -> bool:
    return bool(request.params.logit_bias or request.params.needs_history or request.banned_token_ids or request.allowed)


def _edit_logits(row: Tensor, request: SampleRequest) -> None:
    """Bias, penalties, bans and the grammar's mask, in place. Ids outside the vocabulary are ignored."""
    params, vocab = request.params, row.shape[0]
    bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab}
    if bias:
        row[list(bias)] += torch.tensor(list(bias.values()), dtype=row.dtype)
    if params.repetition_penalty != 1.0:
        seen = sorted(token for token in {*request.prompt, *request.output} if 0 <= token < vocab)
        if seen:
            values = row[seen]
            row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        counts = Counter(token for token in request.output if 0 <= token < vocab)
        if counts:
            times = torch.tensor(list(counts.values()), dtype=row.dtype)
            row[list(counts)] -= params.frequency_penalty * times + params.presence_penalty
    banned = [token for token in request.banned_token_ids if 0 <= token < vocab]
    if banned:
        row[banned] = float("-inf")
    if request.allowed:
        allowed = np.unpackbits(np.frombuffer(request.allowed, dtype=np.uint8), count=vocab, bitorder="little")
        row[torch.from_numpy(allowed == 0)] = float("-inf")


def _draw(edited: Tensor, requests: list[SampleRequest], rows: list[int], token_ids: list[int]) -> None:
    """edited: [R, vocab] float32 logits of `requests`, which stand in `rows` of the step; changed in place."""
    best = _best(edited, rows)
    _store(token_ids, rows, best)
    random = [index for index, request in enumerate(requests) if not _is_greedy(request.params)]
    if not random:
        return
    params = [requests[index].params for index in random]
    scaled = edited[random]
    temperatures = torch.tensor([max(each.temperature, _MIN_TEMPERATURE) for each in params]).view(-1, 1)
    scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / temperatures
    keep_from = _threshold(scaled, params)
    for index, row_scaled, lowest in zip(random, scaled, keep_from.tolist(), strict=True):
        candidates = (
            torch.nonzero(row_scaled >= lowest).view(-1) if lowest > float("-inf") else torch.arange(row_scaled.shape[0])
        )
        request, ids = requests[index], candidates.numpy()
        noisy = row_scaled[candidates].double().numpy() + gumbel_noise(request.params.seed, request.position, ids)
        token_ids[rows[index]] = int(ids[int(np.argmax(noisy))])


def _threshold(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """[R] the lowest scaled logit that each row may draw; scaled's maximum is 0 in every row."""
    num_rows, vocab = scaled.shape
    lowest = torch.full((num_rows,), float("-inf"))
    with_k = [row for row, each in enumerate(params) if 0 < each.top_k < vocab]
    if with_k:
        ks = torch.tensor([params[row].top_k for row in with_k])
        values = torch.topk(scaled[with_k], int(ks.max()), dim=-1).values
        lowest[with_k] = values.gather(1, (ks - 1).view(-1, 1)).view(-1)
    with_p = [row for row, each in enumerate(params) if each.top_p < 1.0]
    if with_p:
        kept = scaled[with_p].masked_fill(scaled[with_p] < lowest[with_p].view(-1, 1), float("-inf"))
        top_p = torch.tensor([params[row].top_p for row in with_p], dtype=torch.float64).view(-1, 1)
        lowest[with_p] = torch.maximum(lowest[with_p], _top_p_threshold(kept, top_p))
    min_p = torch.tensor([each.min_p for each in params])
    return torch.maximum(lowest, min_p.log())  # the best token's scaled logit is 0: log(0) keeps all


def _top_p_threshold(kept: Tensor, top_p: Tensor) -> Tensor:
    """[R] the last logit of the smallest set of best tokens whose probabilities reach top_p [R, 1]."""
    total = torch.logsumexp(kept.double(), dim=-1, keepdim=True)
    size = min(_SHORTLIST, kept.shape[1])
    while True:
        values = torch.topk(kept, size, dim=-1).values
        reached = torch.cumsum((values.double() - total).exp(), dim=-1) >= top_p
        if size == kept.shape[1] or bool(reached.any(dim=-1).all()):
            # Rounding may leave the sum of all a hair below top_p: then everything is kept.
            last = torch.where(reached.any(dim=-1), reached.double().argmax(dim=-1), size - 1)
            return values.gather(1, last.view(-1, 1)).view(-1)
        size = kept.shape[1]


def _best(logits: Tensor, rows: list[int]) -> Tensor:
    best = logits.argmax(dim=-1, keepdim=True)
    finite = torch.isfinite(logits.gather(1, best)).view(-1)
    if not bool(finite.all()):
        broken = [row for row, good in zip(rows, finite.tolist(), strict=True) if not good]
        raise ArithmeticError(f"rows {broken} of the step have no finite logit to draw")
    return best.view(-1)


def _store(token_ids: list[int], rows: list[int], drawn: Tensor) -> None:
    for row, token_id in zip(rows, drawn.tolist(), strict=True):
        token_ids[row] = token_id


def _logprobs(logits: Tensor, requests: Sequence[SampleRequest], token_ids: list[int]) -> dict[int, SampledToken]:
    """Natural-log probabilities from the raw logits, for the rows that want them."""
    rows = [row for row, request in enumerate(requests) if request.params.num_logprobs is not None]
    if not rows:
        return {}
    table = torch.log_softmax(logits[rows].float(), dim=-1)
    counts = [min(requests[row].params.num_logprobs or 0, table.shape[1]) for row in rows]
    values, ids = torch.topk(table, max(counts), dim=-1)
    result = {}
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        token_id = token_ids[row]
        pairs = zip(ids[index].tolist(), values[index].tolist(), strict=True)
        top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]
        result[row] = SampledToken(token_id, float(table[index, token_id]), tuple(top))
    return result
