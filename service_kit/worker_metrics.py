"""A worker's figures for Prometheus, made from its `WorkerLoad` at the moment of the scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from wire.control import Role, WorkerLoad
from wire.ids import WorkerId

LABELS = ("role", "worker")


@dataclass(frozen=True, slots=True)
class WorkerMetric:
    field: str  # of WorkerLoad
    kind: Literal["gauge", "counter"]
    name: str
    help: str


WORKER_METRICS = (
    WorkerMetric("waiting", "gauge", "kvrelay_waiting_sequences", "Sequences that hold no blocks yet"),
    WorkerMetric("running", "gauge", "kvrelay_running_sequences", "Sequences in the running batch"),
    WorkerMetric(
        "reserved", "gauge", "kvrelay_reserved_sequences", "Sequences whose KV is on its way to this decode worker"
    ),
    WorkerMetric("exporting", "gauge", "kvrelay_exporting_sequences", "Sequences whose KV this prefill worker still holds"),
    WorkerMetric("waiting_tokens", "gauge", "kvrelay_waiting_tokens", "Prompt tokens that are still to be computed"),
    WorkerMetric("blocks_total", "gauge", "kvrelay_kv_blocks", "Blocks of the KV pool"),
    WorkerMetric("blocks_free", "gauge", "kvrelay_kv_blocks_free", "Blocks that hold nothing"),
    WorkerMetric("blocks_cached", "gauge", "kvrelay_kv_blocks_cached", "Blocks that hold reusable KV, evicted on demand"),
    WorkerMetric("blocks_held", "gauge", "kvrelay_kv_blocks_held", "Blocks in use"),
    WorkerMetric("preemptions", "counter", "kvrelay_preemptions", "Sequences that lost their blocks and were recomputed"),
    WorkerMetric("prefill_tokens", "counter", "kvrelay_prefill_tokens", "Prompt tokens computed"),
    WorkerMetric("decode_tokens", "counter", "kvrelay_decode_tokens", "Tokens computed by decode steps"),
    WorkerMetric(
        "cached_prompt_tokens", "counter", "kvrelay_cached_prompt_tokens", "Prompt tokens found in the prefix cache"
    ),
    WorkerMetric("handoffs", "counter", "kvrelay_handoffs", "Hand-offs completed"),
    WorkerMetric("handoff_bytes", "counter", "kvrelay_handoff_bytes", "KV bytes moved by hand-offs"),
    WorkerMetric("handoff_failures", "counter", "kvrelay_handoff_failures", "Hand-offs that failed"),
    WorkerMetric("tokens_per_s", "gauge", "kvrelay_tokens_per_second", "Recent rate of computed tokens"),
    WorkerMetric("draining", "gauge", "kvrelay_draining", "1 while the worker takes no new work"),
)


class WorkerCollector(Collector):
    """Metrics of any number of workers: one sample each per call."""

    def __init__(self, loads: Callable[[], Iterable[tuple[WorkerId, Role, WorkerLoad]]]) -> None:
        self._loads = loads

    def collect(self) -> Iterable[Metric]:
        loads = list(self._loads())
        for metric in WORKER_METRICS:
            family_type = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family = family_type(metric.name, metric.help, labels=LABELS)
            for worker_id, role, load in loads:
                family.add_metric([role.value, worker_id], float(getattr(load, metric.field)))
            yield family


def worker_registry(worker_id: WorkerId, role: Role, load: Callable[[], WorkerLoad]) -> CollectorRegistry:
    """The registry of one worker, to which its own instruments may be added."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerCollector(lambda: [(worker_id, role, load())]))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """Prometheus' text format."""
    return generate_latest(registry)
