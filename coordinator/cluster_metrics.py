"""The cluster as Prometheus sees it, read from the view at each scrape: nothing is counted twice, gone workers vanish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.assignments import Assignments
from coordinator.cluster_view import ClusterView
from wire.control import WorkerLoad

_WORKER = ("worker", "role")

# load field, metric name, help
_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("waiting", "waiting_sequences", "Sequences that hold no blocks yet"),
    ("waiting_tokens", "waiting_tokens", "Prompt tokens still to be computed"),
    ("running", "running_sequences", "Sequences in the running batch"),
    ("reserved", "reserved_sequences", "Sequences whose KV is on its way to this worker"),
    ("exporting", "exporting_sequences", "Sequences whose KV this worker still holds for a hand-off"),
    ("blocks_total", "blocks", "KV blocks in all"),
    ("blocks_free", "blocks_free", "KV blocks that nothing uses"),
    ("blocks_cached", "blocks_cached", "KV blocks of the prefix cache that nothing uses"),
    ("blocks_held", "blocks_held", "KV blocks in use"),
    ("tokens_per_s", "tokens_per_second", "Tokens computed per second, lately"),
)
_TOTALS: tuple[tuple[str, str, str], ...] = (
    ("handoffs", "handoffs", "Hand-offs that this worker completed"),
    ("handoff_bytes", "handoff_bytes", "KV bytes handed off"),
    ("handoff_failures", "handoff_failures", "Hand-offs that failed"),
    ("preemptions", "preemptions", "Sequences put back for want of blocks"),
    ("prefill_tokens", "prefill_tokens", "Prompt tokens computed"),
    ("decode_tokens", "decode_tokens", "Output tokens computed"),
    ("cached_prompt_tokens", "cached_prompt_tokens", "Prompt tokens that the prefix cache held"),
)


class ClusterMetrics(Collector):
    """Label values are worker names and transports (bounded by the cluster's size) and names that code gives."""

    def __init__(
        self,
        registry: CollectorRegistry,
        view: ClusterView,
        assignments: Assignments,
        counters: Mapping[str, int],
        outstanding: Callable[[], int],
    ) -> None:
        self._view = view
        self._assignments = assignments
        self._counters = counters
        self._outstanding = outstanding
        registry.register(self)

    def describe(self) -> list[Metric]:
        """Empty: the registry need not collect to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        members = list(self._view.members.values())
        labels = [(member.info.worker_id, member.info.role.value) for member in members]
        for field, name, text in _GAUGES:
            gauge = GaugeMetricFamily(f"kvrelay_worker_{name}", text, labels=_WORKER)
            for label, member in zip(labels, members, strict=True):
                gauge.add_metric(label, _number(member.load, field))
            yield gauge
        for field, name, text in _TOTALS:
            total = CounterMetricFamily(f"kvrelay_worker_{name}", text, labels=_WORKER)
            for label, member in zip(labels, members, strict=True):
                total.add_metric(label, _number(member.load, field))
            yield total
        assigned = GaugeMetricFamily("kvrelay_worker_assigned_sequences", "Sequences placed on this worker", labels=_WORKER)
        up = GaugeMetricFamily("kvrelay_worker_state", "1 for the state that the worker is in", labels=(*_WORKER, "state"))
        for label, member in zip(labels, members, strict=True):
            assigned.add_metric(label, self._assignments.of(member.info.incarnation).sequences)
            up.add_metric((*label, member.state.value), 1)
        yield assigned
        yield up
        yield from self._links()
        yield GaugeMetricFamily("kvrelay_outstanding_sequences", "Accepted and not ended", value=self._outstanding())
        events = CounterMetricFamily(
            "kvrelay_placement_events", "Routes, fallbacks, replays, cancels, failures and refusals", labels=("event",)
        )
        for event, count in sorted(self._counters.items()):
            events.add_metric((event,), count)
        yield events

    def _links(self) -> Iterator[Metric]:
        pair = ("prefill", "decode", "transport")
        up = GaugeMetricFamily("kvrelay_link_up", "1 if the pair's probe hand-off came through", labels=pair)
        speed = GaugeMetricFamily("kvrelay_link_gigabytes_per_second", "Measured by the probe", labels=pair)
        for (prefill, decode), report in self._view.links.items():
            names = self._view.members[prefill].info.worker_id, self._view.members[decode].info.worker_id
            up.add_metric((*names, report.transport), 1 if report.up else 0)
            speed.add_metric((*names, report.transport), report.gb_per_s)
        yield up
        yield speed


def _number(load: WorkerLoad, field: str) -> float:
    return float(getattr(load, field))
