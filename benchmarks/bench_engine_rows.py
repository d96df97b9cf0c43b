"""The figures of `bench_engine`: a job's times, its floor, and what is printed and written of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.peers.protocol import Job
from engine.decoder_config import ModelConfig
from wire.kv_layout import DTYPE_BYTES, KvLayout


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `context` counts tokens that are in the KV cache before the step or prompt."""

    bench: str
    engine: str
    threads: int
    batch: int  # decode: sequences; prefill: tokens of the prompt
    context: int
    dtype: str
    value: float  # the median
    unit: str
    best: float
    spread: float  # 10th to 90th percentile over the median
    floor: float
    ratio: float  # of the time to the floor's

    def as_text(self) -> str:
        return (
            f"{self.bench:7} batch {self.batch:4} context {self.context:4}  {self.engine:13} {self.value:8.1f} {self.unit:7}"
            f" best {self.best:8.1f}  spread {self.spread:4.0%}  floor {self.floor:8.1f}  time/floor {self.ratio:5.2f}"
        )


@dataclass(frozen=True, slots=True)
class Machine:
    bytes_per_s: float
    operations_per_s: float


class Cost:
    """What a job must read and multiply at least, whoever does it."""

    def __init__(self, config: ModelConfig, layout: KvLayout) -> None:
        self._config, self._layout = config, layout
        # Multiplied for every token: all matrices of the layers. The head runs for drawn tokens alone.
        heads = config.num_heads + 2 * config.num_kv_heads
        attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
        gates = 1 if config.family == "gpt2" else 2
        self._layer_weights = config.num_layers * (attention + config.hidden_size * config.intermediate_size * (gates + 1))
        self._head_weights = config.vocab_size * config.hidden_size

    def floor_s(self, job: Job, machine: Machine) -> float:
        """decode: bytes over bandwidth or operations over their rate, whichever is longer; prefill: operations."""
        config, all_weights = self._config, self._layer_weights + self._head_weights
        per_key = 4 * config.num_heads * config.head_dim * config.num_layers
        if job.bench == "prefill":
            keys = job.batch * job.context + job.batch * (job.batch + 1) // 2
            operations = 2 * (job.batch * self._layer_weights + self._head_weights) + per_key * keys
            return operations / machine.operations_per_s
        num_bytes = all_weights * DTYPE_BYTES[self._layout.dtype] + job.batch * job.context * self._layout.bytes_per_token
        operations = 2 * job.batch * all_weights + per_key * job.batch * job.context
        return max(num_bytes / machine.bytes_per_s, operations / machine.operations_per_s)


def make_row(engine: str, dtype: str, threads: int, job: Job, times: list[float], floor_s: float) -> Row:
    def shown(seconds: float) -> float:
        return job.batch / seconds if job.bench == "prefill" else seconds * 1e3

    median = statistics.median(times)
    deciles = statistics.quantiles(times, n=10) if len(times) > 1 else [median, median]
    unit = "tok/s" if job.bench == "prefill" else "ms/step"
    spread = (deciles[-1] - deciles[0]) / median
    best, floor = shown(min(times)), shown(floor_s)
    where = (job.batch, job.context, dtype)
    return Row(job.bench, engine, threads, *where, shown(median), unit, best, spread, floor, median / floor_s)


def ratio_lines(rows: list[Row], ours: str) -> list[str]:
    """One line for each job and thread count in which another engine took part: our median over theirs."""
    lines = []
    for row in rows:
        if row.engine != ours:
            continue
        where = (row.bench, row.threads, row.batch, row.context)
        others = [o for o in rows if o.engine != ours and (o.bench, o.threads, o.batch, o.context) == where]
        if others:
            found = "   ".join(f"÷ {o.engine} {row.value / o.value:5.2f} (best {row.best / o.best:5.2f})" for o in others)
            what = "step" if row.bench == "decode" else "tok/s"
            lines.append(
                f"{row.bench:7} batch {row.batch:4} context {row.context:4}  {row.threads} core(s)  {ours} {what}  {found}"
            )
    return lines
