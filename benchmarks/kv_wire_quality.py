"""What `kv_wire_dtype` costs in accuracy: the same text scored on KV that travelled as it is, and on packed KV.

    python -m benchmarks.kv_wire_quality --model DIR --text FILE [--json FILE]        (about a minute)

For each passage a prefill fills a pool with the KV of its first part. Its blocks are packed and unpacked, as by a hand-off.
The rest is computed on the KV as it was and as it is then, and the two are compared at every position:

    nll        mean negative log-likelihood of the text itself, in nats
    top1       share of positions whose most likely token is the same
    logprob    mean and largest change of the text's own log-probability, in nats (a change of logits, free of their offset)
    margin     the largest gap between the best two tokens (native) at a position where the best one changed, in nats
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.kv_packing import PACKINGS, BlockPacker, packers_for
from engine.model_config import load_model_config
from engine.model_runner import ModelRunner, load_runner
from engine.plan import ScheduledSequence, ScoreRequest, StepPlan
from transport.memory import AnonymousMemory
from wire.ids import BlockId, RequestId
from wire.sequence import SampledToken

BLOCK_SIZE = 64
PROMPT, SCORED = 512, 256


@dataclass(frozen=True, slots=True)
class Row:
    packing: str
    dtype: str
    bytes_per_block: int
    positions: int
    nll_native: float
    nll_packed: float
    top1_same: float
    mean_logprob_change: float
    max_logprob_change: float
    max_margin_of_a_change: float


class Scorer:
    """A runner on a pool of its own, which one sequence uses from block 0 on."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        self.layout = load_model_config(model_dir).kv_layout(BLOCK_SIZE, dtype)
        num_blocks = self.layout.blocks_for(PROMPT + SCORED)
        self.pool = AnonymousMemory(num_blocks * self.layout.block_bytes).view
        self._block_ids = tuple(BlockId(number) for number in range(num_blocks))
        self._runner: ModelRunner = load_runner(
            model_dir, dtype=dtype, kv_memory=self.pool, num_blocks=num_blocks, block_size=BLOCK_SIZE
        )

    def prefill(self, tokens: Sequence[int]) -> None:
        self._run(tokens, 0, None)

    def score(self, tokens: Sequence[int], start: int) -> tuple[SampledToken, ...]:
        """Each token but the first, after those before it; the KV in front of `start` is what lies in the pool."""
        return self._run(tokens, start, ScoreRequest(2, 0, tuple(tokens[1:])))

    def block(self, block_id: int) -> memoryview:
        return self.pool[block_id * self.layout.block_bytes : (block_id + 1) * self.layout.block_bytes]

    def _run(self, tokens: Sequence[int], start: int, score: ScoreRequest | None) -> tuple[SampledToken, ...]:
        name = RequestId("passage")
        sequence = ScheduledSequence(name, tuple(tokens), start, self._block_ids, None, score)
        return self._runner.execute(StepPlan(1, (sequence,))).scored.get(name, ())


def compare(model_dir: Path, dtype: str, passages: Sequence[Sequence[int]]) -> list[Row]:
    """
    Args:
        passages: token ids, each of `PROMPT + SCORED` or more.
    """
    scorer = Scorer(model_dir, dtype)
    packers = packers_for(scorer.layout)
    native: list[SampledToken] = []
    found: dict[str, list[SampledToken]] = {name: [] for name in PACKINGS}
    for passage in passages:
        prompt, rest = passage[:PROMPT], passage[PROMPT : PROMPT + SCORED]
        scorer.prefill(prompt)
        handed_over = bytes(scorer.pool[: scorer.layout.blocks_for(PROMPT) * scorer.layout.block_bytes])
        native += scorer.score(rest, PROMPT)
        for name in PACKINGS:
            scorer.pool[: len(handed_over)] = handed_over
            _travel(scorer, packers[name])
            found[name] += scorer.score(rest, PROMPT)
    return [_row(name, dtype, packers[name].packed_bytes, native, found[name]) for name in PACKINGS]


def _travel(scorer: Scorer, packer: BlockPacker) -> None:
    for block_id in range(scorer.layout.blocks_for(PROMPT)):
        block = scorer.block(block_id)
        block[:] = packer.unpack(packer.pack(block))


def _row(name: str, dtype: str, nbytes: int, native: Sequence[SampledToken], packed: Sequence[SampledToken]) -> Row:
    own = torch.tensor([token.logprob for token in native], dtype=torch.float64)
    other = torch.tensor([token.logprob for token in packed], dtype=torch.float64)
    change = (own - other).abs()
    margins = [a.top[0][1] - a.top[1][1] for a, b in zip(native, packed, strict=True) if a.top[0][0] != b.top[0][0]]
    return Row(
        packing=name,
        dtype=dtype,
        bytes_per_block=nbytes,
        positions=len(native),
        nll_native=-float(own.mean()),
        nll_packed=-float(other.mean()),
        top1_same=1 - len(margins) / len(native),
        mean_logprob_change=float(change.mean()),
        max_logprob_change=float(change.max()),
        max_margin_of_a_change=max(margins, default=0.0),
    )


def passages_of(model_dir: Path, text: str, count: int) -> list[list[int]]:
    """As many passages as there are, at most `count`, from beginning to end."""
    tokens = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    length = PROMPT + SCORED
    starts = range(0, len(tokens) - length + 1, length)
    return [list(tokens[start : start + length]) for start in list(starts)[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of a converted model")
    parser.add_argument("--text", type=Path, required=True, help="a long text file, such as ARCHITECTURE.md")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV cache (default: bfloat16)")
    parser.add_argument("--passages", type=int, default=8, help="at most so many (default: 8)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    passages = passages_of(arguments.model, arguments.text.read_text(encoding="utf-8"), arguments.passages)
    if not passages:
        parser.error(f"--text: fewer than {PROMPT + SCORED} tokens")
    rows = compare(arguments.model, arguments.dtype, passages)
    print("packing  bytes/block  positions     nll native  packed   top1 same   logprob change mean / max   margin")  # noqa: T201
    for row in rows:
        print(  # noqa: T201
            f"{row.packing:<8} {row.bytes_per_block:11d} {row.positions:10d}  {row.nll_native:12.4f} {row.nll_packed:8.4f} "
            f"{row.top1_same:10.4f} {row.mean_logprob_change:16.4f} / {row.max_logprob_change:.3f} "
            f"{row.max_margin_of_a_change:11.3f}"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
